"""Checksums of what lies on a disk. Nothing here imports Ray."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from clamor_ray._native.base import BLOCK_BYTES, c, check

Sums = npt.NDArray[np.uint32]

ZERO_BLOCK: Final = 0x98F94189
"""The CRC-32C of a block of zeros."""


def crc32c(buffer: Any, crc: int = 0) -> int:
    """The CRC-32C (Castagnoli) of bytes, without the GIL.

    Args:
        buffer: Anything contiguous with the buffer protocol.
        crc: That of the bytes before these.

    Example:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
        >>> hex(crc32c(b"456789", crc32c(b"123")))
        '0xe3069283'
    """
    view = memoryview(buffer)
    if not view.nbytes:
        return crc
    return int(c.lib.pc_crc32c(crc, c.ffi.from_buffer(view), view.nbytes))


def block_sums(buffer: Any, out: Sums | None = None) -> Sums:
    """The sum of each block: its CRC-32C XORed with that of a block of zeros.

    So the sum of a block of zeros is 0, and a hole of a file of sums says that a hole is there.

    Args:
        buffer: Anything contiguous with the buffer protocol, of whole blocks.
        out: Contiguous; where the sums go, instead of a new array.

    Raises:
        ValueError: They are no whole blocks, or `out` has not one place for each.

    Example:
        >>> block_sums(np.zeros(8192, np.uint8)).tolist()
        [0, 0]
    """
    view = memoryview(buffer)
    n_blocks, rest = divmod(view.nbytes, BLOCK_BYTES)
    if out is None:
        out = np.empty(n_blocks, np.uint32)
    if rest or out.size != n_blocks or out.dtype != np.uint32 or not out.flags.c_contiguous:
        raise ValueError(f"{view.nbytes} bytes in blocks of {BLOCK_BYTES}, for {out.size} sums")
    if n_blocks:
        to = c.ffi.cast("uint32_t *", out.__array_interface__["data"][0])
        c.lib.pc_crc32c_blocks(c.ffi.from_buffer(view), n_blocks, to)
        out ^= np.uint32(ZERO_BLOCK)
    return out


def copy_to_disk(fd: int, offset_bytes: int, source: Any, sums: Sums) -> None:
    """Copies whole blocks to a file, without the GIL. Many of them go past the page cache.

    Args:
        fd: of a file on disk.
        offset_bytes: where in it; a multiple of the block.
        source: Anything contiguous with the buffer protocol, of whole blocks. It may be changed
            meanwhile.
        sums: Contiguous; gets the sum of each block as it was written (`block_sums`).

    Raises:
        ValueError: They are no whole blocks, or `sums` has not one place for each.
        NoSpaceError: The disk is full.
        SystemCallError: The disk refuses it.

    Example:
        >>> import tempfile
        >>> sums = np.empty(2, np.uint32)
        >>> with tempfile.TemporaryFile() as file:
        ...     copy_to_disk(file.fileno(), 4096, np.zeros(8192, np.uint8), sums)
        >>> sums.tolist()
        [0, 0]
    """
    view = memoryview(source)
    n_blocks, rest = divmod(view.nbytes, BLOCK_BYTES)
    if rest or sums.size != n_blocks or sums.dtype != np.uint32 or not sums.flags.c_contiguous:
        raise ValueError(f"{view.nbytes} bytes in blocks of {BLOCK_BYTES}, for {sums.size} sums")
    if n_blocks:
        to = c.ffi.cast("uint32_t *", sums.__array_interface__["data"][0])
        check(c.lib.pc_copy_to_disk(fd, offset_bytes, c.ffi.from_buffer(view), n_blocks, to))
