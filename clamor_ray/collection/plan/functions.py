"""Functions as tasks get them: pickled once, with their variables numbered.

A `GlobalRef` that a function was given, or closes over, or that is inside something it was given
(a `HashMap`), does not become a part of the pickle. It is a variable of the function, and whoever
loads the function says at which version each of them is: a re-run of the same function on newer
snapshots needs no new pickle. Large arrays of an object that was opened from a variable are
variables too; they stay at the version at which they were opened.
"""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clamor_ray import errors
from clamor_ray._read.ref import GlobalRef
from clamor_ray._read.views import array_at, place_of
from clamor_ray._tasks.function_pickler import FunctionPickler
from clamor_ray.collection.plan.followers import follow


@dataclass(frozen=True)
class Variable:
    """A global variable that a function reads.

    Args:
        ref: a frozen reference to the version that it had when the function was written down.
        moves: `refresh` may take a newer one; not so where the user gave a frozen reference.
    """

    ref: GlobalRef[Any]
    moves: bool

    @property
    def region(self) -> int:
        return self.ref._region

    def at(self, ref: GlobalRef[Any]) -> Variable:
        """The same at another version."""
        return Variable(ref.snapshot(), self.moves)


@dataclass(frozen=True)
class Captured:
    """A function with its arguments.

    Args:
        name: for people.
        payload: pickle of (function, args, kwargs); references are persistent ids.
        variables: by persistent id.
    """

    name: str
    payload: bytes
    variables: tuple[Variable, ...]

    def load(
        self, refs: Sequence[GlobalRef[Any]]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function and its arguments, with these in the places of its variables."""
        loaded = _Loader(io.BytesIO(self.payload), refs).load()
        function, args, kwargs = loaded
        return function, args, kwargs


class _Saver(FunctionPickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.variables: list[Variable] = []
        self.moving: list[GlobalRef[Any]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            where = place_of(obj)
            return None if where is None else (self._number(where[0], moves=False), *where[1:])
        if not isinstance(obj, GlobalRef):
            return None
        at = obj.snapshot()
        if at is not obj:
            self.moving.append(obj)
        return self._number(at, moves=at is not obj)  # a snapshot's snapshot is itself

    def _number(self, at: GlobalRef[Any], *, moves: bool) -> int:
        key = (at._scope, at._region, at.version, moves)
        if key not in self._numbers:
            self._numbers[key] = len(self.variables)
            self.variables.append(Variable(at, moves))
        return self._numbers[key]


class _Loader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, refs: Sequence[GlobalRef[Any]]) -> None:
        super().__init__(file)
        self._refs = refs

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return self._refs[pid]
        number, *where = pid
        return array_at(self._refs[number], *where)


def name_of(function: Any) -> str:
    """What people call a function."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).replace("<locals>.", "").rpartition(".")[2]


def capture(
    function: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Captured:
    """Pickles a function with its arguments.

    Raises:
        TypeError: It cannot be called.
        UnpicklableError: It, or something that it uses, cannot be pickled: says which, and why.
    """
    if not callable(function):
        raise TypeError(f"a function is needed, not {type(function).__qualname__}")
    file = io.BytesIO()
    saver = _Saver(file)
    try:
        saver.dump((function, tuple(args), dict(kwargs or {})))
    except errors.ClamorError:
        raise
    except Exception as failure:  # any: pickling runs the objects' own code
        raise _explained(function, args, kwargs or {}, failure) from failure
    for ref in saver.moving:
        follow(ref)
    return Captured(name_of(function), file.getvalue(), tuple(saver.variables))


def _fails(value: Any) -> Exception | None:
    try:
        _Saver(io.BytesIO()).dump(value)
    except Exception as failure:  # any, as above
        return failure
    return None


def _explained(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], failure: Exception
) -> errors.UnpicklableError:
    named: list[tuple[str, Any]] = [
        *((f"argument {index + 1}", value) for index, value in enumerate(args)),
        *((f"argument {name!r}", value) for name, value in kwargs.items()),
    ]
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        named += [(f"{name!r}, which it closes over,", v) for name, v in used.nonlocals.items()]
        named += [(f"the global {name!r}", value) for name, value in used.globals.items()]
        defaults = function.__defaults__ or ()
        named += [(f"default {index + 1}", value) for index, value in enumerate(defaults)]
    for what, value in named:
        reason = _fails(value)
        if reason is not None:
            kind = type(value).__qualname__
            return errors.UnpicklableError(
                f"{name_of(function)} cannot go to tasks: {what} is a {kind}, and that cannot be "
                f"pickled: {type(reason).__name__}: {reason}."
            )
    return errors.UnpicklableError(
        f"{name_of(function)} cannot go to tasks: {type(failure).__name__}: {failure}."
    )
