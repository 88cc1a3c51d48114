"""Computing what is missing, here or on Ray, and the results folder: whatever was computed is on disk before it is reported."""
