"""Layers' files: what is written is read again; what is torn or damaged is told apart; failures."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._native.checksums import block_sums
from clamor_ray._store import disk, layer_files
from clamor_ray._store.layer_files import (
    DELTA,
    Layer,
    drop_layer,
    layers_of,
    name_committed,
    write_layer,
)
from clamor_ray._store.layout import LAYERS, REGIONS, LayerName
from tests.support.store_files import block_of, engine_layer, memfd, put_layer

CONTENT = {block: block_of(block) for block in (1, 2, 3, 70, 90, 91)}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    for name in (REGIONS, LAYERS):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_layer_is_read_as_it_was_written(node: Path) -> None:
    path = put_layer(node, 7, 42, CONTENT, flags=DELTA)
    assert path.name == "7-000000000000002a.layer"
    assert path.read_bytes().startswith(engine_layer(7, 42, CONTENT, DELTA))
    with Layer.open(path) as layer:
        assert layer.runs.tolist() == [[1, 3], [70, 1], [90, 2]]
        assert layer.blocks.tolist() == sorted(CONTENT)
        assert layer.flags == DELTA
        assert layer.sums.tolist() == [int(block_sums(CONTENT[b])[0]) for b in sorted(CONTENT)]
        layer.check()
        assert layer.read(3, 1) == CONTENT[70].tobytes()


def test_a_large_layer(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CHUNK_BYTES", 64 << 10)
    monkeypatch.setattr(layer_files, "_LARGE_BYTES", 1)
    content = {block: block_of(block) for block in range(0, 700, 2)}  # its head has two blocks
    with Layer.open(put_layer(node, 7, 42, content, version=3)) as layer:
        assert layer.version == 3
        layer.check()
        for index, block in enumerate(content):
            assert layer.read(index, 1) == content[block].tobytes()


@contextlib.contextmanager
def staged_on_disk(node: Path, content: Mapping[int, Any]) -> Iterator[tuple[int, int]]:
    """The engine's file of a large layer, without a name: its descriptor, and the layer's bytes."""
    layer = engine_layer(7, 42, content)
    sums = np.concatenate([block_sums(content[block]) for block in sorted(content)])
    fd = os.open(node, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        disk.write_at(fd, layer + sums.astype("<u4").tobytes() + b"room" * 5, 0)
        yield fd, len(layer)
    finally:
        os.close(fd)


def test_a_layer_that_is_on_this_disk_gets_a_name(node: Path) -> None:
    with staged_on_disk(node, CONTENT) as (fd, n_bytes):
        for _ in range(2):  # a process that was restarted asks again
            path = write_layer(node, 7, 42, fd, n_bytes, version=3)
            assert disk.is_file(path, fd)
        assert path.read_bytes() == put_layer(node, 7, 42, CONTENT, version=3).read_bytes()
    with Layer.open(path) as layer:
        layer.check()


def test_a_layer_whose_sync_failed_is_read_by_nobody(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with staged_on_disk(node, CONTENT) as (fd, n_bytes):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fails)
            with pytest.raises(errors.StoreError, match=r"7-000000000000002a\.layer"):
                write_layer(node, 7, 42, fd, n_bytes)
        # The kernel reports it once: a second sync would say that all is well.
        with pytest.raises(errors.StoreError):
            write_layer(node, 7, 42, fd, n_bytes)
    assert not list((node / LAYERS).iterdir())


def test_a_layer_on_another_file_system_is_copied(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuses)
    with staged_on_disk(node, CONTENT) as (fd, n_bytes):
        path = write_layer(node, 7, 42, fd, n_bytes)
        assert not disk.is_file(path, fd)
    with Layer.open(path) as layer:
        layer.check()


def test_each_length_of_a_torn_file_is_told(node: Path) -> None:
    path = put_layer(node, 7, 42, {1: block_of(1), 5: block_of(2)})
    whole = path.read_bytes()
    for n_bytes in (*range(0, len(whole), 97), *range(len(whole) - 70, len(whole))):
        path.write_bytes(whole[:n_bytes])
        with pytest.raises(errors.StoreDamagedError):
            Layer.open(path)
        path.write_bytes(whole[:n_bytes].ljust(len(whole), b"\0"))
        with pytest.raises(errors.StoreDamagedError):
            Layer.open(path).check()


def test_each_flipped_bit_is_told(node: Path) -> None:
    path = put_layer(node, 7, 42, {1: block_of(1), 5: block_of(2)}, version=3)
    whole = path.read_bytes()
    padding = range(56 + 32, BLOCK_BYTES)
    for at in (*range(56 + 32), *range(BLOCK_BYTES, len(whole), 11), *range(-70, 0)):
        at %= len(whole)
        if at in padding:
            continue
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(errors.StoreDamagedError) as caught, Layer.open(path) as layer:
            layer.check()
        assert caught.value.file == str(path)
        assert caught.value.region == 7
        if BLOCK_BYTES <= at < 3 * BLOCK_BYTES:
            assert caught.value.block == (1 if at < 2 * BLOCK_BYTES else 5)


def test_a_file_of_another_name_is_told(node: Path) -> None:
    path = put_layer(node, 7, 42, CONTENT)
    other = path.with_name(LayerName(8, 42).text)
    path.rename(other)
    with pytest.raises(errors.StoreDamagedError, match="of variable 7"):
        Layer.open(other)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "posix_fallocate"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_write_that_fails_leaves_nothing(
    node: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, is_there: bool
) -> None:
    monkeypatch.setattr(layer_files, "_LARGE_BYTES", 1)
    old = put_layer(node, 7, 42, {9: block_of(9)}).read_bytes() if is_there else None

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        expected = errors.NoSpaceError if code == errno.ENOSPC else errors.StoreError
        with pytest.raises(expected, match=r"7-000000000000002a\.layer"):
            put_layer(node, 7, 42, CONTENT)
    assert [each.read_bytes() for each in (node / LAYERS).iterdir()] == ([old] if old else [])


def test_what_is_no_layer_is_refused(node: Path) -> None:
    layer = engine_layer(7, 42, CONTENT)
    for content, region in ((layer, 8), (layer[:-1], 7), (b"x" * 5000, 7), (b"", 7)):
        with memfd(content) as fd, pytest.raises(errors.ProtocolError):
            write_layer(node, region, 42, fd, len(content))
    assert not list((node / LAYERS).iterdir())


def test_names_of_committed_layers(node: Path) -> None:
    for commit_id in (3, 1, 2):
        put_layer(node, 7, commit_id, CONTENT)
    put_layer(node, 8, 3, CONTENT)
    for _ in range(2):  # again, after a lost answer
        name_committed(node, [(7, 1, 9), (7, 2, 5), (8, 3, 2)])
    assert layers_of(node, 7) == [LayerName(7, 2, 5), LayerName(7, 1, 9), LayerName(7, 3)]
    with pytest.raises(errors.StoreDamagedError, match="missing"):
        name_committed(node, [(7, 77, 1)])
    assert drop_layer(node, 7, 3)
    assert not drop_layer(node, 7, 3)
    assert drop_layer(node, 7, 2, 5)


def test_syncs_of_a_directory_are_shared(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = threading.Semaphore(0), threading.Event()
    calls: list[int] = []

    def slow(fd: int) -> None:
        calls.append(fd)
        began.release()
        assert goes_on.wait(20)

    monkeypatch.setattr(os, "fsync", slow)
    group = disk.DirectorySync(node)
    threads = [threading.Thread(target=group.wait) for _ in range(9)]
    threads[0].start()
    assert began.acquire(timeout=20)
    for thread in threads[1:]:
        thread.start()
    with group._changed:
        assert group._changed.wait_for(lambda: group._asked >= 1, 20)
    while group._asked < 9:
        threading.Event().wait(0.01)
    goes_on.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(calls) == 2  # the first, and one for those that came meanwhile


def test_a_sync_that_failed_stays_failed(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = disk.DirectorySync(node)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        with pytest.raises(errors.StoreError, match="syncing"):
            group.wait()
    with pytest.raises(errors.StoreError, match="syncing"):
        group.wait()


def test_a_sync_has_a_deadline(node: Path) -> None:
    group = disk.DirectorySync(node)
    group._is_busy = True
    with pytest.raises(errors.WaitTimeoutError, match="was not synced"):
        group.wait(0.05)


def test_blocks_and_runs() -> None:
    runs = np.array([[1, 3], [4, 1], [90, 2]], np.uint64)
    blocks = layer_files.blocks_of(runs)
    assert blocks.tolist() == [1, 2, 3, 4, 90, 91]
    assert layer_files.runs_of(blocks).tolist() == [[1, 4], [90, 2]]
    assert layer_files.runs_of(blocks[:0]).shape == (0, 2)
