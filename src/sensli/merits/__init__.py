"""What a site is worth: its gradient from one ordinary pass, added up over batches and processes, and the norms that make a number of it.

Sets hooks for the time of a measurement; whatever happens inside, none survives it.
"""
