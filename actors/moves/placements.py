"""Where the pieces of a new variable go: in turn over all servers. No Ray.

Who makes the variable makes each piece on its own node and seals it; then the piece moves to its
home (``moves``), so no node has more than a few pieces that are not its own. A piece whose home has
no room goes to the server that has the least, and stays where it was made if that one has room.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from clamor_ray import errors
from clamor_ray._labels import capital, label
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import RegionRecord, ServerLost
from clamor_ray._protocol.refusals import NoSuchRegion
from clamor_ray._redundancy.groups import homes_of
from clamor_ray.actors.moves.choices import least_loaded
from clamor_ray.actors.moves.drains import Drains, MovesOne
from clamor_ray.actors.moves.moves import MoveFailed, NoRoom
from clamor_ray.actors.registry.registry_core import RegistryCore

logger = logging.getLogger("clamor_ray.registry")

PAUSE_S = 0.2  # before a piece that could not be moved is tried again
FAILURES = 3  # then another server is tried


class Placements:
    """See the file's head.

    Args:
        core: Regions and servers.
        moves: Moves one.
        drains: Which servers take nothing.
        label: A variable for people, by its id.
    """

    def __init__(
        self,
        core: RegistryCore,
        moves: MovesOne,
        drains: Drains,
        label: Callable[[int], str] = label,
    ) -> None:
        self._core = core
        self._moves = moves
        self._drains = drains
        self._label = label
        self._next = 0  # variables of few pieces begin at different servers
        self._meant: dict[int, dict[int, int]] = {}  # variable with groups -> home of each piece

    def homes(
        self, whole: RegionRecord, maker: int, is_fixed: bool = False, is_here: bool = False
    ) -> tuple[int, ...]:
        """The server that each piece goes to, parity pieces too.

        Args:
            whole: The variable's.
            maker: The server where they are made.
            is_fixed: As in ``Shape``.
            is_here: As in ``PieceLayout``.

        Returns:
            The maker alone, where there is no other, or where it keeps them.
        """
        if is_here:
            return (maker,) * whole.n_pieces
        servers = self._drains.others(0) or [maker]
        first = self._next % len(servers)
        self._next = first + whole.n_pieces
        homes = homes_of(whole.groups, servers, first, is_fixed)
        if whole.group_width:
            self._meant[whole.region] = dict(zip(whole.pieces, homes, strict=True))
        return tuple(homes)

    def forget(self, region: int) -> None:
        """It is gone."""
        self._meant.pop(region, None)

    async def place(self, region: int, home: int, place_s: float) -> None:
        """Moves a piece that is sealed to its home, or to another server that has room.

        Args:
            region: The piece.
            home: The server that it is to be homed at; 0: the one that has the least.
            place_s: How long that may take.

        Raises:
            OutOfMemoryError: No other server has room for it, and it is not to stay.
            NoSuchRegion: It is not there any more, or lost with the server where it was made.
            WaitTimeoutError: It has not been moved in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + place_s
        refused: set[int] = set()
        failed: Counter[int] = Counter()
        may_stay = home != 0  # where it was made, if all others refuse
        why = ""
        while True:
            home = self._taker(region, home, may_stay, refused, why)
            try:
                left_s = max(0.0, deadline - loop.time())
                await asyncio.wait_for(self._moves.move(region, home), left_s)
                return
            except NoRoom as failure:
                why = cause_of(failure)
                refused.add(home)
                home = 0
            except MoveFailed as failure:
                why = cause_of(failure)
                logger.warning("%s is not moved to %#x: %s", self._label(region), home, why)
                failed[home] += 1
                if failed[home] >= FAILURES:  # it may be stopped: others have room, too
                    refused.add(home)
                    home = 0
                await asyncio.sleep(PAUSE_S)
            except asyncio.TimeoutError as failure:
                raise errors.WaitTimeoutError(
                    f"{capital(self._label(region))} has not been moved to its home within "
                    f"{place_s:g} s{why and f': {why}'}."
                ) from failure

    def _home_of(self, region: int) -> int:
        """
        Raises:
            NoSuchRegion: It is not there any more, or its home is lost.
        """
        homes = self._core.homes_of(region)
        if not homes:
            raise NoSuchRegion(f"{self._label(region)}: it was given up")
        if isinstance(lost := self._core.locate(homes[0]), ServerLost):
            raise NoSuchRegion(f"{self._label(region)}: where it was made is lost: {lost.reason}")
        return homes[0]

    def _taker(self, region: int, home: int, may_stay: bool, refused: set[int], why: str) -> int:
        """The home, where that can take it; else the one that has the least of those that can.

        Raises:
            OutOfMemoryError: All have refused.
        """
        maker = self._home_of(region)
        meant = self._meant.get(self._core.whole_of(region), {})
        # Where the others of its group will be, and not where they are made.
        taken = {meant.get(each, 0) for each in self._core.others_of(region)}
        others = [each for each in self._drains.takers(0) if each not in refused]
        if home in others and home not in taken:
            return home
        elsewhere = [each for each in others if each != maker]
        load_bytes = self._drains.load_bytes()
        found = least_loaded([each for each in elsewhere if each not in taken], load_bytes)
        if found is None and may_stay and maker not in taken:
            found = maker
        if found is None:
            found = least_loaded(elsewhere, load_bytes)
        if found is None and may_stay:
            found = maker
        if found is not None:
            if region in meant:
                meant[region] = found
            return found
        raise errors.OutOfMemoryError(
            f"No other node has room for {self._label(region)}{why and f': {why}'}.",
            hint="Free variables, or add nodes.",
        )
