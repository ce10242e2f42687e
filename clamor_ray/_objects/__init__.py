"""In: an object. Out: bytes at offsets, and back.

From objects to buffers to blocks. Pure.
"""
