"""In: homes and layers of a page server in a session with a store. Out: files that outlive it.

Its directory of the store: when what is put there, and what it brings back.
"""
