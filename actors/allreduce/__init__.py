"""In: partial results of tasks of a node. Out: one value."""
