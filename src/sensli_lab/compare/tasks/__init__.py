"""The tasks, one small file each; what is known of a task without its data is in its file."""
