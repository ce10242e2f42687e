"""What of a store's journal goes on when the store is opened anew. Pure.

Between two openings there was no cluster: no task, no reader, no process that has a reference. So
these go, in one transaction, before anything is answered:

* what was not sealed, or freed: page servers drop what the registry does not name to them;
* variables that no name leads to: neither have they one, nor are they inside of one that stays;
* idempotency keys, and which tasks were dropped: their tasks are over;
* sources of other kinds than files and zeros: objects in Ray's store went with the cluster, and a
  callable may close over some;
* where page servers were, which of them were to leave, and who had not heard of a move yet: each
  directory registers anew, and asks what it is home of. Those that are lost stay lost, and so does
  what is known of lost blocks.

Of old versions nobody has the blocks any more. So it is noted at which version each region is
opened: that stands for all before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from clamor_ray._protocol.idempotency import key_kept_in
from clamor_ray._protocol.messages import INLINE_BASE
from clamor_ray._protocol.source import FILE, ZEROS
from clamor_ray.actors.commits.journal import ANY_REGION, Journal, Saved
from clamor_ray.actors.registry.registry_core import RegionState

LASTING = (FILE, ZEROS)  # kinds of sources


def led_to(roots: Iterable[int], inside: Iterable[tuple[int, int]]) -> set[int]:
    """The roots and what is inside of them, at any depth; with `ANY_REGION` where that is unknown
    of one of them.

    Example:
        >>> sorted(led_to([1], [(1, 2), (2, 3), (4, 5)]))
        [1, 2, 3]
    """
    inner_of = defaultdict(list)
    for region, inner in inside:
        inner_of[region].append(inner)
    found: set[int] = set()
    left = list(roots)
    while left:
        if (region := left.pop()) not in found:
            found.add(region)
            left += inner_of.get(region, ())
    return found


def regions_that_go(saved: Saved) -> list[int]:
    """Regions, with their pieces, that a new opening does not have any more."""
    named = {named.region for named in saved.names}
    kept = led_to(named, saved.inside)
    gone = set()
    for each in saved.regions:
        region, whole = each.record.region, each.record.piece_of or each.record.region
        is_kept = ANY_REGION in kept or whole in kept
        if each.state != RegionState.READY.value or not is_kept:
            gone.add(region)
    return [
        each.record.region
        for each in saved.regions
        if each.record.region in gone or each.record.piece_of in gone
    ]


def open_again(journal: Journal, saved: Saved) -> Saved:
    """Writes what is said in the file's head. Doing it again changes nothing.

    Args:
        journal: Of the store.
        saved: What it holds.

    Returns:
        What it holds then.

    Raises:
        JournalFullError: Nothing was changed.
    """
    newest: dict[int, int] = {}
    for entry in saved.entries:
        if entry.region < INLINE_BASE:
            newest[entry.region] = max(entry.version, newest.get(entry.region, 0))
    journal.open_again(
        gone=regions_that_go(saved),
        keys=[entry.region for entry in saved.entries if key_kept_in(entry.region, entry.payload)],
        sources=[region for region, source in saved.sources if source.kind not in LASTING],
        opened=newest,
    )
    return journal.load()
