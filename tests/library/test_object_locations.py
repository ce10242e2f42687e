"""Where a Ray object lies, as `share` asks for it: Ray may not know yet."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from clamor_ray._protocol import ray_state


class Answers:
    """What Ray says, in turn; then the last again."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self._answers = list(answers)
        self.n_asked = 0

    def get_object_locations(self, object_refs: list[Any]) -> dict[Any, Any]:
        self.n_asked += 1
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        return dict.fromkeys(object_refs, answer)


def asked(monkeypatch: pytest.MonkeyPatch, *answers: dict[str, Any]) -> tuple[list[str], int]:
    said = Answers(*answers)
    monkeypatch.setattr(ray, "experimental", said)
    monkeypatch.setattr(ray_state, "LOCATE_S", 0.1)
    return ray_state.nodes_of("reference"), said.n_asked


def test_a_location_that_ray_knows_a_moment_later_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task's result is ready before its owner has heard where it lies. What is taken for small
    goes over the network, whole, to the driver's node."""
    unknown = {"node_ids": [], "object_size": 8_000_253, "did_spill": False}
    known = {**unknown, "node_ids": ["there"]}
    assert asked(monkeypatch, unknown, unknown, known) == (["there"], 3)


@pytest.mark.parametrize("n_bytes", [0, 731, 100 << 10])
def test_a_small_object_is_not_waited_for(n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"node_ids": [], "object_size": n_bytes, "did_spill": False}
    assert asked(monkeypatch, small) == ([], 1)


def test_one_that_was_spilled_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spilled = {"node_ids": [], "object_size": 8_000_253, "did_spill": True}
    assert asked(monkeypatch, spilled) == ([], 1)


@pytest.mark.parametrize("n_bytes", [(100 << 10) + 1, None])
def test_one_that_is_lost_is_waited_for_with_a_deadline(
    n_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, n_asked = asked(monkeypatch, {"node_ids": None, "object_size": n_bytes})
    assert nodes == []
    assert n_asked > 1
