"""In: seals, names, and what Ray counts. Out: the regions that nobody refers to.

The end of a variable whose last reference has gone.
"""
