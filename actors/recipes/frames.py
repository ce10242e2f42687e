"""Messages on a socket, in batches. What is large goes as it is: only the kernel copies it.

    n_lengths n_bytes | lengths: of each message its pickle, its number of buffers, theirs | pickles
    | buffers

Buffers are those of pickle's protocol 5, from `LARGE_BYTES` on: of NumPy arrays, above all.
"""

from __future__ import annotations

import pickle
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import cloudpickle

LARGE_BYTES: Final = 32 << 10
_HEAD: Final = struct.Struct("<QQ")
_N_VECTORS: Final = 512  # of one call: Linux takes 1024


@dataclass(frozen=True)
class Pickled:
    """A message, and what of it goes as it is."""

    data: bytes
    buffers: Sequence[memoryview]

    @property
    def n_bytes(self) -> int:
        return len(self.data) + sum(len(each) for each in self.buffers)


def pickled(message: Any) -> Pickled:
    """Its large buffers are not copied: nobody may change them until it has been sent.

    Raises:
        Exception: Any of the user's objects'.
    """
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        """Whether it goes in the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:  # it is in several pieces
            return True
        if raw.nbytes < LARGE_BYTES:
            return True
        buffers.append(raw)
        return False

    try:
        data = pickle.dumps(message, protocol=5, buffer_callback=keep)
    except (pickle.PicklingError, AttributeError, TypeError):
        # A class of the user's script is not importable in a worker. By value takes longer.
        buffers.clear()
        data = bytes(cloudpickle.dumps(message, protocol=5, buffer_callback=keep))
    return Pickled(data, buffers)


def send(link: socket.socket, batch: Sequence[Pickled]) -> None:
    """Returns when the kernel has all of it.

    Raises:
        OSError: The connection has ended.
    """
    lengths = array("Q")
    for each in batch:
        lengths.extend((len(each.data), len(each.buffers), *map(len, each.buffers)))
    head = _HEAD.pack(len(lengths), sum(len(each.data) for each in batch))
    pieces = [memoryview(head), memoryview(lengths).cast("B")]
    pieces += [memoryview(each.data) for each in batch]
    pieces += [buffer for each in batch for buffer in each.buffers]
    at = 0
    while at < len(pieces):
        sent = link.sendmsg(pieces[at : at + _N_VECTORS])
        while at < len(pieces) and sent >= len(pieces[at]):
            sent -= len(pieces[at])
            at += 1
        if sent:
            pieces[at] = pieces[at][sent:]


def receive(link: socket.socket) -> Iterator[Any]:
    """The messages of the next batch, in their order. Whoever takes them trusts the sender.

    Raises:
        EOFError: The connection has ended.
        OSError: It is broken.
        Exception: Any of the user's objects'.
    """
    n_lengths, n_bytes = _HEAD.unpack(_all(link, _HEAD.size))
    begin = n_lengths * array("Q").itemsize
    first = memoryview(_all(link, begin + n_bytes))
    lengths = iter(first[:begin].cast("Q"))
    pickles, sizes = [], []
    for length in lengths:
        pickles.append(first[begin : begin + length])
        begin += length
        sizes.append([next(lengths) for _ in range(next(lengths))])
    # All has come before the first is handed on.
    buffers = [[_all(link, size) for size in each] for each in sizes]
    for data, each in zip(pickles, buffers, strict=True):
        yield pickle.loads(data, buffers=each)


def _all(link: socket.socket, n_bytes: int) -> bytearray:
    into = bytearray(n_bytes)
    view = memoryview(into)
    got = 0
    while got < n_bytes:
        n = link.recv_into(view[got:])
        if not n:
            raise EOFError(f"the connection ended, {got} of {n_bytes} bytes had come")
        got += n
    return into
