"""A base becomes another file with the same content: who maps the one before keeps that."""

from __future__ import annotations

import os
from pathlib import Path

from clamor_ray._store import disk
from clamor_ray._store.layout import NEW, REGIONS, base_path


def replace_with_copy(directory: Path, region: int) -> None:
    """The base is a copy from now on. Nobody writes to it meanwhile.

    Args:
        directory: the page server's.
        region: its id.

    Raises:
        StoreDamagedError: There is no base.
        NoSpaceError, StoreError, WaitTimeoutError: The base is what it was.
    """
    path = base_path(directory, region)
    copy = path.with_name(f"{NEW}{path.name}")  # one that is left goes when the store is opened
    with disk.open_file(path) as base, disk.asking(copy, "copying a base"):
        n_bytes = os.fstat(base).st_size
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        made = os.open(copy, flags, disk.FILE_MODE)
        try:
            os.ftruncate(made, n_bytes)
            for begin, end in disk.data_ranges(base, 0, n_bytes):
                _copy(base, made, begin, end)
            os.fdatasync(made)
            os.rename(copy, path)
        except BaseException:
            disk.unlink(copy)
            raise
        finally:
            os.close(made)
    disk.sync_directory(directory / REGIONS)


def _copy(base: int, made: int, begin: int, end: int) -> None:
    while begin < end:
        n_bytes = os.copy_file_range(base, made, min(end - begin, disk.CHUNK_BYTES), begin, begin)
        if not n_bytes:
            raise OSError(0, "the base is shorter than it was")
        begin += n_bytes
