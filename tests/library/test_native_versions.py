"""The client's half of versions, as Python sees it: building in place, private copies, addresses.

No Ray: an engine in this process is a page server.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from clamor_ray import errors
from clamor_ray._native import client as _native
from tests.conftest import until

BASE = 0x1300_0000_0000
N_BLOCKS = 2048
LENGTH = N_BLOCKS * _native.BLOCK_BYTES
REGION = 7


@dataclass
class Pair:
    engine: _native.Engine
    client: _native.Client


@pytest.fixture(params=["auto", "sigsegv"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    name = f"clamor-test-{secrets.token_hex(6)}"
    engine = _native.Engine(name, server_id=1, stage_timeout_s=1.5, history_directory="/tmp")
    client = _native.Client(name, trap=request.param)
    try:
        yield Pair(engine, client)
    finally:
        client.close()
        with contextlib.suppress(
            errors.FreedError
        ):  # what a test still mapped there is a guard now
            while True:
                _native.Client.unmap_ended(BASE)
        engine.stop()


def memory(mapping: _native.Mapping) -> npt.NDArray[np.uint8]:
    """The mapping's bytes, writable as far as the mapping is."""
    raw = (ctypes.c_uint8 * mapping.length_bytes).from_address(mapping.address)
    return np.frombuffer(raw, np.uint8)


def built(client: _native.Client) -> _native.Mapping:
    mapping = client.build(REGION, BASE, LENGTH)
    memory(mapping)[:: 2 * _native.BLOCK_BYTES] = 9
    client.build_seal(mapping.id)
    return mapping


def test_what_is_built_in_place_is_a_region(pair: Pair) -> None:
    mapping = built(pair.client)
    assert (mapping.address, mapping.length_bytes) == (BASE, LENGTH)
    shared = pair.client.map(REGION, 0, BASE, LENGTH, flags=_native.MAP_FIXED)
    assert shared == mapping
    reader = _native.Client(pair.client.socket_name)
    try:
        # This process has the address already; for another client that is elsewhere.
        other = reader.map(REGION, 0, BASE, LENGTH, flags=_native.MAP_PRIVATE)
        assert other.address != BASE
        assert memory(other)[:: 2 * _native.BLOCK_BYTES].tolist() == [9] * (N_BLOCKS // 2)
        assert not memory(other)[1 :: 2 * _native.BLOCK_BYTES].any()
    finally:
        reader.close()


def test_an_unsealed_region_cannot_be_mapped(pair: Pair) -> None:
    mapping = pair.client.build(REGION, BASE, LENGTH)
    with pytest.raises(errors.FreedError, match="not sealed"):
        pair.client.map(REGION, 0, BASE, LENGTH)
    with pytest.raises(errors.AddressClashError, match="variable 7"):
        pair.client.build(REGION, BASE, LENGTH)
    pair.client.unmap(mapping.id)
    again = pair.client.build(REGION, BASE, LENGTH)  # it was abandoned
    assert not memory(again).any()
    pair.client.build_seal(again.id)
    with pytest.raises(errors.ExistsError, match="sealed"):
        pair.client.build_seal(again.id)


def test_dirty_blocks_are_those_written(pair: Pair) -> None:
    shared = built(pair.client)
    private = pair.client.map(REGION, 0, BASE, LENGTH, flags=_native.MAP_PRIVATE)
    assert private.address != BASE
    assert pair.client.dirty(private.id).shape == (0, 2)
    view = memory(private)
    assert int(view[4 * _native.BLOCK_BYTES]) == 9  # reads are none
    written = [0, 3, 4, 5, 1000, N_BLOCKS - 1]
    for block in written:
        view[block * _native.BLOCK_BYTES + 17] = block % 251 + 1
    runs = pair.client.dirty(private.id)
    assert runs.dtype == np.uint64
    assert runs.tolist() == [[0, 1], [3, 3], [1000, 1], [N_BLOCKS - 1, 1]]
    assert not memory(shared)[17 :: _native.BLOCK_BYTES].any()
    with pytest.raises(errors.RangeError, match="private"):
        pair.client.dirty(shared.id)


def test_more_runs_than_expected_are_all_told(pair: Pair) -> None:
    built(pair.client)
    private = pair.client.map(REGION, 0, BASE, LENGTH, flags=_native.MAP_PRIVATE)
    memory(private)[:: 2 * _native.BLOCK_BYTES] = 1
    runs = pair.client.dirty(private.id)
    assert runs.tolist() == [[block, 1] for block in range(0, N_BLOCKS, 2)]
    memory(private)[5 * _native.BLOCK_BYTES] = 1
    assert len(pair.client.dirty(private.id)) == N_BLOCKS // 2 - 1


def test_fixed_or_not_at_all(pair: Pair) -> None:
    built(pair.client)
    flags = _native.MAP_PRIVATE | _native.MAP_FIXED
    with pytest.raises(errors.AddressClashError, match="version 0 of it"):
        pair.client.map(REGION, 0, BASE, LENGTH, flags=flags)


def test_old_blocks_that_must_stay_are_counted(pair: Pair) -> None:
    def retained_bytes() -> int:
        stats = pair.engine.stats()
        assert stats["history_retained_expired"] == 0
        return stats["history_retained_bytes"]

    pair.engine.retain(REGION, 0)  # it is not known yet
    pair.client.unmap(built(pair.client).id)
    private = pair.client.map(REGION, 0, BASE, LENGTH, flags=_native.MAP_PRIVATE)
    for block in (3, 4, 900):
        memory(private)[block * _native.BLOCK_BYTES] = 1
    assert not pair.engine.has_layer(REGION, 5)
    assert pair.client.stage(private.id, 5, pair.client.dirty(private.id)) == 1
    assert pair.engine.has_layer(REGION, 5)
    pair.client.resolve(5, REGION, 1, private.id)
    until(lambda: pair.engine.stats()["commits_applied"] == 1)
    assert retained_bytes() == 3 * _native.BLOCK_BYTES
    pair.engine.retain(REGION, 1)
    assert retained_bytes() == 0
    pair.engine.retain(REGION, 0)
    assert retained_bytes() == 3 * _native.BLOCK_BYTES
    pair.engine.retain(REGION, None)
    assert retained_bytes() == 0


def test_a_layer_is_checked_before_it_is_copied(pair: Pair) -> None:
    shared = built(pair.client)
    private = pair.client.map(REGION, 0, BASE, LENGTH, flags=_native.MAP_PRIVATE)
    one = np.array([[0, 1]], np.uint64)
    for runs in ([[N_BLOCKS, 1]], [[4, 2], [5, 1]], [[4, 0]], []):
        with pytest.raises(errors.RangeError):
            pair.client.stage(private.id, 5, np.array(runs, np.uint64).reshape(-1, 2))
    with pytest.raises(errors.RangeError, match="private"):
        pair.client.stage(shared.id, 5, one)
    with pytest.raises(errors.RangeError, match="commit 0"):
        pair.client.stage(private.id, 0, one)
    with pytest.raises(errors.RangeError, match="commit 0"):
        pair.client.resolve(0, REGION, 1)
