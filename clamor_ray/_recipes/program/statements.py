"""The parts of a program's text, as it is described: stages, loops and branches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from clamor_ray import errors


@dataclass(eq=False)
class Stage:
    """A function and what it accesses.

    Args:
        function: What its tasks call.
        name, line: For people.
        reads, writes: Numbers of datasets. None is named twice.
        sends, receives: Whether it uses messages.
    """

    function: Callable[..., Any]
    name: str
    line: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    sends: bool
    receives: bool


@dataclass(eq=False)
class Decision(Stage):
    """A stage with one task, which returns a bool."""


@dataclass(eq=False)
class Loop:
    """Args:
    line: For people.
    most: Rounds.
    body: What runs in each.
    until: Ends it.
    """

    line: str
    most: int
    body: list[Statement] = field(default_factory=list)
    until: Decision | None = None


@dataclass(eq=False)
class Branch:
    """Args:
    line: For people.
    decision: Whether `then` runs, or `otherwise`.
    then, otherwise: Statements; either may be empty.
    """

    line: str
    decision: Decision
    then: list[Statement] = field(default_factory=list)
    otherwise: list[Statement] = field(default_factory=list)


Statement: TypeAlias = Stage | Loop | Branch


def refuse(line: str, why: str) -> NoReturn:
    """
    Raises:
        ProgramError: Always.
    """
    raise errors.ProgramError(f"{line}: {why}")


def line_of_caller() -> str:
    """``file:line`` of the first frame that is not ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_ours(module: str) -> bool:
    is_program = module.startswith("clamor_ray.") and not module.startswith("clamor_ray.workloads")
    return is_program or module == "contextlib"
