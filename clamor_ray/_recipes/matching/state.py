"""What a node keeps of a slice: all partitions with one index of the datasets of a group.

The datasets of a group are accessed together, so a slice is what moves between workers, and each
task needs exactly one (Canary, section 5.3). What moves with the partitions says which stages have
run on them: so each runs exactly once, wherever the slice is (section 4.4).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PartitionState:
    """What has run on one partition.

    Args:
        writer: The number of the stage that has written it last; 0: it is as it was given.
        started: How many stages have begun to read it since.
        finished: How many of those have ended.
        writing: The number of the stage that writes it now; 0: none does.
    """

    writer: int = 0
    started: int = 0
    finished: int = 0
    writing: int = 0


@dataclass
class Inbox:
    """The messages to one task that has not begun.

    Args:
        closed: The tasks of the stage before that have sent all that they send here.
        messages: What came, by sender, in the order in which each has sent.
    """

    closed: set[int] = field(default_factory=set)
    messages: dict[int, list[bytes]] = field(default_factory=dict)

    def close(self, sender: int, messages: list[bytes]) -> bool:
        """A sender has sent all. Whether that is news: what comes twice counts once."""
        if sender in self.closed:
            return False
        self.closed.add(sender)
        if messages:
            self.messages[sender] = messages
        return True

    def in_order(self) -> list[bytes]:
        """All, by sender."""
        return [each for sender in sorted(self.messages) for each in self.messages[sender]]


@dataclass
class SliceState:
    """A slice that does not run: what goes with its partitions to another worker, or a checkpoint.

    Args:
        partitions: By dataset.
        inboxes: By the number of the stage that they are for.
    """

    partitions: dict[int, PartitionState]
    inboxes: dict[int, Inbox] = field(default_factory=dict)
