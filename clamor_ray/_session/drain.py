"""`clamor.drain`: everything off a node that is to go."""

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
    meanwhile moves as well. From its call on, no variable of another node is moved to this one, or
    rebuilt on it; what its own processes put later is homed there. The node's page server goes on,
    for the processes of the node, until the session or the node ends.

    Calling it again moves what has come since.

    Args:
        node_id: Ray's hex id of the node, as in `ray.nodes()`.
        timeout: seconds, for all of it.

    Returns:
        How many variables were moved, their bytes, and how long it took.

    Raises:
        DrainTimeoutError: Something is still there, which it names. Nothing is lost.
        NoOtherNodeError: The cluster has no other node that could take it.
        NoSuchNodeError: No living node has this id.
        JournalFullError: Nothing was begun.
        ValueError: The timeout is negative.
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
    if not timeout >= 0.0 or math.isinf(timeout):
        raise ValueError(f"timeout is a number of seconds, not {timeout!r}")
    return with_current(
        lambda session: session.rpc.drain(node_id, timeout, timeout_s=timeout + ANSWER_S)
    )
