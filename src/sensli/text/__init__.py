"""Text and files: tables for the terminal and for notebooks, JSON that every reader accepts, the one way in which a file is
written, and how a command reports what goes wrong.

Knows nothing of torch or of models; touches the disk and the terminal, and nothing else.
"""
