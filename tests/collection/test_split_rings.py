"""Which rings an actor keeps."""

from __future__ import annotations

import pytest

from clamor_ray.actors.allreduce.rings import Rings


def test_a_ring_stays_from_call_to_call() -> None:
    closed: list[str] = []
    rings = Rings(closed.append, most=2)
    for _ in range(3):
        for name in ("a", "b"):
            with rings.using(name, lambda name=name: f"ring {name}") as ring:
                assert ring == f"ring {name}"
    assert rings.names() == ["a", "b"]
    with rings.using("c", lambda: "ring c"):
        pass
    assert closed == ["ring a"]


def test_none_is_closed_while_a_call_of_it_runs() -> None:
    closed: list[str] = []
    rings = Rings(closed.append, most=1)
    with rings.using("a", lambda: "ring a"):
        for name in ("b", "c"):
            with rings.using(name, lambda name=name: f"ring {name}"):
                pass
        assert closed == ["ring b", "ring c"]
    assert rings.names() == ["a"]


def test_a_broken_ring_is_closed_when_its_last_call_has_ended() -> None:
    closed: list[str] = []
    rings = Rings(closed.append)
    with rings.using("a", lambda: "old"):
        with pytest.raises(ZeroDivisionError), rings.using("a", lambda: "never"):
            raise ZeroDivisionError
        assert closed == []
        with rings.using("a", lambda: "new") as ring:
            assert ring == "new"
    assert closed == ["old"]
    assert rings.names() == ["a"]
