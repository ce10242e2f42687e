"""What people read of a variable, in messages, reports and pictures: all say the same. Pure."""

from __future__ import annotations


def label(region: int, name: str | None = None) -> str:
    """A variable for people: by its name, else by its number.

    Args:
        region: its id.
        name: one of those that it has; None where it has none, or nobody here knows it.

    Example:
        >>> label(3, "index"), label(3)
        ("variable 'index'", 'variable 3')
    """
    return f"variable {region if name is None else repr(name)}"


def capital(text: str) -> str:
    """As a sentence begins.

    Example:
        >>> capital(label(3))
        'Variable 3'
    """
    return text[:1].upper() + text[1:]
