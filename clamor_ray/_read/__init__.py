"""References to objects: mappings, views, prefetch, gather. In: a reference; out: memory that is
read.
"""
