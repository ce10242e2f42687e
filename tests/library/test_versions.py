"""References and their versions: what moves, what does not, and what they are as values."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._objects.layout import Plan
from clamor_ray._read.ref import GlobalRef
from clamor_ray._read.state import State
from clamor_ray._session import process_sessions
from tests.support.fake_session import SCOPE, Cluster, FakeSession

PLAN = Plan(20_000, 120, ((4096, 15_904),))


def a_ref(version: int = 1, region: int = 7, **more: Any) -> GlobalRef[Any]:
    return GlobalRef(region, version, 0x1100_0000_0000, 20_480, PLAN, SCOPE, **more)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSession]:
    session = FakeSession(Cluster())
    monkeypatch.setattr(process_sessions, "_current", session)
    return session


@pytest.fixture(params=["region", "inline"])
def ref(request: pytest.FixtureRequest, session: FakeSession) -> GlobalRef[Any]:
    """Of an array of zeros at version 0."""
    ref = clamor.put(np.zeros(10_000 if request.param == "region" else 100))
    assert ref._inline == (request.param == "inline")
    return ref


def change(ref: GlobalRef[Any], value: float) -> None:
    with clamor.update(ref) as x:
        x[:] = value


# ------------------------------------------------------------------ values


def test_a_moving_reference_keeps_its_place_in_dicts() -> None:
    ref, known = a_ref(), {}
    known[ref] = "here"
    ref._move(State(5, PLAN, None))
    assert ref.version == 5
    assert known[ref] == known[a_ref(1)] == "here"


def test_snapshots_are_equal_by_version() -> None:
    one, two = a_ref(1).snapshot(), a_ref(2).snapshot()
    assert one == a_ref(1).snapshot()
    assert hash(one) == hash(a_ref(1).snapshot())
    assert one != two
    assert one != a_ref(1)
    assert a_ref(1) == a_ref(2)
    assert a_ref(1) != a_ref(1, region=8)
    assert a_ref(1) != "text"


def test_nothing_of_a_reference_can_be_set() -> None:
    ref = a_ref()
    for name in ("region", "version", "plan", "payload", "scope", "frozen", "anything"):
        with pytest.raises(AttributeError):
            setattr(ref, name, 1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("travel", [lambda r: pickle.loads(pickle.dumps(r)), copy.deepcopy])
def test_versions_travel(travel: Any, frozen: bool) -> None:
    ref = a_ref()
    ref._move(State(3, Plan(30_000, 120, ((4096, 25_904),)), None))
    ref = ref.snapshot() if frozen else ref
    again = travel(ref)
    assert (again.version, again._frozen, again._plan) == (3, frozen, ref._plan)
    assert again == ref
    assert again._first.plan == PLAN  # what lay where before it grew


def test_repr_says_what_it_is() -> None:
    assert repr(a_ref(3)) == "GlobalRef(object, 15.6 KiB, variable 7 version 3)"
    assert repr(a_ref(3).snapshot()) == "GlobalRef(object, 15.6 KiB, variable 7 version 3, frozen)"


def test_snapshots_never_move() -> None:
    ref = a_ref(3).snapshot()
    assert ref.snapshot() is ref
    ref._move(State(4, PLAN, None))
    assert ref.version == 3
    with pytest.raises(ValueError, match=r"ref\.at\(\)"):
        ref.refresh()


def test_a_slower_thread_does_not_move_it_back() -> None:
    ref = a_ref(0)
    for version in (5, 3):
        ref._move(State(version, PLAN, None))
    assert ref.version == 5
    barrier = threading.Barrier(4)

    def move(versions: range) -> None:
        barrier.wait()
        for version in versions:
            ref._move(State(version, PLAN, None))
            assert ref.version >= version

    threads = [threading.Thread(target=move, args=(range(n, 4000, 4),)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ref.version == 3999


# ------------------------------------------------------------------ reading versions


def test_each_reference_reads_its_version(ref: GlobalRef[Any]) -> None:
    first, early = ref.snapshot(), pickle.loads(pickle.dumps(ref))
    held = first.get()
    change(ref, 1)
    second = ref.snapshot()
    change(ref, 2)
    assert ref.version == 2
    assert [r.get()[50] for r in (first, second, ref)] == [0, 1, 2]
    assert early.version == 0
    assert early.get()[50] == 0  # a live one too stays where it is
    assert held[50] == 0


def test_at(session: FakeSession, ref: GlobalRef[Any]) -> None:
    for value in (1, 2):
        change(ref, value)
    asked = len(session.cluster.calls)
    here = ref.at(2)
    # Others may have committed, and the home may keep it no longer; an inline object is in there.
    assert session.cluster.calls[asked:] == ([] if ref._inline else ["at"])
    assert here._frozen
    assert [ref.at(v).get()[7] for v in (0, 1, 2)] == [0, 1, 2]
    assert ref.version == 2
    for version in (3, -1):
        with pytest.raises(errors.NoVersionError):
            ref.at(version)
    with pytest.raises(TypeError):
        ref.at("1")  # type: ignore[arg-type]


def test_at_the_own_version_says_what_the_registry_says(session: FakeSession) -> None:
    """Also where it was held while others went on."""
    ref = clamor.put(np.zeros(10_000))
    held = ref._thawed()
    change(ref, 1)

    def expired(method: str) -> None:
        if method == "at":
            raise errors.SnapshotExpired("Its blocks are kept no longer.")

    session.cluster.fail = expired
    with pytest.raises(errors.SnapshotExpired):
        held.at(0)


def test_refresh_and_latest(session: FakeSession, ref: GlobalRef[Any]) -> None:
    other = pickle.loads(pickle.dumps(ref))
    change(ref, 1)
    newest = other._latest()
    assert (newest.version, other.version, newest._frozen) == (1, 0, False)
    assert other.refresh() is other
    assert other.version == 1
    assert other.get()[3] == 1
    assert other.snapshot()._latest().version == 1
    assert other.at(0).get()[3] == 0  # also through one that travelled


def test_an_inline_variable_forgets_its_oldest_contents(session: FakeSession) -> None:
    ref = clamor.put(np.zeros(10))
    session.cluster.log._limits = type(session.cluster.log._limits)(max_payloads=3)
    for value in range(1, 7):
        change(ref, value)
        session.cluster.log.trim(0.0)
    assert ref.at(6).get()[0] == 6
    with pytest.raises(errors.SnapshotExpired):
        ref.at(2)
    assert ref.at(0).get()[0] == 0  # every reference holds that


def test_inline_variables_are_told_apart(session: FakeSession) -> None:
    one, two = clamor.put(np.zeros(3)), clamor.put(np.zeros(3))
    assert one != two
    assert min(one._region, two._region) >= 1 << 62
    change(one, 5)
    assert two.refresh().version == 0


def test_freed_references_ask_nothing(session: FakeSession, ref: GlobalRef[Any]) -> None:
    ref._mark_freed()
    for call in (ref._latest, ref.refresh, lambda: ref.at(1), ref.get):
        with pytest.raises(errors.FreedError):
            call()
    assert ref.snapshot()._freed


def test_several_versions_are_mapped_at_once(session: FakeSession) -> None:
    ref = clamor.put(np.zeros(10_000))
    old = ref.get()
    change(ref, 1)
    new = ref.get()
    found = [session.leases.at(a.__array_interface__["data"][0]) for a in (old, new)]
    assert [leased.snapshot.version for leased in found if leased and leased.snapshot] == [0, 1]
    del old, new, found
    assert len(session.leases) == 0
