"""In: a commit request. Out: a version, or a conflict.

Checks, decision, journal, and the homes that are told.
"""
