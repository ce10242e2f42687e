"""How many maps of pieces this process has, over all sessions: a tenth of what it may have.

The kernel gives a process so many maps (`vm.max_map_count`), and everything that is loaded or
allocated takes of them: who has none left cannot even start a thread. A variable in pieces has a
map for each piece, so many of them at a time would be the first to take all.

No lock: each change is one dict operation, because mappings end inside the garbage collector.
"""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Final

from clamor_ray import errors

SHARE: Final = 10  # pieces have one in so many of the process's maps
USUAL_MOST: Final = 65_530  # the kernel's default

_maps: dict[int, tuple[int, int]] = {}  # by mapping of a variable: its address, its pieces


@functools.cache
def most() -> int:
    """So many maps of pieces a process may have."""
    try:
        allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):  # a container may not show it
        allowed = USUAL_MOST
    return allowed // SHARE


def count() -> int:
    """Maps of pieces that there are. Who opens one version twice has one map of it."""
    return sum(dict(_maps.copy().values()).values())


def add(mapping_id: int, address: int, n_pieces: int) -> bool:
    """A variable is mapped.

    Args:
        mapping_id: of it, of no other in this process.
        address: where.
        n_pieces: how many maps that takes, where nothing was mapped there.

    Returns:
        Whether all maps of pieces are few enough.
    """
    _maps[mapping_id] = (address, n_pieces)
    if count() <= most():
        return True
    gc.collect()  # arrays in a cycle keep their maps
    return count() <= most()


def remove(mapping_id: int) -> None:
    """It is not mapped any more."""
    _maps.pop(mapping_id, None)


def too_many(n_pieces: int) -> errors.OutOfMemoryError:
    """What is raised where `add` says no."""
    return errors.OutOfMemoryError(
        f"A variable in {n_pieces:,} pieces needs as many maps. This process has {count():,} of "
        f"pieces already, and may have {most():,}: one in {SHARE} of vm.max_map_count.",
        hint="Let go of arrays of variables that are spread, open fewer of them or of their "
        "versions at a time, or raise the limit on this node (sysctl vm.max_map_count).",
    )
