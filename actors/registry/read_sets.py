"""What tasks touched, kept for those like them: the registry's part of replayed read sets.

A name (`clamor_ray/_tasks/read_predictor.py`) is the best guess at "the same task". Whether it is
one shows when the next set under it arrives: where at least half of what the last call touched was
touched again, calls of this name repeat; otherwise they vary, and their sets are not handed out
until two in a row are alike. A name that is unsure from the start has to show that it repeats
first.

Bounded: the sets that were noted or asked for longest ago go first. Those of a variable that is
freed go at once: nobody asks for them again. Nothing of it is journaled: a restarted registry has
none, which costs faults.

Thread safety: everything belongs to the registry's loop.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pyroaring import BitMap

from clamor_ray._protocol.messages import ReadPredictorCounters
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore

MOST_BYTES: Final = 64 << 20
SET_COST_BYTES: Final = 200  # of a name and of each set, beside its bytes
ALIKE: Final = 0.5


class Verdict(enum.Enum):
    """Whether calls of a name touch the same again."""

    UNKNOWN = "unknown"
    REPEATS = "repeats"
    VARIES = "varies"


@dataclass
class _Entry:
    sets: dict[int, bytes]
    verdict: Verdict = Verdict.UNKNOWN

    @property
    def cost_bytes(self) -> int:
        return sum(map(len, self.sets.values())) + SET_COST_BYTES * (1 + len(self.sets))


def alike(old: Mapping[int, bytes], new: Mapping[int, bytes]) -> bool:
    """Whether at least half of the old blocks are among the new ones."""
    n_old = n_common = 0
    for region, packed in old.items():
        before = BitMap.deserialize(packed)
        n_old += len(before)
        if region in new:
            n_common += before.intersection_cardinality(BitMap.deserialize(new[region]))
    return n_common >= ALIKE * n_old


class ReadSets:
    """See the file's head.

    Args:
        most_bytes: Of all sets together.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, _Entry] = OrderedDict()
        self._names_of: dict[int, set[bytes]] = {}  # of each region
        self._bytes = 0
        self._noted = self._asked = self._found = 0

    def note(self, digest: bytes, sets: Mapping[int, bytes]) -> None:
        """A call of this name has touched these blocks.

        Args:
            digest: The name.
            sets: A serialized ``BitMap`` of blocks for each region.
        """
        self._noted += 1
        new = dict(sets)
        old = self._kept.get(digest)
        entry = _Entry(new)
        if old is not None:
            self._drop(digest)
            entry.verdict = Verdict.REPEATS if alike(old.sets, new) else Verdict.VARIES
        self._kept[digest] = entry
        self._bytes += entry.cost_bytes
        for region in new:
            self._names_of.setdefault(region, set()).add(digest)
        while self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, digest: bytes) -> None:
        gone = self._kept.pop(digest)
        self._bytes -= gone.cost_bytes
        for region in gone.sets:
            names = self._names_of[region]
            names.discard(digest)
            if not names:
                del self._names_of[region]

    def forget(self, region: int) -> None:
        """It is freed: no call of a name with it comes again."""
        for digest in list(self._names_of.get(region, ())):
            self._drop(digest)

    def find(self, digest: bytes, sure: bool, regions: Iterable[int]) -> dict[int, bytes]:
        """What a call of this name is likely to touch of some regions; {}: nobody knows."""
        self._asked += 1
        entry = self._kept.get(digest)
        if entry is None:
            return {}
        self._kept.move_to_end(digest)
        if entry.verdict is Verdict.VARIES or (entry.verdict is Verdict.UNKNOWN and not sure):
            return {}
        found = {region: entry.sets[region] for region in regions if region in entry.sets}
        self._found += bool(found)
        return found

    def counters(self) -> ReadPredictorCounters:
        """What came, and what is kept."""
        return ReadPredictorCounters(
            noted=self._noted,
            asked=self._asked,
            found=self._found,
            names=len(self._kept),
            bytes=self._bytes,
        )


class SharedReadSets:
    """Read sets as tasks say them and ask for them.

    Args:
        core: Which variables there are, and where they are at home.
        cache_bytes: The job's setting of a node's cache.
    """

    def __init__(self, core: RegistryCore, cache_bytes: int) -> None:
        self._core = core
        self._cache_bytes = cache_bytes
        self._sets = ReadSets()

    def note(self, digest: bytes, sets: Mapping[int, bytes]) -> None:
        """See ``ReadSets.note``. One that touched a variable that was freed is left out."""
        if all(self._core.state(region) is RegionState.READY for region in sets):
            self._sets.note(digest, sets)

    def find(self, packed: bytes) -> bytes:
        """What a task is likely to touch: ``pack(digest, sure, server id, regions)``.

        Returns:
            ``pack`` of the job's setting of a node's cache, of a serialized ``BitMap`` for each
            region of which something is known, and of the regions that have no home but the
            asker's node.
        """
        digest, sure, first_id, regions = unpack(packed)
        # A process knows its node's first page server, and not which one there is now.
        server_id = self._core.server_id_now(first_id)
        here = [region for region in regions if self._core.homes_of(region) == (server_id,)]
        wanted = [region for region in regions if region not in here]
        found = self._sets.find(digest, sure, wanted) if wanted else {}
        return pack(self._cache_bytes, found, here)

    def forget(self, region: int) -> None:
        """See ``ReadSets.forget``."""
        self._sets.forget(region)

    def counters(self) -> ReadPredictorCounters:
        """See ``ReadSets.counters``."""
        return self._sets.counters()
