"""What trains: the small networks of the spirals, all runs at once, and the CNN, one at a time. Knows nothing of folders and reports."""
