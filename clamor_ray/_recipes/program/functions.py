"""What a function says of itself: its name, its arguments, and whether it uses messages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

SENDS = frozenset({"send", "broadcast"})
RECEIVES = frozenset({"recv"})


def name_of(function: Callable[..., Any]) -> str:
    """For people."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def uses_of(
    function: Callable[..., Any], sends: bool | None, receives: bool | None
) -> dict[str, bool]:
    """Whether a function sends and receives, where nobody says so: whether it, or a function in
    it, names a method that does. What it calls elsewhere is not looked at."""
    names = set(_names(function)) if sends is None or receives is None else set()
    return {
        "sends": bool(names & SENDS) if sends is None else sends,
        "receives": bool(names & RECEIVES) if receives is None else receives,
    }


def takes(function: Callable[..., Any], n_arguments: int) -> bool:
    """Whether it can be called with so many arguments. True where nobody can say: a function in C,
    or one that stands for another."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    is_python = isinstance(inner, (FunctionType, MethodType)) or _called(inner) is not None
    if not is_python or hasattr(inner, "__wrapped__"):
        return True
    try:
        inspect.signature(function).bind(*[None] * n_arguments)
    except TypeError:
        return False
    return True


def _names(function: Any) -> Iterator[str]:
    while True:
        while isinstance(function, functools.partial):
            function = function.func
        code = getattr(function, "__code__", None)
        if code is None:
            code = getattr(_called(function), "__code__", None)
        if isinstance(code, CodeType):
            yield from _names_in(code)
        if not hasattr(function, "__wrapped__"):
            return
        function = function.__wrapped__


def _called(function: object) -> FunctionType | None:
    """What runs when an object is called, where that is written in Python."""
    for each in type(function).__mro__:
        called = vars(each).get("__call__")
        if called is not None:
            return called if isinstance(called, FunctionType) else None
    return None


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
