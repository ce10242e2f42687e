"""In: Python values. Out: calls into C.

The only way to `clamor_ray._pagecache`: a class for each handle.
"""
