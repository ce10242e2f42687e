"""In: a command line. Out: what a person or a script reads, and an exit status.

Programs, which stand above the library and the actors.
"""
