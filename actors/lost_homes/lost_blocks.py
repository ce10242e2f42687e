"""Which blocks of regions are lost: on no node, and made by no source. No Ray, no I/O.

A rebuild says what is lost; a commit that writes a lost block makes it whole from its version on,
for a commit has whole blocks. So the set of a region only shrinks, until another of its homes is
lost. Both are in the journal before they are here.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._labels import capital
from clamor_ray._objects import block_sets
from clamor_ray._protocol.messages import Write
from clamor_ray.actors.commits.committed import Entry

HEAL_HINT = (
    "All other blocks can be read and changed. A commit that writes these makes them whole: "
    "`with clamor.update(ref, lost=0) as x` begins with them full of zeros."
)

NO_SOURCE_HINT: Final = (
    "Put it again. Where its making can be repeated, clamor.put(obj, source=make) lets it be made "
    'again by itself; with redundancy="raid5" it survives the loss of a node; what other nodes '
    "have read of it is kept in any case."
)


@dataclass(frozen=True)
class LostBlocks:
    """What nobody has of a region's newest version.

    Args:
        number: Of this loss: other than 0, and than that of another loss of the region. Below
            2**32.
        n_blocks: Of the region.
        blocks: Serialized BitMap of those that are lost; never empty.
        why: What was lost, and why nothing makes the blocks again. For people.
        hint: What to do.
    """

    number: int
    n_blocks: int
    blocks: bytes
    why: str
    hint: str

    def error(self, label: str) -> errors.HomeLostError:
        """For who needs one of them.

        Args:
            label: The variable for people.
        """
        said = block_sets.said(BitMap.deserialize(self.blocks), self.n_blocks)
        return errors.HomeLostError(
            f"Blocks of {label} are lost: {said} are on no node. {self.why}.",
            hint=self.hint,
        )


class BlockLoss(NamedTuple):
    """Blocks of a region that nobody has.

    Args:
        label: The variable for people.
        why: Why its home is lost.
        lost: The blocks.
        n_blocks: Of the region.
        failed: Why its source cannot make it again; None: that was not tried, or there is none.
        has_source: There is one.
    """

    label: str
    why: str
    lost: BitMap
    n_blocks: int
    failed: errors.SourceError | None
    has_source: bool

    def _no_source(self) -> tuple[str, str]:
        """Why no source makes what is lost, and what to do."""
        if self.failed is not None:
            return f"its source cannot make them again. {self.failed.message}", self.failed.hint
        if self.has_source:
            return (
                "commits have changed them, so that its source does not make them",
                "Put it again, and make the changes again.",
            )
        return "it was put without a source", NO_SOURCE_HINT

    def all_of_it(self) -> errors.HomeLostError:
        """Nothing of the region is left."""
        said = block_sets.said(self.lost, self.n_blocks)
        cause, hint = self._no_source()
        return errors.HomeLostError(
            f"{capital(self.label)} is lost: {self.why}, and {said} are on no other node; {cause}.",
            hint=hint,
        )

    def blocks(self) -> LostBlocks:
        """The rest of it is there."""
        cause, hint = self._no_source()
        return LostBlocks(
            number=secrets.randbits(31) | 1,
            n_blocks=self.n_blocks,
            blocks=bytes(self.lost.serialize()),
            why=f"{capital(self.why)}, and {cause}".removesuffix("."),
            hint=f"{hint} {HEAL_HINT}",
        )


def together(known: LostBlocks | None, more: LostBlocks, n_blocks: int) -> LostBlocks:
    """What is lost of a region, with what is lost besides.

    Args:
        known: What was lost before.
        more: Blocks, by number; of another region.
        n_blocks: Of the region.
    """
    blocks = BitMap.deserialize(more.blocks)
    if known is not None:
        blocks |= BitMap.deserialize(known.blocks)
    return replace(
        more, number=secrets.randbits(31) | 1, n_blocks=n_blocks, blocks=bytes(blocks.serialize())
    )


class Losses:
    """The lost blocks of all regions, as the journal has them.

    Example:
        >>> losses = Losses()
        >>> losses.update({7: LostBlocks(1, 10, BitMap([2, 3]).serialize(), "Why", "Do.")})
        >>> changed = losses.without([Entry(7, 4, 9, BitMap([3, 4]).serialize())])
        >>> BitMap.deserialize(changed[7].blocks), losses.of(8)
        (BitMap([2]), None)
    """

    def __init__(self) -> None:
        self._lost: dict[int, LostBlocks] = {}
        self.healed: Callable[[int], object] = lambda region: None

    def of(self, region: int) -> LostBlocks | None:
        """What is lost of it, if anything is."""
        return self._lost.get(region)

    def regions(self) -> tuple[int, ...]:
        """Those that lack blocks."""
        return tuple(self._lost)

    def number(self, region: int) -> int:
        """The number of its loss; 0: nothing is lost."""
        found = self._lost.get(region)
        return found.number if found is not None else 0

    def without(self, entries: Iterable[Entry]) -> dict[int, LostBlocks | None]:
        """What is lost of which regions once these commits are made, where they change that.

        Returns:
            By region; None: nothing is lost of it any more.
        """
        changed: dict[int, LostBlocks | None] = {}
        for entry in entries:
            found = self._lost.get(entry.region)
            if found is None or not entry.blocks:
                continue
            before = BitMap.deserialize(found.blocks)
            left = before - BitMap.deserialize(entry.blocks)
            if left != before:
                blocks = bytes(left.serialize())
                changed[entry.region] = replace(found, blocks=blocks) if left else None
        return changed

    def check_conflict(self, write: Write, label: str) -> None:
        """Refuses a write whose lost blocks were made again meanwhile, by a source, or a node that
        came back: its parity's delta does not know what they have now.

        Raises:
            CommitConflict: There are such blocks.
        """
        found = self._lost.get(write.region)
        again = BitMap.deserialize(write.were_lost)
        if found is not None:
            again -= BitMap.deserialize(found.blocks)
        if again:
            raise errors.CommitConflict(
                f"Block {again.min()} of {label} was lost when this transaction began, and is "
                "there again.",
                *(write.region, write.base_version, write.base_version, again.min(), 1),
            )

    def update(self, lost: Mapping[int, LostBlocks | None]) -> None:
        """As the journal has it from now on."""
        healed = [region for region in lost if lost[region] is None and region in self._lost]
        self._lost.update({region: blocks for region, blocks in lost.items() if blocks is not None})
        for region in healed:
            del self._lost[region]
        for region in healed:  # a copy is healed by the same commit: it does not lack them any more
            self.healed(region)

    def forget(self, region: int) -> None:
        """It is gone."""
        self._lost.pop(region, None)
