"""In: a command line. Out: what a person or a script reads, and an exit status.

Programs, which stand above the library and the actors.
"""

try:
    import click as _click  # noqa: F401
    import rich as _rich  # noqa: F401
except ImportError as _missing:
    raise SystemExit(
        f"clamor: {_missing.name} is not installed: pip install 'clamor-ray[cli]'"
    ) from None
