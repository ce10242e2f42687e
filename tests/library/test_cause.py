"""Causes in messages: many exceptions have no text, and a message must not end in a colon."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import clamor_ray
from clamor_ray import errors
from clamor_ray._protocol import refusals
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.rpc import _meaning_of

HOME = Path(clamor_ray.__file__).parent
# Exceptions that are often raised without a text, and those that may be one of them.
WORDLESS = {
    "ActorDiedError",
    "BaseException",
    "BlockingIOError",
    "CancelledError",
    "ConnectionError",
    "Exception",
    "GetTimeoutError",
    "IncompleteReadError",
    "OSError",
    "RayError",
    "RayTaskError",
    "TimeoutError",
}


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        asyncio.TimeoutError(),
        asyncio.CancelledError(),
        ConnectionResetError(),
        OSError(),
        KeyError(),
        RuntimeError("   "),
        RuntimeError("."),
        errors.WaitTimeoutError("", hint=""),
    ],
)
def test_a_cause_is_never_empty(error: BaseException) -> None:
    assert type(error).__name__ in cause_of(error)
    assert not cause_of(error).endswith((".", ":", " "))


def test_what_has_a_text_keeps_it() -> None:
    assert cause_of(errors.FreedError("It is gone.", hint="Put it.")) == "It is gone. Put it"
    assert cause_of(OSError(28, "No space")) == "OSError: [Errno 28] No space"


def test_an_actors_failure_without_a_text_says_what_it_was() -> None:
    for cause in (None, TimeoutError()):
        message = _meaning_of(cause).message
        assert type(cause).__name__ in message
        assert ": ." not in message


def _names(kind: ast.expr | None) -> Iterator[str]:
    if isinstance(kind, ast.Tuple):
        for part in kind.elts:
            yield from _names(part)
    elif isinstance(kind, ast.Attribute):
        yield kind.attr
    elif isinstance(kind, ast.Name):
        yield kind.id


def bare_texts(source: str) -> list[int]:
    """Lines where a message takes the text of an exception that may have none.

    Example:
        >>> bare_texts("try: f()\\nexcept OSError as e:\\n    log(f'no: {e}')")
        [3]
    """
    found: list[int] = []
    looked_into: set[int] = set()
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler) or not WORDLESS & set(_names(handler.type)):
            continue
        for node in ast.walk(handler):
            if isinstance(node, ast.JoinedStr):
                values = [part for part in node.values if isinstance(part, ast.FormattedValue)]
                typed = any("__name__" in ast.dump(value) for value in values)
                for value in values:
                    is_text = isinstance(value.value, ast.Name) and value.conversion in (-1, 115)
                    if is_text and value.value.id == handler.name and not typed:
                        found.append(node.lineno)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "search":
                looked_into.update(map(id, node.args))  # not for people
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "str":
                named = any(isinstance(a, ast.Name) and a.id == handler.name for a in node.args)
                if named and id(node) not in looked_into:
                    found.append(node.lineno)
    return found


def test_the_check_finds_what_it_is_for() -> None:
    broken = "try: f()\nexcept OSError as e:\n    log(f'no: {e}')\n    log(str(e))"
    assert bare_texts(broken) == [3, 4]
    assert bare_texts(broken.replace("{e}", "{e!r}").replace("str(e)", "repr(e)")) == []


def test_no_message_takes_a_text_that_may_be_empty() -> None:
    files = [path for folder in (HOME, HOME.parent / "actors") for path in folder.rglob("*.py")]
    assert len(files) > 100
    found = {str(path): lines for path in files if (lines := bare_texts(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    ("refusal", "meaning"),
    [
        (refusals.NoSuchRegion("variable 7"), errors.FreedError),
        (refusals.IllegalTransition("it ends"), errors.FreedError),
        (refusals.NoSuchServer("server 7"), errors.ServerUnavailableError),
        (refusals.NoAddresses("no gap"), errors.OutOfMemoryError),
        (refusals.RegistryError("no"), errors.InternalError),
    ],
)
def test_what_the_registry_refuses_has_a_meaning_here(
    refusal: Exception, meaning: type[errors.ClamorError]
) -> None:
    assert type(_meaning_of(refusal)) is meaning
    # Another class of that name is nothing that the registry says.
    other = type(type(refusal).__name__, (Exception,), {})("of somebody else's")
    assert type(_meaning_of(other)) is errors.InternalError
