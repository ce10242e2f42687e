"""The files of checkpoints: in a directory that all nodes reach, or an object store.

    DIRECTORY/checkpoint-<number>/slice-<group>-<index>   what has run on a slice; its partitions
    DIRECTORY/checkpoint-<number>/done                    written last: all of it is there

A checkpoint without ``done`` is none. Nothing else in the directory is looked at, or deleted. Files
are written under other names first, and synced on a local file system; so a full disk or a kill
leaves the last one whole.
"""

from __future__ import annotations

import os
import pickle
import re
from typing import Any, Final

from clamor_ray import errors
from clamor_ray._protocol.cause import cause_of
from clamor_ray._recipes.matching.pickling import pickled
from clamor_ray._store.disk import sync_now

DONE: Final = "done"
NAME: Final = re.compile(r"checkpoint-(\d+)")
KEPT: Final = 2  # the newest, and the one before it


class CheckpointFiles:
    """See the file's head.

    Args:
        place: A directory, or a URI that pyarrow knows: ``s3://bucket/key``.

    Raises:
        StorageError: It cannot be opened.
    """

    def __init__(self, place: str) -> None:
        from pyarrow import fs

        self.place = place
        try:
            if "://" in place:
                self._files, self._root = fs.FileSystem.from_uri(place)
            else:
                self._files, self._root = fs.LocalFileSystem(), os.path.abspath(place)
        except (OSError, ValueError) as failure:
            why = cause_of(failure)
            raise errors.StorageError(f"{place} cannot hold checkpoints: {why}") from failure
        self._is_local = isinstance(self._files, fs.LocalFileSystem)

    def write_slice(self, number: int, group: int, index: int, content: Any) -> int:
        """
        Returns:
            Bytes written.

        Raises:
            StorageError: The last checkpoint is as it was.
        """
        return self._write(number, f"slice-{group}-{index}", pickled(content))

    def read_slice(self, number: int, group: int, index: int) -> Any:
        """
        Raises:
            StorageError: It is not there, or not whole.
        """
        return self._read(number, f"slice-{group}-{index}")

    def finish(self, number: int, about: Any) -> None:
        """All slices are written. Older checkpoints go, but the one before.

        Raises:
            StorageError: It does not count.
        """
        self._write(number, DONE, pickle.dumps(about, protocol=5))
        for old in sorted(self._numbers())[:-KEPT]:
            try:
                self._files.delete_dir(f"{self._root}/checkpoint-{old}")
            except OSError:  # it costs room, and the next checkpoint tries again
                continue

    def newest(self) -> tuple[int, Any] | None:
        """The number of the newest whole checkpoint, and what `finish` was told; None: there is
        none.

        Raises:
            StorageError: The place cannot be read.
        """
        from pyarrow import fs

        for number in sorted(self._numbers(), reverse=True):
            path = f"{self._root}/checkpoint-{number}/{DONE}"
            if self._files.get_file_info(path).type == fs.FileType.File:
                return number, self._read(number, DONE)
        return None

    def next_number(self) -> int:
        """No checkpoint has had it, whole or not."""
        return max(self._numbers(), default=0) + 1

    def _numbers(self) -> list[int]:
        from pyarrow import fs

        try:
            found = self._files.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        except OSError as failure:
            why = cause_of(failure)
            raise errors.StorageError(f"{self.place} cannot be read: {why}") from failure
        matches = (NAME.fullmatch(each.base_name) for each in found)
        return [int(each[1]) for each in matches if each is not None]

    def _write(self, number: int, file: str, content: bytes) -> int:
        name = f"checkpoint-{number}/{file}"
        path = f"{self._root}/{name}"
        part = f"{path}.part" if self._is_local else path  # an object appears whole, or not at all
        try:
            if self._is_local:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(part, "wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(part, path)
                sync_now(os.path.dirname(path))
            else:
                with self._files.open_output_stream(part) as stream:
                    stream.write(content)
        except OSError as failure:
            why = cause_of(failure)
            raise errors.StorageError(f"{self.place}/{name} is not written: {why}") from failure
        return len(content)

    def _read(self, number: int, file: str) -> Any:
        name = f"checkpoint-{number}/{file}"
        try:
            with self._files.open_input_stream(f"{self._root}/{name}") as stream:
                return pickle.loads(stream.read())
        except (OSError, pickle.UnpicklingError, EOFError) as failure:
            why = cause_of(failure)
            raise errors.StorageError(f"{self.place}/{name} is not read: {why}") from failure
