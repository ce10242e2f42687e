"""The typed client of the registry, and the registry: the same calls with the same parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray.actors.store.store_registry import StoreRegistry

CALLS = {name: call for name, call in vars(RegistryClient).items() if not name.startswith("_")}


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """What the registry gets: `timeout_s` by keyword is the carrier's."""
    found = inspect.signature(function).parameters.values()
    return [
        (each.name, each.default, each.annotation)
        for each in found
        if each.kind != each.KEYWORD_ONLY
    ]


def is_optional(parameter: tuple[str, Any, Any]) -> bool:
    return parameter[1] is not inspect.Parameter.empty


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_one_of_the_registry(name: str) -> None:
    asked, answers = parameters(CALLS[name]), parameters(getattr(StoreRegistry, name))
    assert asked == answers[: len(asked)]
    assert all(map(is_optional, answers[len(asked) :]))
    returns = inspect.signature(CALLS[name]).return_annotation
    assert returns == inspect.signature(getattr(StoreRegistry, name)).return_annotation


@pytest.mark.parametrize("name", CALLS)
def test_each_call_carries_its_name_and_its_arguments(name: str) -> None:
    arguments = tuple(range(len(parameters(CALLS[name])) - 1))
    carried: list[tuple[str, tuple[object, ...]]] = []

    def carrier(method: str, *args: Any, timeout_s: float | None = None) -> Any:
        if method != "ask":
            carried.append((method, args))
            return "answer"
        method, *args = unpack(*args)
        carried.append((method, tuple(args)))
        return pack("answer")

    assert CALLS[name](RegistryClient(carrier), *arguments) in ("answer", None)
    assert carried == [(name, arguments)]
