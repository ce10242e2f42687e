"""In: calls that describe a program. Out: its tables and order of stages; text and a picture.

Nothing here runs a task, but `plain.py`, which says what the right answer is.
"""
