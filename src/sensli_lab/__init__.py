"""The lab beside the library: the paper's experiments, growth methods of other papers, and comparisons at equal FLOPs.

It imports the core and is never imported by it: the command line and the registries name what is here as ``module:Class``.
"""
