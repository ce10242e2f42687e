"""Processes and their files: start, end, logs, what outlives an actor."""
