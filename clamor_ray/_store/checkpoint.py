"""A region's base, as its engine has it, becomes what a redo begins with; its layers go.

The engine writes layers to the base without a sync. A checkpoint syncs the base, writes down the
checksums that it has at that version, from those of the layers, and deletes them. What cannot be
checkpointed yet, because somebody reads an older version, is merged: one layer takes the place of
many.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._native.checksums import block_sums
from clamor_ray._store import disk
from clamor_ray._store.committed import LayerVersions, batches, newest_of, pieces_of
from clamor_ray._store.layer_files import (
    DELTA,
    MADE_WHOLE,
    Layer,
    LayerHead,
    data_offset_of,
    footer,
    layers_of,
    put_file,
    runs_of,
)
from clamor_ray._store.layout import LayerName, base_path, layer_path, sums_path
from clamor_ray._store.sums import SumsFile

_MERGED_AT_ONCE: Final = 200
_LAYER_SHIFT: Final = 40
_AT_A_TIME: Final = disk.CHUNK_BYTES // BLOCK_BYTES

# Bases whose sync failed: what the disk refused is gone from memory, and a second sync says nothing
# of it. Only a redo, from the layers, makes them right.
_unsynced: set[tuple[int, int]] = set()
_unsynced_lock = threading.Lock()


def checkpoint(
    directory: Path,
    region: int,
    base_fd: int,
    version: int,
    *,
    names: Iterable[LayerName] | None = None,
) -> None:
    """Base and checksums are at this version, on the disk, and layers up to it are gone.

    Args:
        directory: the page server's.
        region: its id.
        base_fd: of its base.
        version: that all of the base is at, or is later than.
        names: of its layers' files, where they are known (`scan_layers`).

    Raises:
        StoreDamagedError: A layer is missing or damaged; or a delta that is not made whole. Nothing
            is changed.
        NoSpaceError, StoreError, StoreFormatError: The layers are all there. If the disk refused to
            write the base, each later checkpoint of it fails, too: the store must be opened anew.
    """
    found = list(layers_of(directory, region) if names is None else names)
    with SumsFile.open(sums_path(directory, region)) as sums:
        if sums.header.version < version:
            _sync_base(base_path(directory, region), base_fd, sums.header.length_bytes)
            versions = LayerVersions(directory, region, _up_to(found, version))
            for batch in batches(
                versions.open(sums.header.version, _limit(directory, found, version))
            ):
                _take_sums(sums, batch)
            sums.set_version(version)
        elif _up_to(found, sums.header.version):  # its sync may have failed: then it is not there
            sums.set_version(sums.header.version)
        version = sums.header.version
    for name in _up_to(found, version):
        disk.unlink(layer_path(directory, name))


def _limit(directory: Path, names: list[LayerName], version: int) -> int:
    """The newest version whose blocks need sums: merged layers that go on behind `version` stay, so
    what they have is written again by a redo."""
    limit = version
    for name in names:
        if name.version > version >= name.oldest > 0:
            with contextlib.suppress(
                errors.StoreDamagedError
            ):  # torn: those that it is of are there
                Layer.open(layer_path(directory, name)).close()
                limit = min(limit, name.oldest - 1)
    return limit


def _up_to(names: Iterable[LayerName], version: int) -> list[LayerName]:
    return [name for name in names if 0 < name.version <= version]


def _sync_base(path: Path, fd: int, length_bytes: int) -> None:
    with disk.asking(path, "syncing it"):
        found = os.fstat(fd)
        which = found.st_dev, found.st_ino
        with _unsynced_lock:
            failed = which in _unsynced
        if failed or found.st_size < length_bytes:
            raise errors.StoreError(
                f"{path}: the disk has refused to write what was committed to it before.",
                hint="All commits are in the store's layers. Look at the disk, then open the store "
                "anew: that writes them again.",
            )
        try:
            os.fdatasync(fd)
        except OSError:
            with _unsynced_lock:
                _unsynced.add(which)
            raise


def _take_sums(sums: SumsFile, layers: list[Layer]) -> None:
    for layer in layers:
        if layer.flags & DELTA:
            raise errors.StoreDamagedError(
                f"{layer.path} is a delta, which says nothing of what variable "
                f"{layer.head.region} is at version {layer.version}.",
                region=layer.head.region,
                version=layer.version,
                file=str(layer.path),
            )
    newest = newest_of(layers)
    sums.update(newest.blocks, newest.sums(layers))


def merge(
    directory: Path,
    region: int,
    above: int,
    up_to: int,
    *,
    names: Iterable[LayerName] | None = None,
) -> Path | None:
    """One layer in the place of those of some versions: the newest of each block.

    Args:
        directory: the page server's.
        region: its id.
        above, up_to: versions above the one, up to the other.
        names: of its layers' files, where they are known (`scan_layers`).

    Returns:
        Its file; None: fewer than two are there, so nothing is changed.

    Raises:
        ValueError: One of them is a delta. Nothing is changed.
        StoreDamagedError: One is missing or damaged.
        NoSpaceError, StoreError, StoreFormatError, WaitTimeoutError: All of them are still there.
    """
    found = list(layers_of(directory, region) if names is None else names)
    mine = sorted(
        (name for name in found if above < name.oldest and name.version <= up_to),
        key=lambda name: (name.version, -name.oldest),
    )
    path: Path | None = None
    while len(mine) > 1:
        some = mine[:_MERGED_AT_ONCE]
        made = _merged(directory, region, some)
        path = layer_path(directory, made)
        for name in some:
            if name != made:
                disk.unlink(layer_path(directory, name))
        mine = [made, *mine[_MERGED_AT_ONCE:]]
    return path


def _merged(directory: Path, region: int, names: list[LayerName]) -> LayerName:
    first, last = min(name.oldest for name in names), max(name.version for name in names)
    versions = LayerVersions(directory, region, names)
    layers = list(versions.open(first - 1, last))
    try:
        if any(layer.flags & DELTA for layer in layers):
            raise ValueError(f"layers of variable {region} that are deltas cannot be merged")
        made = LayerName(region, layers[-1].head.commit_id, last, first if first < last else 0)
        _write_merged(layer_path(directory, made), layers, last)
    finally:
        for layer in layers:
            layer.close()
    return made


def _write_merged(path: Path, layers: list[Layer], version: int) -> None:
    newest = newest_of(layers)
    sums = newest.sums(layers)
    runs = runs_of(newest.blocks)
    flags = MADE_WHOLE if any(layer.flags & MADE_WHOLE for layer in layers) else 0
    head = LayerHead(
        *(layers[-1].head.region, layers[-1].head.commit_id, layers[0].head.base_version),
        *(len(newest.blocks), data_offset_of(len(runs)), len(runs), flags),
    )
    index = head.packed() + runs.astype("<u8").tobytes()

    def fill(out: int) -> None:
        disk.write_at(out, index.ljust(head.data_offset, b"\0"), 0)
        for at in range(0, head.n_blocks, _AT_A_TIME):
            end = min(at + _AT_A_TIME, head.n_blocks)
            source, position = newest.layer[at:end], newest.position[at:end]
            content = memoryview(bytearray((end - at) * BLOCK_BYTES))
            for low, high in pieces_of(position + (source << _LAYER_SHIFT)):
                layer = layers[int(source[low])]
                some = content[low * BLOCK_BYTES : high * BLOCK_BYTES]
                disk.read_into(layer.fd, some, layer.data_offset + int(position[low]) * BLOCK_BYTES)
            wrong = np.flatnonzero(block_sums(content) != sums[at:end])
            if len(wrong):
                bad = int(wrong[0])
                raise layers[int(source[bad])].damaged(int(position[bad]))
            disk.write_at(out, content, head.data_offset + at * BLOCK_BYTES)
        disk.write_at(out, footer(head, index, sums, version), head.n_bytes)

    put_file(path, fill)
