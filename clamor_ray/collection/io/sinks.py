"""Where collections go: Parquet files, and Ray Data.

`begin` looks at the directory on the driver, `write_parquet_part` writes one partition on a worker,
`finish` or `abort` ends the run on the driver.

Promises, and how they are kept:

* A file has its final name only when it is complete. On a file system it is written beside, under
  a hidden name that no reader takes (`.x`), and then renamed. On an object store it is written
  whole from memory: an upload becomes an object when it is completed, and closing the stream
  completes it, also when the writer has failed half-way. (What a killed process had uploaded so
  far is invisible, and goes with the bucket's rule for incomplete uploads.)
* A partition that is written again, by a retry or a copy of its task, replaces itself: the name
  says the run and the partition.
* A run that fails leaves what was there before, also with mode="overwrite": old files go when all
  new ones are there. Between the first new file and the last old one, readers can see both.

There is no `_SUCCESS` file: Ray Data writes none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from clamor_ray._protocol.cause import cause_of
from clamor_ray.collection.data import blocks
from clamor_ray.collection.data.blocks import Items
from clamor_ray.collection.io.files import (
    Path,
    Store,
    asking,
    entries,
    in_directory,
    info,
    locate,
)
from clamor_ray.errors import StorageError

MODES = ("error", "append", "overwrite", "ignore")
_OBJECT_STORES = ("s3", "gcs", "abfs")


@dataclass(frozen=True)
class ParquetRun:
    """One write of a collection. Small; pickles.

    Args:
        path: the directory, for its file system.
        run_id: in the names of all files of this run.
        filesystem: for `write_parquet_part`.
        skip: there is something already, and the mode is "ignore": nothing is to be written.
        replaced: the paths that `finish` removes (mode "overwrite").
        made: whether `begin` made the directory.
    """

    path: str
    run_id: str
    filesystem: Store
    skip: bool = False
    replaced: tuple[str, ...] = ()
    made: bool = False


def begin(path: Path, mode: str = "error", filesystem: Any = None) -> ParquetRun:
    """Prepares a directory for the files of one run.

    Args:
        path: the directory; local, `s3://bucket/prefix`, or what pyarrow knows. Made where there
            is none.
        mode: what to do where it holds files already, as Ray Data names it: "error" (or
            "create") refuses, "append" leaves them, "overwrite" removes them when the new ones
            are complete, "ignore" writes nothing.
        filesystem: a `pyarrow.fs.FileSystem` the path belongs to; None: by the path.

    Raises:
        StorageError: mode "error" and there are files; the path is a file; the store does not
            answer or refuses.
        ValueError: an unknown mode.
    """
    mode = str(getattr(mode, "value", mode)).lower()  # Ray Data's SaveMode too
    mode = "error" if mode == "create" else mode
    if mode not in MODES:
        raise ValueError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    store, inside = locate(path, filesystem)
    inside = inside.rstrip("/") or inside
    kind = info(store, inside).type
    if kind == pafs.FileType.File:
        raise StorageError(
            f"{store.name(inside)} is a file.", hint="Give a directory: each partition is a file."
        )
    run = ParquetRun(inside, uuid.uuid4().hex, store)
    there = () if kind == pafs.FileType.NotFound else in_directory(store, inside)
    if there and mode == "error":
        raise StorageError(
            f"{store.name(inside)} holds {len(there)} files already.",
            hint="Say mode='overwrite' to replace them, or mode='append' to leave them.",
        )
    if there and mode == "ignore":
        return replace(run, skip=True)
    if there and mode == "overwrite":
        run = replace(run, replaced=tuple(file.path for file in there))
    if kind == pafs.FileType.NotFound and not _is_object_store(store):
        # An object store has no directories, and to make a bucket's needs more rights than to fill
        # it.
        with asking(f"{store.name(inside)}: making it"):
            store.filesystem().create_dir(inside, recursive=True)
        run = replace(run, made=True)
    return run


def _is_object_store(store: Store) -> bool:
    return store.filesystem().type_name in _OBJECT_STORES


def write_parquet_part(
    block: Items,
    path: str,
    index: int,
    run_id: str,
    filesystem: Any = None,
    **options: Any,
) -> str:
    """Writes a partition as one file, `<path>/<run_id>_<index>.parquet`. On a worker.

    Args:
        block: its items; what is no table becomes one (`blocks.to_arrow`).
        path: the directory: of the `ParquetRun`.
        index: number of the partition.
        run_id: of the `ParquetRun`.
        filesystem: of the `ParquetRun`.
        options: of `pyarrow.parquet.write_table`.

    Returns:
        The file's path, for `finish`; "" where nothing was written: no items, and no columns that
        a reader could want to know.

    Raises:
        StorageError: the store refuses or does not answer, or the disk is full. There is no file
            then.
        TypeError: items that Parquet cannot hold.
    """
    untyped = not isinstance(block, pa.Table) and not (
        isinstance(block, np.ndarray) and block.dtype.kind != "O"
    )
    if blocks.n_items(block) == 0 and untyped:
        return ""
    try:
        table = blocks.to_arrow(block)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise TypeError(
            f"partition {index} holds {blocks.schema_of(block)}, which Parquet cannot: {error}"
        ) from error
    store, inside = locate(path, filesystem)
    final = f"{inside.rstrip('/')}/{run_id}_{index:06d}.parquet"
    options.setdefault("write_page_checksum", True)
    if _is_object_store(store):
        _write_object(store, final, table, options)
    else:
        _write_beside(store, final, table, options)
    return final


def _write_object(store: Store, final: str, table: pa.Table, options: dict[str, Any]) -> None:
    memory = pa.BufferOutputStream()
    _encode(table, memory, options)
    content = memory.getvalue()
    with (
        asking(f"{store.name(final)}: writing {content.size} bytes"),
        store.filesystem().open_output_stream(final) as out,
    ):
        out.write(content)


def _encode(table: pa.Table, out: Any, options: dict[str, Any]) -> None:
    try:
        pq.write_table(table, out, **options)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise TypeError(f"Parquet cannot hold {table.schema.to_string()}: {error}") from error


def _write_beside(store: Store, final: str, table: pa.Table, options: dict[str, Any]) -> None:
    directory, _, name = final.rpartition("/")
    beside = f"{directory}/.{name}.{uuid.uuid4().hex}"
    filesystem = store.filesystem()
    try:
        if not store.is_local:
            with filesystem.open_output_stream(beside) as out:
                _encode(table, out, options)
            filesystem.move(beside, final)
            return
        # The driver may have made it on another machine's disk; finish() notices.
        os.makedirs(directory, exist_ok=True)
        with open(beside, "wb") as file:
            _encode(table, file, options)
            file.flush()
            os.fsync(file.fileno())  # a name that survives a power cut must not be of nothing
        os.replace(beside, final)
    except BaseException as error:
        with contextlib.suppress(OSError):
            filesystem.delete_file(beside)
        if isinstance(error, OSError):
            where = f" on {socket.gethostname()}" if store.is_local else ""
            raise StorageError(f"{store.name(final)}{where}: {cause_of(error)}.") from error
        raise


def _delete(store: Store, paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError), asking(f"{store.name(path)}: removing it"):
            store.filesystem().delete_file(path)


def _of_run(run: ParquetRun) -> list[str]:
    """The paths of what this run has made in the directory, complete or not."""
    return [
        str(entry.path)
        for entry in entries(run.filesystem, run.path)
        if entry.base_name.removeprefix(".").startswith(f"{run.run_id}_")
    ]


def finish(run: ParquetRun, parts: Sequence[str]) -> list[str]:
    """Ends a run whose partitions are all written. On the driver.

    Args:
        run: from `begin`.
        parts: what `write_parquet_part` returned, of all partitions.

    Returns:
        The files' names as people write them, by partition.

    Raises:
        StorageError: a file is not there, as seen from here: it went to another machine's disk.
            Or the store does not answer.
    """
    store = run.filesystem
    written = {os.path.basename(part): part for part in parts if part}
    if run.skip:
        return []
    there = {os.path.basename(path): path for path in _of_run(run)}
    lost = sorted(set(written) - set(there))
    if lost:
        raise StorageError(
            f"{store.name(written[lost[0]])} and {len(lost) - 1} more of {len(written)} files were "
            f"written and are not to be seen on {store.host}.",
            hint="Tasks write on the node where they run: give a directory that all nodes share, "
            "or s3://.",
        )
    _delete(store, [path for name, path in sorted(there.items()) if name not in written])
    _delete(store, run.replaced)
    return [store.name(path) for _, path in sorted(written.items())]


def abort(run: ParquetRun) -> None:
    """Removes what a run that failed has written so far. On the driver, when its tasks are over.

    Where `finish` has removed some of the files that were to be replaced, and failed then, the
    new ones stay: they are complete, and all that is left.

    Args:
        run: from `begin`.

    Raises:
        StorageError: the store does not answer; what is left begins with the run's id.
    """
    if run.skip:
        return
    if run.replaced:
        there = {file.path for file in in_directory(run.filesystem, run.path)}
        if not there.issuperset(run.replaced):
            return
    _delete(run.filesystem, _of_run(run))
    if run.made and not entries(run.filesystem, run.path):
        with contextlib.suppress(OSError):  # somebody else has put something there
            if run.filesystem.is_local:
                os.rmdir(run.path)
            else:
                run.filesystem.filesystem().delete_dir(run.path)


def to_ray_dataset(refs: Sequence[Any]) -> Any:
    """A Ray Dataset of partitions, without a copy.

    Args:
        refs: references to Arrow tables; one block each.

    Returns:
        A `ray.data.MaterializedDataset`.
    """
    import ray.data

    return ray.data.from_arrow_refs(list(refs))
