"""Several processes: agreeing or failing together, and how DistributedDataParallel and FSDP2 take a model that has changed.

Touches wrappers and shards; never decides what is inserted.
"""
