"""A digest of values: of what they are, not of how they lie in memory. Pure.

Pickles will not do: they differ with the identity of equal objects (two equal strings, or one
twice) and with the order of sets. So every value is written out with its type and length, parts
without an order by their sorted digests, and an object of a class by what it would be pickled as.
"""

from __future__ import annotations

import copyreg
import hashlib
import types
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_SIZE: Final = 16
_PLAIN: Final = (bool, int, float, complex)
_ROWS_AT_ONCE: Final = 1 << 20


class Digest:
    """Takes values, and says in 16 bytes what they were.

    Args:
        within: identities of the objects that are being written: cycles end there.
    """

    def __init__(self, within: tuple[int, ...] = ()) -> None:
        self._hash = hashlib.blake2b(digest_size=_SIZE)
        self._within = within

    @classmethod
    def of(cls, x: Any) -> bytes:
        """The digest of one value.

        Raises:
            TypeError: It cannot be pickled.
        """
        into = cls()
        into.item(x)
        return into.finish()

    def finish(self) -> bytes:
        """The digest of all that was taken."""
        return self._hash.digest()

    def mark(self, kind: str, length: int) -> None:
        """What follows, and how many of it: no two sequences of values are written alike."""
        self._hash.update(f"{kind}:{length};".encode())

    def _bytes(self, kind: str, content: bytes | memoryview) -> None:
        self.mark(kind, len(content))
        self._hash.update(content)

    # -- arrays

    def array(self, a: npt.NDArray[Any]) -> None:
        """An array: dtype, shape and elements."""
        self._bytes("array", f"{a.dtype.str}{a.shape}".encode())
        if a.dtype == object:
            self._objects(a.reshape(-1))
        elif a.dtype.names is not None:
            for name in a.dtype.names:  # not the padding between fields
                self._bytes("field", name.encode())
                self.array(a[name])
        elif a.dtype.kind in "fc" and a.dtype.itemsize % 10 == 6:  # longdouble has padding
            self._objects(np.fromiter(map(repr, a.reshape(-1)), object, a.size))
        else:
            flat = np.ascontiguousarray(a).reshape(-1)
            self._hash.update(flat.view(np.uint8).data if flat.size else b"")

    def _objects(self, a: npt.NDArray[Any]) -> None:
        kinds = set(map(type, a))
        if str in kinds and kinds <= {str, type(None)}:
            try:
                self.mark("texts", len(a))
                self._column(pa.chunked_array([pa.array(a.tolist(), pa.large_string())]))
                return
            except UnicodeError:
                pass  # lone surrogates: one by one, and always so for these values
        self.mark("objects", len(a))
        for item in a:
            self.item(item)

    # -- Python's values

    def item(self, x: Any) -> None:
        """Any value that could be pickled.

        Raises:
            TypeError: This one cannot.
        """
        if x is None or type(x) in _PLAIN:
            self._bytes(type(x).__name__, repr(x).encode())
        elif type(x) is str:
            self._bytes("str", x.encode("utf-8", "surrogatepass"))
        elif type(x) in (bytes, bytearray):
            self._bytes(type(x).__name__, bytes(x))
        elif id(x) in self._within:
            self.mark("cycle", len(self._within) - self._within.index(id(x)))
        else:
            self._part(x)

    def _part(self, x: Any) -> None:
        outside = self._within
        self._within = (*outside, id(x))
        try:
            if type(x) is np.ndarray:
                self.array(x)
            elif isinstance(x, np.generic) and not isinstance(x, np.object_):
                self.array(np.asarray(x))
            elif type(x) in (list, tuple):
                self.mark(type(x).__name__, len(x))
                for part in x:
                    self.item(part)
            elif type(x) in (set, frozenset):
                self._unordered(type(x).__name__, [(part,) for part in x])
            elif type(x) is dict:
                self._unordered("dict", list(x.items()))
            elif isinstance(x, pa.Table):
                self.table(x)
            else:
                self._object(x)
        finally:
            self._within = outside

    def _unordered(self, kind: str, parts: list[tuple[Any, ...]]) -> None:
        self.mark(kind, len(parts))
        digests = []
        for part in parts:
            one = Digest(self._within)
            for value in part:
                one.item(value)
            digests.append(one.finish())
        self._hash.update(b"".join(sorted(digests)))

    def _object(self, x: Any) -> None:
        if isinstance(x, (type, types.FunctionType, types.BuiltinFunctionType)):
            self._bytes("name", f"{x.__module__}.{x.__qualname__}".encode())
            return
        reduce = copyreg.dispatch_table.get(type(x))
        made = reduce(x) if reduce is not None else x.__reduce_ex__(4)
        if isinstance(made, str):
            self._bytes("name", made.encode())
            return
        self.mark(f"object {type(x).__module__}.{type(x).__qualname__}", len(made))
        for part in made[:3]:
            self.item(part)
        for several in made[3:5]:  # what a list or a dict of its own class holds
            self.item(None if several is None else list(several))

    # -- Arrow's columns

    def table(self, table: pa.Table) -> None:
        """A table: names, types and values, not its chunks, and not what lies under nulls."""
        self.mark("table", table.num_rows)
        for field, column in zip(table.schema, table.columns, strict=True):
            self._bytes("column", field.name.encode())
            self._column(column)

    def _column(self, column: pa.ChunkedArray) -> None:
        self._bytes("type", str(column.type).encode())
        self._values([chunk for chunk in column.chunks if len(chunk)])

    def _values(self, chunks: list[pa.Array]) -> None:
        """One kind of buffer after the other over all chunks, so that the chunking is not seen."""
        self.mark("values", sum(map(len, chunks)))
        for chunk in chunks:
            self._bits(chunk.is_valid())
        chunks = [chunk.drop_null() for chunk in map(_plain, chunks)]
        if not chunks:
            return
        type_ = chunks[0].type
        if pa.types.is_struct(type_):
            for i in range(type_.num_fields):
                self._values([chunk.flatten()[i] for chunk in chunks])
        elif pa.types.is_nested(type_):
            for chunk in chunks:
                self._hash.update(np.asarray(pc.list_value_length(chunk), np.int64).tobytes())
            self._values([chunk.flatten() for chunk in chunks])
        elif pa.types.is_large_binary(type_):
            for chunk in chunks:
                self._hash.update(np.asarray(pc.binary_length(chunk), np.int64).tobytes())
            for chunk in chunks:
                self._text(chunk)
        elif pa.types.is_boolean(type_):
            for chunk in chunks:
                self._bits(chunk)
        elif not pa.types.is_null(type_):
            self._fixed_width(type_.byte_width, chunks)

    def _bits(self, chunk: pa.Array) -> None:
        """Booleans, one byte each, a bounded number at once."""
        for start in range(0, len(chunk), _ROWS_AT_ONCE):
            part = chunk.slice(start, _ROWS_AT_ONCE).to_numpy(zero_copy_only=False)
            self._hash.update(part.astype(np.uint8).data)

    def _text(self, chunk: pa.Array) -> None:
        _, offsets, content = chunk.buffers()
        if content is None or not len(chunk):
            return
        ends = np.frombuffer(offsets, np.int64)
        first, last = ends[chunk.offset], ends[chunk.offset + len(chunk)]
        self._hash.update(memoryview(content)[int(first) : int(last)])

    def _fixed_width(self, width: int, chunks: list[pa.Array]) -> None:
        for chunk in chunks:
            content = chunk.buffers()[1]
            if content is not None and len(chunk):
                start = chunk.offset * width
                self._hash.update(memoryview(content)[start : start + len(chunk) * width])


def _plain(chunk: pa.Array) -> pa.Array:
    """Without an encoding; texts and bytes of any width as large binary, lists as large lists."""
    type_ = chunk.type
    t = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return _plain(chunk.storage)
    if t.is_dictionary(type_):
        return _plain(chunk.dictionary_decode())
    if t.is_run_end_encoded(type_):
        return _plain(pc.run_end_decode(chunk))
    if t.is_map(type_):
        entries = pa.struct([("key", type_.key_type), ("value", type_.item_type)])
        return _plain(chunk.cast(pa.list_(entries)))
    if t.is_string(type_) or t.is_binary(type_) or t.is_large_string(type_) or _is_view(type_):
        return chunk.cast(pa.large_binary())
    return chunk


def _is_view(type_: pa.DataType) -> bool:
    return str(type_) in ("string_view", "binary_view")
