"""In: the engine's questions. Out: answers of the registry.

The page server of a node: its data port and its peers.
"""
