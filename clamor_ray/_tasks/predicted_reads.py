"""One call's dealings with the registry about read sets: ask, fetch ahead, note.

Nothing here fails a call, or keeps it waiting for longer than `LOOKUP_S`: a read set is a guess.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from clamor_ray._native.base import Runs
from clamor_ray._objects.memory import cache_budget, memory_bytes
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray._read import opener
from clamor_ray._read.lease import Lease
from clamor_ray._read.ref import GlobalRef
from clamor_ray._tasks.read_predictor import Hinted, encode, runs_to_fetch

if TYPE_CHECKING:
    from clamor_ray._session.session import Session

logger = logging.getLogger("clamor_ray")

LOOKUP_S: Final = 1.0
REQUEST_S: Final = 5.0  # until the page server of this node has taken a request; it does at once
MOST_HERE: Final = 1 << 16

# What this process has noted, by name: which sets, and how often in a row.
_noted: dict[bytes, tuple[int, int]] = {}
MOST_NOTED: Final = 1 << 16

# Versions at which a call of this name was carried out last in this process: all of it is here.
_done: dict[bytes, frozenset[tuple[int, int]]] = {}

_here: set[tuple[str, int]] = set()  # variables that have no home but this node


@contextlib.contextmanager
def _harmless(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as failure:  # any: without the guess the call works as well
        logger.debug("%s: %r", what, failure)


class PredictedReads:
    """See the file's head.

    Args:
        hint: what the caller said.
        refs: the call's references.
    """

    def __init__(self, hint: Hinted, refs: Sequence[GlobalRef[Any]]) -> None:
        self._key = hint.key
        self._session: Session | None = None
        self._answer: Any = None
        self._asked = False
        self._found: dict[int, bytes] = {}
        self._at = frozenset((ref._region, ref.version) for ref in refs if not ref._inline)
        with _harmless("asking for a read set"):
            scope = hint.ref._scope
            session = opener.current(scope)
            if session._pid != os.getpid():  # a fork cannot reach the registry
                return
            self._session = session
            away = [
                ref._region for ref in refs if not ref._inline and (scope, ref._region) not in _here
            ]
            again = hint.again and not (hint.key.sure and _done.get(hint.key.digest) == self._at)
            if again and away:
                self._asked = True
                question = pack(*hint.key, session.server_id, away)
                # A future: `ray.get` would tell Ray that this task is blocked, and Ray would put
                # another one on its CPU.
                self._answer = session.registry.find_reads.remote(question).future()

    @property
    def asked(self) -> bool:
        """Whether the registry was asked, so that `fetch` has something to wait for."""
        return self._asked

    def fetch(self, leases: Sequence[Lease]) -> None:
        """Has the answer's blocks fetched, and does not wait for them."""
        session, answer, self._answer = self._session, self._answer, None
        if session is None or answer is None:
            return
        with _harmless("fetching ahead"):
            cache_bytes, self._found, here = unpack(answer.result(LOOKUP_S))
            if len(_here) > MOST_HERE:
                _here.clear()
            _here.update((session.scope, region) for region in here)
            budget = cache_budget(cache_bytes, memory_bytes(), session.node_id)
            # All variables of the call have a share of the budget together.
            of_call = [lease for lease in leases if lease.region in self._found]
            for lease in of_call:
                length_bytes = lease.mapping.length_bytes
                found = self._found[lease.region]
                runs = runs_to_fetch(found, length_bytes, budget // len(of_call))
                lease.prefetch(runs, wait=False, timeout_s=REQUEST_S)

    def note(
        self, read: Sequence[tuple[int, Runs]], function: str, versions: Mapping[int, int]
    ) -> None:
        """Says what was touched, where that is not known already; waits for nothing.

        Args:
            read: (region, runs) of each variable.
            function: who touched it, for people.
            versions: which of each region.
        """
        if self._session is None:
            return
        if len(_done) >= MOST_NOTED:
            _done.clear()
        _done[self._key.digest] = self._at
        with _harmless("noting a read set"):
            mark = hash(tuple((region, runs.tobytes()) for region, runs in read))
            if self._is_said(mark):
                return
            sets = {region: packed for region, runs in read if (packed := encode(runs)) is not None}
            if sets and sets != self._found:
                self._report(mark)
                who = (function, self._session.node_id, dict(versions))
                self._session.registry.note_reads.remote(pack(self._key.digest, sets, who))

    def _is_said(self, mark: int) -> bool:
        """Whether the registry has heard just that from here, twice in a row: enough for it to know
        that calls of this name repeat. One that asked and was not told has to say it again."""
        last, times = _noted.get(self._key.digest, (0, 0))
        return last == mark and times >= 2 and not self._asked

    def _report(self, mark: int) -> None:
        last, times = _noted.get(self._key.digest, (0, 0))
        if len(_noted) >= MOST_NOTED:
            _noted.clear()
        _noted[self._key.digest] = (mark, times + 1 if last == mark else 1)
