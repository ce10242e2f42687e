"""In: processes and their files. Out: their start, end and logs.

What outlives an actor, too.
"""
