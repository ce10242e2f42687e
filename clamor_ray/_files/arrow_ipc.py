"""Arrow IPC files (Feather V2): where a table's buffers lie in one. Bodies are not read.

The footer and the metadata of each record batch are read, and put where they lie into a shadow of
the file: addresses of its length that take no memory. pyarrow opens that, without a copy, so the
buffers of its table lie in the shadow where those of the file lie in the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import numpy as np

from clamor_ray._files.reader import Ranges
from clamor_ray._objects.layout import BLOCK_BYTES, Plan, round_up, take_apart_in_place
from clamor_ray.errors import FileFormatError, UnpicklableError

MAGIC: Final = b"ARROW1"
AT_ONCE: Final = 32  # ranges in flight
_END = struct.Struct("<i6s")
_BLOCK = struct.Struct("<qi4xq")  # offset, bytes of metadata, bytes of the body
_DICTIONARIES, _BATCHES = 2, 3  # fields of the footer
_HEADER_TYPE, _HEADER = 1, 2  # of a message
_OF_DICTIONARY, _OF_BATCH = 2, 3  # types of messages
_DATA, _COMPRESSION = 1, 3  # of a dictionary batch; of a record batch


class _Table:
    """A table of a flatbuffer: fields by number. Whatever they say, nothing outside is read."""

    def __init__(self, buffer: bytes, at: int) -> None:
        self._buffer, self._at = buffer, at
        self._vtable = at - self._int("<i", at)

    def _int(self, format: str, at: int) -> int:
        if at < 0:
            raise struct.error("an offset before the buffer")
        return int(struct.unpack_from(format, self._buffer, at)[0])

    @classmethod
    def root(cls, buffer: bytes) -> _Table:
        return cls(buffer, struct.unpack_from("<I", buffer, 0)[0])

    def _place(self, field: int) -> int:
        entry = 4 + 2 * field
        if entry >= self._int("<H", self._vtable):
            return 0
        offset = self._int("<H", self._vtable + entry)
        return self._at + offset if offset else 0

    def has(self, field: int) -> bool:
        return bool(self._place(field))

    def byte(self, field: int) -> int:
        at = self._place(field)
        return self._int("<B", at) if at else 0

    def table(self, field: int) -> _Table | None:
        at = self._place(field)
        return _Table(self._buffer, at + self._int("<I", at)) if at else None

    def blocks(self, field: int) -> Iterator[tuple[int, int, int]]:
        at = self._place(field)
        if not at:
            return
        begin = at + self._int("<I", at)
        n = self._int("<I", begin)
        for i in range(n):
            yield _BLOCK.unpack_from(self._buffer, begin + 4 + i * _BLOCK.size)


def _is_compressed(metadata: bytes) -> bool:
    """Of a message with its 8 bytes before it (in old files 4)."""
    begin = 8 if metadata[:4] == b"\xff\xff\xff\xff" else 4
    message = _Table.root(metadata[begin:])
    batch = message.table(_HEADER)
    if batch is not None and message.byte(_HEADER_TYPE) == _OF_DICTIONARY:
        batch = batch.table(_DATA)
    elif message.byte(_HEADER_TYPE) != _OF_BATCH:
        batch = None
    return batch is not None and batch.has(_COMPRESSION)


def lay_out(path: str, size_bytes: int, file: Ranges) -> tuple[Plan, bytes]:
    """What lies where in the file, and the tail: the pickle stream of its table.

    Raises:
        FileFormatError: It is no Arrow IPC file, is compressed or damaged, or has a column whose
            bytes are not the file's.
        FileReadError and those below it: It cannot be read.
    """
    wrong = FileFormatError(
        f"{path} is no Arrow IPC file, or is not whole.",
        hint="Write it with pyarrow.ipc.new_file, or pyarrow.feather.write_feather.",
    )
    if size_bytes < len(MAGIC) + 2 + _END.size:
        raise wrong
    end = bytes(file.read(size_bytes - _END.size, _END.size))
    footer_bytes, magic = _END.unpack(end)
    footer_at = size_bytes - _END.size - footer_bytes
    if magic != MAGIC or footer_bytes <= 0 or footer_at < len(MAGIC) + 2:
        raise wrong
    footer = bytes(file.read(footer_at, footer_bytes))
    try:
        root = _Table.root(footer)
        blocks = [*root.blocks(_DICTIONARIES), *root.blocks(_BATCHES)]
        for offset, metadata_bytes, body_bytes in blocks:
            if offset < 0 or metadata_bytes <= 8 or body_bytes < 0:
                raise wrong
            if offset + metadata_bytes + body_bytes > footer_at:
                raise wrong
        with ThreadPoolExecutor(AT_ONCE, "clamor-arrow") as threads:
            found = list(threads.map(lambda each: bytes(file.read(each[0], each[1])), blocks))
        compressed = any(_is_compressed(each) for each in found)
    except struct.error as failure:
        raise wrong from failure
    if compressed:
        raise FileFormatError(
            f"{path} is compressed: its columns are not in it as they are in memory.",
            hint="Write it without compression: pyarrow.feather.write_feather(table, path, "
            "compression='uncompressed').",
        )
    parts = [(0, MAGIC + b"\0\0"), (footer_at, footer), (size_bytes - _END.size, end)]
    parts += [(offset, each) for (offset, _, _), each in zip(blocks, found, strict=True)]
    return _plan_of(path, size_bytes, parts)


def _plan_of(path: str, size_bytes: int, parts: list[tuple[int, bytes]]) -> tuple[Plan, bytes]:
    # Not at the top: each process that has a session imports this file, and few open such a file.
    import pyarrow as pa

    shadow = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0))
    for offset, each in parts:
        shadow[offset : offset + len(each)] = each
    image: Any = np.frombuffer(shadow, np.uint8)
    begin = int(image.__array_interface__["data"][0])
    wrong = (pa.ArrowException, OSError, ValueError, KeyError, NotImplementedError)
    try:
        table = pa.ipc.open_file(pa.py_buffer(image)).read_all()
    except wrong as failure:
        raise FileFormatError(f"{path} cannot be read by pyarrow: {failure}.") from failure
    tail_at = round_up(size_bytes, BLOCK_BYTES)
    taken = 0

    def place(n_bytes: int, alignment: int) -> int:
        nonlocal taken
        offset = round_up(tail_at + taken, alignment)
        taken = offset + n_bytes - tail_at
        return offset

    where = (begin, begin + size_bytes, place)
    try:
        laid = take_apart_in_place(table, *where, capacity_bytes=0, as_is=True)
    except UnpicklableError as failure:
        raise FileFormatError(f"{path} cannot be read by pyarrow: {failure.message}") from failure
    if len(laid.pieces) != 1:
        raise FileFormatError(
            f"{path} has a column whose bytes in memory are not those of the file.",
            hint="Read it with pyarrow and put the table: clamor.put(pyarrow.feather.read_table("
            "path)).",
        )
    (offset, stream), plan = laid.pieces[0], laid.plan
    tail = bytes(offset - tail_at) + bytes(stream)
    return replace(plan, capacity_bytes=0), tail
