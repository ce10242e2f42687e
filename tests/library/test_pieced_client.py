"""Several regions as one mapping, against NumPy. No Ray: an engine in this process is the home."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._native import piece_maps
from clamor_ray._native.pieced_client import FIRST_ID, PiecedClient, PieceVersion
from tests.conftest import until

BASE = 0x1300_0000_0000
PIECE_BLOCKS = 512
PIECE_BYTES = PIECE_BLOCKS * 4096
LENGTHS = [PIECE_BYTES, PIECE_BYTES, 40 * 4096]
N_BYTES = sum(LENGTHS)
N_BLOCKS = N_BYTES // 4096
REGIONS = [7, 8, 9]
ROW_BYTES = 5000  # some lie in two pieces
N_ROWS = N_BYTES // ROW_BYTES

Blocks = npt.NDArray[np.int64]


def some_bytes(seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, N_BYTES, np.uint8)


@dataclass
class World:
    engine: _native.Engine
    client: PiecedClient
    content: npt.NDArray[np.uint8]
    row: list[int] = field(default_factory=lambda: [0, 0, 0])

    def pieces(self, row: list[int] | None = None) -> list[PieceVersion]:
        begins = np.cumsum([0, *LENGTHS[:-1]])
        return [
            PieceVersion(region, version, BASE + int(begin), length)
            for region, version, begin, length in zip(
                REGIONS, row or self.row, begins, LENGTHS, strict=True
            )
        ]

    def map(self, flags: int = 0, row: list[int] | None = None) -> _native.Mapping:
        return self.client.map_pieces(self.pieces(row), flags=flags)

    def commit(self, mapping: _native.Mapping) -> list[int]:
        """What a private mapping has that is new, as a version of each piece that was written."""
        commit_id = secrets.randbits(63) | 1
        for part in self.client.parts(mapping.id, self.client.dirty(mapping.id)):
            self.client.stage(part.mapping_id, commit_id, part.runs)
            index = REGIONS.index(part.region)
            self.row[index] += 1
            self.engine.publish(part.region, self.row[index], commit_id)
        return list(self.row)


@pytest.fixture(params=["auto", "sigsegv"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    name = f"clamor-test-{secrets.token_hex(6)}"
    engine = _native.Engine(name, server_id=1, stage_timeout_s=30.0, history_directory="/tmp")
    client = PiecedClient(name, trap=request.param)
    world = World(engine, client, some_bytes(1))
    begin = 0
    for piece in world.pieces():
        fd = client.create(piece.region, piece.base_address, piece.length_bytes)
        _native.copy_in(fd, 0, world.content[begin : begin + piece.length_bytes])
        os.close(fd)
        client.seal(piece.region)
        begin += piece.length_bytes
    try:
        yield world
    finally:
        client.close()
        for piece in world.pieces():
            with contextlib.suppress(errors.FreedError):
                while True:
                    PiecedClient.unmap_ended(piece.base_address)
        engine.stop()


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def taken_bytes(first: int) -> int:
    """Of so many addresses as the variable has."""
    found = 0
    for line in maps():
        begin, end = (int(number, 16) for number in line.split()[0].split("-"))
        found += max(0, min(end, first + N_BYTES) - max(begin, first))
    return found


def memory(mapping: _native.Mapping) -> npt.NDArray[np.uint8]:
    raw = (ctypes.c_uint8 * mapping.length_bytes).from_address(mapping.address)
    return np.frombuffer(raw, np.uint8)


def test_they_are_one_piece_of_memory(world: World) -> None:
    mapping = world.map()
    assert mapping.id >= FIRST_ID
    assert (mapping.address, mapping.length_bytes) == (BASE, N_BYTES)
    assert np.array_equal(memory(mapping), world.content)
    again = world.map()
    assert again.address == BASE
    world.client.unmap(mapping.id)
    assert np.array_equal(memory(again), world.content)
    with pytest.raises(errors.FreedError, match="No mapping"):
        world.client.unmap(mapping.id)
    with pytest.raises(errors.FreedError, match="No mapping"):
        world.client.dirty(mapping.id)
    world.client.unmap_later(again.id)
    assert world.map().address == BASE


def test_what_is_written_to_a_private_one_is_told_by_piece(world: World) -> None:
    private = world.map(_native.MAP_PRIVATE)
    view = memory(private)
    for block in (0, PIECE_BLOCKS - 1, PIECE_BLOCKS, N_BLOCKS - 1):
        view[block * 4096] ^= 1
    dirty = world.client.dirty(private.id)
    assert dirty.tolist() == [[0, 1], [PIECE_BLOCKS - 1, 2], [N_BLOCKS - 1, 1]]
    parts = world.client.parts(private.id, dirty)
    assert [(part.region, part.version) for part in parts] == [(7, 0), (8, 0), (9, 0)]
    assert [part.runs.tolist() for part in parts] == [
        [[0, 1], [PIECE_BLOCKS - 1, 1]],
        [[0, 1]],
        [[39, 1]],
    ]
    with pytest.raises(errors.RangeError, match="outside"):
        world.client.parts(private.id, np.array([[N_BLOCKS - 1, 2]], np.uint64))
    blank = np.array([[PIECE_BLOCKS - 2, 4]], np.uint64)
    world.client.blank(private.id, blank)
    begin = (PIECE_BLOCKS - 2) * 4096
    assert not memory(private)[begin : begin + 4 * 4096].any()


def test_versions_of_one_variable_beside_each_other(world: World) -> None:
    """An old version keeps its addresses; the new one lies elsewhere, in one piece."""
    old = world.map()
    private = world.map(_native.MAP_PRIVATE)
    assert private.address != BASE
    assert np.array_equal(memory(private), world.content)
    changed = world.content.copy()
    for at in (3, PIECE_BYTES + 17):
        changed[at] ^= 255
        memory(private)[at] ^= 255
    row = world.commit(private)
    assert row == [1, 1, 0]
    new = world.map()
    assert new.address not in (BASE, private.address)
    assert np.array_equal(memory(new), changed)
    assert np.array_equal(memory(old), world.content)
    with pytest.raises(errors.AddressClashError):
        world.map(_native.MAP_FIXED)
    for mapping in (old, private, new):
        world.client.unmap(mapping.id)
    assert world.map().address == BASE
    assert np.array_equal(memory(world.map()), changed)


def test_a_version_that_is_not_there_leaves_nothing_behind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    map_all = world.client._map_all

    def note(pieces, flags, at, deadline):
        reserved.append(at)
        return map_all(pieces, flags, at, deadline)

    monkeypatch.setattr(world.client, "_map_all", note)
    for n_before in (0, len(REGIONS)):
        held = world.map() if n_before else None
        reserved.clear()
        with pytest.raises(errors.WaitTimeoutError):  # there is no registry that says so
            world.client.map_pieces(world.pieces([0, 0, 5]), timeout_s=0.2)
        until(lambda n=n_before: world.engine.stats()["mappings"] == n)
        assert [at != 0 for at in reserved] == [False] + [True] * bool(held)
        assert sum(taken_bytes(at) for at in reserved if at) == 0
        assert taken_bytes(BASE) == (N_BYTES if held else 0)
        assert held is None or np.array_equal(memory(held), world.content)


def test_rows_are_gathered_across_pieces(world: World) -> None:
    mapping = world.map()
    rows = world.content[: N_ROWS * ROW_BYTES].reshape(N_ROWS, ROW_BYTES)
    lies = {"offset_bytes": 0, "stride_bytes": ROW_BYTES, "row_bytes": ROW_BYTES}

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, N_ROWS - 1), max_size=40))
    def check(numbers: list[int]) -> None:
        crossing = [PIECE_BYTES // ROW_BYTES, 2 * PIECE_BYTES // ROW_BYTES]
        ids = np.array(numbers + crossing * (len(numbers) % 2), np.uint64)
        out = np.zeros((ids.size, ROW_BYTES), np.uint8)
        world.client.gather(mapping.id, ids, out, **lies)
        assert np.array_equal(out, rows[ids.astype(np.int64)])
        assert world.client.rows_here(mapping.id, ids.astype(np.int64), N_ROWS, **lies)

    check()
    part = {"offset_bytes": 100, "stride_bytes": ROW_BYTES, "row_bytes": 8}
    ids = np.arange(N_ROWS, dtype=np.uint64)
    out = np.zeros(N_ROWS, np.uint64)
    world.client.gather(mapping.id, ids, out, **part)
    assert np.array_equal(out.view(np.uint8).reshape(-1, 8), rows[:, 100:108])
    with pytest.raises(errors.RangeError, match="outside"):
        world.client.gather(mapping.id, np.array([N_ROWS], np.uint64), out[:625], **lies)
    with pytest.raises(ValueError, match="do not fit"):
        world.client.gather(mapping.id, ids, out[:5], **part)


def test_rows_are_here_where_all_their_blocks_are(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping = world.map()
    asked: set[int] = set()
    whole = np.array([[0, N_BLOCKS]], np.uint64)
    part_ids = [part.mapping_id for part in world.client.parts(mapping.id, whole)]

    def rows_here(client: _native.Client, part_id: int, ids: Blocks, *_: int, **lies: int) -> bool:
        assert lies == {"offset_bytes": 0, "stride_bytes": 4096, "row_bytes": 4096}
        blocks = ids + part_ids.index(part_id) * PIECE_BLOCKS
        assert not asked & set(blocks.tolist())  # none is asked for twice
        asked.update(blocks.tolist())
        return absent not in asked

    monkeypatch.setattr(_native.Client, "rows_here", rows_here)
    rng = np.random.default_rng(3)
    for row_bytes, offset_bytes in ((100, 50), (5000, 100), (9000, 4090)):
        n_rows = (N_BYTES - offset_bytes) // row_bytes
        lies = {"offset_bytes": offset_bytes, "stride_bytes": row_bytes, "row_bytes": row_bytes}
        for n_ids in (1, 7, 3000):
            ids = rng.integers(-n_rows, n_rows, n_ids)
            begins = (ids % n_rows) * row_bytes + offset_bytes
            ends = (begins + row_bytes - 1) // 4096 + 1
            expected = {
                block
                for begin, end in zip((begins // 4096).tolist(), ends.tolist(), strict=True)
                for block in range(begin, end)
            }
            asked.clear()
            absent = -1
            assert world.client.rows_here(mapping.id, ids, n_rows, **lies)
            assert asked == expected
            asked.clear()
            absent = max(expected)
            assert not world.client.rows_here(mapping.id, ids, n_rows, **lies)


def test_what_was_read_is_told_of_all_pieces(world: World) -> None:
    mapping = world.map(_native.MAP_EXACT_READS)
    blocks = np.array([[1, 2], [PIECE_BLOCKS - 1, 2], [N_BLOCKS - 3, 3]], np.uint64)
    world.client.prefetch(mapping.id, blocks)
    world.client.prefetch(mapping.id, blocks, wait=False)
    assert world.client.absent_blocks(mapping.id) == 0  # it is at home here
    world.client.evicted_begin(mapping.id)
    world.client.access_report_begin(mapping.id)
    assert int(memory(mapping)[PIECE_BYTES]) == int(world.content[PIECE_BYTES])
    read = world.client.access_report_end(mapping.id)
    assert any(first <= PIECE_BLOCKS < first + n for first, n in read.tolist())
    world.client.report_reads(mapping.id, read)
    assert world.client.evicted(mapping.id).shape[1] == 2
    world.client.evicted_end(mapping.id)
    world.client.access_report_begin(mapping.id)
    world.client.access_report_drop(mapping.id)


def test_one_regions_mappings_are_as_ever(world: World) -> None:
    piece = world.pieces()[1]
    mapping = world.client.map(*piece)
    assert mapping.id < FIRST_ID
    (part,) = world.client.parts(mapping.id, np.array([[0, 3]], np.uint64))
    assert (part.mapping_id, part.region) == (mapping.id, 0)
    out = np.zeros(10, np.uint8)
    ids = np.arange(10, dtype=np.uint64)
    lies = {"offset_bytes": 0, "stride_bytes": 4096, "row_bytes": 1}
    world.client.gather(mapping.id, ids, out, **lies)
    assert out.tolist() == world.content[PIECE_BYTES::4096][:10].tolist()
    assert world.client.rows_here(mapping.id, ids.astype(np.int64), 10, **lies)


def n_of_ours() -> int:
    """How many maps there are of variables: those of the allocator come and go."""
    return sum("memfd:clamor" in each for each in maps())


def test_pieces_have_a_share_of_the_processs_maps(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert piece_maps.most() == allowed // 10
    monkeypatch.setattr(piece_maps, "_maps", {})  # other tests unmap nothing
    monkeypatch.setattr(piece_maps, "most", lambda: 2 * len(REGIONS))
    first = world.map()
    again = world.map()  # the same memory, so no map more
    private = world.map(_native.MAP_PRIVATE)
    assert piece_maps.count() == 2 * len(REGIONS)
    taken = n_of_ours()
    with pytest.raises(errors.OutOfMemoryError, match="3 pieces needs as many maps") as caught:
        world.map(_native.MAP_PRIVATE)
    assert "vm.max_map_count" in caught.value.hint
    assert n_of_ours() == taken
    world.client.unmap(first.id)
    assert piece_maps.count() == 2 * len(REGIONS)
    world.client.unmap(again.id)
    assert piece_maps.count() == len(REGIONS)
    other = world.map(_native.MAP_PRIVATE)
    assert np.array_equal(memory(other), world.content)
    for mapping in (private, other):
        world.client.unmap(mapping.id)
    assert piece_maps.count() == 0


def test_its_addresses_outlive_the_client_and_are_let_go_of(world: World) -> None:
    mapping = world.map()
    world.client.close()
    assert taken_bytes(BASE) == N_BYTES
    world.client.unmap(mapping.id)
    assert taken_bytes(BASE) == 0


OTHER = 20  # a region of a piece's length that is none of the variable's


def make_other(world: World) -> tuple[PieceVersion, npt.NDArray[np.uint8]]:
    content = some_bytes(9)[:PIECE_BYTES]
    piece = PieceVersion(OTHER, 0, BASE + 64 * PIECE_BYTES, PIECE_BYTES)
    fd = world.client.create(piece.region, piece.base_address, piece.length_bytes)
    _native.copy_in(fd, 0, content)
    os.close(fd)
    world.client.seal(OTHER)
    return piece, content


def test_a_piece_shows_another_region_and_is_committed_as_itself(world: World) -> None:
    other, content = make_other(world)
    private = world.map(_native.MAP_PRIVATE)
    view = memory(private)
    expected = world.content.copy()
    view[PIECE_BYTES] ^= 1  # is gone with what the piece showed
    view[3] = expected[3] = 77  # of another piece: it stays
    world.client.replace(private.id, 1, other.region, 0, other.base_address)
    assert world.client.is_whole(private.id)
    expected[PIECE_BYTES : 2 * PIECE_BYTES] = content
    assert np.array_equal(view, expected)
    assert world.client.dirty(private.id).tolist() == [[0, 1]]
    view[PIECE_BYTES + 5 * 4096] = expected[PIECE_BYTES + 5 * 4096] = 78
    dirty = world.client.dirty(private.id)
    assert dirty.tolist() == [[0, 1], [PIECE_BLOCKS + 5, 1]]
    parts = world.client.parts(private.id, np.array([[PIECE_BLOCKS, 10]], np.uint64))
    assert [(part.region, part.version) for part in parts] == [(8, 0)]
    # Ten blocks of what is shown, as a layer of the piece itself.
    commit_id = secrets.randbits(63) | 1
    world.client.stage(parts[0].mapping_id, commit_id, parts[0].runs, of=(8, 0))
    world.engine.publish(8, 1, commit_id)
    committed = world.content.copy()
    ten = slice(PIECE_BYTES, PIECE_BYTES + 10 * 4096)
    committed[ten] = expected[ten]
    newer = world.map(row=[0, 1, 0])
    assert np.array_equal(memory(newer), committed)
    with pytest.raises(errors.RangeError, match="no variable"):
        world.client.stage(parts[0].mapping_id, commit_id, parts[0].runs, of=(0, 0))
    # Another one again, to be read only.
    world.client.replace(private.id, 1, 8, 1, BASE + PIECE_BYTES, private=False)
    assert np.array_equal(view[ten], committed[ten])
    world.client.unmap(private.id)
    world.client.unmap(newer.id)
    assert taken_bytes(private.address) == 0


def test_a_piece_that_cannot_be_replaced_keeps_its_addresses(world: World) -> None:
    other, content = make_other(world)
    shared, private = world.map(), world.map(_native.MAP_PRIVATE)
    with pytest.raises(errors.RangeError, match="to be read"):
        world.client.replace(shared.id, 1, other.region, 0, other.base_address)
    with pytest.raises(errors.FreedError):
        world.client.replace(shared.id + 1000, 1, other.region, 0, other.base_address)
    with pytest.raises(errors.RangeError):  # no address of a region
        world.client.replace(private.id, 1, other.region, 0, 4096)
    assert world.client.is_whole(private.id)
    assert np.array_equal(memory(private), world.content)
    for _ in range(2):
        with pytest.raises(errors.WaitTimeoutError):  # nobody says what region 99 is
            world.client.replace(private.id, 1, 99, 0, other.base_address, timeout_s=0.2)
        assert not world.client.is_whole(private.id)
        assert taken_bytes(private.address) == N_BYTES
    world.client.replace(private.id, 1, other.region, 0, other.base_address)
    assert world.client.is_whole(private.id)
    assert np.array_equal(memory(private)[PIECE_BYTES : 2 * PIECE_BYTES], content)
    with pytest.raises(errors.WaitTimeoutError):
        world.client.replace(private.id, 2, 99, 0, other.base_address, timeout_s=0.2)
    world.client.unmap(private.id)
    assert taken_bytes(private.address) == 0
