"""How a session begins: its registry, its store and its name; where other processes find it."""
