"""Local files, and those of a shared file system, by ranges."""

from __future__ import annotations

import os
import time
from typing import Any, Final

from clamor_ray._files.spec import FileSpec
from clamor_ray.errors import (
    FileAccessError,
    FileChangedError,
    FileFormatError,
    FileReadError,
    NoSuchFileError,
)

TICK_S: Final = 0.02
COARSE_TICK_S: Final = 2.0


def _identity(st: os.stat_result) -> tuple[Any, ...]:
    return (st.st_ino, st.st_mtime_ns, st.st_ctime_ns)


def _young_s(st: os.stat_result) -> float:
    """For how long a write could still leave the times as they are: kernels count them in ticks,
    and some file systems in seconds."""
    tick_s = COARSE_TICK_S if st.st_ctime_ns % 10**9 == 0 else TICK_S
    return min(tick_s, st.st_ctime_ns / 1e9 + tick_s - time.time())


def _error(path: str, failure: OSError) -> FileReadError:
    if isinstance(failure, FileNotFoundError):
        return NoSuchFileError(f"There is no file {path}.")
    if isinstance(failure, PermissionError):
        return FileAccessError(
            f"{path} may not be read: {failure.strerror}.",
            hint="Give the user of the page servers, who started Ray, the right to read it.",
        )
    return FileReadError(f"{path} cannot be read: {failure.strerror or failure}.")


def describe(path: str) -> tuple[str, int, tuple[Any, ...]]:
    """Absolute path, bytes and identity of a file.

    Raises:
        NoSuchFileError, FileAccessError, FileReadError: It cannot be read.
        FileFormatError: It is a directory, or a device.
    """
    whole = os.path.abspath(path)
    try:
        st = os.stat(whole)
        if (young_s := _young_s(st)) > 0:
            time.sleep(young_s)
            st = os.stat(whole)
    except OSError as failure:
        raise _error(whole, failure) from failure
    if not os.path.isfile(whole):
        raise FileFormatError(f"{whole} is not a regular file.", hint="Name a file.")
    return whole, st.st_size, _identity(st)


class LocalFile:
    """Reads ranges of a file, as long as it is the one that is described. Safe from any thread.

    It is opened for each range: no descriptor is kept, and a file that was put in its place is
    noticed.
    """

    def __init__(self, spec: FileSpec) -> None:
        self._spec = spec

    def read(self, offset: int, n_bytes: int) -> bytes:
        """Bytes [offset, offset + n_bytes) of the file.

        Raises:
            FileChangedError: It is another one, before or after they were read.
            FileAccessError, FileReadError: It cannot be read.
        """
        path = self._spec.path
        try:
            # What was put there meanwhile may be a pipe, which would be waited for.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as failure:
            raise FileChangedError(f"{path} is not there any more.") from failure
        except OSError as failure:
            raise _error(path, failure) from failure
        try:
            self._check(fd)
            parts, at = [], offset
            while at < offset + n_bytes:
                part = os.pread(fd, offset + n_bytes - at, at)
                if not part:
                    raise FileChangedError(f"{path} has become shorter than {at} bytes.")
                parts.append(part)
                at += len(part)
            self._check(fd)
        except OSError as failure:
            if isinstance(failure, FileReadError):
                raise
            raise _error(path, failure) from failure
        finally:
            os.close(fd)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check(self, fd: int) -> None:
        st, spec = os.fstat(fd), self._spec
        if (st.st_size, *_identity(st)) != (spec.size_bytes, *spec.identity):
            raise FileChangedError(
                f"{spec.path} has changed since the variable was made of it: it was "
                f"{spec.size_bytes} bytes long, and is {st.st_size}, or was written or replaced."
            )
