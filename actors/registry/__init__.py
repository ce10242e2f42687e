"""In: calls of sessions and page servers. Out: decisions.

The registry: regions, servers, and their end.
"""
