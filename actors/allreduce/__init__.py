"""Partial results of a node's tasks become one value."""
