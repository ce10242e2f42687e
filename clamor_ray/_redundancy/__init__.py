"""In: a level, pieces, servers. Out: groups of pieces, and where each goes.

Levels of redundancy. Pure.
"""
