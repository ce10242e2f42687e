"""In: items of a partition. Out: items, keys, joins, order, sums.

Pure.
"""
