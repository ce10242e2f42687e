"""The layers of a page server's directory: the blocks that a commit changed in a region, synced.

The engine's file of the layer as it is (pagecache_c/common/wire.h: head, runs, blocks), then

    u32 for each of its blocks      its checksum (`checksums.block_sums`)
    trailer, 64 bytes               what it is of, and checksums of head, runs, sums and itself

A file without a trailer that is right was never synced, so nobody was told that it is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._native.checksums import Sums, block_sums, copy_to_disk, crc32c
from clamor_ray._store import disk
from clamor_ray._store.layout import LAYERS, NEW, LayerName, layer_name_of, layer_path

Runs = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]

DELTA: Final = 1
MADE_WHOLE: Final = 2

_HEAD: Final = struct.Struct("<6Q2I")
_HEAD_MAGIC: Final = 0x3152594C43
_TRAILER: Final = struct.Struct("<8s2I5Q")
_TRAILER_CRC: Final = struct.Struct("<I")
TRAILER_BYTES: Final = _TRAILER.size + 2 * _TRAILER_CRC.size
_MAGIC: Final = b"CLAMLAYR"
_FORMAT: Final = 1
_RUN_BYTES: Final = 16

_LARGE_BYTES: Final = 4 << 20  # what is less is one write

# Files of the engine whose sync has failed once. Few, and never forgotten: the file may be there.
_unsynced: dict[tuple[int, int], OSError] = {}


class LayerHead(NamedTuple):
    """The engine's head of a layer: struct pc__layer_head.

    Args:
        region, commit_id: whose it is.
        base_version: that the writer saw.
        n_blocks, data_offset, n_runs: of its blocks.
        flags: DELTA, MADE_WHOLE or 0.
    """

    region: int
    commit_id: int
    base_version: int
    n_blocks: int
    data_offset: int
    n_runs: int
    flags: int

    @property
    def n_bytes(self) -> int:
        """Of the engine's file."""
        return self.data_offset + self.n_blocks * BLOCK_BYTES

    @property
    def index_bytes(self) -> int:
        """Of head and runs."""
        return _HEAD.size + self.n_runs * _RUN_BYTES

    def packed(self) -> bytes:
        return _HEAD.pack(_HEAD_MAGIC, *self)


def data_offset_of(n_runs: int) -> int:
    """Where the blocks of a layer begin.

    Example:
        >>> data_offset_of(1), data_offset_of(253)
        (4096, 8192)
    """
    return -(-(_HEAD.size + n_runs * _RUN_BYTES) // BLOCK_BYTES) * BLOCK_BYTES


def head_of(content: bytes | bytearray) -> LayerHead | None:
    """Of the first bytes of a layer; None: it is none."""
    if len(content) < _HEAD.size:
        return None
    magic, *fields = _HEAD.unpack_from(content)
    head = LayerHead(*fields)
    is_one = magic == _HEAD_MAGIC and head.data_offset == data_offset_of(head.n_runs)
    return head if is_one and head.n_runs <= head.n_blocks else None


def packed_trailer(head: LayerHead, version: int, crc: int) -> bytes:
    trailer = _TRAILER.pack(
        *(_MAGIC, _FORMAT, 0, head.n_bytes, head.n_blocks, head.region, head.commit_id, version)
    )
    trailer += _TRAILER_CRC.pack(crc)
    return trailer + _TRAILER_CRC.pack(crc32c(trailer))


# ---------------------------------------------------------------------------------- writing


def write_layer(
    directory: Path, region: int, commit_id: int, fd: int, n_bytes: int, *, version: int = 0
) -> Path:
    """A layer of the engine's in a file of its own, synced: it is there after a power cut.

    One that is on this disk with its checksums gets a name, and all others are copied. A file that
    has the name already is replaced at once. A new one may be torn until this returns, and whoever
    opens it sees that.

    Args:
        directory: the page server's.
        region, commit_id: as the layer has them.
        fd: of the engine's file, which nobody writes any more.
        n_bytes: of it.
        version: where it is known to be committed.

    Returns:
        Its file.

    Raises:
        ProtocolError: It is no such layer.
        NoSpaceError, StoreError: It could not be written; nothing is there of it.
        WaitTimeoutError: The directory was not synced in time.
    """
    with disk.asking(f"layer of variable {region}", "reading it"):
        if (refused := _unsynced.get(disk.file_id(fd))) is not None:
            raise OSError(refused.errno, refused.strerror) from refused
        head = head_of(disk.read_at(fd, min(_HEAD.size, n_bytes), 0))
        if head is None or (head.region, head.commit_id) != (region, commit_id):
            raise errors.ProtocolError(f"no layer of commit {commit_id:x} of variable {region}")
        if head.n_bytes != n_bytes:
            raise errors.ProtocolError(f"a layer of {head.n_bytes} bytes has {n_bytes}")
        index = disk.read_at(fd, head.index_bytes, 0)
        has_sums = os.fstat(fd).st_size > n_bytes
    path = layer_path(directory, LayerName(region, commit_id, version))
    if has_sums and _name_as_it_is(path, fd, head, index, version):
        return path

    def fill(out: int) -> None:
        sums = np.empty(head.n_blocks, np.uint32)
        if n_bytes < _LARGE_BYTES:
            content = disk.read_at(fd, n_bytes, 0)
            block_sums(memoryview(content)[head.data_offset :], sums)
            disk.write_at(out, b"".join((content, footer(head, index, sums, version))), 0)
        else:
            _copy_large(fd, out, head, sums)
            disk.write_at(out, footer(head, index, sums, version), n_bytes)

    put_file(path, fill)
    return path


def _name_as_it_is(path: Path, fd: int, head: LayerHead, index: Any, version: int) -> bool:
    """The engine's file is on this disk, with its checksums: it gets a trailer, and the name.
    False: it cannot have that."""
    with disk.asking(path, "writing it"):
        if not disk.is_file(path, fd):  # else it was synced before it got the name
            sums = np.frombuffer(disk.read_at(fd, 4 * head.n_blocks, head.n_bytes), "<u4")
            disk.write_at(fd, footer(head, index, sums, version), head.n_bytes)
            os.ftruncate(fd, head.n_bytes + sums.nbytes + TRAILER_BYTES)
            try:
                os.fdatasync(fd)
            except OSError as error:
                # The next sync may say that all is well. So there is no next one: nobody reads it.
                _unsynced[disk.file_id(fd)] = error
                os.ftruncate(fd, 0)
                raise
    if not disk.link(fd, path):
        return False
    disk.sync_directory(path.parent)
    return True


def footer(head: LayerHead, index: Any, sums: Sums, version: int) -> bytes:
    """What follows the engine's file of a layer."""
    packed = sums.astype("<u4", copy=False).tobytes()
    return packed + packed_trailer(head, version, crc32c(packed, crc32c(index)))


def put_file(path: Path, fill: Any) -> None:
    """A file that `fill(fd)` writes, synced with its name.

    Raises:
        NoSpaceError, StoreError, WaitTimeoutError: It is not there, or what was there before is.
    """
    # A name that is new needs no rename: the trailer says whether a file is whole. That is one
    # commit of the file system's journal, and not two.
    made, is_new = path, True
    with disk.asking(path, "writing it"):
        try:
            out = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, disk.FILE_MODE)
        except FileExistsError:
            made, is_new = path.with_name(f"{NEW}{path.name}-{secrets.token_hex(4)}"), False
            out = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, disk.FILE_MODE)
        try:
            try:
                fill(out)
                os.fdatasync(out)
            finally:
                os.close(out)
            if not is_new:
                os.rename(made, path)
        except Exception:
            with contextlib.suppress(OSError):
                os.unlink(made)
            raise
    disk.sync_directory(path.parent)


def _copy_large(fd: int, out: int, head: LayerHead, sums: Sums) -> None:
    """Copies a layer, and sums its blocks."""
    os.posix_fallocate(out, 0, head.n_bytes + sums.nbytes + TRAILER_BYTES)
    disk.write_at(out, disk.read_at(fd, head.data_offset, 0), 0)
    at_a_time = disk.CHUNK_BYTES // BLOCK_BYTES
    for first in range(0, head.n_blocks, at_a_time):
        some = sums[first : first + at_a_time]
        at = head.data_offset + first * BLOCK_BYTES
        try:
            copy_to_disk(out, at, disk.read_at(fd, len(some) * BLOCK_BYTES, at), some)
        except (errors.NoSpaceError, errors.SystemCallError) as error:  # it does not know the path
            code = errno.ENOSPC if isinstance(error, errors.NoSpaceError) else errno.EIO
            raise OSError(code, error.message) from error


# ------------------------------------------------------------------------------------ names


def scan_layers(directory: Path) -> dict[int, list[LayerName]]:
    """All layers of a page server's directory, by region.

    Raises:
        StoreError: It cannot be listed.
    """
    found: dict[int, list[LayerName]] = {}
    with disk.asking(directory / LAYERS, "listing it"):
        names = os.listdir(directory / LAYERS)
    for text in names:
        name = layer_name_of(text)
        if name is not None:
            found.setdefault(name.region, []).append(name)
    return found


def layers_of(directory: Path, region: int) -> list[LayerName]:
    """The layers of a region: those with a version in its order, then those without.

    Raises:
        StoreError: They cannot be listed.
    """
    found = scan_layers(directory).get(region, [])
    return sorted(found, key=lambda name: (not name.version, name.version, name.commit_id))


def name_committed(directory: Path, committed: Iterable[tuple[int, int, int]]) -> None:
    """Layers get the names of committed ones, synced. What has such a name already stays so.

    Args:
        directory: the page server's.
        committed: region, id of the commit, and its version, of each.

    Raises:
        StoreDamagedError: A layer is not there, under either name.
        StoreError, WaitTimeoutError.
    """
    for region, commit_id, version in committed:
        before = layer_path(directory, LayerName(region, commit_id))
        after = layer_path(directory, LayerName(region, commit_id, version))
        with disk.asking(before, f"naming it {after.name}"):
            try:
                os.rename(before, after)
                disk.unlink(before)  # two names of one file both stay
            except FileNotFoundError:
                os.stat(after)
    disk.sync_directory(directory / LAYERS)


def drop_layer(directory: Path, region: int, commit_id: int, version: int = 0) -> bool:
    """Deletes a layer's file, without a sync.

    Returns:
        Whether it was there.

    Raises:
        StoreError: It cannot be deleted.
    """
    return disk.unlink(layer_path(directory, LayerName(region, commit_id, version)))


# ---------------------------------------------------------------------------------- reading


class Layer:
    """A layer's file, open: its trailer, head, runs and sums are right. `check` reads its blocks.

    Example:
        with Layer.open(path) as layer:
            layer.check()
    """

    def __init__(
        self, path: Path, fd: int, head: LayerHead, runs: Runs, sums: Sums, version: int
    ) -> None:
        self.path = path
        self.fd = fd
        self.head = head
        self.runs = runs
        self.sums = sums
        self.version = version

    @property
    def flags(self) -> int:
        """DELTA, MADE_WHOLE or 0."""
        return self.head.flags

    @property
    def data_offset(self) -> int:
        """Where its blocks begin."""
        return self.head.data_offset

    @property
    def blocks(self) -> Runs:
        """The number of each of its blocks, in the order that they are in."""
        return blocks_of(self.runs)

    @staticmethod
    def open(path: Path) -> Layer:
        """
        Raises:
            StoreDamagedError: It is torn or damaged; not there; or of another region.
            StoreFormatError: A newer version of the library has written it.
            StoreError: It cannot be read.
        """
        with disk.asking(path, "opening it"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with disk.asking(path, "reading it"):
                return _opened(path, fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chunks(self, n_bytes: int = disk.CHUNK_BYTES) -> Iterator[tuple[int, bytearray]]:
        """Its blocks, so many bytes at a time, and the index of the first of them. They are right.

        Raises:
            StoreDamagedError: A block has not its checksum.
            StoreError: It cannot be read.
        """
        at_a_time = n_bytes // BLOCK_BYTES
        for first in range(0, self.head.n_blocks, at_a_time):
            n_blocks = min(at_a_time, self.head.n_blocks - first)
            yield first, self.read(first, n_blocks)

    def read(self, first: int, n_blocks: int, wanted: Indices | None = None) -> bytearray:
        """Blocks of it, by their index in it. They are right.

        Args:
            first, n_blocks: of them.
            wanted: which of them must be right, counted from the first; None: all.

        Raises:
            StoreDamagedError: One has not its checksum.
            StoreError: It cannot be read.
        """
        with disk.asking(self.path, "reading it"):
            content = disk.read_at(
                self.fd, n_blocks * BLOCK_BYTES, self.data_offset + first * BLOCK_BYTES
            )
        is_wrong = block_sums(content) != self.sums[first : first + n_blocks]
        wrong = np.flatnonzero(is_wrong) if wanted is None else wanted[is_wrong[wanted]]
        if len(wrong):
            raise self.damaged(first + int(wrong[0]))
        return content

    def damaged(self, index: int) -> errors.StoreDamagedError:
        """That a block has not its checksum.

        Args:
            index: of the block, in the layer.
        """
        block = int(self.blocks[index])
        return errors.StoreDamagedError(
            f"Block {block} of variable {self.head.region}, as of version {self.version}, has not "
            f"its checksum in {self.path}.",
            region=self.head.region,
            version=self.version,
            block=block,
            file=str(self.path),
        )

    def check(self) -> None:
        """Reads each block.

        Raises:
            StoreDamagedError: One has not its checksum.
            StoreError: It cannot be read.
        """
        for _ in self.chunks():
            pass


def blocks_of(runs: Runs) -> Runs:
    """The number of each block of runs, in their order.

    Example:
        >>> blocks_of(np.array([[3, 2], [9, 1]], np.uint64)).tolist()
        [3, 4, 9]
    """
    if not len(runs):
        return np.empty(0, np.uint64)
    if len(runs) == 1:
        return np.arange(runs[0, 0], runs[0, 0] + runs[0, 1], dtype=np.uint64)
    lengths = runs[:, 1].astype(np.int64)
    before = np.cumsum(lengths) - lengths
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    return np.repeat(runs[:, 0], lengths) + within.astype(np.uint64)


def runs_of(blocks: Runs) -> Runs:
    """Runs of ascending blocks.

    Example:
        >>> runs_of(np.array([3, 4, 9], np.uint64)).tolist()
        [[3, 2], [9, 1]]
    """
    begins = np.flatnonzero(np.append(True, blocks[1:] != blocks[:-1] + np.uint64(1)))
    if not len(blocks):
        return np.empty((0, 2), np.uint64)
    lengths = np.diff(np.append(begins, len(blocks)))
    return np.stack([blocks[begins], lengths.astype(np.uint64)], axis=1)


def _opened(path: Path, fd: int) -> Layer:
    name = layer_name_of(path.name)

    def damaged(why: str) -> errors.StoreDamagedError:
        region = name.region if name else 0
        version = name.version if name else 0
        return errors.StoreDamagedError(
            f"{path}, with blocks of variable {region} at version {version or '?'}, {why}.",
            region=region,
            version=version,
            file=str(path),
        )

    size = os.fstat(fd).st_size
    if size < BLOCK_BYTES + TRAILER_BYTES:
        raise damaged(f"is torn: it has {size} bytes")
    trailer = disk.read_at(fd, TRAILER_BYTES, size - TRAILER_BYTES)
    magic, form, _, n_bytes, n_blocks, region, commit_id, version = _TRAILER.unpack_from(trailer)
    (crc,) = _TRAILER_CRC.unpack_from(trailer, _TRAILER.size)
    (own,) = _TRAILER_CRC.unpack_from(trailer, _TRAILER.size + _TRAILER_CRC.size)
    if magic != _MAGIC or own != crc32c(trailer[: -_TRAILER_CRC.size]):
        raise damaged("is torn: it has no trailer that is right")
    if form > _FORMAT:
        raise errors.StoreFormatError(f"{path} has the format {form} of a newer clamor-ray.")
    if size != n_bytes + 4 * n_blocks + TRAILER_BYTES:
        raise damaged(f"has {size} bytes, and its trailer is of another length")
    head = head_of(disk.read_at(fd, _HEAD.size, 0))
    if head is None or (head.region, head.commit_id) != (region, commit_id):
        raise damaged("has a damaged head")
    if (head.n_bytes, head.n_blocks) != (n_bytes, n_blocks):
        raise damaged("has a damaged head")
    index = disk.read_at(fd, head.index_bytes, 0)
    packed = disk.read_at(fd, 4 * n_blocks, n_bytes)
    if crc32c(packed, crc32c(index)) != crc:
        raise damaged("has damaged runs or checksums")
    if name is not None and (name.region, name.commit_id) != (region, commit_id):
        raise damaged(f"is the layer of commit {commit_id:x} of variable {region}")
    if name is not None and name.version:
        version = name.version
    runs = np.frombuffer(index, "<u8", offset=_HEAD.size).reshape(-1, 2)
    return Layer(path, fd, head, runs, np.frombuffer(packed, "<u4"), version)
