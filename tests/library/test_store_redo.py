"""Bases, checksums, and what a redo refuses. `test_store_redo_property.py` has its crashes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._store import bases, checkpoint, redo, sums
from clamor_ray._store.layer_files import DELTA, layers_of, scan_layers
from clamor_ray._store.layout import (
    LAYERS,
    REGIONS,
    LayerName,
    base_path,
    layer_path,
    sums_path,
)
from clamor_ray._store.notes import LOST_YET, WAS_LOST
from clamor_ray._store.sums import SumsFile
from tests.support.store_files import base_file, block_of, put_layer

REGION = 7
N_BLOCKS = 5000
CONTENT = {3: block_of(3), 4: block_of(4), 4999: block_of(5)}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    for name in (REGIONS, LAYERS):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def base(node: Path) -> Iterator[int]:
    with base_file(node, CONTENT, N_BLOCKS) as fd:
        bases.keep_base(node, REGION, fd, 1, 1 << 44, N_BLOCKS * BLOCK_BYTES)
        yield fd


def test_a_base_and_its_sums(node: Path, base: int) -> None:
    with SumsFile.open(sums_path(node, REGION)) as found:
        assert found.header == (0, REGION, 1, 1 << 44, N_BLOCKS * BLOCK_BYTES, 1)
        assert not len(sums.wrong_blocks(base, found))
        assert os.fstat(found.fd).st_blocks * 512 < 64 << 10  # holes
        for block in (0, 4, 4998):
            os.pwrite(base, b"x", block * BLOCK_BYTES + 99)
        assert sums.wrong_blocks(base, found).tolist() == [0, 4, 4998]
    assert bases.bases_of(node) == [REGION]
    assert bases.drop_region(node, REGION)
    assert not bases.drop_region(node, REGION)
    assert not os.listdir(node / REGIONS)


def test_a_base_that_became_a_hole_is_told(node: Path, base: int) -> None:
    os.ftruncate(base, 0)
    os.ftruncate(base, N_BLOCKS * BLOCK_BYTES)
    with SumsFile.open(sums_path(node, REGION)) as found:
        assert sums.wrong_blocks(base, found).tolist() == sorted(CONTENT)


def test_the_other_header_is_taken_where_one_is_damaged(node: Path, base: int) -> None:
    path = sums_path(node, REGION)
    with SumsFile.open(path) as found:
        found.set_version(2)
        found.set_version(3)
        os.pwrite(found.fd, b"\xff", 20)
    with SumsFile.open(path) as found:
        assert found.header.version == 2
        os.pwrite(found.fd, b"\xff", 4096 + 20)
    with pytest.raises(errors.StoreDamagedError, match="no header"):
        SumsFile.open(path)
    path.unlink()
    with pytest.raises(errors.StoreDamagedError, match="missing"):
        SumsFile.open(path)


def test_sums_of_scattered_blocks(node: Path, base: int) -> None:
    blocks = np.array([0, 1, 2, 7, 4095, 4096, 4099, 4999], np.uint64)
    with SumsFile.open(sums_path(node, REGION)) as found:
        found.update(blocks, np.arange(1, 9, dtype=np.uint32))
        assert found.of(blocks).tolist() == list(range(1, 9))
        assert found.read(3, 1)[0] != 0  # block 3 is as it was
        with pytest.raises(errors.RangeError, match="5000"):
            found.update(np.array([5000], np.uint64), np.zeros(1, np.uint32))


def test_a_base_without_a_way_to_a_name_is_refused(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with base_file(node, CONTENT, N_BLOCKS) as fd:
        copy = os.open(node / "named", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(copy, N_BLOCKS * BLOCK_BYTES)
        (node / "named").unlink()
        with pytest.raises(errors.StoreAccessError, match="O_TMPFILE"):
            bases.keep_base(node, REGION, copy, 1, 1 << 44, N_BLOCKS * BLOCK_BYTES)
        os.close(copy)
        bases.keep_base(node, REGION, fd, 1, 1 << 44, N_BLOCKS * BLOCK_BYTES)


def test_a_missing_version_is_named(node: Path, base: int) -> None:
    put_layer(node, REGION, 12, CONTENT, version=2)
    put_layer(node, REGION, 14, CONTENT, version=4)
    with pytest.raises(errors.StoreDamagedError, match="Version 3 of variable 7") as caught:
        redo.redo(node, REGION, 4, {})
    assert (caught.value.region, caught.value.version) == (7, 3)
    assert len(layers_of(node, REGION)) == 2  # nothing goes before all is well
    put_layer(node, REGION, 13, CONTENT)
    redo.redo(node, REGION, 4, {13: 3})
    assert not scan_layers(node)


def test_a_flipped_bit_in_a_layer_is_named_where_it_counts(node: Path, base: int) -> None:
    path = put_layer(node, REGION, 12, {8: block_of(8), 9: block_of(9)}, version=2)
    with path.open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 5)
        file.write(b"\0\0\0")
    with pytest.raises(errors.StoreDamagedError, match="Block 9 of variable 7") as caught:
        redo.redo(node, REGION, 2, {})
    assert (caught.value.block, caught.value.file) == (9, str(path))
    put_layer(node, REGION, 13, {9: block_of(10)}, version=3)  # a newer one has that block
    redo.redo(node, REGION, 3, {})
    assert os.pread(base, BLOCK_BYTES, 9 * BLOCK_BYTES) == block_of(10).tobytes()


def test_a_delta_of_a_damaged_block_is_refused(node: Path, base: int) -> None:
    put_layer(node, REGION, 12, {4: block_of(8)}, version=2, flags=DELTA)
    os.pwrite(base, b"x", 4 * BLOCK_BYTES)
    with pytest.raises(errors.StoreDamagedError, match="Block 4") as caught:
        redo.redo(node, REGION, 2, {})
    assert caught.value.file == str(base_path(node, REGION))


@pytest.mark.parametrize("newest", [0, 5])
def test_a_base_that_does_not_fit_is_refused(node: Path, base: int, newest: int) -> None:
    if newest:
        os.ftruncate(base, 4096)
    with pytest.raises(errors.StoreDamagedError, match=r"7\.base"):
        redo.redo(node, REGION, newest, {})


def test_notes_say_from_when_a_block_is_there(node: Path) -> None:
    n = 600
    notes = np.zeros(n, "<u8")
    notes[5], notes[6], notes[7] = LOST_YET, 9, 2
    for in_file in (False, True):
        region = REGION + in_file
        with base_file(node, {}, n) as fd:
            os.pwrite(fd, notes.tobytes(), n * BLOCK_BYTES)
            os.ftruncate(fd, (n + 2) * BLOCK_BYTES)
            length = n * BLOCK_BYTES
            bases.keep_base(node, region, fd, 1, 1 << 44, length, in_file=in_file)
            blocks = {block: block_of(block) for block in (4, 5, 6, 7, 599)}
            put_layer(node, region, 12, blocks, version=2)
            put_layer(node, region, 13, {4: block_of(1), 8: block_of(2)}, version=3)
            redo.redo(node, region, 3, {})
            found = np.frombuffer(os.pread(fd, 8 * n, length), "<u8")
        was_lost = int(WAS_LOST) if in_file else 0
        expected = {5: 2 | was_lost, 6: 2, 7: 2}
        expected |= {4: 2, 8: 3, 599: 2} if in_file else {}
        assert {i: int(found[i]) for i in np.flatnonzero(found)} == expected


def test_a_delta_leaves_lost_blocks_lost(node: Path) -> None:
    n = 600
    with base_file(node, {1: block_of(1)}, n) as fd:
        notes = np.zeros(n, "<u8")
        notes[2] = LOST_YET
        os.pwrite(fd, notes.tobytes(), n * BLOCK_BYTES)
        os.ftruncate(fd, (n + 2) * BLOCK_BYTES)
        bases.keep_base(node, REGION, fd, 1, 1 << 44, n * BLOCK_BYTES)
        put_layer(node, REGION, 12, {1: block_of(5), 2: block_of(6)}, version=2, flags=DELTA)
        redo.redo(node, REGION, 2, {})
        found = os.pread(fd, BLOCK_BYTES, BLOCK_BYTES)
        assert found == (block_of(1) ^ block_of(5)).tobytes()
        assert os.pread(fd, 8, n * BLOCK_BYTES + 16) == b"\xff" * 8
        assert not any(os.pread(fd, BLOCK_BYTES, 2 * BLOCK_BYTES))


def test_a_checkpoint_keeps_what_is_newer(node: Path, base: int) -> None:
    for version in (2, 3, 4):
        put_layer(node, REGION, version, {version: block_of(version)}, version=version)
    put_layer(node, REGION, 99, CONTENT)
    for block in (2, 3):
        os.pwrite(base, block_of(block).tobytes(), block * BLOCK_BYTES)
    checkpoint.checkpoint(node, REGION, base, 3)
    assert layers_of(node, REGION) == [LayerName(REGION, 4, 4), LayerName(REGION, 99)]
    with SumsFile.open(sums_path(node, REGION)) as found:
        assert found.header.version == 3
        assert not len(sums.wrong_blocks(base, found))
    checkpoint.checkpoint(node, REGION, base, 2)  # it is later than that already


def test_a_checkpoint_of_a_delta_is_refused(node: Path, base: int) -> None:
    put_layer(node, REGION, 2, CONTENT, version=2, flags=DELTA)
    with pytest.raises(errors.StoreDamagedError, match="delta"):
        checkpoint.checkpoint(node, REGION, base, 2)
    put_layer(node, REGION, 3, CONTENT, version=3)
    with pytest.raises(ValueError, match="deltas"):
        checkpoint.merge(node, REGION, 1, 3)
    assert len(layers_of(node, REGION)) == 2


def test_a_base_whose_sync_failed_is_never_checkpointed(
    node: Path, base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_layer(node, REGION, 2, {2: block_of(2)}, version=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        with pytest.raises(errors.StoreError, match="syncing"):
            checkpoint.checkpoint(node, REGION, base, 2)
    with pytest.raises(errors.StoreError, match="refused"):
        checkpoint.checkpoint(node, REGION, base, 2)
    assert len(layers_of(node, REGION)) == 1
    redo.redo(node, REGION, 2, {})
    assert os.pread(base, BLOCK_BYTES, 2 * BLOCK_BYTES) == block_of(2).tobytes()


def test_many_layers_become_one(node: Path, base: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_MERGED_AT_ONCE", 3)
    for version in range(2, 12):
        blocks = {version: block_of(version), 50: block_of(100 + version)}
        put_layer(node, REGION, version, blocks, version=version)
    made = checkpoint.merge(node, REGION, 2, 10)
    assert made == layer_path(node, LayerName(REGION, 10, 10, 3))
    assert layers_of(node, REGION) == [
        LayerName(REGION, 2, 2),
        LayerName(REGION, 10, 10, 3),
        LayerName(REGION, 11, 11),
    ]
    assert checkpoint.merge(node, REGION, 2, 10) is None
    with pytest.raises(errors.StoreDamagedError, match="does not know"):
        redo.redo(node, REGION, 5, {})
    redo.redo(node, REGION, 11, {})
    for version in range(2, 12):
        found = os.pread(base, BLOCK_BYTES, version * BLOCK_BYTES)
        assert found == block_of(version).tobytes()
    assert os.pread(base, BLOCK_BYTES, 50 * BLOCK_BYTES) == block_of(111).tobytes()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
def test_a_redo_that_fails_is_done_again(
    node: Path, base: int, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    put_layer(node, REGION, 2, {2: block_of(2)}, version=2)

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(errors.NoSpaceError if code == errno.ENOSPC else errors.StoreError):
            redo.redo(node, REGION, 2, {})
    assert len(layers_of(node, REGION)) == 1
    redo.redo(node, REGION, 2, {})
    assert os.pread(base, BLOCK_BYTES, 2 * BLOCK_BYTES) == block_of(2).tobytes()


def test_what_the_registry_does_not_know_is_not_deleted(node: Path, base: int) -> None:
    """Its part of the store is a copy from before: the layer was named when it was committed."""
    put_layer(node, REGION, 2, CONTENT, version=2)
    put_layer(node, REGION, 3, CONTENT, version=3)
    with pytest.raises(errors.StoreDamagedError, match="does not know"):
        redo.redo(node, REGION, 2, {})
    assert len(layers_of(node, REGION)) == 2
    redo.redo(node, REGION, 3, {})
