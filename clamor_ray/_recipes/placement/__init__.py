"""In: a map of slices to workers, in versions. Out: slices that move, messages that find them.

`worker_core.py` is what each worker does, `controller_core.py` what decides where slices are. Pure:
no I/O, and no clock of their own.
"""
