"""In: what allocates. Out: an object that is built where it is read.

Regions, allocators, libraries.
"""
