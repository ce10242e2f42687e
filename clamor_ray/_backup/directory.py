"""The directory that a backup is: its files, on a disk or in an object store.

    checkpoint-00000007.json      the manifest of a checkpoint (`manifest.py`)
    data/00000007-3f2a...-12      records of chunks; never changed once it is written
    writer.lock, writer.json      who writes (`writer.py`)

Data files come first. On a disk they are synced, and so is their directory, before the manifest
gets its name; a name is given once. So a manifest that is there has all that it names, whatever
ended who wrote it. What a dead writer has left is of no manifest; a later checkpoint deletes it.

Files of a disk are for their owner alone: directories have the mode 0700, files 0600.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow.fs as pafs

from clamor_ray import errors
from clamor_ray._backup.manifest import DATA, Manifest, name_of, number_of, of_bytes
from clamor_ray.collection.io.files import Path, Store, asking, locate, persistent

_DIRECTORY_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_AS_IT_WAS: Final = "The last checkpoint of the backup is as it was."


def data_name(number: int, token: str, part: str) -> str:
    """Name of a data file.

    Args:
        number: of the checkpoint that it is written for.
        token: of who writes that.
        part: what no other file of both has.
    """
    return f"{DATA}/{number:08d}-{token}-{part}"


def number_of_data(name: str) -> int:
    """The checkpoint that a data file was written for; 0: it is no data file of ours.

    Example:
        >>> number_of_data(data_name(7, "3f", "1")), number_of_data("data/notes.txt")
        (7, 0)
    """
    number = name.rpartition("/")[2].partition("-")[0]
    return int(number) if number.isdigit() else 0


@dataclass(frozen=True)
class Directory:
    """See the file's head. Small, and pickles.

    Args:
        store: where it is.
        path: for the store's file system.
    """

    store: Store
    path: str

    @staticmethod
    def at(path: Path, filesystem: Any = None) -> Directory:
        """The directory of a path, whether it is there or not.

        Raises:
            SourceError, TypeError: See `files.locate`.
        """
        store, found = locate(path, filesystem)
        return Directory(store, found.rstrip("/") or found)

    @property
    def name(self) -> str:
        """As people write it."""
        return self.store.name(self.path)

    def _of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def name_of(self, name: str) -> str:
        """A file of it as people write it."""
        return self.store.name(self._of(name))

    @contextlib.contextmanager
    def _asking(self, name: str, what: str) -> Iterator[None]:
        """
        Raises:
            StorageError: It failed, or was refused.
            FileNotFoundError: As it came.
        """
        try:
            with asking(f"{self.name_of(name)}: {what}"):
                yield
        except errors.StorageError as error:
            raise errors.StorageError(error.message, hint=f"{error.hint} {_AS_IT_WAS}") from error

    @contextlib.contextmanager
    def _changing(self, name: str, what: str) -> Iterator[None]:
        """
        Raises:
            StorageError: It failed, or was refused; or the directory is not there.
        """
        try:
            with self._asking(name, what):
                yield
        except FileNotFoundError as error:
            raise errors.StorageError(
                f"{self.name_of(name)}: {what}: {error.strerror or error}.",
                hint=f"Is the directory there, and writable? {_AS_IT_WAS}",
            ) from error

    # -- reading

    def _names(self, below: str) -> list[str]:
        selector = pafs.FileSelector(self._of(below).rstrip("/"), allow_not_found=True)
        with self._asking(below, "listing it"):
            found = self.store.filesystem().get_file_info(selector)
        return [info.base_name for info in found if info.type == pafs.FileType.File]

    def numbers(self) -> list[int]:
        """Of the checkpoints that are there, ascending.

        Raises:
            StorageError: It cannot be listed.
        """
        found = map(number_of, self._names(""))
        return sorted(number for number in found if number is not None)

    def data_files(self) -> list[str]:
        """Names of all data files, of no manifest too.

        Raises:
            StorageError: They cannot be listed.
        """
        return list(self.data_sizes())

    def data_sizes(self) -> dict[str, int]:
        """Bytes of all data files, by name.

        Raises:
            StorageError: They cannot be listed.
        """
        selector = pafs.FileSelector(self._of(DATA), allow_not_found=True)
        with self._asking(DATA, "listing it"):
            found = self.store.filesystem().get_file_info(selector)
        files = (info for info in found if info.type == pafs.FileType.File)
        return {f"{DATA}/{info.base_name}": info.size for info in files}

    def read(self, name: str) -> bytes | None:
        """A small file's content; None: it is not there.

        Raises:
            StorageError: It cannot be read.
        """
        try:
            return self._read(name, 0, None)
        except FileNotFoundError:
            return None

    @persistent
    def _read(self, name: str, offset: int, n_bytes: int | None) -> bytes:
        with (
            self._asking(name, "reading it"),
            self.store.filesystem().open_input_file(self._of(name)) as file,
        ):
            wanted = file.size() - offset if n_bytes is None else n_bytes
            found: bytes = file.read_at(max(wanted, 0), offset)
        return found

    def read_range(self, name: str, offset: int, n_bytes: int) -> bytes:
        """A part of a data file; less where the file is shorter.

        Raises:
            StorageError: It cannot be read.
            FileNotFoundError: It is not there.
        """
        return self._read(name, offset, n_bytes)

    def manifest(self, number: int) -> Manifest:
        """
        Raises:
            NoBackupError: There is no such checkpoint.
            BackupFormatError, DamagedBackupError, StorageError: It cannot be read.
        """
        content = self.read(name_of(number))
        if content is None:
            raise errors.NoBackupError(f"{self.name} has no checkpoint {number}.")
        return of_bytes(content, self.name_of(name_of(number)))

    # -- writing

    def prepare(self) -> None:
        """Makes the directories; those that are there stay as they are.

        Raises:
            StorageError: They cannot be made.
        """
        with self._changing("", "making it"):
            if self.store.is_local:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                for made in (self.path, self._of(DATA)):
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(made, _DIRECTORY_MODE)
                self._sync_at(os.path.dirname(self.path))
            elif self.store.kind != "s3":
                self.store.filesystem().create_dir(self._of(DATA), recursive=True)

    def write(self, name: str, parts: Sequence[memoryview | bytes]) -> None:
        """A new file, whole; synced, on a disk.

        Raises:
            StorageError: It cannot be written. What is there under its name means nothing.
        """
        with self._changing(name, "writing it"):
            if self.store.is_local:
                self._write_local(name, parts)
                return
            # Closing a stream completes an upload, also after an exception: all of it is here.
            content = b"".join(parts)
            with self.store.filesystem().open_output_stream(self._of(name)) as file:
                file.write(content)

    def _write_local(self, name: str, parts: Sequence[memoryview | bytes]) -> None:
        path = self._of(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(path, flags, _FILE_MODE)
        try:
            for part in parts:
                rest = memoryview(part).cast("B")
                while rest.nbytes:
                    rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)

    def _sync(self, below: str = "") -> None:
        self._sync_at(self._of(below))

    @staticmethod
    def _sync_at(path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def put_manifest(self, number: int, content: bytes) -> None:
        """From now on the checkpoint is there, with all data files that were written before.

        Raises:
            BackupInUseError: Another one has this number already.
            StorageError: It cannot be written.
        """
        name = name_of(number)
        taken = errors.BackupInUseError(
            f"{self.name_of(name)} was written by another process meanwhile."
        )
        if not self.store.is_local:
            if number in self.numbers():
                raise taken
            self.write(name, [content])
            return
        temporary = f".{name}-{secrets.token_hex(8)}"
        with self._changing(name, "writing it"):
            self._write_local(temporary, [content])
            try:
                self._sync(DATA)
                os.link(self._of(temporary), self._of(name))  # never over one that is there
            except FileExistsError:
                raise taken from None
            finally:
                os.unlink(self._of(temporary))
            self._sync()

    def delete(self, names: Iterable[str]) -> None:
        """Files that need not be there.

        Raises:
            StorageError: One of them cannot be deleted.
        """
        for name in names:
            with self._changing(name, "deleting it"), contextlib.suppress(FileNotFoundError):
                if self.store.is_local:
                    os.unlink(self._of(name))
                else:
                    self.store.filesystem().delete_file(self._of(name))

    def tidy(self, number: int, keep: int) -> None:
        """After a checkpoint: older ones go, and data files that none of those that stay needs.

        Args:
            number: of that checkpoint.
            keep: how many stay.

        Raises:
            StorageError: Something cannot be deleted, or looked at.
        """
        numbers = self.numbers()
        kept = [each for each in numbers if each > number or each in numbers[-keep:]]
        try:
            needed = set().union(*(self.manifest(each).files for each in kept))
        except (errors.DamagedBackupError, errors.BackupFormatError, errors.NoBackupError):
            return  # nobody knows what it needs: all stays
        self.delete(name_of(each) for each in numbers if each not in kept)
        if self.store.is_local:
            self._sync()
        # What is of this number, and of no manifest, may be another writer's that is at work.
        self.delete(
            name
            for name in self.data_files()
            if name not in needed and 0 < number_of_data(name) < number
        )
