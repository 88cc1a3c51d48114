"""Several processes: agreeing or failing together, and how DistributedDataParallel and FSDP2 follow a model that has changed.

Touches wrappers and shards; never decides what is inserted.
"""
