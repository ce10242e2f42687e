"""What every error and warning of this library stands on. `errors.py` has them all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar


def level_of_caller() -> int:
    """For `warnings.warn` in the function that calls this: the first frame that is not ours."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == (
        "clamor_ray"
    ):
        level, frame = level + 1, frame.f_back
    return level


class ClamorWarning(UserWarning):
    """Something works, but not the way it was probably meant.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught, clamor.build(4096):
        ...     warnings.simplefilter("always")  # nothing is published before the region's end
        >>> any(warning.category is clamor.errors.ClamorWarning for warning in caught)
        True
    """


class LostBlocksWarning(ClamorWarning):
    """Blocks of a variable that is opened are lost; all others are not.

    Once in each process for each loss. A touch of a lost block ends the process; a commit that
    writes it makes it whole (`clamor.update(ref, lost=0)`).

    Args:
        message: which variable and blocks, why, and what to do.
        region: id of the variable.
        runs: (first block, number of blocks) of what is lost; empty where nobody could say.
    """

    def __init__(self, message: str, region: int = 0, runs: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.region = region
        self.runs = tuple(runs)


def _rebuild(cls: type[ClamorError], message: str, state: dict[str, Any]) -> ClamorError:
    error = cls(message)
    error.__dict__.update(state)
    return error


class ClamorError(Exception):
    """Base of everything this library raises on purpose.

    Args:
        message: what happened, as a sentence.
        code: the page cache's error code (`enum pc_err`), or None.
        hint: what to do about it; the class's own where none is given.

    Example:
        >>> m = clamor.HashMap.build([1, 2], [0.1, 0.2])
        >>> try:
        ...     m[7]
        ... except clamor.errors.ClamorError as error:
        ...     print(error.message)
        The hash map has no key 7.
    """

    default_hint: ClassVar[str] = ""

    code: int | None
    hint: str
    # A commit that failed for now: the transaction, still open. It does not travel with a pickle.
    transaction: Any = None

    def __init__(self, message: str, *, code: int | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.hint = self.default_hint if hint is None else hint

    @property
    def message(self) -> str:
        """What happened, without the hint."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in self.__dict__.items() if name != "transaction"}
        return _rebuild, (type(self), self.message, state)
