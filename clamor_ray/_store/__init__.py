"""In: layers and bases of a persistent store. Out: files that a power cut leaves whole; a redo.

`layout.py` has the names of all files. Only `fsck.py` looks at more than one directory.
"""
