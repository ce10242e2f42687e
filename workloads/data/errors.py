"""How a program fails: its input cannot be used, or it found what is wrong. Pure: no Ray."""

from __future__ import annotations

import re

__all__ = ["InputError", "WrongResult", "WrongWeights"]


class InputError(ValueError):
    """The data that the user brought cannot be used; the message says which and why."""


class WrongResult(Exception):
    """What a program found is not what its check says; subclasses are named for what is wrong."""

    @classmethod
    def heading(cls) -> str:
        """The class's name in capitals, a word at a time: WRONG RESULT."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).upper()


class WrongWeights(WrongResult):
    """The tasks' weights are not those that one process finds."""
