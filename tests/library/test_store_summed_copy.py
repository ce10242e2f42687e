"""Bases that are filled past the page cache: what is in them, and which sums are known of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._native.checksums import block_sums
from clamor_ray._store import bases, disk, summed_copy, sums
from clamor_ray._store.layout import LAYERS, REGIONS, base_path, sums_path
from clamor_ray._store.summed_copy import SummedCopy, is_too_large, known_of
from clamor_ray._store.sums import SumsFile, sums_of, wrong_blocks

N_BLOCKS = 24
LENGTH = N_BLOCKS * BLOCK_BYTES
REGION = 7


@pytest.fixture
def node(tmp_path: Path) -> Path:
    for name in (REGIONS, LAYERS):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def base(node: Path) -> Iterator[int]:
    fd = os.open(node, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, LENGTH)
    yield fd
    os.close(fd)


parts = st.lists(
    st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH), st.integers(0, 255)), max_size=8
)


@settings(max_examples=200, deadline=None)
@given(written=parts)
def test_any_parts_in_any_order(tmp_path_factory: pytest.TempPathFactory, written: list) -> None:
    node = tmp_path_factory.mktemp("node")
    (node / REGIONS).mkdir()
    image = np.zeros(LENGTH, np.uint8)
    fd = os.open(node, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, LENGTH)
        copy = SummedCopy(fd, LENGTH)
        for offset, n_bytes, value in written:
            some = (np.arange(min(n_bytes, LENGTH - offset)) * 7 + value).astype(np.uint8)
            image[offset : offset + len(some)] = some
            copy.write(offset, some)
        assert bytes(disk.read_at(fd, LENGTH, 0)) == image.tobytes()
        copy.note(REGION)
        known = known_of(node, REGION, fd, LENGTH)
        for block in np.flatnonzero(known) if known is not None else ():
            assert int(known[block]) - (1 << 32) == int(block_sums(image)[block])
        found = np.zeros(N_BLOCKS, np.uint32)
        for first, some_sums in sums_of(fd, LENGTH, known):
            found[first : first + len(some_sums)] = some_sums
        assert found.tolist() == block_sums(image).tolist()
    finally:
        os.close(fd)


def test_a_kept_base_has_the_sums_and_the_note_goes(
    node: Path, base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = np.random.default_rng(1).integers(0, 256, LENGTH, np.uint8)
    copy = SummedCopy(base, LENGTH)
    copy.write(0, content)
    copy.note(REGION)

    def read(*_: object) -> None:
        raise AssertionError("the base is read again")

    with monkeypatch.context() as patch:
        patch.setattr(sums, "block_sums", read)
        bases.keep_base(node, REGION, base, 1, 1 << 44, LENGTH)
    assert base_path(node, REGION).read_bytes() == content.tobytes()
    with SumsFile.open(sums_path(node, REGION)) as kept:
        assert not len(wrong_blocks(base, kept))
        assert kept.read(0, N_BLOCKS).tolist() == block_sums(content).tolist()
    assert sorted(each.name for each in (node / REGIONS).iterdir()) == ["7.base", "7.sums"]


def test_a_note_of_another_file_is_not_taken(node: Path, base: int) -> None:
    copy = SummedCopy(base, LENGTH)
    copy.write(0, bytes(LENGTH))
    copy.note(REGION)
    other = os.open(node, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(other, LENGTH)
        assert known_of(node, REGION, base, LENGTH) is not None
        assert known_of(node, REGION, other, LENGTH) is None
        assert known_of(node, REGION, base, LENGTH - BLOCK_BYTES) is None
        assert known_of(node, REGION + 1, base, LENGTH) is None
    finally:
        os.close(other)


def test_a_note_is_as_long_as_what_was_written(node: Path, base: int) -> None:
    SummedCopy(base, LENGTH).note(REGION)
    assert not list((node / REGIONS).iterdir())
    copy = SummedCopy(base, LENGTH)
    copy.write(2 * BLOCK_BYTES, bytes(3 * BLOCK_BYTES))
    copy.note(REGION)
    known = known_of(node, REGION, base, LENGTH)
    assert known is not None
    assert [bool(each) for each in known] == [False, False, True, True, True]
    assert bases.drop_region(node, REGION) is False
    assert not list((node / REGIONS).iterdir())


def test_a_torn_note_is_not_taken_and_goes_when_the_store_is_opened(node: Path, base: int) -> None:
    copy = SummedCopy(base, LENGTH)
    copy.write(0, bytes(LENGTH))
    copy.note(REGION)
    (note,) = (node / REGIONS).iterdir()
    note.write_bytes(note.read_bytes()[:-1])
    assert known_of(node, REGION, base, LENGTH) is None
    bases.settle(node)
    assert not list((node / REGIONS).iterdir())


def test_a_disk_that_has_no_room_for_a_note(
    node: Path, base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write_at", full)
    copy = SummedCopy(base, LENGTH)
    copy.write(0, bytes(LENGTH))
    copy.note(REGION)
    assert not list((node / REGIONS).iterdir())


def test_a_base_of_no_store_has_no_note(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, LENGTH)
    copy = SummedCopy(fd, LENGTH)
    copy.write(0, bytes(LENGTH))
    copy.note(REGION)
    os.close(fd)
    assert not list(tmp_path.iterdir())


def test_what_is_too_large_goes_by_the_memory_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed_copy, "available_bytes", lambda: 1 << 30)
    assert [is_too_large(n) for n in (1 << 26, (1 << 26) + 1)] == [False, True]
    monkeypatch.setattr(summed_copy, "available_bytes", lambda: None)
    assert not is_too_large(1 << 60)
