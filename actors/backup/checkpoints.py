"""The registry's part of a checkpoint: one version of every variable, all of one moment.

Commits are decided one after the other on the registry's loop. ``begin`` looks at all variables and
pins what it sees before anything else runs on that loop: so of a transaction over several variables
it has all or nothing, and what later commits replace stays readable, as it does for collections.

Who makes the checkpoint says every now and then that it is at work (``keep``). If it says nothing
for ``SILENCE_S``, it has died, and what only it needed may go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final, Protocol

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._labels import capital
from clamor_ray._protocol.idempotency import key_kept_in
from clamor_ray._protocol.messages import INLINE_BASE, CheckpointVariable, Latest, VariableRecord
from clamor_ray._protocol.rpc import pack
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.lost_homes.lost_blocks import LostBlocks
from clamor_ray.actors.lost_homes.watched_calls import Examined, watched
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.registry_core import RegistryCore

logger = logging.getLogger("clamor_ray.registry")

SILENCE_S: Final = 300.0
HOME_SHARE: Final = 0.8  # of the caller's time; the rest is for the answer
PAUSE_S: Final = 0.1


class Homes(Examined, Protocol):
    """What of the page servers is asked."""

    async def home_blocks(self, giver: int, region: int, version: int) -> bytes:
        """The blocks of a home that hold data at a version: a serialized BitMap."""


class HomeTeller(Protocol):
    """What of ``Commits`` is needed."""

    async def tell_now(self, home: int) -> None:
        """Tells a home once of what it has not acknowledged."""


class Variables(Protocol):
    """What of ``VariableNames`` is needed."""

    def variables(self) -> list[VariableRecord]:
        """All variables that can be opened and that the registry knows."""

    def label(self, region: int) -> str:
        """A variable for people."""


class PinHolder(Protocol):
    """What of ``LineageService`` is needed."""

    async def open(self, packed: bytes) -> None:
        """These snapshots stay readable: ``pack(number, description, [(region, version)])``."""

    async def close(self, collections: Iterable[int]) -> None:
        """What only they needed may go."""


class LossLookup(Protocol):
    """What of ``Versions`` is needed."""

    def lost_blocks(self, region: int) -> LostBlocks | None:
        """Which blocks of a variable are lost, if any are."""

    def why_lost(self, region: int) -> errors.HomeLostError | None:
        """Why the variable, or blocks of it, are lost, if they are."""


class Checkpoints:
    """See the file's head. Coroutines of the registry's loop.

    Args:
        core: Knows the regions and their homes.
        log: Their versions.
        variables: Their names.
        pins: What keeps versions.
        losses: What of them is lost.
        homes: The page servers.
        commits: Tells these what is decided.
        timeout_s: What a call of a session has.
    """

    def __init__(
        self,
        core: RegistryCore,
        log: CommitLog,
        variables: Variables,
        pins: PinHolder,
        losses: LossLookup,
        homes: Homes,
        commits: HomeTeller,
        timeout_s: float,
    ) -> None:
        self._core = core
        self._log = log
        self._variables = variables
        self._pins = pins
        self._losses = losses
        self._homes = homes
        self._commits = commits
        self._timeout_s = timeout_s
        self._silent: dict[int, asyncio.TimerHandle] = {}
        self._background = BackgroundTasks(logger)

    # -- which versions

    async def begin(self, number: int) -> tuple[CheckpointVariable, ...]:
        """All variables at their newest versions, which stay readable until the checkpoint is over.

        Args:
            number: Of the checkpoint, 63 random bits. What it had before counts no more.

        Raises:
            WaitTimeoutError: A page server has not said in time that it keeps them.
            JournalFullError: They would not stay after a restart of the registry.
        """
        found = tuple(self._now())
        pins = [(each.latest.region, each.latest.version) for each in found]
        self.keep(number, SILENCE_S)
        await self._pins.open(pack(number, "a checkpoint", pins))  # pinned before it waits
        return found

    def _now(self) -> Iterable[CheckpointVariable]:
        named = {each.region: each for each in self._variables.variables()}
        for region in self._log.open_variables():
            record = self._core.record_of(region)
            if region >= INLINE_BASE:
                latest = self._log.latest(region)
                if key_kept_in(region, latest.payload) is None:
                    yield self._variable(latest, named.pop(region, None))
            elif record is not None and not record.piece_of and region in named:
                yield self._variable(self._log.latest(region), named.pop(region))
        for each in named.values():  # inline ones that no commit has changed
            yield self._variable(each.latest, each)

    def _variable(self, latest: Latest, known: VariableRecord | None) -> CheckpointVariable:
        region = latest.region
        regions = self._log.pieces_of(region) or (region,)
        homes = [next(iter(self._core.homes_of(each)), 0) for each in regions]
        return CheckpointVariable(
            latest=latest,
            record=self._core.record_of(region),
            names=known.names if known is not None else (),
            packed=known.packed if known is not None else None,
            nodes=tuple(self._core.node_of(home) or "" for home in homes),
        )

    def keep(self, number: int, keep_s: float) -> None:
        """Whoever makes the checkpoint is at work.

        Args:
            number: Of the checkpoint.
            keep_s: For so long, if nothing more is said; 0: it is over.
        """
        if (timer := self._silent.pop(number, None)) is not None:
            timer.cancel()
        if keep_s > 0:
            loop = asyncio.get_running_loop()
            self._silent[number] = loop.call_later(keep_s, self._over, number)
        else:
            self._over(number)

    def _over(self, number: int) -> None:
        self._silent.pop(number, None)
        self._background.spawn(self._pins.close([number]))

    # -- which blocks

    async def data_blocks(self, region: int, version: int) -> bytes:
        """The blocks of a variable that hold data at a version; all others are zeros. It may be
        more, never less.

        Args:
            region: Its id.
            version: Its version.

        Returns:
            A serialized BitMap; blocks count from the variable's first byte.

        Raises:
            FreedError, NoVersionError, SnapshotExpired: There is no such version (any more).
            HomeLostError: Blocks of it are lost.
            WaitTimeoutError: A home has not answered in time.
        """
        if (lost := self._losses.why_lost(region)) is not None:
            raise lost
        record = self._core.record_of(region)
        if record is not None and record.in_file:  # its home has what was written, and no more
            return bytes(BitMap(range(self._log.n_blocks(region))).serialize())
        deadline = asyncio.get_running_loop().time() + HOME_SHARE * self._timeout_s
        pieces = self._log.data_of(region)
        if not pieces:
            return bytes((await self._of_home(region, version, deadline)).serialize())
        found = await asyncio.gather(
            *(
                self._of_home(piece, at, deadline)
                for piece, at in zip(pieces, self._log.row(region, version), strict=False)
            )
        )
        blocks, first_block = BitMap(), 0
        for piece, of_piece in zip(pieces, found, strict=True):
            blocks |= of_piece.shift(first_block)
            first_block += self._log.n_blocks(piece)
        return bytes(blocks.serialize())

    async def _of_home(self, region: int, version: int, deadline: float) -> BitMap:
        """Of a region with a home, which may be lost or move meanwhile: then the next one says."""
        loop = asyncio.get_running_loop()
        why: Exception | None = None
        while (left_s := deadline - loop.time()) > 0:
            homes = self._core.homes_of(region)
            if not homes:
                raise errors.FreedError(
                    f"{capital(self._variables.label(region))} was freed while it was copied."
                )
            (home,) = homes
            try:
                if isinstance(why, errors.NoVersionError):
                    await watched(self._homes, home, self._commits.tell_now(home), left_s)
                call = self._homes.home_blocks(home, region, version)
                found = BitMap.deserialize(await watched(self._homes, home, call, left_s))
            except errors.SnapshotExpired:
                raise
            except asyncio.TimeoutError:
                break
            except Exception as failure:  # any: it is told, or it is the home no more, or not yet
                why = failure
                if (lost := self._losses.why_lost(region)) is not None:
                    raise lost from None
            else:
                # A home that was made again meanwhile says nothing of blocks that it lacks.
                if (lost := self._losses.why_lost(region)) is not None:
                    raise lost
                return found
            await asyncio.sleep(PAUSE_S)
        raise errors.WaitTimeoutError(
            f"The home of {self._variables.label(region)} has not said in time which of its blocks "
            "hold data.",
            hint="Try again in a moment.",
        ) from why

    async def close(self) -> None:
        """Ends what runs."""
        for timer in self._silent.values():
            timer.cancel()
        self._silent.clear()
        await self._background.end()


class CheckpointCalls:
    """Calls of the registry that a checkpoint makes; the registry has them beside its own."""

    _checkpoints: Checkpoints

    async def begin_checkpoint(self, number: int) -> tuple[CheckpointVariable, ...]:
        """See ``Checkpoints.begin``."""
        return await self._checkpoints.begin(number)

    async def keep_checkpoint(self, number: int, keep_s: float) -> None:
        """See ``Checkpoints.keep``."""
        self._checkpoints.keep(number, keep_s)

    async def data_blocks(self, region: int, version: int) -> bytes:
        """See ``Checkpoints.data_blocks``."""
        return await self._checkpoints.data_blocks(region, version)
