"""In: actors. Out: a group that reduces arrays.

Who is a member, and how they connect.
"""
