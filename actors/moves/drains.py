"""Moves everything off a server whose node is to go. No Ray.

From its beginning on the server takes no home of others, by moves or rebuilds, while there is
another server; also after its end, and after a restart of the registry; until that is cancelled,
or the server has ended (``departures``). What is put on its node
meanwhile is made there, and moves too.

Each region goes to the server that has the least: the fewest bytes of homes, of regions that were
asked for, whether they hold data or not. Where that one has no room the next one is asked. Those
that are read most go first: the time may be too short for all.

A region that was freed, and is still read by processes of other nodes, cannot move: a drain waits
for them.

If the server is lost meanwhile, what was there at that moment says how the drain ends: a moment
later it is rebuilt elsewhere, and looks as if it had been moved.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._objects.layout import format_bytes
from clamor_ray._protocol.messages import DrainResult, NodeRoom, ServerLost
from clamor_ray._spans.record import span
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.moves.choices import by_use, least_loaded
from clamor_ray.actors.moves.moves import MoveFailed, NoRoom
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore

logger = logging.getLogger("clamor_ray.registry")

BEGUN_AT_ONCE = 4  # of them, some copy, and others wait for their turn or are at their end
PAUSE_S = 0.2  # before a region is tried again
PAUSE_MOST_S = 5.0
REGIONS_SAID = 4
FREED_HINT = (
    "Nothing is lost yet. What was freed cannot move: it goes when those processes let go of their "
    "arrays, or end. If the node goes before that, they end when they read what they have not read "
    "yet. So call clamor.drain again, or undo it by clamor.cancel_drain."
)


class _Lost(Exception):
    """The server was lost before everything was moved off it."""


class MovesOne(Protocol):
    """What of ``Moves`` a drain needs."""

    async def move(self, region: int, taker: int) -> int:
        """See ``Moves.move``."""


@dataclass
class _Drain:
    """One that is under way.

    Args:
        server_id: Everything goes from here.
        load_bytes: Of the homes of each server.
        turns: Of regions: which goes first.
        running: The moves, and whose they are.
        pauses_s: Of regions that could not be moved: how long it takes until they are tried again.
        again_s: When that is.
        refused: Who had no room for a region, since all have last been asked.
        why: What has failed last.
        n_moved: How many were moved.
        n_bytes: What that carried.
    """

    server_id: int
    load_bytes: Counter[int]
    turns: dict[int, int] = field(default_factory=dict)
    running: dict[asyncio.Task[int], tuple[int, int]] = field(default_factory=dict)
    pauses_s: dict[int, float] = field(default_factory=dict)
    again_s: dict[int, float] = field(default_factory=dict)
    refused: dict[int, set[int]] = field(default_factory=dict)
    why: str = ""
    n_moved: int = 0
    n_bytes: int = 0


class Drains:
    """See the file's head.

    Args:
        core: Regions and servers.
        journal: Where it is written which servers leave.
        moves: Moves one.
        label: A variable for people, by its id.
        ask: What a server's homes are used for; None: it does not answer.
    """

    def __init__(
        self,
        core: RegistryCore,
        journal: Journal,
        moves: MovesOne,
        label: Callable[[int], str] = label,
        ask: Callable[[int], Awaitable[NodeRoom | None]] | None = None,
    ) -> None:
        self._core = core
        self._journal = journal
        self._moves = moves
        self._label = label
        self._ask = ask
        # Whether a server is so silent that it may be lost. The registry says how that is known.
        self.is_suspected: Callable[[int], bool] = lambda server_id: False
        self.stayed: Callable[[], object] = lambda: None  # a server takes homes again
        self._leaving: set[int] = set()
        self._turns: dict[int, asyncio.Lock] = {}
        self._running: dict[int, set[asyncio.Task[None]]] = {}
        # What was on servers that were lost while drains of them run, or wait for their turn.
        self._left: dict[int, set[int]] = {}

    def take_back(self, leaving: Iterable[int]) -> None:
        """What the journal has."""
        self._leaving.update(leaving)

    def is_leaving(self, server_id: int) -> bool:
        """Whether it is to get no home of others."""
        return server_id in self._leaving

    @property
    def leaving(self) -> tuple[int, ...]:
        """All that are to get none."""
        return tuple(sorted(self._leaving))

    def is_running(self, server_id: int) -> bool:
        """Whether homes are moved off it now."""
        return bool(self._running.get(server_id))

    def others(self, server_id: int) -> list[int]:
        """Who can take its homes."""
        return [
            info.server_id
            for info in self._core.servers()
            if info.server_id != server_id and info.server_id not in self._leaving
        ]

    def takers(self, server_id: int) -> list[int]:
        """Who of them should: not who is so silent that it may be lost, while there are others."""
        others = self.others(server_id)
        return [each for each in others if not self.is_suspected(each)] or others

    async def drain(
        self, server_id: int, node_id: str, timeout_s: float, is_idle: bool = False
    ) -> DrainResult:
        """Moves all homes off a server. A second call, also at the same time, does what is left.

        Args:
            server_id: The server.
            node_id: Its node, for people.
            timeout_s: For all of it.
            is_idle: Because nothing uses it; nobody has asked for it.

        Raises:
            NoOtherNodeError: There is no other server that could take what is there. Nothing has
                changed.
            DrainTimeoutError: Something is there still.
            DrainCancelledError: See ``cancel``.
            NodeLostError: The server was lost meanwhile, with something on it.
            JournalFullError: Nothing has changed.
        """
        began_s = time.monotonic()
        if not self.others(server_id) and self._stays(server_id):
            raise errors.NoOtherNodeError(
                f"Node {node_id} cannot be drained: no other node of the session can take what it "
                "has."
            )
        self._journal.leave(server_id, is_idle)
        self._leaving.add(server_id)
        drain = _Drain(server_id, self.load_bytes())
        turn = self._turns.setdefault(server_id, asyncio.Lock())
        work = asyncio.ensure_future(self._in_turn(turn, drain))
        self._running.setdefault(server_id, set()).add(work)
        if isinstance(self._core.locate(server_id), ServerLost) and server_id not in self._left:
            self._left[server_id] = self._stays(server_id)  # but for what is rebuilt already
        try:
            with span("", "drain", node=node_id):
                await asyncio.wait_for(work, timeout_s)
        except asyncio.TimeoutError:
            if self._left.get(server_id):
                self._raise_lost(drain, node_id)
            if server_id not in self._left and self._stays(server_id):
                self._raise_late(drain, node_id, timeout_s)
        except _Lost:
            self._raise_lost(drain, node_id)
        except asyncio.CancelledError:
            if server_id in self._leaving:
                raise  # it is who asked that goes
            raise errors.DrainCancelledError(
                f"The drain of node {node_id} was cancelled: {drain.n_moved} variables were moved."
            ) from None
        finally:
            self._running[server_id].discard(work)
            if server_id in self._left:
                self._leaving.discard(server_id)  # which a drain that began later has added again
                if not self._running[server_id]:
                    del self._left[server_id]
        return DrainResult(drain.n_moved, drain.n_bytes, time.monotonic() - began_s)

    def _stays(self, server_id: int) -> set[int]:
        """What is there that has to go first."""
        return {*self._core.homed_at(server_id), *self._read_elsewhere(server_id)}

    def cancel(self, server_id: int) -> bool:
        """The server takes homes again. Drains of it that run raise ``DrainCancelledError``; a move
        that the journal has ends by itself.

        Returns:
            Whether it was leaving.

        Raises:
            JournalFullError: Nothing has changed.
        """
        if server_id not in self._leaving:
            return False
        self._journal.stay(server_id)
        self._leaving.discard(server_id)
        for work in self._running.get(server_id, ()):
            work.cancel()
        self.stayed()
        return True

    def lost(self, server_id: int) -> None:
        """It is lost, or has left. To be called before anything of it gets another home."""
        self._leaving.discard(server_id)
        if self.is_running(server_id):
            self._left[server_id] = self._stays(server_id)

    async def _in_turn(self, turn: asyncio.Lock, drain: _Drain) -> None:
        async with turn:
            try:
                drain.turns = await self._turns_of(drain.server_id)
                await self._move_all(drain)
            finally:
                for task in drain.running:
                    task.cancel()
                await asyncio.gather(*drain.running, return_exceptions=True)
                for region, taker in drain.running.values():  # it is written, and ends by itself
                    drain.n_moved += taker in self._core.homes_of(region)

    async def _turns_of(self, server_id: int) -> dict[int, int]:
        room = await self._ask(server_id) if self._ask is not None else None
        order = by_use(room.homes) if room is not None else []
        return {region: turn for turn, region in enumerate(order)}

    async def _move_all(self, drain: _Drain) -> None:
        while True:
            under_way = {region for region, _ in drain.running.values()}
            there = [each for each in self._core.homed_at(drain.server_id) if each not in under_way]
            is_lost = drain.server_id in self._left
            if is_lost and not drain.running:
                if self._left[drain.server_id]:
                    raise _Lost
                return
            if not (there or drain.running or self._read_elsewhere(drain.server_id)):
                return
            now_s = time.monotonic()
            there.sort(key=lambda region: drain.turns.get(region, len(drain.turns)))
            for region in there:
                if is_lost or len(drain.running) >= BEGUN_AT_ONCE:
                    break
                if drain.again_s.get(region, 0.0) <= now_s:
                    self._begin(drain, region)
            if drain.running:
                await asyncio.wait(
                    drain.running, timeout=PAUSE_S, return_when=asyncio.FIRST_COMPLETED
                )
            else:
                await asyncio.sleep(PAUSE_S)
            for task in [task for task in drain.running if task.done()]:
                self._end(drain, task)

    def _begin(self, drain: _Drain, region: int) -> None:
        refused = drain.refused.setdefault(region, set())
        left = [each for each in self.takers(drain.server_id) if each not in refused]
        taker = least_loaded(self._core.apart(region, left) or left, drain.load_bytes)
        if taker is None:
            drain.why = drain.why if refused else "there is no other node any more"
            refused.clear()  # they may have room by and by
            self._put_off(drain, region)
            return
        drain.load_bytes[taker] += self._length_bytes(region)
        heading = contextlib.ExitStack()  # from now on: the move begins a moment later
        heading.enter_context(self._core.heading(region, taker))
        task = asyncio.ensure_future(self._moves.move(region, taker))
        task.add_done_callback(lambda _: heading.close())
        drain.running[task] = region, taker

    def _end(self, drain: _Drain, task: asyncio.Task[int]) -> None:
        region, taker = drain.running.pop(task)
        try:
            drain.n_bytes += task.result()
            drain.n_moved += 1
            # A taker that had everything at the loss becomes the home.
            self._left.get(drain.server_id, set()).discard(region)
            return
        except NoRoom as failure:
            drain.refused[region].add(taker)
            drain.why = str(failure)
        except MoveFailed as failure:
            drain.why = str(failure)
            self._put_off(drain, region)
        except Exception as failure:  # any: the others go on
            logger.exception("moving variable %d", region)
            drain.why = repr(failure)
            self._put_off(drain, region)
        drain.load_bytes[taker] -= self._length_bytes(region)
        logger.warning("variable %d is not moved to %#x: %s", region, taker, drain.why)

    def _put_off(self, drain: _Drain, region: int) -> None:
        pause_s = drain.pauses_s.get(region, PAUSE_S)
        drain.pauses_s[region] = min(2 * pause_s, PAUSE_MOST_S)
        drain.again_s[region] = time.monotonic() + pause_s

    def _read_elsewhere(self, server_id: int) -> list[int]:
        """Regions that were freed, whose home there processes of other nodes may still read."""
        freed = self._core.homed_at(server_id, RegionState.FREED)
        return [region for region in freed if self._core.waits_for(region) - {server_id}]

    def _length_bytes(self, region: int) -> int:
        record = self._core.record_of(region)
        return record.length_bytes if record is not None else 0

    def load_bytes(self) -> Counter[int]:
        """The bytes of all homes, by server."""
        load_bytes: Counter[int] = Counter()
        for record in self._core.ready_regions():
            for home in record.homes[:1]:  # a variable in pieces has none itself
                load_bytes[home] += record.length_bytes
        return load_bytes

    def _raise_late(self, drain: _Drain, node_id: str, timeout_s: float) -> NoReturn:
        what = []
        if stays := self._core.homed_at(drain.server_id):
            what.append(f"{self._list(stays)} {'are' if len(stays) > 1 else 'is'} still there")
        if freed := self._read_elsewhere(drain.server_id):
            what.append(
                f"{self._list(freed)} {'were' if len(freed) > 1 else 'was'} freed, and processes "
                "of other nodes still have what get gave them"
            )
        raise errors.DrainTimeoutError(
            f"Node {node_id} has not been drained within {timeout_s:g} s: {'; '.join(what)}"
            f"{drain.why and f'; the last failure: {drain.why}'}.",
            hint=FREED_HINT if freed else None,
        )

    def _raise_lost(self, drain: _Drain, node_id: str) -> NoReturn:
        left = sorted(self._left[drain.server_id])
        found = self._core.locate(drain.server_id)
        why = found.reason if isinstance(found, ServerLost) else ""
        raise errors.NodeLostError(
            f"Node {node_id} was lost while it was drained ({why}): {self._list(left)} "
            f"{'were' if len(left) > 1 else 'was'} still there. Moved before: {drain.n_moved}."
        )

    def _list(self, regions: Sequence[int]) -> str:
        some = ", ".join(map(self._label, regions[:REGIONS_SAID]))
        more = len(regions) - REGIONS_SAID
        n_bytes = format_bytes(sum(map(self._length_bytes, regions)))
        return f"{some}{f' and {more} more' if more > 0 else ''} ({n_bytes})"
