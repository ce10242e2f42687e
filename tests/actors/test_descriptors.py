"""A process that has made room for descriptors has it in the kernel's table, too."""

from __future__ import annotations

import resource
import subprocess
import sys

from clamor_ray.actors.process import descriptors

SAYS = """
import os, resource
from clamor_ray.actors.process import descriptors
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), {hard}))
before = len(os.listdir("/proc/self/fd"))
descriptors.make_room()
with open("/proc/self/status") as status:
    (size,) = (line.split()[1] for line in status if line.startswith("FDSize:"))
left = len(os.listdir("/proc/self/fd")) - before
print(*resource.getrlimit(resource.RLIMIT_NOFILE), size, left)
"""


def room(hard: str = "hard") -> list[int]:
    """The limits, the table's size, and what it left open, of a process that has made room."""
    done = subprocess.run(
        [sys.executable, "-c", SAYS.format(hard=hard)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [int(word) for word in done.stdout.split()]


def test_the_table_has_room_for_all_that_the_limit_allows() -> None:
    soft, hard, size, left = room()
    assert soft == hard
    assert size >= min(hard if hard != resource.RLIM_INFINITY else size, descriptors.TABLE)
    assert left == 0


def test_a_low_limit_is_no_trouble() -> None:
    soft, hard, size, left = room("300")
    assert (soft, hard, left) == (300, 300, 0)
    assert size >= 300
