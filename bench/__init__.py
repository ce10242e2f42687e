"""Benchmarks: ``python -m bench NAME [--small]``. JSON lines on stdout, the last one the summary.

Not installed, and never run by tests but for a ``--small`` smoke test: figures depend on the
machine, so each is a ratio against a peer measured in the same run.
"""
