"""Collections from outside: `clamor.from_items`, `clamor.read_parquet`, ..."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import ray

from clamor_ray._session import session
from clamor_ray.collection import options
from clamor_ray.collection.collection import DataCollection
from clamor_ray.collection.io import sources
from clamor_ray.collection.plan.plan import Node, Source

INLINE_BYTES: Final = 64 << 10  # larger partitions of the driver become Ray objects at once
TASKS_PER_CPU: Final = 2


def _made(kind: str, splits: Sequence[Any], *, objects: bool = False) -> DataCollection:
    source = Source(kind, tuple(splits), objects)
    return DataCollection(Node(source, (), len(source.splits)), options.from_env())


def _n_partitions(partitions: int | None) -> int:
    session.current()  # without clamor.init() this is said here, and not later
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

    Raises:
        NotInitializedError: Before `clamor.init()`.
        TypeError: A str or bytes: its letters are hardly meant.

    Example:
        >>> clamor.from_items(range(1000)).map(lambda x: x * x).sum()   # doctest: +SKIP
    """
    n = _n_partitions(partitions)
    return _of_splits("items", sources.items_splits(items, n))


def from_numpy(array: Any, *, partitions: int | None = None) -> DataCollection:
    """A collection of an array's elements, or of its rows (axis 0).

    Raises:
        NotInitializedError: Before `clamor.init()`.
        TypeError, ValueError: A masked array; one without an axis.
    """
    n = _n_partitions(partitions)
    if getattr(array, "nbytes", 0) <= n * INLINE_BYTES and isinstance(array, np.ndarray):
        array = array.copy()  # larger ones become objects at once; none follows the user's array
    return _of_splits("numpy", sources.numpy_splits(array, n))


def from_arrow(table: pa.Table, *, partitions: int | None = None) -> DataCollection:
    """A collection of a table's rows."""
    n = _n_partitions(partitions)
    return _of_splits("arrow", sources.arrow_splits(table, n))


def from_ray_dataset(dataset: Any) -> DataCollection:
    """A collection of a `ray.data.Dataset`'s rows, a partition for each block. Executes it."""
    session.current()
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
    """Rows of Parquet files. Row groups are read by tasks, the columns that are wanted only.

    Args:
        paths: files, directories, patterns, or a list of them; local or `s3://`.
        columns: None: all.
        filesystem: a `pyarrow.fs.FileSystem` that the paths belong to; None: by the path.
        partitions: about so many; None: of about 64 MiB.

    Raises:
        SourceError: No such file, or none that is Parquet.
        MissingColumnError: A file has no such column.
        StorageError: The store does not answer, after retries.

    Example:
        >>> clamor.read_parquet("s3://bucket/part-*.parquet").count()   # doctest: +SKIP
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
    """Rows of CSV files, a partition for each file or several.

    Args:
        paths, columns, filesystem, partitions: as `read_parquet`'s.
        options: `read_options`, `parse_options`, `convert_options` of `pyarrow.csv`.
    """
    _check(partitions)
    return _made("csv", sources.csv_splits(paths, columns, filesystem, partitions, **options))


def read_text(
    paths: Any, *, filesystem: Any = None, partitions: int | None = None, **options: Any
) -> DataCollection:
    """Lines of text files, without their ends.

    Args:
        paths, filesystem, partitions: as `read_parquet`'s.
        options: `encoding`, `drop_empty_lines`.
    """
    _check(partitions)
    return _made("text", sources.text_splits(paths, filesystem, partitions, **options))


def read_npy(
    paths: Any, *, filesystem: Any = None, partitions: int | None = None
) -> DataCollection:
    """Elements, or rows, of `.npy` files."""
    _check(partitions)
    return _made("npy", sources.npy_splits(paths, filesystem, partitions))


def _check(partitions: int | None) -> None:
    if partitions is not None:
        _n_partitions(partitions)
    else:
        session.current()
