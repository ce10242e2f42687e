"""How far a program is. In: stage numbers below which all has run, seconds of slices. Out: rounds,
rates, skew of nodes and partitions, as numbers and as text. Pure.
"""
