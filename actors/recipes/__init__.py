"""In: a program, its partitions, and nodes. Out: its tasks, run where the partitions are.

One worker on each node; one controller for each program.
"""
