"""How fast one core makes parity: deltas XORed into it, against a copy of the same bytes.

parity_rate   GB/s of deltas XORed into a parity / GB/s of the same bytes copied by the C library.
              Both are larger than the caches. A pass of one and a pass of the other in turn, on one
              core, in time of that core that this thread had; the median of the pairs.

The bar is 0.7. XOR reads two streams and writes one, a copy reads one and writes one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

BAR = 0.7
DELTA_BYTES = 128 << 20
PASS_BYTES = 8 << 20


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This thread stays on the core that it is on."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def parity_rate(delta_bytes: int = DELTA_BYTES, passes: int = 5) -> dict[str, float]:
    """XORs deltas into a parity, and copies them.

    Args:
        delta_bytes: Of all deltas.
        passes: Over all of them.

    Returns:
        parity_rate, and the two rates in GB/s: xor_gb_s, copy_gb_s.

    Raises:
        RuntimeError: The XOR is wrong.
    """
    from clamor_ray._native.parity import xor_into

    def noise(seed: int) -> npt.NDArray[np.uint8]:
        return np.random.default_rng(seed).integers(0, 256, delta_bytes, np.uint8)

    delta, parity, copy = noise(1), noise(2), np.zeros(delta_bytes, np.uint8)
    expected = parity ^ delta
    n_bytes = min(PASS_BYTES, delta_bytes)
    pairs = []
    with one_core():
        for each in range(passes):
            for at in range(0, delta_bytes - n_bytes + 1, n_bytes):
                part = slice(at, at + n_bytes)
                source, to = delta[part], copy[part]
                address, from_address = to.ctypes.data, source.ctypes.data
                copied_s = _seconds(lambda: ctypes.memmove(address, from_address, n_bytes))  # noqa: B023
                xored_s = _seconds(lambda: xor_into(parity[part], source))  # noqa: B023
                pairs.append((copied_s, xored_s))
            if each == 0 and not (np.array_equal(parity, expected) and np.array_equal(copy, delta)):
                raise RuntimeError("the parity is not the XOR of what it is made of")
    return {
        "parity_rate": statistics.median(copied_s / xored_s for copied_s, xored_s in pairs),
        "xor_gb_s": n_bytes / statistics.median(xored_s for _, xored_s in pairs) / 1e9,
        "copy_gb_s": n_bytes / statistics.median(copied_s for copied_s, _ in pairs) / 1e9,
    }
