"""In: the variables of a session. Out: a directory that has them, and the variables again."""
