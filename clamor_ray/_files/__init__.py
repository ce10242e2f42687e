"""In: a path. Out: what lies where in the file, and its bytes by ranges.

A file's bytes are the first of the variable's region. Behind them, from the next block on, lies the
pickle stream of the object that is made of them, which no file has.
"""
