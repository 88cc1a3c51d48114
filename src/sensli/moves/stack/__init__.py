"""Copies of a whole stack of blocks after it, which act at once and change the function: G_stack."""
