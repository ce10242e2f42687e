"""In: writes. Out: a version.

Private memory over a snapshot, and one commit.
"""
