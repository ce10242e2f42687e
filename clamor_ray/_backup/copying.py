"""Copies chunks of variables into data files: what runs near the homes of a variable.

One call makes one file: it reads what it was told to, leaves out what the last checkpoint has, and
writes the rest. So it needs memory for one file (`FILE_BYTES`). What it reads lies in the home's
own memory, where it runs there; elsewhere it goes through the cache of the node, as any scan does.
"""

from __future__ import annotations

import os
import secrets
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from clamor_ray._backup.chunks import CHUNK_BLOCKS, record_of
from clamor_ray._backup.directory import Directory, data_name
from clamor_ray._backup.manifest import ChunkPlace
from clamor_ray._native.base import Runs
from clamor_ray._objects.layout import BLOCK_BYTES
from clamor_ray._read import opener
from clamor_ray._read.ref import GlobalRef

FILE_BYTES: Final = 32 << 20


class CopyOrder(NamedTuple):
    """A chunk that is to be copied.

    Args:
        chunk: its number.
        blocks: its blocks that may hold data, of the variable: a serialized BitMap.
        digest: of the record that the last checkpoint has of it; "": none.
    """

    chunk: int
    blocks: bytes
    digest: str


class OrdersOf(NamedTuple):
    """Chunks of one variable that are to be copied.

    Args:
        ref: the variable, frozen at its version.
        orders: its chunks.
    """

    ref: GlobalRef[object]
    orders: tuple[CopyOrder, ...]


class Copied(NamedTuple):
    """What became of a chunk.

    Args:
        place: where it is; None: it is all zeros.
        is_same: the last checkpoint has it.
    """

    place: ChunkPlace | None
    is_same: bool = False


def _runs_of(blocks: BitMap) -> Runs:
    numbers = np.frombuffer(blocks.to_array(), np.uint32).astype(np.uint64)
    begins = np.flatnonzero(np.diff(numbers.astype(np.int64), prepend=-2) != 1)
    lengths = np.diff(begins, append=len(numbers))
    return np.stack([numbers[begins], lengths.astype(np.uint64)], axis=1)


def _read(blocks: BitMap, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy of blocks of a mapping, which has shape (n, 4096)."""
    first, last = blocks.min(), blocks.max()
    if last - first + 1 == len(blocks):
        copied: npt.NDArray[np.uint8] = memory[first : last + 1].copy()
    else:
        copied = memory[np.frombuffer(blocks.to_array(), np.uint32)]
    return copied


def copy_chunks(
    directory: Directory, number: int, token: str, all_orders: list[OrdersOf]
) -> tuple[list[list[Copied]], int]:
    """Copies chunks into a new data file, which is not written where none has changed.

    Args:
        directory: the backup.
        number, token: as `data_name`'s.
        all_orders: of each variable.

    Returns:
        What became of each chunk of each variable, in their order; and the bytes that were written.

    Raises:
        FreedError, SnapshotExpired, HomeLostError, PrefetchTimeoutError: A variable cannot be read.
        StorageError: The file cannot be written.
    """
    name = data_name(number, token, secrets.token_hex(8))
    parts: list[memoryview] = []
    at = 0
    found: list[list[Copied]] = []
    for ref, orders in all_orders:
        of_variable: list[Copied] = []
        found.append(of_variable)
        session = opener.current(ref._scope)
        all_blocks = BitMap.union(*(BitMap.deserialize(order.blocks) for order in orders))
        lease = session.open(ref, stream=False, warns=False)
        try:
            # What is lost is an exception here, where a touch of it would end the process.
            with session.explaining(ref._region):
                runs = _runs_of(all_blocks)
                lease.prefetch(runs, wait=True, timeout_s=session.config.patience_s)
            memory = lease.bytes().reshape(-1, BLOCK_BYTES)
            for order in orders:
                blocks = BitMap.deserialize(order.blocks)
                numbers = np.frombuffer(blocks.to_array(), np.uint32) - order.chunk * CHUNK_BLOCKS
                record = record_of(numbers.astype(np.uint16), _read(blocks, memory))
                if record is None or record.digest == order.digest:
                    of_variable.append(Copied(None, is_same=record is not None))
                    continue
                of_variable.append(Copied(ChunkPlace(name, at, record.n_bytes, record.digest)))
                parts += record.parts
                at += record.n_bytes
            del memory
        finally:
            lease.close()
    if parts:
        directory.write(name, parts)
    return found, at


def is_seen(path: str) -> bool:
    """Whether the node that this runs on has the file: then it has the directory, too."""
    return os.path.exists(path)
