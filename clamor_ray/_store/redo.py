"""A region's base and checksums are brought to its newest committed version, after a crash.

Layers have whole blocks, so it is of no matter which of them a base has already, whole, torn or not
at all: all those behind the version of the checksums are written again, in their order, and of each
block the newest only. A redo that is killed is done again. A layer that is a delta is made whole
first, in its file: what it is XORed with may not be there any more once the base is changed.

What was not committed is deleted: nobody was told that it is there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._native.checksums import block_sums
from clamor_ray._native.parity import xor_into
from clamor_ray._store import disk
from clamor_ray._store.committed import (
    LayerVersions,
    Newest,
    batches,
    close_all,
    newest_of,
    pieces_of,
)
from clamor_ray._store.layer_files import (
    DELTA,
    MADE_WHOLE,
    Indices,
    Layer,
    LayerHead,
    Runs,
    data_offset_of,
    footer,
    layers_of,
    put_file,
    runs_of,
)
from clamor_ray._store.layout import LayerName, base_path, layer_path, sums_path
from clamor_ray._store.notes import lost_yet, note_written
from clamor_ray._store.sums import SumsFile

Content = npt.NDArray[np.uint8]

_AT_A_TIME: Final = disk.CHUNK_BYTES // BLOCK_BYTES


def redo(
    directory: Path,
    region: int,
    newest_version: int,
    committed: Mapping[int, int],
    *,
    names: Iterable[LayerName] | None = None,
) -> None:
    """Brings a region's base to its newest version. Nobody else has the directory open.

    Args:
        directory: the page server's.
        region: its id.
        newest_version: that was committed.
        committed: versions of its commits by their ids, for layers whose names do not say them.
        names: of its layers' files, where they are known (`scan_layers`).

    Raises:
        StoreDamagedError: A layer or the base is missing or damaged. Run again when it is there.
        NoSpaceError, StoreError, StoreFormatError, WaitTimeoutError: Likewise.
    """
    found = list(layers_of(directory, region) if names is None else names)
    versions = LayerVersions(directory, region, found, committed)
    for name in found:
        if name.version > newest_version:  # it was named after the registry had it
            raise errors.StoreDamagedError(
                f"{layer_path(directory, name)} has versions that the registry does not know: it "
                f"knows {newest_version} of variable {region} as the newest.",
                region=region,
                version=name.version,
                file=str(layer_path(directory, name)),
            )
    path = base_path(directory, region)
    with contextlib.ExitStack() as opened:
        with disk.asking(path, "opening it"):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        opened.callback(os.close, fd)
        sums = opened.enter_context(SumsFile.open(sums_path(directory, region)))
        _check(path, fd, sums, region, newest_version)
        if sums.header.version < newest_version:
            _redo(path, fd, sums, versions, newest_version)
        elif found:  # who wrote that version may not have synced it
            sums.set_version(newest_version)
    for name in found:  # those up to the version are in the base now; the others are of no version
        disk.unlink(layer_path(directory, name))


def _check(path: Path, fd: int, sums: SumsFile, region: int, newest_version: int) -> None:
    header = sums.header
    size = os.fstat(fd).st_size
    why = ""
    if header.region != region:
        why = f"its checksums are of variable {header.region}"
    elif size < header.length_bytes:
        why = f"it has {size} bytes, and should have {header.length_bytes}"
    elif header.version > newest_version:
        why = f"it is at version {header.version}, and the registry knows {newest_version}"
    if why:
        raise errors.StoreDamagedError(
            f"{path}, the base of variable {region}: {why}.",
            region=region,
            version=newest_version,
            file=str(path),
        )


def _redo(
    path: Path, fd: int, sums: SumsFile, versions: LayerVersions, newest_version: int
) -> None:
    layers = versions.open(sums.header.version, newest_version)
    for batch in batches(layers, single=DELTA):
        whole = batch
        if batch[0].flags & DELTA:
            whole = [_made_whole(fd, sums, batch[0])]
        with disk.asking(path, "writing it"):
            _apply(fd, sums, whole)
        close_all(whole)
    with disk.asking(path, "syncing it"):
        os.fdatasync(fd)
    sums.set_version(newest_version)


def _apply(fd: int, sums: SumsFile, layers: list[Layer]) -> None:
    newest = newest_of(layers)
    if not len(newest.blocks):
        return
    # A note before its block: a block that is there, and of no version, would be read as lost.
    note_written(fd, sums.header, newest.blocks, _versions_of(newest, layers))
    for index, mine in newest.by_layer():
        _copy(layers[index], newest.position[mine], newest.blocks[mine], fd)
    sums.update(newest.blocks, newest.sums(layers))


def _versions_of(newest: Newest, layers: list[Layer]) -> Runs:
    """The version that wrote each block first."""
    return np.array([layer.version for layer in layers], np.uint64)[newest.first]


def _copy(layer: Layer, position: Indices, blocks: Runs, fd: int) -> None:
    """Blocks of a layer into a base, some at a time.

    Raises:
        StoreDamagedError: One of these has not its checksum.
        OSError: As it came, of the base.
    """
    if len(position) == 1:  # many small commits: without arrays of arrays
        one = layer.read(int(position[0]), 1)
        disk.write_at(fd, one, int(blocks[0]) * BLOCK_BYTES)
        return
    part = position // _AT_A_TIME
    cuts = np.flatnonzero(np.diff(part)) + 1
    for mine in np.split(np.arange(len(position)), cuts):
        first, last = int(position[mine[0]]), int(position[mine[-1]])
        within = position[mine] - first
        content = memoryview(layer.read(first, last - first + 1, within))
        to = blocks[mine]
        for low, high in pieces_of(within, to):
            begin = int(within[low]) * BLOCK_BYTES
            some = content[begin : begin + (high - low) * BLOCK_BYTES]
            disk.write_at(fd, some, int(to[low]) * BLOCK_BYTES)


# ----------------------------------------------------------------------------------- deltas


def _made_whole(fd: int, sums: SumsFile, delta: Layer) -> Layer:
    """The layer that a delta and the version before make, in the delta's place, synced.

    Raises:
        StoreDamagedError: A block of either has not its checksum.
    """
    blocks = delta.blocks
    stays = np.flatnonzero(~lost_yet(fd, sums.header, blocks))  # a lost one XOR anything is lost
    runs = runs_of(blocks[stays])
    head = LayerHead(
        *(delta.head.region, delta.head.commit_id, delta.head.base_version, len(stays)),
        *(data_offset_of(len(runs)), len(runs), MADE_WHOLE),
    )
    index = head.packed() + runs.astype("<u8").tobytes()
    whole_sums = np.empty(len(stays), np.uint32)

    def fill(out: int) -> None:
        disk.write_at(out, index.ljust(head.data_offset, b"\0"), 0)
        for at in range(0, len(stays), _AT_A_TIME):
            mine = stays[at : at + _AT_A_TIME]
            content = _xored(fd, sums, delta, mine, blocks[mine])
            block_sums(content, whole_sums[at : at + len(mine)])
            disk.write_at(out, content, head.data_offset + at * BLOCK_BYTES)
        disk.write_at(out, footer(head, index, whole_sums, delta.version), head.n_bytes)

    put_file(delta.path, fill)
    layer = Layer.open(delta.path)
    layer.version = delta.version
    return layer


def _xored(fd: int, sums: SumsFile, delta: Layer, mine: Indices, blocks: Runs) -> Content:
    """Blocks of a delta XOR those of the base."""
    first = int(mine[0])
    content = delta.read(first, int(mine[-1]) - first + 1, mine - first)
    out = np.frombuffer(content, np.uint8).reshape(-1, BLOCK_BYTES)[mine - first]
    old = np.empty_like(out)
    for low, high in pieces_of(blocks):
        disk.read_into(fd, old[low:high], int(blocks[low]) * BLOCK_BYTES)
    wrong = np.flatnonzero(block_sums(old) != sums.of(blocks))
    if len(wrong):
        block, path = int(blocks[wrong[0]]), base_path(delta.path.parent.parent, delta.head.region)
        raise errors.StoreDamagedError(
            f"Block {block} of variable {delta.head.region}, as of version {delta.version - 1}, "
            f"has not its checksum in {path}.",
            region=delta.head.region,
            version=delta.version,
            block=block,
            file=str(path),
        )
    xor_into(out, old)
    return out
