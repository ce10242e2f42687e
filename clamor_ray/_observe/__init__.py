"""In: what tasks have read, and what page servers say. Out: plain values, text and pictures.

Access reports, and the counters of `clamor.stats()`.
"""
