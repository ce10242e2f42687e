"""What the registry remembers of commits: entries, outcomes, a variable's newest ones. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyroaring import BitMap

ENTRY_BYTES = 256  # what an entry costs beside its bitmap, plan and payload


@dataclass(frozen=True)
class Limits:
    """How much is kept; see the file's head.

    Args:
        max_commits: Of one region.
        max_payloads: Of one inline variable.
        max_retained: Commits, or contents, of one variable that has a floor; see ``retain``.
        budget_bytes: Of all commits together.
        max_outcomes: Commit ids whose outcome is remembered.
        outcome_s: No outcome younger than this is forgotten.
        max_freed_inline: Inline variables known to be freed.
        max_dropped: Tasks known to be dropped, with their idempotency keys.
    """

    max_commits: int = 4096
    max_payloads: int = 64
    max_retained: int = 65536
    budget_bytes: int = 64 << 20
    max_outcomes: int = 65536
    outcome_s: float = 120.0
    max_freed_inline: int = 65536
    max_dropped: int = 65536


@dataclass(frozen=True)
class Entry:
    """One commit's part in one variable.

    Args:
        region: The variable's id.
        version: The one that it made.
        commit_id: The commit.
        blocks: Serialized BitMap of the blocks that it changed.
        plan: Valid from this version on, or None.
        payload: An inline variable's content, or None.
        changed: ``blocks``, where they have been read; None: nobody has.
    """

    region: int
    version: int
    commit_id: int
    blocks: bytes = b""
    plan: bytes | None = None
    payload: bytes | None = None
    changed: BitMap | None = field(default=None, compare=False, repr=False)

    @property
    def n_bytes(self) -> int:
        """About what it costs to keep."""
        return ENTRY_BYTES + 2 * len(self.blocks) + len(self.plan or b"") + len(self.payload or b"")


@dataclass(frozen=True)
class Outcome:
    """What became of a commit: its versions, or none if it was aborted; and when that was."""

    versions: dict[int, int]
    at_s: float


@dataclass(frozen=True)
class Trimmed:
    """What was forgotten and may go from the journal too.

    Args:
        commits: (region, version).
        plans: (region, version).
        outcomes: Commit ids.
        retained: (region, the oldest version that is left) where something went that a live
            collection could need.
    """

    commits: tuple[tuple[int, int], ...] = ()
    plans: tuple[tuple[int, int], ...] = ()
    outcomes: tuple[int, ...] = ()
    retained: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.commits or self.plans or self.outcomes)


@dataclass
class Forgotten:
    """What a trim has taken out so far; see `Trimmed`."""

    commits: list[tuple[int, int]] = field(default_factory=list)
    plans: list[tuple[int, int]] = field(default_factory=list)
    retained: dict[int, int] = field(default_factory=dict)


@dataclass
class CommittedVariable:
    """What is known of one variable's commits."""

    region: int
    homes: tuple[int, ...]
    n_blocks: int | None = None  # of its region, where that is known
    closed: bool = False
    home_lost: bool = False  # one of them, and there is no other yet
    newest: int = 0
    entries: list[Entry] = field(default_factory=list)  # contiguous, the newest last
    blocks: list[BitMap] = field(default_factory=list)  # of each entry
    n_bytes: int = 0
    plan_versions: list[int] = field(default_factory=list)
    plans: dict[int, bytes] = field(default_factory=dict)
    plans_lost: bool = False  # older ones than these were forgotten
    acknowledged: dict[int, int] = field(default_factory=dict)  # by home

    @property
    def horizon(self) -> int:
        """The oldest version from which on every change is known."""
        return self.newest - len(self.entries)

    @property
    def settled(self) -> int:
        """The newest version that every home knows. While one is lost: of what had been
        acknowledged nothing but what is forgotten already may be taken for it."""
        if self.home_lost:
            return self.horizon
        return min((self.acknowledged[home] for home in self.homes), default=self.newest)

    def after(self, version: int) -> int:
        """Index of the first entry above a version at or above the horizon."""
        return version - self.horizon
