"""Who waits for the others of a group: what it says when they do not come. Without Ray."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._protocol.rendezvous import Guest, Waiting
from clamor_ray._ring import group as group_module
from clamor_ray._ring.group import RingGroup


class Registry:
    """Answers for a while that others are missing; then it is too busy to.

    Args:
        answers_s: how long it answers.
    """

    def __init__(self, answers_s: float) -> None:
        self.silent_from_s = time.monotonic() + answers_s
        self.config = SimpleNamespace(control_timeout_s=60.0)
        self.left: list[tuple[Any, ...]] = []
        leave = SimpleNamespace(remote=lambda *arguments: self.left.append(arguments))
        self.registry = SimpleNamespace(leave_meeting=leave)

        self.rpc = self

    def meet(self, *_: object, timeout_s: float) -> Waiting:
        if time.monotonic() < self.silent_from_s:
            return Waiting((2, 3))
        time.sleep(timeout_s)
        raise errors.WaitTimeoutError("The registry did not answer.")


def meet(registry: Registry) -> None:
    group = RingGroup("test-meeting", 4, 0, None, timeout_s=0.5)
    group._meet(registry, Guest(0, "localhost", 1, 5))  # type: ignore[arg-type]


def test_a_last_question_without_an_answer_hides_nothing() -> None:
    registry = Registry(answers_s=0.2)
    with pytest.raises(errors.MemberLostError, match=r"2, 3 did not come within 0\.5 s"):
        meet(registry)
    assert registry.left == [("test-meeting", 5)]


def test_a_registry_that_never_answered_is_named() -> None:
    with pytest.raises(errors.WaitTimeoutError, match="registry did not answer"):
        meet(Registry(answers_s=0.0))


def test_an_answer_of_long_ago_says_nothing_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "MEET_KNOWN_S", 0.1)
    with pytest.raises(errors.WaitTimeoutError, match="registry did not answer"):
        meet(Registry(answers_s=0.2))
