"""Between Arrow's columns and NumPy's arrays or Python's values. Pure.

Rows that are arrays lie in a table as Arrow's fixed-shape tensors (numbers; Ray's own tensors
are read too), so that a row gives an array back; fixed-size lists give lists as rows, and N-D
arrays as columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from clamor_ray import errors
from clamor_ray._objects.global_array import GlobalArray, plain_or_same

Array: TypeAlias = npt.NDArray[Any]

_PLAIN: Final = frozenset({int, float, bool, str, bytes})
_NESTED: Final = (list, tuple, set, frozenset, dict, np.ndarray)
# What Arrow raises of values that it does not have.
CANNOT: Final = (pa.ArrowException, TypeError, ValueError, OverflowError, UnicodeError)
_TIME_UNITS: Final = {"Y": "D", "M": "D", "W": "D", "h": "s", "m": "s"}
_SPAN_UNITS: Final = {"W": "s", "D": "s", "h": "s", "m": "s"}


def objects(values: Sequence[Any]) -> Array:
    """A 1-D array of Python objects, none of them looked into."""
    return np.fromiter(values, object, len(values))


def alike(values: Sequence[Any] | Array) -> bool:
    """Whether all are arrays of one shape and one dtype."""
    first = values[0]
    return isinstance(first, np.ndarray) and all(
        type(value) in (np.ndarray, GlobalArray)
        and value.shape == first.shape
        and value.dtype == first.dtype
        for value in values
    )


# -- tables


def unique_names(table: pa.Table) -> list[str]:
    """The column names, where a dict can be made of them.

    Raises:
        ValueError: Two columns have one name.
    """
    names: list[str] = table.column_names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"The table has {names.count(twice)} columns {twice!r}: rename them "
            f"(table.rename_columns) before rows are made of them."
        )
    return names


def column(table: pa.Table, name: object) -> pa.ChunkedArray:
    """One column.

    Raises:
        MissingColumnError: There is none of that name.
        ValueError: There are several.
    """
    names: list[str] = table.column_names
    if not isinstance(name, str) or name not in names:
        raise errors.MissingColumnError(
            f"There is no column {name!r}; the table has {', '.join(map(repr, names)) or 'none'}."
        )
    if names.count(name) > 1:
        raise ValueError(f"The table has {names.count(name)} columns {name!r}: rename them first.")
    return table.column(name)


def rows_only(count: int) -> pa.Table:
    """A table of this many rows and no column."""
    return pa.table({"": pa.nulls(count)}).select([])


def slice_of(table: pa.Table, start: int, count: int) -> pa.Table:
    """So many rows from here on, or as many as there are."""
    if table.num_columns:
        return table.slice(start, count)
    return rows_only(min(count, table.num_rows - start))  # Arrow would give `count` of them


def take(table: pa.Table, places: Array) -> pa.Table:
    """These rows, in this order."""
    if not table.num_columns:
        if places.size and not 0 <= places.min() <= places.max() < table.num_rows:
            raise IndexError(f"The table has {table.num_rows} rows.")
        return rows_only(len(places))
    places = np.where(places < 0, places + table.num_rows, places)
    return movable(table).take(pa.array(places, pa.int64()))


def movable(table: pa.Table) -> pa.Table:
    """The same rows, with columns that Arrow can take rows of: no run ends, and no views."""
    for position, field in enumerate(table.schema):
        if pa.types.is_run_end_encoded(field.type) or str(field.type).endswith("_view"):
            table = table.set_column(position, field.name, decoded(table.column(position)))
    return table


def concat_tables(tables: list[pa.Table]) -> pa.Table | None:
    """Tables of the same columns as one, types promoted as Arrow has it; None: they do not fit."""
    names = tables[0].column_names
    for table in tables:
        same = table.column_names == names
        if not same and (len(set(names)) < len(names) or set(table.column_names) != set(names)):
            return None
        if not same and len(table.column_names) != len(names):
            return None
    if not names:
        return rows_only(sum(table.num_rows for table in tables))
    ordered = [t if t.column_names == names else t.select(names) for t in tables]
    if all(table.schema.equals(ordered[0].schema) for table in ordered):
        return pa.concat_tables(ordered)
    try:
        return pa.concat_tables(ordered, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return None


def table_of_dicts(rows: list[dict[Any, Any]]) -> pa.Table | None:
    """Dicts of the same text keys as a table; None where a value would not come back as it is.

    NumPy's scalars are the exception: they come back as Python's.
    """
    names = list(rows[0])
    keys = set(names)
    if not names or not all(type(name) is str for name in names):
        return None
    if not all(len(row) == len(names) and row.keys() == keys for row in rows):
        return None
    columns = []
    for name in names:
        exact = _exact([row[name] for row in rows])
        if exact is None:
            return None
        columns.append(exact)
    try:
        return pa.table(columns, names)
    except UnicodeError:
        return None


def _exact(values: list[Any]) -> pa.Array | None:
    kinds = set(map(type, values)) - {type(None)}
    if GlobalArray in kinds:
        values = [plain_or_same(value) for value in values]
        kinds = set(map(type, values)) - {type(None)}
    try:
        if len(kinds) == 1:
            kind = next(iter(kinds))
            if kind is int:
                return pa.array(values, pa.int64())
            if kind in _PLAIN:
                return pa.array(values)
            if kind is np.ndarray:
                return tensors(np.stack(values)) if alike(values) and values[0].ndim else None
            if issubclass(kind, np.integer | np.floating | np.bool_):
                return _of_scalars(values)
        found = inferred(values)
        return found if _same(values, found.to_pylist()) else None
    except CANNOT:
        return None


def _of_scalars(values: list[Any]) -> pa.Array | None:
    """NumPy's scalars of one type, and None."""
    dtypes = {value.dtype for value in values if value is not None}
    dtype = dtypes.pop()
    if dtypes or dtype.kind not in "biuf":
        return None
    plain = [None if value is None else value.item() for value in values]
    return pa.array(plain, pa.from_numpy_dtype(dtype))


def inferred(values: list[Any]) -> pa.Array | pa.ChunkedArray:
    """Python's values as Arrow takes them.

    Raises:
        TypeError: It has no such values.
    """
    check_inferable(values)
    return pa.array(values)


def check_inferable(values: Iterable[Any]) -> None:
    """That Arrow's guess of a type is safe: it drops imaginary parts, and ends the process where
    NumPy's times are among other values (both seen with pyarrow 26.0.1).

    Raises:
        TypeError: There are such values.
    """
    kinds: set[type] = set()
    _add_kinds(kinds, values)
    kinds.discard(type(None))
    times = any(issubclass(kind, (np.datetime64, np.timedelta64)) for kind in kinds)
    if times and len(kinds) > 1:
        shown = ", ".join(sorted(kind.__qualname__ for kind in kinds))
        raise TypeError(f"times of NumPy among other values: {shown}")
    if any(issubclass(kind, (complex, np.complexfloating)) for kind in kinds):
        raise TypeError("Arrow has no complex numbers")


def _add_kinds(into: set[type], values: Iterable[Any]) -> None:
    """The types of all values, also inside lists, dicts and arrays."""
    here = set(map(type, values))
    if any(issubclass(kind, _NESTED) for kind in here):
        for value in values:
            if isinstance(value, dict):
                _add_kinds(into, value.values())
            elif isinstance(value, np.ndarray) and value.dtype != np.dtype(object):
                into.add(value.dtype.type)
            elif isinstance(value, _NESTED):
                _add_kinds(into, list(value))
    into.update(k for k in here if not issubclass(k, _NESTED))


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def table_of_columns(columns: Mapping[Any, Any]) -> pa.Table:
    """A dict of columns as a table.

    Raises:
        TypeError: A name that is no text, a column that is no array, or values that Arrow does
            not have.
        ValueError: Columns of different lengths.
    """
    made: dict[str, Any] = {}
    for name, values in columns.items():
        if not isinstance(name, str):
            raise TypeError(f"Columns are named by text, not by {name!r}.")
        made[name] = _column(values, name)
    lengths = {name: len(values) for name, values in made.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "The columns of a batch are equally long; these have "
            + ", ".join(f"{name!r}: {length}" for name, length in lengths.items())
            + " items."
        )
    return pa.table(made)


def _column(values: Any, name: str) -> pa.Array | pa.ChunkedArray:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, pa.Table):
        return struct_of(values)
    if type(values).__name__ == "Series" and hasattr(values, "to_numpy"):
        values = values.to_numpy()
    if isinstance(values, (list, tuple)):
        values = objects(values)
    if not isinstance(values, np.ndarray) or not values.ndim:
        raise TypeError(
            f"Column {name!r} of a batch is {type(values).__qualname__}, not an array or a list."
        )
    if values.dtype == object and values.ndim == 1 and len(values) and alike(values):
        values = np.stack(list(values)) if values[0].ndim else values
    return tensors(values) if values.ndim > 1 else column_of(values, name)


def table_of_frame(frame: Any) -> pa.Table:
    """A DataFrame without its index.

    Raises:
        TypeError: Values that Arrow does not have.
    """
    try:
        for position, dtype in enumerate(frame.dtypes):
            if dtype.kind == "O":
                check_inferable(frame.iloc[:, position])
        return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
    except CANNOT as error:
        raise TypeError(f"The DataFrame cannot become an Arrow table: {error}.") from error


def struct_of(table: pa.Table) -> pa.ChunkedArray:
    """The rows of a table as one column of structs."""
    if not table.num_columns:
        return pa.chunked_array([pa.array([{}] * table.num_rows, pa.struct([]))])
    return table.to_struct_array()


# -- columns into values


def is_tensor(type_: pa.DataType) -> bool:
    """Whether the values of such a column are arrays of one shape (Arrow's tensors, or Ray's)."""
    return isinstance(type_, pa.BaseExtensionType) and "tensor" in type_.extension_name


def _tensor_chunk(chunk: Any) -> Array:
    if hasattr(chunk, "to_numpy_ndarray"):
        return np.asarray(chunk.to_numpy_ndarray())
    return np.asarray(chunk.to_numpy(zero_copy_only=False))


def _stacked(values: pa.ChunkedArray) -> Array | None:
    """A column of equal-shaped arrays as one; None: it is none, or has nulls."""
    type_ = values.type
    if values.null_count:
        return None
    if is_tensor(type_):
        chunks = [_tensor_chunk(chunk) for chunk in values.chunks if len(chunk)]
        if not chunks:
            shape = tuple(getattr(type_, "shape", ()))
            dtype = getattr(type_, "value_type", None)
            return np.empty((0, *shape), object if dtype is None else dtype.to_pandas_dtype())
        same = len({chunk.shape[1:] for chunk in chunks}) == 1
        return np.concatenate(chunks) if same else None
    if not pa.types.is_fixed_size_list(type_) or not type_.list_size:
        return None
    inner = pa.chunked_array([chunk.flatten() for chunk in values.chunks], type_.value_type)
    nested = _stacked(inner)
    if nested is None:
        if inner.null_count or not is_plain_number(type_.value_type):
            return None
        nested = inner.to_numpy(zero_copy_only=False)
    return nested.reshape(len(values), type_.list_size, *nested.shape[1:])


def is_plain_number(type_: pa.DataType) -> bool:
    """Integers, floats and booleans: what NumPy has as well."""
    types = pa.types
    return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_))


def is_text(type_: pa.DataType) -> bool:
    """Text or bytes, of any length or of one."""
    types = pa.types
    found = types.is_string(type_) or types.is_binary(type_) or types.is_fixed_size_binary(type_)
    large = types.is_large_string(type_) or types.is_large_binary(type_)
    return bool(found or large) and not types.is_decimal(type_)


def _is_time(type_: pa.DataType) -> bool:
    types = pa.types
    naive = types.is_timestamp(type_) and type_.tz is None
    return bool(naive or types.is_date32(type_) or types.is_duration(type_))


def decoded(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The same column without a dictionary or run-end encoding, and without views."""
    while pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if pa.types.is_run_end_encoded(values.type):
        values = pa.chunked_array(
            [pc.run_end_decode(c) for c in values.chunks], values.type.value_type
        )
    if str(values.type) in ("string_view", "binary_view"):
        values = values.cast(pa.string() if str(values.type) == "string_view" else pa.binary())
    return values


def chunked(values: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    """A column, whether it came in one piece or in several."""
    return values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([values])


def values_of(values: pa.Array | pa.ChunkedArray) -> Iterable[Any]:
    """The values of a column as rows have them: Python's, None for null, tensors as arrays."""
    column = decoded(chunked(values))
    if is_tensor(column.type):
        stacked = _stacked(column)
        if stacked is not None:
            return stacked
        rows = iter([row for chunk in column.chunks for row in _tensor_chunk(chunk.drop_null())])
        return [next(rows) if valid else None for valid in column.is_valid().to_pylist()]
    if is_text(column.type) or (is_plain_number(column.type) and not column.null_count):
        found: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return found
    return column.to_pylist()  # type: ignore[no-any-return]


def batch_column(values: pa.ChunkedArray) -> Array:
    """A column as Ray Data hands it to functions of batches: null numbers are NaN."""
    column = decoded(values)
    stacked = _stacked(column)
    if stacked is not None:
        return stacked
    if is_tensor(column.type):
        return objects(list(values_of(column)))
    return np.asarray(column.to_numpy(zero_copy_only=False))


def column_items(values: pa.Array | pa.ChunkedArray) -> Array | pa.Table:
    """A column as a block: see `blocks.column`."""
    column = decoded(chunked(values))
    stacked = _stacked(column)
    if stacked is not None:
        return stacked
    if not column.null_count:
        if pa.types.is_struct(column.type) and column.type.num_fields:
            names = [field.name for field in column.type]
            return pa.table(
                pa.Table.from_batches(
                    [pa.RecordBatch.from_struct_array(chunk) for chunk in column.chunks],
                    pa.schema([column.type.field(i) for i in range(len(names))]),
                )
            )
        if is_plain_number(column.type) or _is_time(column.type):
            return np.asarray(column.to_numpy(zero_copy_only=False))
    if is_text(column.type):
        return np.asarray(column.to_numpy(zero_copy_only=False), object)
    return objects(list(values_of(column)))


# -- arrays into columns


def tensors(array: Array) -> pa.Array:
    """The rows of an N-D array as tensors; as fixed-size lists where Arrow has no such tensors."""
    native = array.dtype.isnative and array.dtype.kind in "iuf" and array.dtype.itemsize in (4, 8)
    if native and array.size:
        return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))
    return column_of(array, "")


def column_of(array: Array, name: str) -> pa.Array:
    """An array as a column of Arrow's; rows of an N-D array as fixed-size lists.

    Raises:
        TypeError: Arrow has no such values.
    """
    try:
        return _column_of(array)
    except CANNOT as error:
        what = f"Python objects ({error})" if array.dtype == object else str(array.dtype)
        raise TypeError(f"Column {name!r} cannot be one of Arrow's: it is of {what}.") from error


def _column_of(array: Array) -> pa.Array:
    dtype = array.dtype
    if array.ndim > 1:
        found = _column_of(array.reshape(-1))
        if not array.size:
            type_ = found.type
            for length in reversed(array.shape[1:]):
                type_ = pa.list_(type_, length)
            return pa.array(array.tolist(), type_)
        for length in reversed(array.shape[1:]):
            found = pa.FixedSizeListArray.from_arrays(found, length)
        return found
    if dtype.names is not None:
        fields = [_column_of(array[field]) for field in dtype.names]
        return pa.StructArray.from_arrays(fields, list(dtype.names))
    if dtype.kind in "US":  # as Python's: Arrow ends NumPy's texts at their first NUL
        return pa.array(array.tolist(), pa.string() if dtype.kind == "U" else pa.binary())
    if dtype == np.dtype(object):
        return inferred(array.tolist())
    if dtype.kind in "Mm":
        unit = np.datetime_data(dtype)[0]
        units = _TIME_UNITS if dtype.kind == "M" else _SPAN_UNITS
        array = array.astype(f"{dtype.kind}8[{units.get(unit, unit)}]")
    elif not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
    if dtype.kind == "V":
        return pa.array([value.tobytes() for value in array], pa.binary(dtype.itemsize))
    return pa.array(array)
