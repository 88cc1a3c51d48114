"""Layers that start as identities: their forms, which of them fits where, and what one would be worth."""
