"""In: partitions, messages and decisions of a node. Out: the tasks that may run there now.

`matcher.py` is the model: what it does in Python, C does in memory that processes share.
"""
