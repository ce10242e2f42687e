"""In: a program, and its partitions. Out: a job that runs it on the cluster, and its results.

Starts the actors of `actors/recipes/`; what they decide is in `_recipes/`.
"""
