"""In: spans of this node's processes; the engine's counters. Out: what `clamor timeline` asks for.

Each process sends what took it long (`_session/span_sender.py`). What faults wait the engine
counts anyway, by variable and by process: here it is looked at twice a second, off the way of
faults. So a span of it says: so long have faults waited between two looks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final, Generic, Protocol, TypeVar

from clamor_ray._protocol.messages import ServerConfig
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray._spans import record
from clamor_ray._spans.record import KEPT_NS, LEAST_NS, Span, thinned

logger = logging.getLogger("clamor_ray.page_server")

INTERVAL_S: Final = 0.5
SHARE: Final = 1000  # a look takes one part in so many of a core's time
MOST: Final = 16_384  # of all processes of the node
FAULT_WAIT: Final = "faults wait for"  # a variable
PROCESS_WAIT: Final = "faults wait"
THREAD: Final = "faults"  # a row of their own: they begin and end with a look

_Key = TypeVar("_Key", bound=Hashable)


class _Engine(Protocol):
    def region_stats(self) -> Iterable[Mapping[str, int]]: ...
    def process_waits(self) -> Iterable[Mapping[str, int]]: ...


def _unnamed(pid: int) -> str:
    return f"process {pid}" if pid else "processes of other namespaces"


class KeptSpans:
    """What this node's processes have sent. Safe from any thread.

    Args:
        most: that are kept; beyond that some are left out (`record.thinned`).
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._spans: dict[tuple[str, int], list[Span]] = {}  # by process
        self._n = 0

    def add(self, process: str, pid: int, spans: Iterable[Span]) -> None:
        """Spans of a process.

        Args:
            process: what it is called; "": as it calls itself when it sends something.
            pid, spans: its.
        """
        with self._lock:
            new = list(spans)
            self._spans.setdefault((process, pid), []).extend(new)
            self._n += len(new)
            if self._n > self._most:
                self._thin()

    def _thin(self) -> None:
        everything = [each for spans in self._spans.values() for each in spans]
        # Half of the room is free then: it is not done for each span that comes.
        kept = set(map(id, thinned(everything, self._most // 2, time.time_ns())))
        self._spans = {
            who: left
            for who, spans in self._spans.items()
            if (left := [each for each in spans if id(each) in kept])
        }
        self._n = len(kept)

    def all(self, now_ns: int) -> list[tuple[str, int, list[Span]]]:
        """(process, its pid, its spans of the last hour) of each; this process is called "".

        Args:
            now_ns: since the epoch of Unix.
        """
        since_ns = now_ns - KEPT_NS
        with self._lock:
            names = {os.getpid(): "", **{pid: process for process, pid in self._spans if process}}
            return [
                (
                    process or names.get(pid, _unnamed(pid)),
                    pid,
                    [each for each in spans if each.start_ns + each.duration_ns >= since_ns],
                )
                for (process, pid), spans in self._spans.items()
            ]


class FaultWaits(Generic[_Key]):
    """What counters of faults have grown by, between two looks. Of one thread.

    Args:
        began_ns: when all was 0, since the epoch of Unix.
        of_ended: whether they count what has waited and waits no more; else what waits still, too.
    """

    def __init__(self, began_ns: int, *, of_ended: bool) -> None:
        self._of_ended = of_ended
        self._last: dict[_Key, tuple[int, int]] = {}  # faults, what they have waited
        self._looked_ns = began_ns

    def look(self, counters: Mapping[_Key, Mapping[str, int]], now_ns: int) -> dict[_Key, Span]:
        """Spans of those that have waited for a millisecond or more.

        Args:
            counters: `faults` and `fault_wait_ns`, of whatever has them.
            now_ns: as `began_ns`.
        """
        began_ns, self._looked_ns = self._looked_ns, now_ns
        last, self._last = self._last, {}
        found = {}
        for key, each in counters.items():
            faults, wait_ns = self._last[key] = (each["faults"], each["fault_wait_ns"])
            old_faults, old_wait_ns = last.get(key, (0, 0))
            n_faults, waited_ns = max(0, faults - old_faults), wait_ns - old_wait_ns
            if waited_ns >= LEAST_NS:
                duration_ns = now_ns - began_ns
                if self._of_ended and n_faults > 0:  # they may have begun before the last look
                    duration_ns = max(duration_ns, waited_ns // n_faults)
                details = {"faults": n_faults, "wait_ms": waited_ns / 1e6}
                found[key] = Span(
                    name=FAULT_WAIT,
                    start_ns=now_ns - duration_ns,
                    duration_ns=duration_ns,
                    thread=THREAD,
                    details=details,
                )
        return found


class Looks:
    """At the engine's counters: spans of variables, and of processes. Of one thread.

    Args:
        engine: whose.
        now_ns: since the epoch of Unix.
    """

    def __init__(self, engine: _Engine, now_ns: int) -> None:
        self._engine = engine
        self._regions: FaultWaits[int] = FaultWaits(now_ns, of_ended=False)
        self._processes: FaultWaits[tuple[int, int]] = FaultWaits(now_ns, of_ended=True)

    def look(self, now_ns: int) -> None:
        """Args: now_ns: as above."""
        regions = {each["region"]: each for each in self._engine.region_stats()}
        for region, found in self._regions.look(regions, now_ns).items():
            details = {**found.details, "region": region}
            _of_node.add("", os.getpid(), [found._replace(details=details)])
        clients = {(each["pid"], each["client"]): each for each in self._engine.process_waits()}
        for (pid, _), found in self._processes.look(clients, now_ns).items():
            _of_node.add("", pid, [found._replace(name=PROCESS_WAIT)])


def start(engine: _Engine, config: ServerConfig) -> Callable[[], None]:
    """Looks at the engine, on a thread of its own, until what this returns is called."""
    over = threading.Event()
    if not config.has_spans:
        return over.set
    record.here.begin("")
    looks = Looks(engine, time.time_ns())

    def work() -> None:
        pause_s = 0.0
        has_failed = False
        while not over.wait(max(INTERVAL_S, pause_s)):
            began_s = time.thread_time()
            try:
                looks.look(time.time_ns())
            except Exception as failure:  # the engine has been closed, or it is short of memory
                if not (over.is_set() or has_failed):
                    logger.warning("waits of faults are not recorded just now: %r", failure)
                has_failed = True
            pause_s = SHARE * (time.thread_time() - began_s)

    threading.Thread(target=work, name="clamor-faults", daemon=True).start()
    return over.set


_of_node: Final = KeptSpans()


class NodeSpans:
    """Calls of a page server."""

    def note_spans(self, packed: bytes) -> None:
        """A process of this node has something new.

        Args:
            packed: as ``rpc.pack`` makes it: what it is called, its pid, its spans as tuples.
        """
        process, pid, spans = unpack(packed)
        if record.here.keeps(""):
            _of_node.add(process, pid, map(Span._make, spans))

    def spans(self) -> bytes:
        """All there are: of this process, whose name is "", and of the node's others.

        Returns:
            As packed: a list of (process, pid, spans as tuples).
        """
        # Which thread of this process has done it is nothing to people.
        own = [each._replace(thread="") for each in record.here.spans()]
        found = [("", os.getpid(), own), *_of_node.all(time.time_ns())]
        return pack([(who, pid, [tuple(each) for each in spans]) for who, pid, spans in found])
