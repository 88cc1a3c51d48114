"""The change itself: insertion, undo, replay, and everything that follows a change.

The only room that changes a user's model, optimizer or scheduler. All checks come before the first change.
"""
