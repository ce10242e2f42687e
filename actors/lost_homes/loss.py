"""What is said of blocks that are lost: why, and what to do. Pure."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Final, NamedTuple

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._labels import capital
from clamor_ray._objects import block_sets
from clamor_ray.actors.lost_homes.lost_blocks import HEAL_HINT, LostBlocks

NO_SOURCE_HINT: Final = (
    "Put it again. Where its making can be repeated, clamor.put(obj, source=make) lets it be made "
    'again by itself; with redundancy="raid5" it survives the loss of a node; what other nodes '
    "have read of it is kept in any case."
)


class Loss(NamedTuple):
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
