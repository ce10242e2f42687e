"""In: what a driver asks of a session. Out: its registry and its store.

Processes that this one starts are told where it is attached.
"""
