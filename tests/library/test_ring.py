"""Rings of threads in this process: how they join, what they compute, how they fail."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clamor_ray import errors
from clamor_ray._native.ring import Ring, dtype_code
from clamor_ray._ring import joining
from clamor_ray._ring.joining import RingPlace, in_ring, join, listen

SECRET = bytes(range(32))
HOST = "127.0.0.1"
TIMEOUT_S = 20.0


@contextlib.contextmanager
def rings(
    n: int, n_lanes: int = 2, small_bytes: int = 4096, order: Sequence[int] | None = None
) -> Iterator[list[Ring]]:
    """Joined rings, by rank; `order` is that of ranks in the ring."""
    listeners = [listen(HOST) for _ in range(n)]
    places = [
        RingPlace(rank, HOST, listeners[rank].getsockname()[1]) for rank in (order or range(n))
    ]

    def one(rank: int) -> Ring:
        return join(
            listeners[rank],
            b"group",
            SECRET,
            places,
            rank,
            n_lanes=n_lanes,
            small_bytes=small_bytes,
            timeout_s=TIMEOUT_S,
        )

    with ThreadPoolExecutor(n) as pool:
        made = list(pool.map(one, range(n)))
    try:
        yield made
    finally:
        for ring in made:
            ring.close()
        for listener in listeners:
            listener.close()


def everywhere(made: Sequence[Ring], work: Callable[[Ring], Any]) -> list[Any]:
    """What each member gets, or raises."""

    def one(ring: Ring) -> Any:
        try:
            return work(ring)
        except errors.ClamorError as error:
            return error

    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(one, made))


def allreduce(ring: Ring, array: np.ndarray[Any, Any], op: str = "sum") -> np.ndarray[Any, Any]:
    result = np.empty_like(array)
    code = dtype_code(array.dtype)
    assert code is not None
    ring.run("allreduce", array.shape, code, op, 0, array, result, array.size, TIMEOUT_S)
    return result


PLAIN: dict[str, Callable[[Any], Any]] = {
    "sum": lambda a: a.sum(axis=0, dtype=a.dtype),
    "prod": lambda a: a.prod(axis=0, dtype=a.dtype),
    "min": lambda a: a.min(axis=0),
    "max": lambda a: a.max(axis=0),
}


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 6),
    size=st.integers(0, 3000),
    dtype=st.sampled_from(["float32", "float64", "int32", "int64"]),
    op=st.sampled_from(sorted(PLAIN)),
    seed=st.integers(0, 2**32 - 1),
)
def test_as_numpy(n: int, size: int, dtype: str, op: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = rng.integers(-4, 5, (n, size)).astype(dtype)
    if op == "prod":
        arrays = np.where(arrays > 0, 2, 1).astype(dtype)
    want = PLAIN[op](arrays)
    with rings(n, order=rng.permutation(n).tolist()) as made:
        for found in everywhere(made, lambda ring: allreduce(ring, arrays[ring.rank], op)):
            np.testing.assert_array_equal(found, want)


def test_nan_and_infinity() -> None:
    arrays = np.array([[np.nan, 1, np.inf, 1], [1, np.nan, -np.inf, 2]] * 2).repeat(500, axis=1)
    with rings(4) as made:
        for op in PLAIN:
            found = everywhere(made, lambda ring, op=op: allreduce(ring, arrays[ring.rank], op))
            with np.errstate(invalid="ignore"):
                np.testing.assert_array_equal(found[0], PLAIN[op](arrays))


def test_other_shapes_are_named_and_the_ring_goes_on() -> None:
    def odd(ring: Ring) -> Any:
        shape = (5,) if ring.rank == 2 else (2, 3)
        return allreduce(ring, np.ones(shape))

    with rings(4) as made:
        for error in everywhere(made, odd):
            assert isinstance(error, errors.CollectiveMismatchError)
            assert "member 2" in str(error).lower()
            assert "allreduce of float64 of shape (5,) by sum" in str(error)
            assert "shape (2, 3)" in str(error)
        for found in everywhere(made, lambda ring: allreduce(ring, np.ones(3))):
            np.testing.assert_array_equal(found, [4.0] * 3)


def test_a_member_that_closes_is_named() -> None:
    def one(ring: Ring) -> Any:
        if ring.rank == 1:
            ring.close()
            return None
        return allreduce(ring, np.ones(100_000))

    with rings(3) as made:
        begun = time.monotonic()
        found = everywhere(made, one)
        assert time.monotonic() - begun < TIMEOUT_S / 2
        for rank in (0, 2):
            assert isinstance(found[rank], errors.MemberLostError)
            assert found[rank].member is not None
        assert 1 in (found[0].member, found[2].member)


def test_a_silent_member_is_named() -> None:
    with rings(2) as made:
        with pytest.raises(errors.MemberLostError, match=r"Member 1 .* did nothing for 0\.2 s"):
            made[0].run("barrier", timeout_s=0.2)
        with pytest.raises(errors.MemberLostError):  # and stays broken
            made[0].run("barrier", timeout_s=0.2)


def test_shut_ends_a_call() -> None:
    with rings(2) as made, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(made[0].run, "barrier")
        time.sleep(0.1)
        made[0].shut()
        with pytest.raises(errors.ClosedError):
            waiting.result(10)


def test_bytes_go_around() -> None:
    with rings(3, order=[2, 0, 1]) as made:
        said = {0: b"", 1: b"x" * 200_000, 2: b"y"}
        found = everywhere(made, lambda ring: bytes(ring.swap(said[ring.rank], TIMEOUT_S)))
        assert found == [said[2], said[0], said[1]]


# ------------------------------------------------------------------ joining


def test_nodes_by_address_and_their_members_side_by_side() -> None:
    places = [
        RingPlace(0, "10.0.0.2", 1),
        RingPlace(1, "10.0.0.1", 1),
        RingPlace(2, "10.0.0.2", 2),
    ]
    assert [place.rank for place in in_ring(places)] == [1, 0, 2]


def join_two(listener: socket.socket, port: int, group: bytes, secret: bytes, rank: int) -> Ring:
    ports = [0, 0]
    ports[rank], ports[1 - rank] = listener.getsockname()[1], port
    places = [RingPlace(i, HOST, ports[i]) for i in range(2)]
    return join(listener, group, secret, places, rank, timeout_s=1.5)


@pytest.mark.parametrize("other", [(b"another", SECRET), (b"group", bytes(32))])
def test_strangers_are_turned_away(other: tuple[bytes, bytes]) -> None:
    """Of another group, or of an earlier joining of this one, or without the secret."""
    with listen(HOST) as a, listen(HOST) as b, ThreadPoolExecutor(2) as pool:
        one = pool.submit(join_two, a, b.getsockname()[1], b"group", SECRET, 0)
        two = pool.submit(join_two, b, a.getsockname()[1], *other, 1)
        for waiting in (one, two):
            with pytest.raises(errors.MemberLostError):
                waiting.result(30)


def test_a_missing_member_is_named() -> None:
    with listen(HOST) as a, listen(HOST) as b:
        begun = time.monotonic()
        with pytest.raises(errors.MemberLostError, match="Member 1") as raised:
            join_two(a, b.getsockname()[1], b"group", SECRET, 0)
        assert raised.value.member == 1
        assert time.monotonic() - begun < 10


def test_a_stranger_that_says_nothing_does_not_hold_up_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "HANDSHAKE_S", 0.3)
    with listen(HOST) as a, listen(HOST) as b, ThreadPoolExecutor(2) as pool:
        with socket.create_connection(a.getsockname()) as silent:
            one = pool.submit(join_two, a, b.getsockname()[1], b"group", SECRET, 0)
            two = pool.submit(join_two, b, a.getsockname()[1], b"group", SECRET, 1)
            made = [one.result(30), two.result(30)]
            assert silent.recv(1) == b""
        barrier = threading.Thread(target=made[0].run, args=("barrier",))
        barrier.start()
        made[1].run("barrier")
        barrier.join(10)
        for ring in made:
            ring.close()
