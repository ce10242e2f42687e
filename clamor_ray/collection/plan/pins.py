"""Which old versions a collection could need, as the lineage registry is told.

A node pins the snapshots that its function reads, from when it is written down, and those that the
tasks read whose results are kept. It lets go of them when the collection is gone.
"""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import ray

from clamor_ray import errors
from clamor_ray._protocol.rpc import await_rpc, pack
from clamor_ray._session import process_sessions
from clamor_ray._session.session import Session
from clamor_ray.collection.plan.plan import Node
from clamor_ray.collection.plan.results import Pin, StageResult

_of_node: weakref.WeakKeyDictionary[Node, Pins]
_held: Counter[bytes] = Counter()  # tokens, by how many nodes need their idempotency keys
_let_go_of: deque[set[bytes]] = deque()  # what nodes that are gone needed


def _let_go(session: Session, number: int, tokens: set[bytes]) -> None:
    # Wherever the last reference dies, maybe while Python or Ray ends: it waits for nothing. After
    # the end of the session there is no registry, and a call would have Ray start a cluster.
    _let_go_of.append(tokens)
    if session not in process_sessions.sessions() or not ray.is_initialized():
        return
    with contextlib.suppress(Exception):
        session.registry.lineage_close.remote([number])


def _release(tokens: Iterable[bytes]) -> list[bytes]:
    """A node needs them no more; those that none does."""
    free = []
    for token in tokens:
        _held[token] -= 1
        if _held[token] <= 0:
            del _held[token]
            free.append(token)
    return free


def drop_keys(session: Any, tokens: Iterable[bytes] = ()) -> None:
    """Of these tasks, and of those whose collections are gone, no attempt will begin any more, but
    of those that a kept collection needs; waits for nothing."""
    gone = [token for token in tokens if token not in _held]
    while _let_go_of:
        gone += _release(_let_go_of.popleft())
    if gone:
        session.registry.drop_keys.remote(gone)


class Pins:
    """What one node pins. Made by `of`; `number` names it to the registry."""

    def __init__(self, node: Node) -> None:
        self._node = weakref.ref(node)
        self._session = process_sessions.current()
        self.number = secrets.randbits(63)
        self._told: tuple[frozenset[Pin], frozenset[Pin]] = (frozenset(), frozenset())
        self._tokens: set[bytes] = set()  # the very set that the finalizer has
        self._answer: Any = None
        self._finalizer: Any = None

    @staticmethod
    def of(node: Node) -> Pins:
        """The pins of a node."""
        found = _of_node.get(node)
        if found is None:
            found = _of_node.setdefault(node, Pins(node))
        return found

    def _wanted(self) -> tuple[frozenset[Pin], frozenset[Pin]]:
        """Of its own variables, and of all that its kept results are made of."""
        node = self._node()
        if node is None:
            return frozenset(), frozenset()
        own = frozenset(Pin(v.region, v.ref.version) for v in node.variables)
        kept = [r.pins for r in list(node.results.values()) if isinstance(r, StageResult)]
        return own, frozenset().union(*kept) - own

    def _keep_words(self) -> None:
        node = self._node()
        results = node.results.values() if node is not None else ()
        kept = [result.key_tokens for result in results if isinstance(result, StageResult)]
        tokens = frozenset().union(*kept)
        gone = self._tokens - tokens
        _held.update(tokens - self._tokens)
        self._tokens.clear()
        self._tokens.update(tokens)
        drop_keys(self._session, _release(gone))

    def update(self) -> None:
        """Tells the registry what has changed, and does not wait."""
        node = self._node()
        if self._finalizer is None and node is not None:
            self._finalizer = weakref.finalize(
                node, _let_go, self._session, self.number, self._tokens
            )
            self._finalizer.atexit = False  # the registry ends with its driver
        self._keep_words()
        wanted = self._wanted()
        if wanted == self._told:
            return
        self._told = wanted
        name = getattr(self._node(), "name", "")
        pins, inherited = (sorted(tuple(pin) for pin in some) for some in wanted)
        packed = pack(self.number, name, pins, inherited)
        self._answer = self._session.registry.lineage_open.remote(packed)

    def confirm(self) -> None:
        """Returns when the registry, and with it the homes, know what is pinned.

        Raises:
            ServerUnavailableError, WaitTimeoutError, FreedError: They do not.
        """
        answer, self._answer = self._answer, None
        if answer is not None:
            try:
                await_rpc(answer, self._session.config.control_timeout_s)
            except errors.ClamorError:
                self._told = (frozenset(), frozenset())  # said again the next time
                raise


_of_node = weakref.WeakKeyDictionary()
