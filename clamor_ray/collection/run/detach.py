"""Results that look into global variables, copied out of them.

A partition is to hold what its task read. A view of a variable would be read when it is pickled,
after the read set was taken, and would keep the variable's version alive.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from clamor_ray._counting.anchors import collecting, giving
from clamor_ray._read.lease import inline_images
from clamor_ray._session import process_sessions
from clamor_ray.collection.data.blocks import Columns


def _is_global(address: int) -> bool:
    return process_sessions.at_address(address) is not None or inline_images.at(address) is not None


def _of_array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.hasobject:
        return _by_pickle(array)
    if array.nbytes and _is_global(int(array.__array_interface__["data"][0])):
        return array.copy()
    return array


def _buffers(array: pa.Array) -> list[pa.Buffer]:
    found = list(array.buffers())
    if pa.types.is_dictionary(array.type):
        found += _buffers(array.dictionary)
    return found


def _of_table(table: pa.Table) -> pa.Table:
    buffers = (
        buffer
        for column in table.columns
        for chunk in column.chunks
        for buffer in _buffers(chunk)
        if buffer is not None and buffer.is_cpu
    )
    if not any(_is_global(buffer.address) for buffer in buffers):
        return table
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


class _Looker(cloudpickle.Pickler):
    """Pickles to nothing; notices views of variables. Classes of the user's script go along."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=5, buffer_callback=lambda _: False)
        self.found = False

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray) and obj.nbytes and not obj.dtype.hasobject:
            self.found |= _is_global(int(obj.__array_interface__["data"][0]))
            return "array"
        if isinstance(obj, pa.Buffer) and obj.size and obj.is_cpu:
            self.found |= _is_global(obj.address)
            return "buffer"
        return None


class _Nowhere(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def _by_pickle(value: Any) -> Any:
    looker = _Looker()
    looker.dump(value)
    if not looker.found:
        return value
    with collecting() as held_by:
        copied = cloudpickle.dumps(value, 5)
    with giving(tuple(held_by)):
        return pickle.loads(copied)


def detached(value: Any) -> Any:
    """The same value, without views of global variables in it."""
    if isinstance(value, np.ndarray):
        return _of_array(value)
    if isinstance(value, pa.Table):
        return _of_table(value)
    if isinstance(value, Columns):
        return Columns(tuple(detached(field) for field in value.fields))
    return value if value is None or isinstance(value, (int, float, str)) else _by_pickle(value)
