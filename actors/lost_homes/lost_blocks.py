"""Which blocks of regions are lost: on no node, and made by no source. No Ray, no I/O.

A rebuild says what is lost; a commit that writes a lost block makes it whole from its version on,
for a commit has whole blocks. So the set of a region only shrinks, until another of its homes is
lost. Both are in the journal before they are here.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._objects import block_sets
from clamor_ray.actors.commits.committed import Entry

HEAL_HINT = (
    "All other blocks can be read and changed. A commit that writes these makes them whole: "
    "`with clamor.update(ref, lost=0) as x` begins with them full of zeros."
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

    def update(self, lost: Mapping[int, LostBlocks | None]) -> None:
        """As the journal has it from now on."""
        for region, blocks in lost.items():
            if blocks is not None:
                self._lost[region] = blocks
            elif self._lost.pop(region, None) is not None:
                self.healed(region)

    def forget(self, region: int) -> None:
        """It is gone."""
        self._lost.pop(region, None)
