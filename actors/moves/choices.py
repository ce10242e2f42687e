"""Which home moves, when, and where to. Pure: no Ray, no clock, no I/O.

A drain whose time may be too short moves first what is used most. A full node gives away what is
used least, to the server that has the least. A home whose memory would stay, because processes of
the node map it, is not given away for that. A taker keeps a part of its memory free, so it is not
full itself then, and does not give homes back.

Tests: ``tests/actors/test_choices.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from clamor_ray._protocol.messages import HomeUse, NodeRoom

RECENT_S = 600.0  # what was last read before that counts as not read
RESERVE_SHARE = 8  # a taker keeps this part of its memory free


def least_loaded(
    servers: Iterable[int], load_bytes: Mapping[int, int], refused: Iterable[int] = ()
) -> int | None:
    """The server that has the least; of those that have equally little the first.

    Args:
        servers: Who may be chosen.
        load_bytes: What each has.
        refused: Who is not asked again.

    Returns:
        None where there is none.

    Example:
        >>> least_loaded([7, 8, 9], {7: 10, 9: 4}, refused=[8])
        9
    """
    left = [each for each in servers if each not in set(refused)]
    return min(left, key=lambda server_id: load_bytes.get(server_id, 0), default=None)


def recent_reads(home: HomeUse) -> int:
    """How often a home is read: 0 where that was long ago.

    Example:
        >>> recent_reads(HomeUse(1, 4096, 9, 2.0, False)), recent_reads(
        ...     HomeUse(1, 4096, 9, 4000.0, False))
        (9, 0)
    """
    return home.reads if home.idle_s <= RECENT_S else 0


def by_use(homes: Iterable[HomeUse]) -> list[int]:
    """The regions in the order in which they are to be safe: the most read of the last minutes
    first, then those that were read later than others, then the small ones.

    Args:
        homes: Of one server.

    Example:
        >>> by_use([HomeUse(1, 9, 0, 0.0, False), HomeUse(2, 9, 5, 7000.0, False),
        ...         HomeUse(3, 9, 5, 1.0, False), HomeUse(4, 9, 7, 1.0, True)])
        [4, 3, 2, 1]
    """

    def order(home: HomeUse) -> tuple[int, bool, float, int]:
        return -recent_reads(home), not home.reads, home.idle_s, home.n_bytes

    return [home.region for home in sorted(homes, key=order)]


def to_make_room(
    short_bytes: int,
    homes: Iterable[HomeUse],
    takers: Mapping[int, NodeRoom],
    load_bytes: Mapping[int, int],
    stay: Collection[int] = (),
    apart: Callable[[int, list[int]], list[int]] = lambda region, servers: servers,
) -> list[tuple[int, int]] | None:
    """Which homes a full server gives to whom. The fewest reads first; of equally read ones the
    smallest that is enough, else the largest that fits.

    Args:
        short_bytes: What is wanting.
        homes: Of the full server.
        takers: The room of those that may take some.
        load_bytes: Of the homes of each server.
        stay: Regions that do not move.
        apart: Of servers that could take a region those that may.

    Returns:
        (region, taker); None where that is not enough: then nothing need move.

    Example:
        >>> homes = [HomeUse(1, 100, 5, 1.0, False), HomeUse(2, 100, 0, 0.0, False)]
        >>> to_make_room(80, homes, {9: NodeRoom(800, 1000)}, {})
        [(2, 9)]
    """
    left = [each for each in homes if each.n_bytes and not each.keeps_memory]
    left = [each for each in left if each.region not in stay]
    free = {server_id: _free_bytes(room) for server_id, room in takers.items()}
    load = Counter(load_bytes)
    chosen: list[tuple[int, int]] = []
    while short_bytes > 0:
        most_bytes = max(free.values(), default=0)
        fit = [each for each in left if each.n_bytes <= most_bytes]
        if not fit:
            return None
        home = min(fit, key=lambda each: _goes_before(each, short_bytes))
        able = [server_id for server_id, n_bytes in free.items() if n_bytes >= home.n_bytes]
        left.remove(home)
        if not (able := apart(home.region, able)):
            continue
        taker = min(able, key=lambda server_id: load[server_id])
        chosen.append((home.region, taker))
        free[taker] -= home.n_bytes
        load[taker] += home.n_bytes
        short_bytes -= home.n_bytes
    return chosen


def _free_bytes(room: NodeRoom) -> int:
    if room.available_bytes is None or room.memory_bytes is None:
        return 0
    return max(0, room.available_bytes - room.memory_bytes // RESERVE_SHARE)


def _goes_before(home: HomeUse, short_bytes: int) -> tuple[int, bool, int]:
    is_enough = home.n_bytes >= short_bytes
    return recent_reads(home), not is_enough, home.n_bytes if is_enough else -home.n_bytes
