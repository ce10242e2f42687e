"""References as arguments: as bytes, and the same on the other side."""

from __future__ import annotations

import concurrent.futures
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from clamor_ray._counting.anchors import Anchor
from clamor_ray._objects.layout import Plan
from clamor_ray._read.ref import GlobalRef
from clamor_ray._read.state import State
from clamor_ray._tasks import passing
from clamor_ray._tasks.passing import Passing, is_packed, packed, unpacked
from clamor_ray._tasks.read_predictor import Hinted, hinting_of, key_of

PLAN = Plan(8192, 10, ((4096, 4096),), 0, 16384, fixed=True)


def refs() -> dict[str, GlobalRef[Any]]:
    at = ("s", None)
    first = State(0, PLAN, None)
    freed: GlobalRef[Any] = GlobalRef(4, 0, 0x1100_0000_0000, 8192, PLAN, *at)
    freed._mark_freed()
    moved: GlobalRef[Any] = GlobalRef(5, 0, 0x1100_0000_0000, 8192, PLAN, *at)
    moved._packed()
    moved._move(State(3, Plan(4096, 9), None))
    return {
        "plain": GlobalRef(1, 0, 0x1100_0000_0000, 8192, PLAN, *at),
        "later": GlobalRef(2, 7, 0x1100_0000_0000, 8192, Plan(4096, 10), *at, first=first),
        "frozen": GlobalRef(2, 7, 0x1100_0000_0000, 8192, PLAN, *at, first=first, frozen=True),
        "inline": GlobalRef(1 << 62, 0, 0, 0, Plan(5, 5), "s", b"hello"),
        "freed": freed,
        "moved": moved,
    }


def fields(ref: GlobalRef[Any]) -> Any:
    where = (ref._region, ref._base_address, ref._length_bytes, ref._scope)
    return (*where, ref._state, ref._first, ref._frozen, ref._freed)


@pytest.mark.parametrize("name", refs())
def test_references_arrive_as_they_were(name: str) -> None:
    ref = refs()[name]
    for _ in range(2):  # the second one is known
        assert fields(unpacked(packed(ref))) == fields(ref)
    copied = pickle.loads(pickle.dumps(ref))
    assert fields(copied) == fields(ref)
    assert copied == ref


def test_a_reference_that_moved_is_packed_anew() -> None:
    ref = refs()["plain"]
    before = ref._packed()
    assert ref._packed() is before
    ref._move(State(1, PLAN, None))
    assert unpacked(packed(ref)).version == 1
    ref._mark_freed()
    assert unpacked(packed(ref))._freed


def test_names_of_calls_arrive() -> None:
    ref = refs()["later"]
    for again in (False, True):
        hinted = Hinted(ref, key_of("f", (ref, 1), {}), again)
        got = unpacked(packed(hinted))
        assert (got.key, got.again) == (hinted.key, again)
        assert fields(got.ref) == fields(ref)


@pytest.mark.parametrize("value", [1, "text", b"", b"bytes", None, [1], bytearray(b"x")])
def test_other_values_are_left_alone(value: Any) -> None:
    assert packed(value) is value
    assert not is_packed(value)
    assert unpacked(value) is value


def test_bytes_that_look_like_it_are_a_users() -> None:
    for value in (packed(refs()["plain"]), packed(packed(refs()["plain"])), passing._MAGIC):
        assert unpacked(packed(value)) == value
        assert type(unpacked(packed(value))) is bytes


def test_what_arrives_has_no_anchor_yet_and_may_ask_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passing, "_known", {})
    of_caller = Anchor(ray.ObjectRef(b"1" * 28))
    ref = refs()["later"]._held((of_caller,))
    asked: list[int] = []

    class Session:
        def ask_anchor(self, region: int) -> Any:
            asked.append(region)
            answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
            answer.set_result(f"anchor of {region}")
            return SimpleNamespace(future=lambda: answer)

    monkeypatch.setattr(passing.opener, "current", lambda scope: Session())
    for value in (ref, Hinted(ref, key_of("f", (ref, 1), {}), False)):
        got = unpacked(packed(value))
        got = getattr(got, "ref", got)
        assert fields(got) == fields(ref)
        (anchor,) = got._anchors
        assert not asked
        assert anchor.object_ref() == anchor.object_ref() == "anchor of 2"
        assert asked == [2]
        asked.clear()
    assert [known._anchors for known in passing._known.values()] == [None]  # it keeps nothing


def test_a_weak_one_arrives_weak() -> None:
    for ref in (refs()["later"], refs()["later"]._held(())):
        assert unpacked(packed(ref))._anchors == ()
        assert unpacked(packed(Hinted(ref, key_of("f", (ref, 1), {}), False))).ref._anchors == ()
    inside = refs()["inline"]._held((Anchor(ray.ObjectRef(b"1" * 28)),))
    assert packed(inside) is inside  # Ray is to count what is inside


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "_known", {})
    monkeypatch.setattr(passing, "MOST_KNOWN", 3)
    for region in range(10):
        ref: GlobalRef[Any] = GlobalRef(region, 0, 0x1100_0000_0000, 8192, PLAN, "s")
        assert unpacked(packed(ref))._region == region
        assert len(passing._known) <= 3
    assert unpacked(packed(refs()["inline"]))._payload == b"hello"
    assert all(not ref._inline for ref in passing._known.values())


@pytest.mark.parametrize("replay", [None, False])
def test_submitted_arguments(replay: bool | None) -> None:
    def function(*_: Any, **__: Any) -> None: ...

    sent: list[Any] = []
    hook = Passing(hinting_of(function, replay))
    submit = hook(lambda args, kwargs: sent.append((args, kwargs)))
    ref = refs()["plain"]
    submit((1, ref), {"x": ref, "y": b"z"})
    submit(None, None)
    (args, kwargs), nothing = sent
    assert args[0] == 1
    assert kwargs["y"] == b"z"
    first = unpacked(args[1])
    assert type(first) is (GlobalRef if replay is False else Hinted)
    assert fields(unpacked(kwargs["x"])) == fields(ref)
    assert nothing == ([], {})
