"""In: stage numbers below which all has run, seconds of slices. Out: rounds, rates, skew, as text.

How far a program is, and how even its work is on nodes and partitions. Pure.
"""
