"""Parity as Python sees it: layers that are deltas, mirrors, and blocks made again of a group.

No Ray: an engine in this process is the page server, and the home of all regions.
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
from clamor_ray._native.parity import xor_into
from tests.conftest import until

BLOCK = _native.BLOCK_BYTES
BASE = 0x1300_0000_0000
STEP = 1 << 30
N_BLOCKS = 600  # more than are XORed at a time
LENGTH = N_BLOCKS * BLOCK
SHORT = 200 * BLOCK
ONE, TWO, PARITY = 11, 12, 13

Bytes = npt.NDArray[np.uint8]


@dataclass
class Group:
    """Two pieces, the second one shorter, and their parity."""

    engine: _native.Engine
    client: _native.Client
    bytes_of: dict[int, Bytes]

    def map(self, region: int, version: int, flags: int = 0) -> _native.Mapping:
        length_bytes = len(self.bytes_of[region])
        return self.client.map(region, version, BASE + region * STEP, length_bytes, flags=flags)

    def read(self, region: int, version: int) -> Bytes:
        mapping = self.map(region, version)
        found = memory(mapping).copy()
        self.client.unmap(mapping.id)
        return found

    def change(self, region: int, version: int, blocks: list[int]) -> _native.Mapping:
        """A private mapping in which these blocks are written."""
        mapping = self.map(region, version, _native.MAP_PRIVATE)
        for block in blocks:
            memory(mapping)[block * BLOCK : (block + 1) * BLOCK] = noise(
                BLOCK, version * 1000 + block
            )
        self.bytes_of[region] = memory(mapping).copy()
        return mapping

    def member(self, mapping: _native.Mapping) -> _native.ParityMember:
        return _native.ParityMember(mapping.id, self.client.dirty(mapping.id))

    def xor(self) -> Bytes:
        found = self.bytes_of[ONE].copy()
        found[:SHORT] ^= self.bytes_of[TWO]
        return found


def memory(mapping: _native.Mapping) -> Bytes:
    raw = (ctypes.c_uint8 * mapping.length_bytes).from_address(mapping.address)
    return np.frombuffer(raw, np.uint8)


def noise(n_bytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, n_bytes, np.uint8)


@pytest.fixture(params=["auto", "sigsegv"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    name = f"clamor-test-{secrets.token_hex(6)}"
    engine = _native.Engine(name, server_id=1, stage_timeout_s=60, history_directory="/tmp")
    client = _native.Client(name, trap=request.param)
    contents = {ONE: noise(LENGTH, 1), TWO: noise(SHORT, 2)}
    contents[PARITY] = Group(engine, client, contents).xor()
    try:
        for region, content in contents.items():
            mapping = client.build(region, BASE + region * STEP, len(content))
            memory(mapping)[:] = content
            client.build_seal(mapping.id)
            client.unmap(mapping.id)
        yield Group(engine, client, contents)
    finally:
        client.close()
        for region in contents:
            with contextlib.suppress(errors.FreedError):
                _native.Client.unmap_ended(BASE + region * STEP)
        engine.stop()


def test_a_commit_changes_the_parity_by_what_it_changes(group: Group) -> None:
    one = group.change(ONE, 0, [0, 1, 2, 150, *range(300, 420), N_BLOCKS - 1])
    two = group.change(TWO, 0, [2, 3, 151, 199])  # beside those of the other, and the same
    for mapping, region in ((one, ONE), (two, TWO)):
        group.client.stage(mapping.id, 5, group.client.dirty(mapping.id))
        group.client.resolve(5, region, 1, mapping.id)
    layer = group.client.stage_parity(PARITY, 5, [group.member(one), group.member(two)])
    assert layer.server_id == 1
    assert layer.runs.tolist() == [[0, 4], [150, 2], [199, 1], [300, 120], [N_BLOCKS - 1, 1]]
    assert layer.layer_bytes == (1 + 128) * BLOCK
    group.client.resolve(5, PARITY, 1)
    assert (group.read(PARITY, 1) == group.xor()).all()
    # One piece alone, and again: the delta is of what was there last.
    group.client.unmap(two.id)
    again = group.change(TWO, 1, [3, 4])
    group.client.stage(again.id, 6, group.client.dirty(again.id))
    layer = group.client.stage_parity(PARITY, 6, [group.member(again)])
    assert layer.runs.tolist() == [[3, 2]]
    group.client.resolve(6, TWO, 2, again.id)
    group.client.resolve(6, PARITY, 2)
    assert (group.read(PARITY, 2) == group.xor()).all()
    until(lambda: group.engine.stats()["commits_applied"] == 5)
    assert (group.read(PARITY, 2) == group.xor()).all()


def test_a_delta_that_is_dropped_changes_nothing(group: Group) -> None:
    before = group.read(PARITY, 0)
    one = group.change(ONE, 0, [7])
    group.client.stage_parity(PARITY, 5, [group.member(one)])
    assert group.engine.has_layer(PARITY, 5)
    group.client.resolve(5, PARITY, 0)
    until(lambda: not group.engine.has_layer(PARITY, 5))
    assert (group.read(PARITY, 0) == before).all()


def test_a_mirror_has_the_blocks_themselves(group: Group) -> None:
    one = group.change(ONE, 0, [0, 599])
    layer = group.client.stage_parity(PARITY, 5, [group.member(one)], delta=False)
    assert layer.runs.tolist() == [[0, 1], [599, 1]]
    group.client.resolve(5, PARITY, 1)
    found = group.read(PARITY, 1)
    for block in (0, 599):
        at = slice(block * BLOCK, (block + 1) * BLOCK)
        assert (found[at] == group.bytes_of[ONE][at]).all()


def test_what_cannot_be_a_parity_is_refused(group: Group) -> None:
    one = group.change(ONE, 0, [0])
    two = group.change(TWO, 0, [0])
    both = [group.member(one), group.member(two)]
    with pytest.raises(errors.RangeError, match="a mirror is of one"):
        group.client.stage_parity(PARITY, 5, both, delta=False)
    with pytest.raises(errors.RangeError, match="0 members"):
        group.client.stage_parity(PARITY, 5, [])
    shared = group.map(ONE, 0)
    runs = np.array([[0, 1]], np.uint64)
    with pytest.raises(errors.RangeError, match="private"):
        group.client.stage_parity(PARITY, 5, [_native.ParityMember(shared.id, runs)])
    outside = np.array([[199, 2]], np.uint64)
    with pytest.raises(errors.RangeError, match="not inside"):
        group.client.stage_parity(PARITY, 5, [_native.ParityMember(two.id, outside)])
    assert not group.engine.has_layer(PARITY, 5)


def test_the_writers_mapping_of_what_was_is_gone_afterwards(group: Group) -> None:
    until(lambda: group.engine.stats()["mappings"] == 0)  # those that the regions were built in
    one = group.change(ONE, 0, [5])
    group.client.stage_parity(PARITY, 5, [group.member(one)])
    until(lambda: group.engine.stats()["mappings"] == 1)  # its own
    assert (memory(one) == group.bytes_of[ONE]).all()


def test_blocks_come_back_from_the_other_members(group: Group) -> None:
    runs = np.array([[1, 3], [199, 2], [N_BLOCKS - 1, 1]], np.uint64)
    group.engine.stage_home(PARITY, 0, 31, runs)
    group.engine.stage_home(TWO, 0, 32, np.array([[1, 3], [199, 1]], np.uint64))
    group.engine.stage_xor(ONE, 0, 33, [(PARITY, 31), (TWO, 32)])
    assert not group.engine.has_layer(PARITY, 31)
    assert not group.engine.has_layer(TWO, 32)
    group.client.resolve(33, ONE, 1)  # as if it were a commit: its blocks are what is there already
    assert (group.read(ONE, 1) == group.bytes_of[ONE]).all()
    until(lambda: group.engine.stats()["commits_applied"] == 1)
    assert (group.read(ONE, 1) == group.bytes_of[ONE]).all()


def test_what_is_no_content_is_in_no_sum(group: Group) -> None:
    one = group.change(ONE, 0, [5])
    group.client.stage_parity(PARITY, 5, [group.member(one)])
    with pytest.raises(errors.ProtocolError, match="delta"):
        group.engine.stage_xor(ONE, 0, 33, [(PARITY, 5)])
    with pytest.raises(errors.NoVersionError, match="staged"):
        group.engine.stage_xor(ONE, 0, 33, [(PARITY, 6)])
    with pytest.raises(errors.RangeError, match="part 0"):
        group.engine.stage_xor(PARITY, 0, 5, [(PARITY, 5)])
    group.engine.stage_home(PARITY, 0, 31, np.array([[200, 1]], np.uint64))
    with pytest.raises(errors.RangeError, match="outside"):
        group.engine.stage_xor(TWO, 0, 33, [(PARITY, 31)])
    assert group.engine.has_layer(PARITY, 31)  # what failed takes nothing
    assert not group.engine.has_layer(TWO, 33)
    with pytest.raises(errors.FreedError):
        group.engine.stage_xor(99, 0, 33, [(PARITY, 31)])


@pytest.mark.parametrize("n_bytes", [0, 1, 31, 127, 128, 129, 4096, 100_003])
@pytest.mark.parametrize("shift", [0, 1, 17])
def test_xor_is_numpys(n_bytes: int, shift: int) -> None:
    a, b = noise(n_bytes + 32, 1)[shift : shift + n_bytes], noise(n_bytes + 32, 2)[:n_bytes]
    expected = a ^ b
    xor_into(a, b)
    assert (a == expected).all()
    xor_into(a, a)
    assert not a.any()


def test_xor_stays_inside() -> None:
    a = np.full(1000, 7, np.uint8)
    xor_into(a[100:300], np.full(200, 1, np.uint8))
    assert (a[:100] == 7).all()
    assert (a[300:] == 7).all()
    assert (a[100:300] == 6).all()
    with pytest.raises(ValueError, match="contiguous"):
        xor_into(a[::2], a[:500])
    with pytest.raises(ValueError, match="200 and 100 bytes"):
        xor_into(a[:200], a[:100])
