"""What follows a new parameter: the optimizer's groups and moments, learning rates, schedulers, and their saved states."""
