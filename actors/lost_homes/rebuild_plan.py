"""How a region whose home is lost is put together again. Pure: no Ray, no clock, no I/O.

What is left of a lost home's region lies in the caches of other page servers, and in the layers of
commits that they have staged, or retain: blocks of versions
that those are labelled with. A block that did not change after the version it is cached at is the
same in the newest one. What no cache has the variable's source may make again, which makes version
0: so it is good for blocks that no commit has changed.

Nothing is assumed of a block that neither has: it is lost, also where it may never have been
written.

Tests: ``tests/actors/test_rebuild_plan.py`` compares it with a model that holds contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pyroaring import BitMap

from clamor_ray._protocol.messages import RebuildOrder, RegionRecord
from clamor_ray._protocol.source import CALL, Source


def preferred(servers: list[int], *rules: Callable[[int], bool]) -> list[int]:
    """Those that follow the rules, the first before the second. A rule that nobody follows is void.

    Example:
        >>> preferred([7, 8, 9], lambda each: each > 7, lambda each: each > 9)
        [8, 9]
    """
    for rule in rules:
        servers = [each for each in servers if rule(each)] or servers
    return servers


@dataclass(frozen=True)
class Holding:
    """What one page server has of one version of a region.

    Args:
        server_id: The server.
        version: The version that its blocks are labelled with.
        blocks: Which it has, counted from the region's start.
    """

    server_id: int
    version: int
    blocks: BitMap


@dataclass(frozen=True)
class Take:
    """Blocks that come from one server's cache of one version."""

    server_id: int
    version: int
    blocks: BitMap


@dataclass(frozen=True)
class RebuildPlan:
    """Where the blocks of the newest version come from; the sets are disjoint.

    Args:
        home: The server that is to be the new home: the one that has most of them.
        takes: From caches, those of the new home first.
        from_source: What the variable's source must make.
        compared: Blocks of `takes` that the source makes too: its content must be the same there.
        lost: What nobody has.
        from_group: What the other pieces of its group make.
    """

    home: int
    takes: tuple[Take, ...]
    from_source: BitMap
    compared: BitMap
    lost: BitMap
    from_group: BitMap = field(default_factory=BitMap)


def plan(
    n_blocks: int,
    holdings: Iterable[Holding],
    changed_since: Callable[[int], BitMap | None],
    *,
    has_source: bool,
    servers: Iterable[int],
    load: Callable[[int], int] = lambda server_id: 0,
    from_group: BitMap | None = None,
    is_in_file: bool = False,
) -> RebuildPlan | None:
    """Decides where each block of the newest version comes from.

    Args:
        n_blocks: Of the region.
        holdings: What the living servers have.
        changed_since: The blocks that changed after a version, up to the newest; None where that
            is not known any more: nothing of that version is used then.
        has_source: Whether the blocks of version 0 can be made again.
        servers: Who can be the home.
        load: What a server has to do already. Of those that have equally much of the region the one
            that has the least to do becomes the home; of those the first.
        from_group: What the other pieces of its group make. That is not asked of caches, which
            have no old versions.
        is_in_file: What no commit has changed is in a file: no home has it. Where nobody knows any
            more what they changed, everything that is nowhere else is lost: what the file has there
            may be old.

    Returns:
        None where nobody can be the home.

    Example:
        >>> held = [Holding(7, 3, BitMap([0, 1])), Holding(8, 2, BitMap([1, 2]))]
        >>> found = plan(4, held, lambda version: BitMap([1][: 3 - version]), has_source=False,
        ...              servers=[7, 8])
        >>> found.home, [list(take.blocks) for take in found.takes], list(found.lost)
        (7, [[0, 1], [2]], [3])
    """
    candidates = list(dict.fromkeys(servers))
    everything = BitMap(range(n_blocks)) - (from_group or BitMap())
    if is_in_file and (written := changed_since(0)) is not None:
        everything &= written
    good: list[Take] = []
    for holding in holdings:
        changed = changed_since(holding.version)
        if changed is not None:
            blocks = (holding.blocks & everything) - changed
            good.append(Take(holding.server_id, holding.version, blocks))
    if not candidates:
        return None
    has: dict[int, BitMap] = {}
    for take in good:
        has.setdefault(take.server_id, BitMap()).update(take.blocks)
    home = max(candidates, key=lambda server_id: (len(has.get(server_id, ())), -load(server_id)))
    # What is at the new home need not travel; of the rest as much as possible from each.
    good.sort(key=lambda take: (take.server_id != home, -len(take.blocks), -take.version))
    missing, takes = everything.copy(), []
    for take in good:
        blocks = take.blocks & missing
        if blocks:
            takes.append(Take(take.server_id, take.version, blocks))
            missing -= blocks
    changed = changed_since(0) if has_source else None
    sourced = BitMap() if changed is None else everything - changed
    from_source = missing & sourced
    return RebuildPlan(
        home=home,
        takes=tuple(takes),
        from_source=from_source,
        compared=(everything - missing) & sourced if from_source else BitMap(),
        lost=missing - from_source,
        from_group=from_group or BitMap(),
    )


def order_of(
    record: RegionRecord,
    plan: RebuildPlan,
    takes: tuple[tuple[int, int, int], ...],
    *,
    before_bytes: int,
    attempt: int,
    source: Source | None,
    digest: bytes,
) -> RebuildOrder:
    """What the new home is told.

    Args:
        record: With it as the home.
        plan: Of what comes from where.
        takes: (server, commit id, bytes) of what others have staged.
        before_bytes: Where the region begins in its variable.
        attempt: Its number, for what its group makes.
        source: Of the variable.
        digest: Of the Ray object whose content the region is, where it is that.
    """
    pieces: tuple[tuple[int, bytes], ...] = ()
    if plan.from_source and source is not None and source.kind != CALL:
        pieces = ((source.offset, source.what),)
    return RebuildOrder(
        record=record,
        cached=tuple(
            (take.version, bytes(take.blocks.serialize()))
            for take in plan.takes
            if take.server_id == plan.home
        ),
        takes=takes,
        from_source=bytes(plan.from_source.serialize()) if plan.from_source else b"",
        compared=bytes(plan.compared.serialize()) if plan.compared else b"",
        lost=bytes(plan.lost.serialize()) if plan.lost else b"",
        before_bytes=before_bytes,
        attempt=attempt if plan.from_group else 0,
        pieces=pieces,
        digest=digest if plan.from_source and source is None else b"",
    )
