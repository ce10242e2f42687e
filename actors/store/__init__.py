"""In: a session with a store. Out: a session that outlives its cluster, and power cuts.

The registry of such a session, and what it does differently.
"""
