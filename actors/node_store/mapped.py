"""Which files the processes of this node map.

Who has an array of a session that has ended goes on reading the base that it maps. That must not
change under it, so the next opening of the store changes another file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")

FileId = tuple[int, int, int]  # major, minor, inode


def id_of(fd: int) -> FileId:
    """What ``mapped_files`` knows an open file by."""
    found = os.fstat(fd)
    return os.major(found.st_dev), os.minor(found.st_dev), found.st_ino


def _of(maps: Iterable[str]) -> set[FileId]:
    found = set()
    for line in maps:
        fields = line.split(maxsplit=5)
        if len(fields) >= 5 and fields[4] != "0":
            major, _, minor = fields[3].partition(":")
            found.add((int(major, 16), int(minor, 16), int(fields[4])))
    return found


def mapped_files(proc: Path = PROC) -> set[FileId]:
    """All that some process maps, as far as we may look: others' processes cannot map our files.

    Example:
        >>> import mmap, tempfile
        >>> with tempfile.TemporaryFile() as file:
        ...     _ = file.truncate(4096)
        ...     with mmap.mmap(file.fileno(), 4096):
        ...         id_of(file.fileno()) in mapped_files()
        True
    """
    found: set[FileId] = set()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            with open(entry / "maps", encoding="utf-8", errors="replace") as maps:
                found |= _of(maps)
        except OSError:  # it has ended, or is another user's
            continue
    return found
