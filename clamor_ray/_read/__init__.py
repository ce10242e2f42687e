"""In: a reference. Out: memory that is read.

Mappings, views, prefetch, gather.
"""
