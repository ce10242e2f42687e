"""The page server of a node: its port, its peers, and the engine's questions."""
