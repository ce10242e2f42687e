"""Collections from outside: `clamor.from_items`, `clamor.read_parquet`, ..."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import ray

from clamor_ray._session import process_sessions
from clamor_ray.collection import options
from clamor_ray.collection.collection import DataCollection
from clamor_ray.collection.io import sources
from clamor_ray.collection.plan.plan import Node, Scan

INLINE_BYTES: Final = 64 << 10  # larger partitions of the driver become Ray objects at once
TASKS_PER_CPU: Final = 2


def _made(kind: str, splits: Sequence[Any], *, objects: bool = False) -> DataCollection:
    source = Scan(kind, tuple(splits), objects)
    return DataCollection(Node(source, (), len(source.splits)), options.from_env())


def _n_partitions(partitions: int | None) -> int:
    process_sessions.current()  # without clamor.init() this is said here, and not later
    if partitions is not None:
        if not isinstance(partitions, int) or isinstance(partitions, bool) or partitions < 1:
            raise ValueError(f"partitions is a number from 1 on, not {partitions!r}")
        return partitions
    return max(1, int(ray.cluster_resources().get("CPU", 1)) * TASKS_PER_CPU)


def _of_splits(kind: str, splits: Sequence[Any]) -> DataCollection:
    """Of what the driver has in memory."""
    if all((split.size_bytes or 0) <= INLINE_BYTES for split in splits):
        return _made(kind, splits)
    return _made(kind, [ray.put(split.read()) for split in splits], objects=True)


def from_items(items: Iterable[Any], *, partitions: int | None = None) -> DataCollection:
    """A collection of Python objects.

    Numbers become arrays, dicts with the same keys tables, tuples of one length columns side by
    side; everything else stays what it is.

    Args:
        items: all of them.
        partitions: at most so many, and no more than items; None: two for each CPU.

    Returns:
        A `DataCollection`.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        TypeError: A str or bytes: its letters are hardly meant.

    Example:
        >>> clamor.from_items(range(1000), partitions=2).map(lambda x: x * x).sum()
        332833500
    """
    n = _n_partitions(partitions)
    return _of_splits("items", sources.items_splits(items, n))


def from_numpy(array: Any, *, partitions: int | None = None) -> DataCollection:
    """A collection of an array's elements, or of its rows (axis 0).

    Args:
        array: shape (n, ...), of any dtype.
        partitions: number of them; None: two for each CPU.

    Returns:
        A `DataCollection` of n items, in the array's order.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        TypeError, ValueError: A masked array; one without an axis.

    Example:
        >>> clamor.from_numpy(np.arange(12).reshape(4, 3), partitions=2).count()
        4
    """
    n = _n_partitions(partitions)
    if getattr(array, "nbytes", 0) <= n * INLINE_BYTES and isinstance(array, np.ndarray):
        array = array.copy()  # larger ones become objects at once; none follows the user's array
    return _of_splits("numpy", sources.numpy_splits(array, n))


def from_arrow(table: pa.Table, *, partitions: int | None = None) -> DataCollection:
    """A collection of a table's rows.

    Args:
        table: a `pyarrow.Table`.
        partitions: number of them; None: two for each CPU.

    Returns:
        A `DataCollection`, whose items are dicts by column.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        ValueError: `partitions` is no number from 1 on.

    Example:
        >>> import pyarrow
        >>> table = pyarrow.table({"x": [1, 2, 3]})
        >>> clamor.from_arrow(table, partitions=2).sum("x")
        6
    """
    n = _n_partitions(partitions)
    return _of_splits("arrow", sources.arrow_splits(table, n))


def from_ray_dataset(dataset: Any) -> DataCollection:
    """A collection of the rows of a `ray.data.Dataset`, a partition for each block. It executes
    the dataset.

    Args:
        dataset: a `ray.data.Dataset`.

    Returns:
        A `DataCollection`, whose items are dicts by column.

    Raises:
        NotInitializedError: Before `clamor.init()`.

    Example:
        >>> import ray.data
        >>> clamor.from_ray_dataset(ray.data.from_items([{"x": 1}, {"x": 2}])).sum("x")
        3
    """
    process_sessions.current()
    references = sources.ray_dataset_refs(dataset)
    if not references:
        return _of_splits("ray dataset", sources.numpy_splits(np.empty(0, object), 1))
    return _made("ray dataset", references, objects=True)


def read_parquet(
    paths: Any,
    *,
    columns: Sequence[str] | None = None,
    filesystem: Any = None,
    partitions: int | None = None,
) -> DataCollection:
    """A collection of the rows of Parquet files. Tasks read the row groups, and only the columns
    that are wanted. Names of directories (`year=2024/`) do not become columns.

    Args:
        paths: files, directories (their `.parquet`, `.pq` and `.parq` files), patterns, or a list
            of them; local, `s3://`, or what pyarrow knows.
        columns: names of those that are read, in their order; None: all.
        filesystem: a `pyarrow.fs.FileSystem` (or fsspec's) that the paths belong to; it travels to
            the workers. None: by the path; S3 takes credentials and region from pyarrow's default
            chain in each process, and AWS_ENDPOINT_URL from here.
        partitions: about so many, and no more than row groups; None: of about 64 MiB.

    Returns:
        A `DataCollection`, whose items are dicts by column.

    Raises:
        SourceError: No such file, or none that is (complete) Parquet.
        MissingColumnError: A file has no such column.
        StorageError: The store does not answer, after retries.
        ValueError: `columns` names none.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "table")
        >>> files = clamor.from_items([{"x": i} for i in range(4)]).write_parquet(path)
        >>> clamor.read_parquet(path).sum("x")
        6
    """
    _check(partitions)
    return _made("parquet", sources.parquet_splits(paths, columns, filesystem, partitions))


def read_csv(
    paths: Any,
    *,
    columns: Sequence[str] | None = None,
    filesystem: Any = None,
    partitions: int | None = None,
    **options: Any,
) -> DataCollection:
    r"""A collection of the rows of CSV files, a partition for each file or several.

    Each file's types are found from its rows; give `convert_options` with `column_types` where
    files must agree. Compressed files (`.gz`, `.bz2`, `.zst`, `.lz4`, `.br`) are taken as such.

    Args:
        paths: files, directories, patterns, or a list of them; see `read_parquet`.
        columns: names of those that are read, in their order; None: all.
        filesystem: see `read_parquet`.
        partitions: about so many; None: of about 64 MiB.
        options: `read_options`, `parse_options`, `convert_options` of `pyarrow.csv`.

    Returns:
        A `DataCollection`, whose items are dicts by column.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        SourceError: No such file; from reading: an empty one, a row with another number of
            columns, a value that is not of its column's type.
        StorageError: The store does not answer, after retries.
        MissingColumnError: A file has no such column.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.csv")
        >>> open(path, "w").write("x,y\n1,a\n2,b\n")
        12
        >>> clamor.read_csv(path).sum("x")
        3
    """
    _check(partitions)
    return _made("csv", sources.csv_splits(paths, columns, filesystem, partitions, **options))


def read_text(
    paths: Any, *, filesystem: Any = None, partitions: int | None = None, **options: Any
) -> DataCollection:
    r"""A collection of the lines of text files, without their ends.

    Lines end with `\n` or `\r\n`; the last one need not. Compressed files (`.gz`, `.bz2`, `.zst`,
    `.lz4`, `.br`) are taken as such, a partition each.

    Args:
        paths: files, directories, patterns, or a list of them; see `read_parquet`.
        filesystem: see `read_parquet`.
        partitions: about so many; None: of about 64 MiB.
        options: `encoding`: of the text, one in which a newline is a byte of its own (not utf-16).
            `drop_empty_lines`: leaves out lines without a letter (Ray Data's default; here they
            stay, as in Spark).

    Returns:
        A `DataCollection` of str.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        SourceError: No such file; from reading: bytes that are not of the encoding.
        StorageError: The store does not answer, after retries.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.txt")
        >>> open(path, "w").write("a\nb\n")
        4
        >>> clamor.read_text(path).collect()
        ['a', 'b']
    """
    _check(partitions)
    return _made("text", sources.text_splits(paths, filesystem, partitions, **options))


def read_npy(
    paths: Any, *, filesystem: Any = None, partitions: int | None = None
) -> DataCollection:
    """A collection of the elements, or the rows (axis 0), of `.npy` files.

    Args:
        paths: files, directories (their `.npy` files), patterns, or a list of them; see
            `read_parquet`.
        filesystem: see `read_parquet`.
        partitions: about so many, and no more than rows; None: of about 64 MiB.

    Returns:
        A `DataCollection`.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        SourceError: No such file, or no complete `.npy`; Fortran order, Python objects, no axis.
        StorageError: The store does not answer, after retries.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.npy")
        >>> np.save(path, np.arange(4))
        >>> clamor.read_npy(path).sum()
        6
    """
    _check(partitions)
    return _made("npy", sources.npy_splits(paths, filesystem, partitions))


def _check(partitions: int | None) -> None:
    if partitions is not None:
        _n_partitions(partitions)
    else:
        process_sessions.current()
