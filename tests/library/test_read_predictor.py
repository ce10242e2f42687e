"""Replayed read sets without Ray: names of calls, what is kept, what is fetched."""

from __future__ import annotations

import itertools
import pickle
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

import clamor_ray as clamor
from clamor_ray._objects.layout import Plan
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session import process_sessions
from clamor_ray._tasks import predicted_reads, read_predictor
from clamor_ray._tasks.predicted_reads import PredictedReads
from clamor_ray._tasks.read_predictor import (
    Hinted,
    Submitted,
    encode,
    hint,
    hinting_of,
    key_of,
    runs_to_fetch,
)
from clamor_ray.actors.registry.read_sets import SET_COST_BYTES, ReadSets, alike
from tests.support.fake_session import Cluster, FakeSession


@pytest.fixture(autouse=True)
def nothing_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tests before this one, whose variables have the same ids."""
    monkeypatch.setattr(predicted_reads, "_done", {})


def ref_of(region: int, version: int = 0, scope: str = "s", payload: bytes | None = None) -> Any:
    return GlobalRef(region, version, 0x1100_0000_0000, 8192, Plan(8192, 10), scope, payload)


# ------------------------------------------------------------------ names


PLAIN: list[Any] = [
    *(
        0,
        1,
        -1,
        True,
        False,
        None,
        0.0,
        -0.0,
        1.0,
        float("nan"),
        1.0 + 2**-52,
        "",
        "1",
        b"",
        b"1",
        "ab",
    ),
    *((), (1,), ((1,),), (1, 2), ("a", "b"), ("ab",), ((), ()), (b"1",), ("1",), (None,)),
    *(10**30, "\udc80", ref_of(1), ref_of(2), ref_of(1, scope="t"), (ref_of(1), 1)),
]


def test_equal_plain_arguments_and_no_others_have_one_name() -> None:
    names = {}
    for index, value in enumerate(PLAIN):
        for how, key in {
            "only": key_of("f", (value,), {}),
            "first": key_of("f", (value, 1), {}),
            "named": key_of("f", (), {"x": value}),
            "otherwise": key_of("f", (), {"y": value}),
            "of another": key_of("g", (value,), {}),
        }.items():
            assert key.sure
            assert key.digest not in names, (names[key.digest], value)
            names[key.digest] = (index, how)
        again = pickle.loads(pickle.dumps(value))
        assert key_of("f", (again,), {}).digest in names


def test_versions_and_the_order_of_names_do_not_matter() -> None:
    one = key_of("f", (ref_of(1, 3),), {"a": 1, "b": 2})
    assert one == key_of("f", (ref_of(1, 4),), {"b": 2, "a": 1})


@pytest.mark.parametrize("value", [[1], {"a": 1}, np.arange(3), np.int64(1), object(), (1, [2])])
def test_what_is_left_out_makes_a_name_unsure(value: Any) -> None:
    key = key_of("f", (value, 1), {})
    assert not key.sure
    assert key == key_of("f", (pickle.loads(pickle.dumps(value)), 1), {})
    assert key != key_of("f", (value, 2), {})
    assert key != key_of("f", (1, value), {})
    if type(value) is list:
        assert key == key_of("f", ([5, 6], 1), {})
    assert key_of("f", (value,), {}, sure=True).sure
    assert not key_of("f", (1,), {}, sure=False).sure


def test_the_caller_remembers_what_it_submitted() -> None:
    seen = Submitted(most_keys=3)
    keys = [key_of("f", (i,), {}) for i in range(4)]
    assert [seen.again(key) for key in keys[:3]] == [False] * 3
    assert [seen.again(key) for key in keys[:3]] == [True] * 3
    assert not seen.again(keys[3])  # it is full: all are forgotten
    assert not seen.again(keys[0])
    assert seen.again(keys[3])


def test_the_first_reference_carries_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_predictor, "submitted", Submitted())
    inline, first, second = ref_of(9, payload=b"x"), ref_of(1), ref_of(2)

    def call(*args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        return hint(args, kwargs, lambda: key_of("f", args, kwargs))

    args, kwargs = call(1, inline, first, second, x=second)
    hinted = args[2]
    assert type(hinted) is Hinted
    assert hinted.ref is first
    assert not hinted.again
    assert args[:2] == [1, inline]
    assert args[3] is kwargs["x"] is second
    assert call(1, inline, first, second, x=second)[0][2].again
    args, kwargs = call(1, x=first)
    assert args == [1]
    assert type(kwargs["x"]) is Hinted
    assert call(1, [first], inline) == ([1, [first], inline], {})  # nothing at top level


def test_which_functions_are_predicted() -> None:
    def function() -> None: ...

    name = f"{__name__}.test_which_functions_are_predicted.<locals>.function"
    for replay, expected in {
        None: (name, None),
        True: (name, True),
        "step": ("step", True),
    }.items():
        hinting = hinting_of(function, replay)
        assert hinting is not None
        assert (hinting.name, hinting.sure) == expected
    assert hinting_of(function, False) is None
    anonymous = hinting_of(lambda: None, None)
    assert anonymous is not None
    assert anonymous.sure is False
    assert clamor.remote(function)._decorator.hinting is not None
    assert clamor.remote(replay=False)(function)._decorator.hinting is None
    assert clamor.remote(read_set="off")(function)._decorator.hinting is None
    with pytest.raises(TypeError, match="replay is a name"):
        clamor.remote(replay=3)
    with pytest.raises(TypeError, match="replay= is for functions"):
        clamor.remote(replay=True)(type("Actor", (), {}))


# ------------------------------------------------------------------ sets


def runs_of(*runs: tuple[int, int]) -> Any:
    return np.array(runs, np.uint64).reshape(-1, 2)


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(0, 300)) | st.just(set(range(5, 90))),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_what_is_fetched_is_what_was_read(blocks: set[int], n_blocks: int, most: int) -> None:
    runs = runs_of(*((block, 1) for block in sorted(blocks)))
    if len(blocks) == 85:
        runs = runs_of((5, 20), (25, 65))
    packed = encode(runs)
    if not blocks:
        assert packed is None
        return
    assert packed is not None
    runs = runs_to_fetch(packed, n_blocks * 4096, 4 * most * 4096)
    assert runs.dtype == np.uint64
    fetched = [int(first) + i for first, n in runs for i in range(int(n))]
    assert fetched == [b for b in sorted(blocks) if b < n_blocks][: max(1, most)]
    assert all(first + n < after for (first, n), (after, _) in itertools.pairwise(runs.tolist()))


def test_what_is_too_large_is_not_kept() -> None:
    scattered = runs_of(*((block, 1) for block in range(0, 3 << 20, 2)))
    assert len(encode(scattered[: 1 << 16]) or b"") > 0
    rng = np.random.default_rng(0)
    blocks = np.unique(rng.integers(0, 1 << 40, 300_000).astype(np.uint64) & np.uint64(0xFFFFFFFF))
    assert encode(np.stack([blocks, np.ones_like(blocks)], axis=1)) is None
    assert encode(runs_of((0, 1 << 30))) is not None  # 4 TiB in one run


def packed(*blocks: int) -> bytes:
    return bytes(BitMap(blocks).serialize())


def test_half_of_the_old_makes_it_alike() -> None:
    old = {1: packed(*range(10)), 2: packed(*range(10))}
    assert alike(old, old)
    assert alike(old, {1: packed(*range(10))})
    assert alike(old, {1: packed(*range(100)), 3: packed(1)})
    assert not alike(old, {1: packed(*range(9))})
    assert not alike(old, {})


def test_a_sure_name_is_found_after_one_call() -> None:
    kept = ReadSets()
    assert kept.find(b"k", True, [1]) == {}
    kept.note(b"k", {1: packed(1, 2), 2: packed(3)})
    assert kept.find(b"k", True, [1]) == {1: packed(1, 2)}
    assert kept.find(b"k", True, [1, 2, 3]) == {1: packed(1, 2), 2: packed(3)}
    assert kept.find(b"k", True, [3]) == {}
    assert kept.find(b"other", True, [1]) == {}
    counters = kept.counters()
    assert (counters.noted, counters.asked, counters.found) == (1, 5, 2)
    assert counters.names == 1


def test_an_unsure_name_has_to_show_that_it_repeats() -> None:
    kept = ReadSets()
    kept.note(b"k", {1: packed(1, 2, 3)})
    assert kept.find(b"k", False, [1]) == {}
    kept.note(b"k", {1: packed(2, 3, 4)})
    assert kept.find(b"k", False, [1]) == {1: packed(2, 3, 4)}


@pytest.mark.parametrize("sure", [False, True])
def test_calls_that_vary_are_not_guessed(sure: bool) -> None:
    kept = ReadSets()
    kept.note(b"k", {1: packed(1)})
    kept.note(b"k", {1: packed(2)})
    assert kept.find(b"k", sure, [1]) == {}
    kept.note(b"k", {1: packed(2)})
    assert kept.find(b"k", sure, [1]) == {1: packed(2)}
    kept.note(b"k", {1: packed(7)})
    assert kept.find(b"k", sure, [1]) == {}


def test_what_is_freed_is_forgotten() -> None:
    kept = ReadSets()
    kept.note(b"both", {1: packed(1), 2: packed(2)})
    kept.note(b"two", {2: packed(2)})
    kept.forget(3)
    kept.forget(1)
    assert kept.find(b"both", True, [2]) == {}
    assert kept.find(b"two", True, [2]) == {2: packed(2)}
    kept.note(b"both", {2: packed(2)})
    kept.forget(2)
    kept.forget(2)
    counters = kept.counters()
    assert (counters.names, counters.bytes) == (0, 0)


def test_the_oldest_go_first_and_the_bound_holds() -> None:
    one = len(packed(1)) + 2 * SET_COST_BYTES
    kept = ReadSets(most_bytes=3 * one)
    for name in (b"a", b"b", b"c"):
        kept.note(name, {1: packed(1)})
    assert kept.find(b"a", True, [1])  # used last now
    kept.note(b"d", {1: packed(1)})
    assert [bool(kept.find(name, True, [1])) for name in (b"a", b"b", b"c", b"d")] == [1, 0, 1, 1]
    for i in range(1000):
        kept.note(b"%d" % (i % 7), {1: packed(*range(i % 50 + 1)), 2: packed(i)})
        assert kept.counters().bytes <= 3 * one
    assert kept.counters().names <= 3
    kept.forget(1)
    assert (kept.counters().names, kept.counters().bytes) == (0, 0)
    few = ReadSets()
    for _ in range(3):
        few.note(b"a", {1: packed(1)})
    assert few.counters().bytes == one
    kept.note(b"huge", {1: packed(*range(0, 5000, 2))})
    assert kept.counters().bytes <= 3 * one


# ------------------------------------------------------------------ nothing of it fails a call


class Registry:
    """Answers wrongly, or not at all."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []
        self.find_reads = self.note_reads = self

    def remote(self, packed: bytes) -> Any:
        self.asked.append(unpack(packed))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self

    def future(self) -> Any:
        told: Future[Any] = Future()
        told.set_result(self.answer)
        return told


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("the actor is dead"),
        b"no pickle",
        pack(0, {1: b"no bitmap"}, []),
        pack(1 << 60, {1: packed(1)}, []),
        pack("nonsense"),
    ],
)
def test_no_answer_fails_a_call(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    session = FakeSession(Cluster())
    session.registry = Registry(answer)
    monkeypatch.setattr(process_sessions, "_current", session)
    ref = session.creator.put(np.zeros(100_000))
    hinted = Hinted(ref, key_of("f", (ref,), {}), True)
    replaying = PredictedReads(hinted, [ref])
    assert session.registry.asked == [(*hinted.key, session.server_id, [ref._region])]
    session.fake.prefetched.clear()
    lease = session.open(ref)
    session.fake.prefetched.clear()
    replaying.fetch([lease])
    assert not session.fake.prefetched
    replaying.note([(ref._region, runs_of((3, 4)))], "f", {})
    sets = {ref._region: encode(runs_of((3, 4)))}
    who = ("f", session.node_id, {})
    assert session.registry.asked[1:] == [(hinted.key.digest, sets, who)]


def test_what_is_known_is_fetched_and_not_noted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession(Cluster())
    ref = session.creator.put(np.zeros(100_000))
    there = encode(runs_of((2, 3), (9, 1)))
    session.registry = Registry(pack(0, {ref._region: there}, []))
    monkeypatch.setattr(process_sessions, "_current", session)
    replaying = PredictedReads(Hinted(ref, key_of("f", (ref,), {}), True), [ref])
    lease = session.open(ref)
    session.fake.prefetched.clear()
    replaying.fetch([lease])
    assert session.fake.prefetched == [(lease.mapping.id, [[2, 3], [9, 1]], False)]
    replaying.note([(ref._region, runs_of((2, 3), (9, 1)))], "f", {})
    assert len(session.registry.asked) == 1
    replaying.note([(ref._region, runs_of((2, 3)))], "f", {})
    assert len(session.registry.asked) == 2


def test_a_first_call_and_one_whose_home_is_here_ask_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = FakeSession(Cluster())
    ref = session.creator.put(np.zeros(100_000))
    session.registry = Registry(pack(0, {}, [ref._region]))
    monkeypatch.setattr(process_sessions, "_current", session)
    monkeypatch.setattr(predicted_reads, "_here", set())
    key = key_of("f", (ref,), {})
    PredictedReads(Hinted(ref, key, False), [ref]).fetch([])
    assert session.registry.asked == []
    PredictedReads(Hinted(ref, key, True), [ref]).fetch([])
    assert len(session.registry.asked) == 1
    PredictedReads(Hinted(ref, key, True), [ref]).fetch([])  # now it is known where its home is
    assert len(session.registry.asked) == 1


def test_what_was_done_at_a_version_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSession(Cluster())
    ref = session.creator.put(np.zeros(100_000))
    session.registry = Registry(pack(0, {}, []))
    monkeypatch.setattr(process_sessions, "_current", session)
    key = key_of("f", (ref,), {})

    def call() -> int:
        before = len(session.registry.asked)
        replaying = PredictedReads(Hinted(ref, key, True), [ref])
        replaying.fetch([])
        replaying.note([], "f", {})
        return len(session.registry.asked) - before

    assert [call(), call()] == [1, 0]
    with clamor.update(ref) as x:
        x[0] = 1
    assert [call(), call()] == [1, 0]


@pytest.mark.parametrize("again", [False, True])
def test_what_was_said_twice_is_said(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    session = FakeSession(Cluster())
    ref = session.creator.put(np.zeros(100_000))
    session.registry = Registry(pack(0, {}, []))
    monkeypatch.setattr(process_sessions, "_current", session)
    monkeypatch.setattr(predicted_reads, "_noted", {})
    key = key_of("f", (ref,), {})

    def noted(*runs: tuple[int, int]) -> int:
        predicted_reads._done.clear()  # as at another version
        before = len(session.registry.asked)
        replaying = PredictedReads(Hinted(ref, key, again), [ref])
        replaying.fetch([])
        replaying.note([(ref._region, runs_of(*runs))], "f", {})
        return len(session.registry.asked) - before - again

    # Who asks, and is not told, says it again: the registry may have forgotten.
    assert [noted((2, 3)) for _ in range(4)] == ([1, 1, 1, 1] if again else [1, 1, 0, 0])
    assert [noted((2, 4)) for _ in range(3)] == ([1, 1, 1] if again else [1, 1, 0])
    assert noted((2, 3)) == 1
