"""What a partition is made of: a block of items, and what is done with one. Pure.

A block of items is one of three: a NumPy array (axis 0 is the items; dtype object where nothing
better fits), an Arrow table (items are its rows, as dicts), or `Columns` (items are tuples, one
block for each field). Functions here never change a block that they are given, and what they
return may share memory with it.

No code here asks for a particular number of items: a block of none goes through every function.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clamor_ray import errors
from clamor_ray._objects.global_array import GlobalArray, plain_or_same
from clamor_ray.collection.data import arrow
from clamor_ray.collection.data.arrow import objects
from clamor_ray.collection.data.digests import Digest

Array: TypeAlias = npt.NDArray[Any]

ITEM: Final = "item"  # the column of what is no row, as Ray Data calls it
FORMATS: Final = ("numpy", "pyarrow", "pandas")

# dtypes whose Python scalars say all that NumPy's say
_EXACT: Final = frozenset(map(np.dtype, (np.bool_, np.int64, np.float64, np.complex128)))
_SAMPLED_ITEMS: Final = 256  # of an object array, to tell how large it is
_ROWS_AT_ONCE: Final = 65536


@dataclass(frozen=True, eq=False)
class Columns:
    """A block whose items are tuples: one block for each field, all equally long.

    Args:
        fields: at least one block.

    Raises:
        ValueError: There is none, or their lengths differ.
    """

    fields: tuple[Array | pa.Table | Columns, ...]

    def __post_init__(self) -> None:
        lengths = [n_items(field) for field in self.fields]
        if not lengths or len(set(lengths)) > 1:
            raise ValueError(
                f"The fields of tuples have the same number of items each; these have {lengths}."
            )

    def __len__(self) -> int:
        return n_items(self.fields[0])

    def __repr__(self) -> str:
        return f"Columns({len(self)} × {schema_of(self)})"


Items: TypeAlias = Array | pa.Table | Columns

EMPTY: Final[Items] = np.empty(0, object)  # an empty block of no known type


def n_items(b: Items) -> int:
    """How many items a block has."""
    return int(b.num_rows) if isinstance(b, pa.Table) else len(b)


def n_bytes(b: Items) -> int:
    """About how much memory a block takes. Python objects are estimated from a sample, one deep."""
    if isinstance(b, pa.Table):
        return int(b.nbytes)
    if isinstance(b, Columns):
        return sum(n_bytes(field) for field in b.fields)
    if b.dtype != object or not b.size:
        return int(b.nbytes)
    sample = b.reshape(-1)[:: max(1, b.size // _SAMPLED_ITEMS)]
    mean = sum(sys.getsizeof(item) for item in sample) / len(sample)
    return int(b.nbytes + mean * b.size)


def from_items(values: Sequence[Any]) -> Items:
    """The block that holds these items best, such that `items` gives them back.

    Numbers of one type become an array (int: int64, float: float64; NumPy's scalars keep their
    dtype; ints beyond int64 stay objects), arrays of one shape and dtype an N-D array, dicts
    with the same keys a table where Arrow keeps the values as they are, tuples of one length
    `Columns`. Anything else, and any mixture, is an array of objects: no int becomes a float
    because of its neighbours.
    """
    if isinstance(values, range) and _fits_int64(values):
        return np.arange(values.start, values.stop, values.step, dtype=np.int64)
    values = values if isinstance(values, list) else list(values)
    kinds = set(map(type, values))
    if GlobalArray in kinds:
        values = [plain_or_same(value) for value in values]
        kinds = set(map(type, values))
    if len(kinds) != 1:
        return objects(values) if values else EMPTY
    made = _of_one_type(kinds.pop(), values)
    return objects(values) if made is None else made


def _fits_int64(values: range) -> bool:
    return all(-(2**63) <= edge < 2**63 for edge in (values.start, values.stop))


def _of_one_type(kind: type, values: list[Any]) -> Items | None:
    if kind is int:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return None
    if kind in (float, bool, complex):
        return np.array(values, kind)
    if kind is tuple:
        width = len(values[0])
        if width and all(len(value) == width for value in values):
            return Columns(tuple(from_items([v[i] for v in values]) for i in range(width)))
    if kind is dict:
        return arrow.table_of_dicts(values)
    if kind is np.ndarray and arrow.alike(values) and values[0].ndim:
        return np.stack(values)
    if issubclass(kind, np.generic) and not issubclass(kind, np.character):
        dtypes = {value.dtype for value in values}
        return np.array(values, dtypes.pop()) if len(dtypes) == 1 else None
    return None


def items(b: Items) -> Iterator[Any]:
    """The items of a block, one by one.

    Of a 1-D array Python's scalars where they say the same (int64, float64, bool, complex128,
    text and bytes), otherwise NumPy's (a float32 stays one); of an N-D array its rows, as views;
    of a table dicts; of `Columns` tuples.

    Raises:
        ValueError: A table has two columns of one name, which no dict can have.
    """
    if isinstance(b, Columns):
        return zip(*map(items, b.fields), strict=True)
    if isinstance(b, pa.Table):
        return _rows(b)
    if b.ndim == 1 and (b.dtype in _EXACT or b.dtype.kind in "USO"):
        return _scalars(b)
    return iter(b)


def _scalars(b: Array) -> Iterator[Any]:
    for start in range(0, len(b), _ROWS_AT_ONCE):
        yield from b[start : start + _ROWS_AT_ONCE].tolist()


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    names = arrow.unique_names(table)
    for start in range(0, table.num_rows, _ROWS_AT_ONCE):
        part = arrow.slice_of(table, start, _ROWS_AT_ONCE)
        if not names:
            yield from ({} for _ in range(part.num_rows))
        for row in zip(*map(arrow.values_of, part.columns), strict=True):
            yield dict(zip(names, row, strict=True))


def concat(bs: Sequence[Items]) -> Items:
    """Blocks one after the other, as one.

    Empty blocks do not count, unless all are. Arrays of different numeric dtypes promote as
    NumPy has it, columns of tables as Arrow has it; what would not stay what it is (numbers and
    text, int64 and uint64, rows of different shapes, tables with other columns, a table and an
    array) becomes an array of the items.
    """
    full = [b for b in bs if n_items(b)]
    if not full:
        return next((b for b in bs if not _is_untyped(b)), EMPTY)
    if len(full) == 1:
        return full[0]
    joined: Items | None = None
    tuples = [b for b in full if isinstance(b, Columns)]
    arrays = [b for b in full if isinstance(b, np.ndarray)]
    if len(tuples) == len(full):
        if len({len(b.fields) for b in tuples}) == 1:
            return Columns(tuple(map(concat, zip(*(b.fields for b in tuples), strict=True))))
    elif len(arrays) == len(full):
        joined = _concat_arrays(arrays)
    elif not tuples and not arrays:
        joined = arrow.concat_tables(full)
    return objects([item for b in full for item in items(b)]) if joined is None else joined


def _is_untyped(b: Items) -> bool:
    return isinstance(b, np.ndarray) and b.dtype == object and b.ndim == 1


def _concat_arrays(arrays: list[Array]) -> Array | None:
    if len({a.shape[1:] for a in arrays}) > 1:
        return None
    dtypes = {a.dtype for a in arrays}
    if len(dtypes) > 1:
        kinds = {dtype.kind for dtype in dtypes}
        if len(kinds) > 1 and not kinds <= set("biufc"):
            return None
        try:
            promoted = np.result_type(*dtypes)
        except TypeError:  # structures of different fields, time in units that do not meet
            return None
        if kinds <= set("biu") and promoted.kind == "f":
            return None  # uint64 and int64: floats would not be the same numbers
        if promoted.kind in "fc" and any(map(_is_beyond_floats, arrays)):
            return None
    return np.concatenate(arrays)


def _is_beyond_floats(array: Array) -> bool:
    """Whether it has integers that float64 would change."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or not array.size:
        return False
    return bool(array.max() > 1 << 53 or array.min() < -(1 << 53))


def slice_of(b: Items, start: int, stop: int) -> Items:
    """The items from `start` to before `stop`, as views of the block's memory."""
    if isinstance(b, Columns):
        return Columns(tuple(slice_of(field, start, stop) for field in b.fields))
    start, stop, _ = slice(start, stop).indices(n_items(b))
    return (
        arrow.slice_of(b, start, max(0, stop - start)) if isinstance(b, pa.Table) else b[start:stop]
    )


def take(b: Items, indices: npt.ArrayLike) -> Items:
    """The items at these places, in this order, copied; or those where a mask is true.

    Raises:
        IndexError: A place that the block does not have.
    """
    places = np.asarray(indices)
    if places.dtype == bool:
        if places.shape != (n_items(b),):
            raise IndexError(f"A mask of {places.shape} is not one of {n_items(b)} items.")
        places = np.flatnonzero(places)
    places = places.astype(np.int64, copy=False)
    if isinstance(b, Columns):
        return Columns(tuple(take(field, places) for field in b.fields))
    return arrow.take(b, places) if isinstance(b, pa.Table) else b[places]


def to_batch(b: Items, fmt: str) -> Any:
    """A block as what a function of batches is given.

    Args:
        b: the block.
        fmt: "numpy": an array; a dict of arrays for a table (with NaN for null numbers, as in
            Ray Data), a tuple of those for `Columns`. "pyarrow": a table, see `to_arrow`.
            "pandas": a DataFrame of the same columns.

    Raises:
        ValueError: Another format, or two columns of one name for a dict.
        ImportError: pandas is asked for and not installed.
        TypeError: Arrow is asked for and has no such values.
    """
    if fmt not in FORMATS:
        raise ValueError(f"batch_format is one of {', '.join(FORMATS)}, not {fmt!r}.")
    if fmt == "pyarrow":
        return to_arrow(b)
    if fmt == "pandas":
        return _frame(b)
    if isinstance(b, Columns):
        return tuple(to_batch(field, fmt) for field in b.fields)
    if isinstance(b, pa.Table):
        names = arrow.unique_names(b)
        return {name: arrow.batch_column(col) for name, col in zip(names, b.columns, strict=True)}
    return b


def _frame(b: Items) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            'batch_format "pandas" needs pandas: pip install pandas, or take "pyarrow".'
        ) from error
    if isinstance(b, pa.Table):
        return b.to_pandas()
    fields = (
        [(str(i), f) for i, f in enumerate(b.fields)] if isinstance(b, Columns) else [(ITEM, b)]
    )
    plain = {
        name: f if isinstance(f, np.ndarray) and f.ndim == 1 else objects(list(items(f)))
        for name, f in fields
    }
    return pandas.DataFrame(plain)


def from_batch(value: Any) -> Items:
    """What a function of batches has returned, as a block.

    Args:
        value: an array (axis 0 is the items), a dict of equally long columns, an Arrow table,
            record batch or column, a DataFrame or Series, a tuple of those (the fields of
            tuples), or a list of items.

    Raises:
        TypeError: It is something else, or has values that Arrow does not have.
        ValueError: Columns or fields of different lengths.
    """
    if isinstance(value, (pa.Table, Columns)):
        return value
    if isinstance(value, np.ndarray) and value.ndim and not isinstance(value, np.ma.MaskedArray):
        return np.asarray(value)
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return arrow.column_items(value)
    if isinstance(value, dict):
        return arrow.table_of_columns(value)
    if isinstance(value, tuple) and value:
        return Columns(tuple(map(from_batch, value)))
    if isinstance(value, list):
        return from_items(value)
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        return arrow.table_of_frame(value)
    if pandas is not None and isinstance(value, pandas.Series):
        return np.asarray(value.to_numpy())
    what = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    shape = " without dimensions" if isinstance(value, np.ndarray) and not value.ndim else ""
    raise TypeError(
        f"A function of batches returns an array, a dict of arrays, an Arrow table, a DataFrame, "
        f"a list of items or a tuple of those; this one returned {what}{shape}."
    )


def to_arrow(b: Items) -> pa.Table:
    """A block as an Arrow table.

    An array becomes the column "item" (rows of an N-D array as fixed-size lists), the fields of
    tuples "0", "1", ...; tables and tuples inside those become structs.

    Raises:
        TypeError: Arrow has no such values (complex numbers, arbitrary objects): which.
    """
    if isinstance(b, pa.Table):
        return b
    if isinstance(b, Columns):
        names = [str(i) for i in range(len(b.fields))]
        return pa.table([_arrow_column(f, n) for f, n in zip(b.fields, names, strict=True)], names)
    return pa.table([_arrow_column(b, ITEM)], [ITEM])


def _arrow_column(b: Items, name: str) -> pa.Array | pa.ChunkedArray:
    if isinstance(b, np.ndarray):
        return arrow.column_of(b, name)
    return arrow.struct_of(to_arrow(b))


def column(b: Items, name: str | int) -> Items:
    """One column as a block of its values: by name of a table or structure, by number of tuples.

    A column of numbers without nulls is an array of their dtype, one of fixed-size lists an N-D
    array, one of structs a table; in any other a null is None among Python objects.

    Raises:
        MissingColumnError: There is none of that name.
    """
    if isinstance(b, Columns):
        if isinstance(name, int) and 0 <= name < len(b.fields):
            return b.fields[name]
        raise _missing(name, f"fields 0 to {len(b.fields) - 1}")
    if isinstance(b, pa.Table):
        return arrow.column_items(arrow.column(b, name))
    if b.dtype.names is not None:
        if name in b.dtype.names:
            return b[name]
        raise _missing(name, f"the fields {', '.join(b.dtype.names)}")
    if b.dtype == object and b.ndim == 1:
        return from_items([_entry(item, name) for item in b])
    if not len(b):
        return EMPTY
    raise _missing(name, f"no columns: its items are {schema_of(b)}")


def _entry(item: Any, name: str | int) -> Any:
    if isinstance(item, (tuple, list, dict)) and not isinstance(name, bool):
        try:
            return item[name]  # type: ignore[index]
        except (LookupError, TypeError):
            pass
    raise _missing(name, f"this item among others: {item!r:.100}")


def _missing(name: object, there: str) -> errors.MissingColumnError:
    return errors.MissingColumnError(f"There is no column {name!r}; the collection has {there}.")


def schema_of(b: Items) -> str:
    """What the items are, for people.

    Example:
        >>> schema_of(np.zeros((2, 3)))
        'float64[3]'
        >>> schema_of(from_items([("a", 1)]))
        '(str, int64)'
    """
    if isinstance(b, Columns):
        return f"({', '.join(map(schema_of, b.fields))}{',' * (len(b.fields) == 1)})"
    if isinstance(b, pa.Table):
        return "{" + ", ".join(f"{field.name}: {field.type}" for field in b.schema) + "}"
    shape = "".join(f"[{length}]" for length in b.shape[1:])
    if b.dtype == object and b.ndim == 1:
        kinds = {type(item).__qualname__ for item in b[:_SAMPLED_ITEMS]}
        return kinds.pop() if len(kinds) == 1 else "object"
    return f"{b.dtype}{shape}"


def digest(b: Items) -> bytes:
    """16 bytes that say what is in a block: content and types, wherever it lies in memory.

    The same rows give the same digest however a table is cut into chunks, whatever lies under
    its nulls, and in whichever order a set or dict iterates. NaN is told by its bits.

    Raises:
        TypeError: An item that cannot be pickled.
    """
    into = Digest()
    _feed(into, b)
    return into.finish()


def _feed(into: Digest, b: Items) -> None:
    if isinstance(b, Columns):
        into.mark("columns", len(b.fields))
        for field in b.fields:
            _feed(into, field)
    elif isinstance(b, pa.Table):
        into.table(b)
    else:
        into.array(b)
