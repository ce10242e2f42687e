"""CRC-32C of bytes and of blocks: known answers, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._native.checksums import ZERO_BLOCK, block_sums, crc32c


def test_known_answers() -> None:
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(BLOCK_BYTES)) == ZERO_BLOCK
    assert crc32c(b"", 7) == 7


def test_in_parts() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    for cut in (0, 1, 8, 500, 999, 1000):
        assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


@pytest.mark.parametrize("n_blocks", range(8))
def test_each_block_has_its_own(n_blocks: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, (n_blocks, BLOCK_BYTES), np.uint8)
    expected = [crc32c(block) ^ ZERO_BLOCK for block in data]
    assert block_sums(data).tolist() == expected
    out = np.full(n_blocks, 9, np.uint32)
    assert block_sums(data.tobytes(), out) is out
    assert out.tolist() == expected


def test_a_hole_is_zero() -> None:
    data = np.zeros((3, BLOCK_BYTES), np.uint8)
    data[1, 5] = 1
    sums = block_sums(data)
    assert sums[0] == sums[2] == 0 != sums[1]


@pytest.mark.parametrize(
    ("n_bytes", "out"),
    [
        (BLOCK_BYTES + 1, None),
        (BLOCK_BYTES, np.empty(2, np.uint32)),
        (BLOCK_BYTES, np.empty(1, np.uint64)),
        (2 * BLOCK_BYTES, np.empty(4, np.uint32)[::2]),
    ],
)
def test_what_does_not_fit_is_refused(n_bytes: int, out: np.ndarray | None) -> None:
    with pytest.raises(ValueError, match="blocks of 4096"):
        block_sums(bytes(n_bytes), out)
