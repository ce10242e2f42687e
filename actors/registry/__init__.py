"""The registry: regions, servers and their end. In: calls of sessions and page servers; out:
decisions.
"""
