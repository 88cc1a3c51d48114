"""What new units would be worth: the gradient of the columns that would read them."""
