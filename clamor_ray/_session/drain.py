"""`clamor.drain` and `clamor.cancel_drain`: everything off a node that is to go, or not."""

from __future__ import annotations

import math
from typing import Final

from clamor_ray._protocol.messages import DrainResult
from clamor_ray._session.process_sessions import with_current

ANSWER_S: Final = 30.0  # what the registry has on top: nodes may get their page servers first


def drain(node_id: str, timeout: float = 60.0) -> DrainResult:
    """Moves all variables that are homed on a node to other nodes, while they are used.

    Reads go on, and so do commits: one that comes at the last step of a move waits for it, at most
    for some seconds while both page servers answer. Old versions move too. What is put on the node
    meanwhile moves as well. A node that has nothing needs no other one: nothing moves. From its
    call on, no variable of another node is moved to this one, or rebuilt on it; what its own
    processes put later is homed there.

    After that the node's page server goes on as long as processes of the node use it: as long as
    they have what `get` gave them, change a variable, or watch one. Then it ends, with its memory,
    and nothing of the session keeps the node. A process of the node that opens or puts a variable
    later gets another page server, which takes variables as any. The page server on the node of the
    session's driver does not end: the session is there.

    Programs (`clamor.Program`) leave the node as well, while they run: their partitions move to
    other nodes that have CPUs, and no program begins there before `clamor.cancel_drain`.

    Calling it again moves what has come since. `clamor.cancel_drain` undoes it.

    Args:
        node_id: Ray's hex id of the node, as in `ray.nodes()`.
        timeout: seconds, for all of it.

    Returns:
        How many variables were moved, their bytes, how long it took, and whether the page server
        ends when nothing uses it.

    Raises:
        DrainTimeoutError: Something is still there, which it names. Nothing is lost. The node takes
            no variables of others still. A variable that was freed cannot move: it is there until
            the processes of other nodes that have arrays of it let go of them. A program cannot
            leave where no other node has CPUs.
        DrainCancelledError: `clamor.cancel_drain` was called meanwhile.
        NodeLostError: The node was lost meanwhile, and something was still there, which it names.
        NoOtherNodeError: Variables are on the node, and the cluster has no other one that could
            take them.
        NoSuchNodeError: No living node has this id.
        JournalFullError: Nothing was begun.
        ValueError: The timeout is negative, or no number.
        NotInitializedError: Before `clamor.init()`.

    Safe from any thread.

    Example:
        >>> ref = clamor.put(np.arange(10**5))
        >>> result = clamor.drain(clamor.init().node_id)
        >>> result.moved >= 1, result.bytes > ref.nbytes
        (True, True)
        >>> int(ref.get()[7])
        7
    """
    if not isinstance(timeout, int | float) or not 0.0 <= timeout < math.inf:
        raise ValueError(f"timeout is a number of seconds, 0 or more, not {timeout!r}")
    return with_current(
        lambda session: session.rpc.drain(node_id, timeout, timeout_s=timeout + ANSWER_S)
    )


def cancel_drain(node_id: str) -> bool:
    """Undoes `clamor.drain`: variables may come to the node again, and its page server stays.

    A `clamor.drain` of the node that runs raises `DrainCancelledError`. What was moved does not
    come back by itself.

    Args:
        node_id: Ray's hex id of the node, as in `ray.nodes()`.

    Returns:
        Whether the node was drained, or being drained. Where its page server has ended since, the
        node gets another one, which takes variables: that is True, too.

    Raises:
        NoSuchNodeError: No living node has this id.
        ServerUnavailableError: The node's next page server does not start.
        JournalFullError: Nothing has changed.
        NotInitializedError: Before `clamor.init()`.

    Safe from any thread.

    Example:
        >>> node_id = clamor.init().node_id
        >>> result = clamor.drain(node_id)
        >>> clamor.cancel_drain(node_id), clamor.cancel_drain(node_id)
        (True, False)
    """
    return with_current(lambda session: session.rpc.cancel_drain(node_id))
