"""The bytes of a file's region, whatever the file is."""

from __future__ import annotations

from typing import Any, Protocol

from clamor_ray._files.local import LocalFile
from clamor_ray._files.s3 import S3File
from clamor_ray._files.spec import FileSpec


class Ranges(Protocol):
    """A file by ranges."""

    def read(self, offset: int, n_bytes: int) -> Any:
        """Bytes [offset, offset + n_bytes) as a buffer."""


def open_ranges(spec: FileSpec) -> Ranges:
    """
    Raises:
        FileReadError: S3 cannot be used.
    """
    return LocalFile(spec) if spec.is_local else S3File(spec)


def read_region(spec: FileSpec, file: Ranges, offset: int, n_bytes: int) -> Any:
    """Bytes of the region: those of the file, zeros up to the next block, the tail, zeros.

    Args:
        spec: the file.
        file: reads it.
        offset, n_bytes: in the region, of whole blocks.

    Returns:
        A buffer of n_bytes.

    Raises:
        FileReadError and those below it: the file cannot be read.
    """
    end = offset + n_bytes
    if end <= spec.size_bytes:
        return file.read(offset, n_bytes)
    image = bytearray(n_bytes)
    if offset < spec.size_bytes:
        image[: spec.size_bytes - offset] = file.read(offset, spec.size_bytes - offset)
    first = max(offset, spec.tail_offset)
    part = spec.tail[first - spec.tail_offset : max(0, end - spec.tail_offset)]
    if first < end and part:
        image[first - offset : first - offset + len(part)] = part
    return image
