"""In: what went wrong, and with what. Out: the exceptions that a user can see, by subject.

`clamor_ray/errors.py` is where users find them.
"""
