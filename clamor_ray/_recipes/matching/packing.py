"""A slice's state <-> bytes, as `pc_match_add` in pagecache_match.h has them. Pure.

They hold on every machine of one byte order, so they can go to another worker as they are.
"""

from __future__ import annotations

from array import array

from clamor_ray._recipes.matching.state import Inbox, PartitionState, SliceState


def pack_state(state: SliceState) -> bytes:
    """
    Example:
        >>> unpack_state(pack_state(SliceState({3: PartitionState(writer=7)}))).partitions
        {3: PartitionState(writer=7, started=0, finished=0, writing=0)}
    """
    numbers = [len(state.partitions), len(state.inboxes)]
    pieces: list[bytes] = []
    for dataset, at in sorted(state.partitions.items()):
        numbers += (dataset, at.writer, at.started, at.finished, at.writing)
    for number, inbox in sorted(state.inboxes.items()):
        sent = [(who, each) for who in sorted(inbox.messages) for each in inbox.messages[who]]
        numbers += (number, len(inbox.closed), len(sent), *sorted(inbox.closed))
        for sender, message in sent:
            numbers += (sender, len(message))
            pieces.append(message)
    return b"".join((array("Q", numbers).tobytes(), *pieces))


def unpack_state(packed: bytes) -> SliceState:
    """What `pack_state` was given."""
    numbers = array("Q", packed[: len(packed) // 8 * 8])  # and part of the messages, behind them
    state = SliceState({})
    at = 2
    for _ in range(numbers[0]):
        dataset, *fields = numbers[at : at + 5]
        state.partitions[dataset] = PartitionState(*fields)
        at += 5
    lengths: list[tuple[Inbox, int, int]] = []
    for _ in range(numbers[1]):
        number, n_closed, n_messages = numbers[at : at + 3]
        at += 3
        inbox = state.inboxes[number] = Inbox(set(numbers[at : at + n_closed]))
        at += n_closed
        for place in range(at, at + 2 * n_messages, 2):
            lengths.append((inbox, numbers[place], numbers[place + 1]))
        at += 2 * n_messages
    offset = 8 * at
    for inbox, sender, length in lengths:
        inbox.messages.setdefault(sender, []).append(packed[offset : offset + length])
        offset += length
    return state
