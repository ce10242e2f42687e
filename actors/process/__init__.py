"""In: processes and their files. Out: their start, end and logs.

What outlives an actor, too; and what many in an actor share: turns, and a budget of bytes.
"""
