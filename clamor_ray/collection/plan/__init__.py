"""In: calls. Out: a graph of operators, and its stages.

Runs nothing.
"""
