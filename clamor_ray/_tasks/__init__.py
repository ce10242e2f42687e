"""In: a task's arguments. Out: objects, and what the task read.

What is fetched ahead, too.
"""
