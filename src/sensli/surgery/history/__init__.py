"""The record of what was done and decided: growths, looks, and the outline of the model. Plain data that goes to JSON and back."""
