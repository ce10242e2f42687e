"""What the tries of one rebuild know of each other."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from clamor_ray import errors
from clamor_ray.actors.lost_homes.repairs import Repairable


class Again(Exception):
    """It failed for now; the text says why."""


@dataclass
class Attempts:
    """What the tries of one rebuild know of those before.

    Args:
        refused: Servers that had no room to be the home, since all have last been asked.
        made: What a source is making, or has made, and for which new home.
        heading: The new home that this try has chosen; 0: none yet.
        failed: Why the source does not make it again: it is not asked any more.
        group: What the others of its group make, at this try.
        mates: See ``Repairs.mates``, at this try.
        number: Of the attempt, at the new home.
    """

    refused: set[int] = field(default_factory=set)
    made: tuple[int, list[Any]] | None = None
    heading: int = 0
    failed: errors.SourceError | None = None
    group: Repairable | None = None
    mates: dict[int, tuple[int, bool]] = field(default_factory=dict)
    number: int = field(default_factory=lambda: secrets.randbits(63) | 1)
