"""One run of the example on a copy of the model, and what can be read from it: calls, the autograd graph, activations, stacks of blocks.

Reads only.
"""
