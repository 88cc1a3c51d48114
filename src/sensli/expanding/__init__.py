"""Expanding a saved model on disk: read as bytes, planned on a small sibling, written all or nothing, and undone."""
