"""Twins: copies of blocks that start as identities. Which parameters must be zero, and what counts the blocks, is found by trial."""
