"""What a source makes, and how it is put beside what other nodes have."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
from pyroaring import BitMap

from clamor_ray._objects.layout import Plan, take_apart, take_apart_zeros
from clamor_ray._protocol.messages import RebuildOrder, RegionRecord
from clamor_ray._protocol.source import Source, make_again, source_of_call, source_of_zeros
from clamor_ray._read.ref import GlobalRef
from clamor_ray.actors.lost_homes.new_home import fill_from_source, written_bytes
from clamor_ray.errors import SourceError, UnpicklableError

BLOCK = 4096
N_BLOCKS = 24


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test")
    os.ftruncate(made, N_BLOCKS * BLOCK)
    yield made
    os.close(made)


def order(from_source: BitMap, compared: BitMap) -> RebuildOrder:
    record = RegionRecord(1, 0, 0, N_BLOCKS * BLOCK, (2,))
    blocks = (bytes(each.serialize()) if each else b"" for each in (from_source, compared))
    return RebuildOrder(record, (), (), *blocks)


def image_of(pieces: list[tuple[int, bytes]]) -> bytes:
    image = bytearray(N_BLOCKS * BLOCK)
    for offset, piece in pieces:
        image[offset : offset + len(piece)] = piece
    return bytes(image)


def some_pieces(rng: random.Random) -> list[tuple[int, bytes]]:
    """Side by side, with gaps, that begin and end anywhere."""
    ends = sorted(rng.sample(range(N_BLOCKS * BLOCK), 2 * rng.randint(1, 6)))
    return [
        (begin, rng.randbytes(end - begin))
        for begin, end in zip(ends[::2], ends[1::2], strict=True)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_just_the_blocks_that_are_wanted_are_written(fd: int, seed: int) -> None:
    rng = random.Random(seed)
    pieces = some_pieces(rng)
    image = image_of(pieces)
    wanted = BitMap(rng.sample(range(N_BLOCKS), rng.randint(1, N_BLOCKS)))
    others = BitMap(range(N_BLOCKS)) - wanted
    changed = BitMap(block for block in others if rng.random() < 0.3)
    for block in others:  # of peers; what commits changed differs
        content = rng.randbytes(BLOCK) if block in changed else image[block * BLOCK :][:BLOCK]
        os.pwrite(fd, content, block * BLOCK)
    before = os.pread(fd, N_BLOCKS * BLOCK, 0)
    fill_from_source(fd, order(wanted, others - changed), pieces)
    after = os.pread(fd, N_BLOCKS * BLOCK, 0)
    for block in range(N_BLOCKS):
        at = slice(block * BLOCK, (block + 1) * BLOCK)
        assert after[at] == (image if block in wanted else before)[at]


@pytest.mark.parametrize("seed", range(30))
def test_a_byte_that_differs_is_seen_before_anything_is_written(fd: int, seed: int) -> None:
    rng = random.Random(seed)
    pieces = some_pieces(rng)
    offset, piece = rng.choice(pieces)
    at = offset + rng.choice([0, len(piece) - 1, rng.randrange(len(piece))])
    compared = BitMap([at // BLOCK])
    image = bytearray(image_of(pieces))
    image[at] ^= 1
    block = at // BLOCK
    os.pwrite(fd, image[block * BLOCK : (block + 1) * BLOCK], block * BLOCK)
    before = os.pread(fd, N_BLOCKS * BLOCK, 0)
    with pytest.raises(SourceError, match=rf"block {block} differs"):
        fill_from_source(fd, order(BitMap(range(N_BLOCKS)) - compared, compared), pieces)
    assert os.pread(fd, N_BLOCKS * BLOCK, 0) == before


def test_only_what_is_written_takes_memory() -> None:
    record = RegionRecord(1, 0, 0, 1 << 40, (2,))
    some = bytes(BitMap([1, 2, 5]).serialize())
    own, takes = ((3, some), (2, some)), ((4, 9, 5 * BLOCK), (5, 8, 2 * BLOCK))
    assert written_bytes(RebuildOrder(record, (), ())) == 0
    assert written_bytes(RebuildOrder(record, own, ())) == 6 * BLOCK
    assert written_bytes(RebuildOrder(record, own, takes)) == 13 * BLOCK
    assert written_bytes(RebuildOrder(record, own, takes, some)) == 16 * BLOCK
    pieces = ((BLOCK - 3, bytes(2 * BLOCK)), (5 * BLOCK + 7, b"x"), (90 * BLOCK, b"x"))
    assert written_bytes(RebuildOrder(record, (), takes, some, pieces=pieces)) == 10 * BLOCK


def test_the_notes_of_lost_blocks_take_memory() -> None:
    record = RegionRecord(1, 0, 0, 1 << 40, (2,))

    def noted(lost: BitMap) -> int:
        return written_bytes(RebuildOrder(record, (), (), lost=bytes(lost.serialize())))

    assert noted(BitMap([7])) == BLOCK  # 8 bytes, in a page of their own
    assert noted(BitMap(range(512))) == BLOCK
    assert noted(BitMap(range(511, 513))) == 2 * BLOCK
    assert noted(BitMap(range(1000, 9000))) == 17 * BLOCK
    assert noted(BitMap(range(0, 1 << 20, 1024))) == 1024 * BLOCK


def test_a_source_makes_the_pieces_that_were_put() -> None:
    def again() -> dict[str, np.ndarray]:
        return {"a": np.arange(3000), "b": np.ones((70, 9))}

    pickled = take_apart(again())
    source = source_of_call(again, pickled)
    pieces = make_again(source.what, source.digest)
    wanted = [(offset, bytes(view)) for offset, view in pickled.pieces()]
    assert [(offset, bytes(piece)) for offset, piece in pieces] == wanted
    # They travel between processes as they are.
    travelled = cloudpickle.loads(cloudpickle.dumps(pieces))
    assert [(offset, bytes(piece)) for offset, piece in travelled] == wanted


def test_references_inside_make_no_difference() -> None:
    def again() -> Any:
        ref: GlobalRef[Any] = GlobalRef(1, 0, 0, 0, Plan(5, 5), "s", b"hello")
        return [ref, np.arange(3000)]

    pickled = take_apart(again())
    source = source_of_call(again, pickled)
    assert len(make_again(source.what, source.digest)) == 2


@pytest.mark.parametrize(
    "other", [np.arange(2999), np.arange(3000, dtype=np.float64), [np.arange(3000)]]
)
def test_another_object_is_refused(other: object) -> None:
    pickled = take_apart(np.arange(3000))
    source = source_of_call(lambda: other, pickled)
    with pytest.raises(SourceError, match="differs from what was put"):
        make_again(source.what, source.digest)


def test_what_cannot_be_a_source() -> None:
    pickled = take_apart(np.arange(3000))
    with pytest.raises(TypeError, match="callable"):
        source_of_call(3, pickled)  # type: ignore[arg-type]
    lock = __import__("threading").Lock()
    with pytest.raises(UnpicklableError, match="The source"):
        source_of_call(lambda: lock, pickled)


@pytest.mark.parametrize("capacity", [None, 10**6])
def test_zeros_are_their_stream(capacity: int | None) -> None:
    plan, inband = take_apart_zeros(10**5, np.int64, capacity)
    assert source_of_zeros(plan, inband) == Source("zeros", plan.inband_offset, b"", inband)
