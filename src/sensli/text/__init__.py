"""Text and files: tables for the terminal and for notebooks, JSON that every reader takes, and the one way in which a file is written.

Knows nothing of torch or of models; touches the disk, and nothing else.
"""
