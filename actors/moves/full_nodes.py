"""Makes room on a full node: homes that are used least move to nodes that have room. No Ray.

Who needs memory on a node, and finds too little, asks before it gives up. Where moving homes is
enough, they move (``moves``), and the request goes on. Where it is not, nothing moves, and the
answer comes at once.

Homes do not go back and forth: a taker keeps a part of its memory free (``choices``); a server that
has asked itself takes none, for ``STAY_S``; and what has moved stays for so long.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from clamor_ray._labels import label
from clamor_ray._objects.layout import format_bytes
from clamor_ray._protocol.messages import NodeRoom
from clamor_ray.actors.moves.choices import to_make_room
from clamor_ray.actors.moves.drains import Drains, MovesOne
from clamor_ray.actors.moves.moves import MoveFailed, NoRoom
from clamor_ray.actors.registry.registry_core import RegistryCore

logger = logging.getLogger("clamor_ray.registry")

STAY_S = 60.0
WAIT_SHARE = 0.75  # the rest is for the answer
TRIES = 3  # of choices: a taker may say no
SLACK_BYTES = 8 << 20  # more than is needed: other processes take memory, too
FREE_S = 5.0  # until the giver has let go of what has moved
PAUSE_S = 0.05


class FullNodes:
    """See the file's head.

    Args:
        core: Regions and servers.
        moves: Moves one.
        drains: Which servers take homes, and what each has.
        ask: The room of a server; None: it does not answer.
        timeout_s: How long who needs room waits for the registry.
        label: A variable for people, by its id.
    """

    def __init__(
        self,
        core: RegistryCore,
        moves: MovesOne,
        drains: Drains,
        ask: Callable[[int], Awaitable[NodeRoom | None]],
        timeout_s: float,
        label: Callable[[int], str] = label,
    ) -> None:
        self._core = core
        self._moves = moves
        self._drains = drains
        self._ask = ask
        self._wait_s = WAIT_SHARE * timeout_s
        self._label = label
        self._turns: dict[int, asyncio.Lock] = {}
        self._moved_s: dict[int, float] = {}  # regions, and when they moved for this
        self._full_s: dict[int, float] = {}  # servers, and when they had no room
        self.n_moved = 0  # since the registry began

    async def make_room(
        self, server_id: int, needed_bytes: int, stay: Collection[int] = ()
    ) -> bool:
        """Moves homes off a server, until it has room.

        Args:
            server_id: The server.
            needed_bytes: Of memory.
            stay: Regions that are not to move.

        Returns:
            Whether there is room now.
        """
        try:
            return await asyncio.wait_for(
                self._in_turn(server_id, needed_bytes, stay), self._wait_s
            )
        except asyncio.TimeoutError:
            logger.warning(
                "no room was made on %#x for %s within %g s",
                *(server_id, format_bytes(needed_bytes), self._wait_s),
            )
            return False

    async def _in_turn(self, server_id: int, needed_bytes: int, stay: Collection[int]) -> bool:
        async with self._turns.setdefault(server_id, asyncio.Lock()):
            refused: set[int] = set()
            for _ in range(TRIES):
                rooms = await self._ask_all()
                here = rooms.get(server_id)
                if here is None or here.available_bytes is None:
                    return False
                if here.available_bytes >= needed_bytes:
                    return True
                self._forget_old()
                self._full_s[server_id] = time.monotonic()
                chosen = to_make_room(
                    needed_bytes + SLACK_BYTES - here.available_bytes,
                    [each for each in here.homes if self._is_there(each.region, server_id)],
                    {
                        each: rooms[each]
                        for each in self._drains.others(server_id)
                        if each in rooms and each not in refused and each not in self._full_s
                    },
                    self._drains.load_bytes(),
                    {*stay, *self._moved_s},
                    self._core.apart,  # room is no reason to lose two at once
                )
                if chosen is None:
                    return False
                await self._move_all(server_id, chosen, refused)
                if await self._until_free(server_id, needed_bytes):
                    return True
            return False

    async def _ask_all(self) -> dict[int, NodeRoom]:
        servers = [info.server_id for info in self._core.servers()]
        answers = await asyncio.gather(*map(self._ask, servers))
        return {each: room for each, room in zip(servers, answers, strict=True) if room is not None}

    def _is_there(self, region: int, server_id: int) -> bool:
        return self._core.homes_of(region) == (server_id,)

    def _forget_old(self) -> None:
        since_s = time.monotonic() - STAY_S
        for times_s in (self._moved_s, self._full_s):
            for each in [each for each, at_s in times_s.items() if at_s < since_s]:
                del times_s[each]

    async def _move_all(
        self, server_id: int, chosen: list[tuple[int, int]], refused: set[int]
    ) -> None:
        calls = (self._moves.move(region, taker) for region, taker in chosen)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for (region, taker), outcome in zip(chosen, outcomes, strict=True):
            if isinstance(outcome, NoRoom):
                refused.add(taker)
            elif not isinstance(outcome, BaseException):
                self._moved_s[region] = time.monotonic()
                self.n_moved += 1
                logger.info(
                    "%s has moved to %#x: %#x had no room",
                    *(self._label(region), taker, server_id),
                )
                continue
            elif not isinstance(outcome, MoveFailed):
                raise outcome
            logger.warning("%s does not make room: %s", self._label(region), outcome)

    async def _until_free(self, server_id: int, needed_bytes: int) -> bool:
        deadline_s = time.monotonic() + FREE_S
        while True:
            room = await self._ask(server_id)
            if room is not None and (room.available_bytes or 0) >= needed_bytes:
                return True
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(PAUSE_S)
