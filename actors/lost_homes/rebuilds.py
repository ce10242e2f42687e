"""Gives regions whose home is lost another one. No Ray.

One region:

    what is left  -> every living page server says which blocks of which versions it has
    plan          -> ``rebuild_plan.plan``: what comes from whom, and what from the source
    layers        -> servers stage what they are to give
    source        -> runs on the new home's node, if it is needed, and is waited for here
    new home      -> pulls all that, and keeps it; nobody is served from it yet
    journal       -> from here on it is the home
    told          -> the new home; then whoever waits for the region

It is begun when a home is found to be lost, or when somebody asks for such a region, and runs once
at a time for each. Where it fails for now (a server that gives is restarted or lost, the new home
is lost or has no room, blocks were evicted meanwhile) it begins again, ``TRIES`` times; then it is
put off until somebody asks for the region. Blocks that are on no node, and that no source makes,
are lost; the rest is rebuilt. Only where nothing at all is left the region is lost for good, and
everybody gets the same ``HomeLostError``. A piece of a variable is rebuilt even then, with all of
its blocks lost: the variable's other pieces are read as before.

``AT_ONCE`` of them are under way at a time, and as many that a group makes again, whose pace is
limited. Of those that wait for their turn, the one that was asked for most often since its home was
lost is next (commits, and page servers whose readers wait, which ask again and again): so what is
read most. Of those that nobody has asked for, the first of the lost home's regions is next.

One whose source runs, or whose new home is to be told, is not counted, and holds up no other. No
page server waits for a source: it is called when the object is there. ``SOURCES_AT_ONCE`` run at a
time on a node, and homes that are equally good are taken in turn, so that sources spread.

No commit can be made meanwhile, for want of a home. Thread safety: all is of one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._labels import capital
from clamor_ray._protocol.messages import (
    BLOCK_BYTES,
    CommitRequest,
    Pinned,
    RegionRecord,
    ServerLost,
)
from clamor_ray._protocol.refusals import NO_ROOM
from clamor_ray._protocol.source import CALL, Source
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import no_room
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes import rebuild_plan
from clamor_ray.actors.lost_homes.attempts import Again, Attempts, Calls
from clamor_ray.actors.lost_homes.lost_blocks import BlockLoss, Losses, LostBlocks, together
from clamor_ray.actors.lost_homes.rebuild_servers import ASK_S, Servers, all_holdings
from clamor_ray.actors.lost_homes.repairs import LAYER_BLOCKS, GiverFull, Repairs
from clamor_ray.actors.lost_homes.unheard_homes import UnheardHomes
from clamor_ray.actors.lost_homes.watched_calls import TELL_S, told_in_the_end
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.process.byte_rate import ByteRate
from clamor_ray.actors.process.turns import Turns
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore
from clamor_ray.actors.store.stored_homes import StoredHomes

logger = logging.getLogger("clamor_ray.registry")

TRIES = 12
PAUSE_S = 0.1
PAUSE_MOST_S = 5.0
PUT_OFF_S = 30.0  # of a piece that others of its group may need
STAGE_S = 120.0
REBUILD_S = 900.0
REHOME_S = 5.0  # who asks for a new home waits so long for each answer
AT_ONCE = 4
SOURCES_AT_ONCE = 4  # on a node
SOURCE_S = 600.0
COMMITS_SAID = 1000  # layers of older ones have been resolved for long


class Rebuilds:
    """See the file's head.

    Args:
        core: Regions and servers.
        log: Versions and changes.
        journal: Where a new home is written first.
        servers: The page servers.
        rehomed: Is told the id of a page server that is the home of more than before.
        losses: What is lost of which regions.
        unheard: Whose new home may not have heard that it is that.
        is_leaving: Whether a server is to give its homes away: no region comes to it while there
            is another one.
        make_room: Has homes moved off a server until it has so many bytes of memory.
        is_suspected: Whether a server is so silent that it may be lost: no rebuild begins there
            while there is another one.
        repair_bytes_s: What all repairs together read of others in a second; 0: there is no limit.
        stored: Of which lost homes a directory of a store has everything.
    """

    def __init__(
        self,
        core: RegistryCore,
        log: CommitLog,
        journal: Journal,
        servers: Servers,
        rehomed: Callable[[int], object] = lambda server_id: None,
        losses: Losses | None = None,
        unheard: UnheardHomes | None = None,
        is_leaving: Callable[[int], bool] = lambda server_id: False,
        is_suspected: Callable[[int], bool] = lambda server_id: False,
        make_room: Callable[[int, int], Awaitable[bool]] = no_room,
        repair_bytes_s: int = 0,
        stored: StoredHomes | None = None,
    ) -> None:
        self._core = core
        self._log = log
        self._journal = journal
        self._servers = servers
        self._rehomed = rehomed
        self._is_leaving, self._is_suspected = is_leaving, is_suspected
        self._losses = losses if losses is not None else Losses()
        self._losses.healed = self._tell_all
        self._activating = unheard if unheard is not None else UnheardHomes()
        self._stored = stored or StoredHomes(core, log, journal, self._losses, self._activating)
        self._stored.when_back, self._stored.when_damaged = self._came_back, self._is_hollow
        self._sources: dict[int, Source] = {}
        self._shared: dict[int, tuple[Pinned, list[Any]]] = {}
        self._hollow: dict[int, int] = {}  # region -> its home, which lives and has nothing of it
        self._staged: set[int] = set()  # commit ids of layers that running rebuilds wait for
        self._running: dict[int, asyncio.Task[None]] = {}
        self._make_room = make_room
        self._lost: dict[int, errors.HomeLostError] = {}
        self._put_off: dict[int, str] = {}  # what has failed last
        self._turns = Turns(AT_ONCE), Turns(AT_ONCE)  # of those in a group the second
        self._sources_of: dict[int, asyncio.Semaphore] = {}  # by the node's page server
        self._rebuilt: dict[int, int] = {}  # region -> the home that it has got
        self._load: Counter[int] = Counter()  # regions that a server has got, or is to get
        self._background = BackgroundTasks(logger)
        spawn = self._background.spawn
        calls = Calls(servers)
        self._watched, self._needed, self._say = calls.watched, calls.needed, calls.say
        rate = ByteRate(repair_bytes_s)
        self._repairs = Repairs(core, log, servers, self._losses, self._staged, spawn, rate)
        self.repair_set, self.n_degraded = self._repairs.repair_set, self._repairs.n_degraded

    # -- what is known of regions

    def set_source(self, region: int, source: Source) -> None:
        """How the region's version 0 is made again."""
        self._sources[region] = source

    def has_file(self, region: int) -> bool:
        """Whether its version 0 is a file: no home need keep it."""
        return (record := self._core.record_of(region)) is not None and record.in_file

    def set_shared(self, region: int, pinned: Pinned, object_refs: list[Any]) -> None:
        """The region is this Ray object's content at version 0."""
        self._shared[region] = (pinned, object_refs)

    def shared_at(self, server_id: int) -> list[tuple[Pinned, list[Any]]]:
        """What a page server has to pin again when it is restarted. A region that was rebuilt is no
        Ray object any more, and one that is lost for good is nothing."""
        return [
            (pinned, object_refs)
            for region, (pinned, object_refs) in self._shared.items()
            if pinned.record.homes[0] == server_id
            and region not in self._rebuilt
            and region not in self._lost
        ]

    def _set_rebuilt(self, region: int, home: int | None) -> None:
        if (before := self._rebuilt.pop(region, None)) is not None:
            self._load[before] -= 1
        if home is not None:
            self._rebuilt[region] = home
            self._load[home] += 1

    def moved(self, region: int, home: int) -> None:
        """The region has moved to this home, which has all that the one before had."""
        self._set_rebuilt(region, home)
        self._hollow.pop(region, None)
        self._put_off.pop(region, None)

    def _came_back(self, region: int, home: int) -> None:
        """The home has all of it, and knows that it is that; who does not hear of it asks."""
        self.moved(region, home)
        self._tell_all(region)

    def _is_hollow(self, region: int, home: int) -> None:
        if self._core.others_of(region):
            self._hollow[region] = home
            self._begin(region, self._rebuild(region))

    def forget(self, region: int) -> None:
        """It is gone."""
        self._set_rebuilt(region, None)
        self._sources.pop(region, None)
        self._shared.pop(region, None)
        self._lost.pop(region, None)
        self._hollow.pop(region, None)
        self._put_off.pop(region, None)
        self._losses.forget(region)
        self._stored.forget(region)

    # -- events

    def server_lost(self, server_id: int) -> None:
        """Begins to rebuild what was homed there."""
        for region in self._core.homed_at(server_id):
            self._begin(region, self._rebuild(region))

    def activate(self, regions: Iterable[int], lost: Iterable[int] = ()) -> None:
        """After a restart of the registry: new homes may not have heard that they are that, and
        nobody may ask for what was homed at servers that were lost before."""
        for region in regions:
            if (record := self._core.record_of(region)) is not None:
                self._set_rebuilt(region, record.homes[0])
            if self._core.state(region) is RegionState.READY and not self._why(region):
                self._activating.add(region)
                self._begin(region, self._activate_again(region))
        for server_id in lost:
            self.server_lost(server_id)
        self._background.spawn(self._repairs.look_for_stale_parity(self._make_parities_again))

    def verdict(self, region: int) -> errors.HomeLostError | None:
        """Why all of the region is lost for good, if it is; or away, in a directory of a store."""
        return self._lost.get(region) or self._stored.error(region)

    def why_lost(self, region: int) -> errors.HomeLostError | None:
        """Why the region, or blocks of it, are lost, if they are."""
        if (verdict := self.verdict(region)) is not None:
            return verdict
        found = self._losses.of(region)
        return found.error(self._log.label(region)) if found is not None else None

    def lost_blocks(self, region: int) -> LostBlocks | None:
        """Which blocks of its newest version are lost, if any are. All of it: see ``verdict``."""
        return self._losses.of(region)

    async def settle(self, region: int, timeout_s: float) -> bool:
        """Waits until the region has a home that serves, or is not there any more.

        Returns:
            Whether it is so; False: the time is over, or it is put off: the next call begins it
            again.

        Raises:
            HomeLostError: It is lost for good, or away still.
        """
        if self._core.state(region) is not RegionState.READY:
            return True
        await self._stored.until_back(region, timeout_s)
        if self._why(region):  # who had it before it moved may still have all of it
            await self._activating.moving.until_over(region, timeout_s)
        if self._why(region) and region not in self._lost:
            if timeout_s > 0:
                self._turns_of(region).ask(region)
            self._begin(region, self._rebuild(region))
        if (running := self._running.get(region)) is not None:
            await asyncio.wait({running}, timeout=timeout_s)
            if not running.done():
                return False
        if (lost := self._lost.get(region)) is not None:
            raise lost
        return not self._why(region)

    async def settle_all(self, request: CommitRequest, deadline: float) -> None:
        """``settle`` of all variables of a commit, until then by the monotonic clock.

        Raises:
            HomeLostError: One of them is lost for good.
            WaitTimeoutError: One of them has no new home yet.
        """
        for write in request.writes:
            if not await self.settle(write.region, max(0.0, deadline - time.monotonic())):
                why = self._put_off.get(write.region, "")
                raise errors.WaitTimeoutError(
                    f"{capital(self._log.label(write.region))} has lost its home, and does not "
                    f"have another one yet{why and f': {why}'}.",
                    hint="Nothing was committed and the transaction is still open: commit again.",
                )

    async def new_home(self, region: int, server_id: int) -> RegionRecord | None:
        """The region's record once its home is another one than this server, which is lost.

        Returns:
            None where that takes more than a few seconds: ask again.

        Raises:
            HomeLostError: There will be no other.
            FreedError: It is not there any more.
        """
        if not await self.settle(region, REHOME_S):
            return None
        record = self._core.peek(region)
        if not isinstance(record, RegionRecord):
            raise errors.FreedError(f"{capital(self._log.label(region))} was freed.")
        if server_id in record.homes and not await self._has(server_id, region):
            return None
        return self._newest(record)

    def _newest(self, record: RegionRecord) -> RegionRecord:
        region = record.region
        return replace(record, version=self._log.newest(region), loss=self._losses.number(region))

    async def _has(self, home: int, region: int) -> bool:
        """A home that lives was taken for lost, or does not serve: it is asked itself. One that
        says that it has nothing of the region is replaced; one that does not answer is not."""
        try:
            if await asyncio.wait_for(self._servers.is_home(home, region), ASK_S):
                return True
        except Exception as failure:  # any: silence is no verdict, and who asks comes again
            logger.info("home %#x does not say if it has %d: %r", home, region, failure)
            return False
        is_home = home in self._core.homes_of(region) and region not in self._activating
        if is_home and not self._stored.has_nothing(region, home):
            logger.error("home %#x has nothing of variable %d", home, region)
            self._hollow[region] = home
            self._begin(region, self._rebuild(region))
        return False

    async def activated(self, region: int, timeout_s: float) -> None:
        """Waits until the region's new home has heard that it is that: it refuses who asks before.

        Raises:
            ServerUnavailableError: It has not heard it in that time: ask again.
        """
        if not self._refuses(region):
            return
        if region in self._hollow:
            self._begin(region, self._rebuild(region))
        if (running := self._running.get(region)) is not None:
            await asyncio.wait({running}, timeout=timeout_s)
        else:
            await self._activating.until_over(region, timeout_s)
        if self._refuses(region):
            raise errors.ServerUnavailableError(
                f"The new home of {self._log.label(region)} has not heard yet that it is that.",
                hint="Ask again.",
            )

    def _refuses(self, region: int) -> bool:
        """Whether its home, which lives, does not serve it, and will, or another one."""
        if self._core.state(region) is not RegionState.READY or region in self._lost:
            return False
        return region in self._activating or region in self._hollow

    def check_outcome(self, commit_id: int) -> None:
        """Is asked before anybody hears that a layer belongs to no commit.

        Raises:
            ServerUnavailableError: A rebuild that runs waits for the layer: ask again.
        """
        if commit_id in self._staged:
            raise errors.ServerUnavailableError(
                f"What is staged under {commit_id:#x} is on its way to a variable's new home.",
                hint="Ask again.",
            )

    async def close(self) -> None:
        """Ends what runs."""
        await self._background.end()

    # -- one region

    def _why(self, region: int) -> str:
        """Why a home of it is lost; "" where none is."""
        for home in self._core.homes_of(region):
            if isinstance(answer := self._core.locate(home), ServerLost):
                return f"its home {home:#x} is lost ({answer.reason})"
            if self._hollow.get(region) == home:
                return f"its home {home:#x} has nothing of it"
        return ""

    def _begin(self, region: int, work: Coroutine[Any, Any, None]) -> None:
        moves = region in self._activating.moving  # who was the home before has it all
        if moves or region in self._running or region in self._lost:
            work.close()
            return

        async def run() -> None:
            try:
                await work
            finally:
                work.close()
                del self._running[region]
                for turns in self._turns:
                    turns.forget(region)

        self._running[region] = self._background.spawn(run())

    def _turns_of(self, region: int) -> Turns:
        return self._turns[bool(self._core.others_of(region))]

    async def _rebuild(self, region: int) -> None:
        pause_s, tries, attempts = PAUSE_S, 0, Attempts()
        while tries < TRIES:
            is_ready = self._core.state(region) is RegionState.READY
            if not is_ready or not (why := self._why(region)) or self._stored.error(region):
                return
            n_refused, had_source = len(attempts.refused), attempts.failed is None
            try:
                await self._try(region, why, attempts)
                self._put_off.pop(region, None)
                return
            except errors.HomeLostError as verdict:
                self._give_up(region, verdict)
                return
            except (Again, errors.JournalFullError) as failure:
                self._put_off[region] = str(failure)
            except Exception as failure:  # any: whoever waits for the region must get an answer
                logger.exception("rebuilding variable %d", region)
                self._put_off[region] = repr(failure)
            logger.warning("variable %d cannot be rebuilt yet: %s", region, self._put_off[region])
            if len(attempts.refused) > n_refused or had_source > (attempts.failed is None):
                continue  # there are others, or there is no source
            tries += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MOST_S)
        put_off = "variable %d is not rebuilt until somebody asks for it: %s; the last of %d: %s"
        logger.error(put_off, region, why, TRIES, self._put_off[region])
        if self._core.others_of(region):  # a parity nobody asks for, until it is too late
            self._hollow.pop(region, None)
            self._background.spawn(self._rebuild_later(region))

    async def _rebuild_later(self, region: int) -> None:
        await asyncio.sleep(PUT_OFF_S)
        self._begin(region, self._rebuild(region))

    def _give_up(self, region: int, verdict: errors.HomeLostError) -> None:
        logger.error("%s", verdict)
        if self._core.state(region) is RegionState.READY:
            verdict.is_verdict = True
            self._lost[region] = verdict
            self._log.nothing_is_left(region)
            self._set_rebuilt(region, None)
            for server_id in self._core.known_to(region):
                self._background.spawn(self._drop_prepared(server_id, region))

    async def _try(self, region: int, why: str, attempts: Attempts) -> None:
        """
        Raises:
            HomeLostError: Its blocks are nowhere, or its source cannot make them.
            Again, JournalFullError: It failed for now.
        """
        staged: list[tuple[int, int, int]] = []
        heading = attempts.heading = contextlib.ExitStack()
        try:
            async with self._turns_of(region).of(region):
                found = await self._stage_all(region, why, attempts, staged)
                if found is None:
                    return
                record, plan = found
                if not (runs := self._runs_source(region, plan)):
                    await self._prepare(record, plan, tuple(staged), attempts, [])
                    await self._bring(record, plan, attempts)
            if runs:
                made = await self._make(region, plan, attempts)
                async with self._turns_of(region).of(region):
                    await self._prepare(record, plan, tuple(staged), attempts, made)
                    await self._bring(record, plan, attempts)
        finally:
            heading.close()
            for server_id, commit_id, _ in staged:
                self._staged.discard(commit_id)
                self._background.spawn(self._drop(server_id, commit_id, region))
        now = self._core.record_of(region)
        if now is None or self._core.state(region) is not RegionState.READY:
            return
        if now.term + 1 != record.term:
            raise Again("it has got another home meanwhile")
        if self._servers.why_lost(plan.home) is not None or (
            self._log.newest(region) != record.version
        ):
            raise Again("the new home is lost too")
        if self._is_leaving(plan.home) and self._others_than(plan.home):
            raise Again("the new home is drained")
        if self._repairs.mates(region, bool(plan.lost)) != attempts.mates:
            raise Again("another piece of its group was lost, or came back, meanwhile")
        # No await in here: from the journal on it is the home.
        lost = self._lost_by(record, why, plan, attempts)
        self._journal.rehome(record, record.version, lost.get(region), others=lost)
        self._losses.update({region: None, **lost})
        self._activating.add(region)
        try:
            self._core.rehome(region, plan.home)
            self._log.rehome(region, plan.home)
            self._set_rebuilt(region, plan.home)
            self._hollow.pop(region, None)
            await self._activate(self._newest(record))
        finally:
            self._activating.discard(region)
        self._make_parities_again(region)

    def _make_parities_again(self, region: int) -> None:
        """All data of a piece's group is there, and its parity lacks blocks: another server gets
        all of it. Commits to the group wait for that, as where its home is lost."""
        for parity in set(self._repairs.remakeable(region)) - set(self._running):
            (home,) = self._core.homes_of(parity)
            if self._others_than(home):
                self._hollow[parity] = home
                self._begin(parity, self._rebuild(parity))

    def _others_than(self, home: int) -> list[int]:
        servers = (info.server_id for info in self._core.servers())
        return [each for each in servers if each != home and not self._is_leaving(each)]

    async def _stage_all(
        self, region: int, why: str, attempts: Attempts, staged: list[tuple[int, int, int]]
    ) -> tuple[RegionRecord, rebuild_plan.RebuildPlan] | None:
        """What is to be done, with what others give for it staged; None: it was freed."""
        record = self._core.record_of(region)
        if record is None:
            return None
        version = self._log.newest(region)
        holdings, silent = await self._ask_all(region)
        if self._core.state(region) is not RegionState.READY:
            return None
        # No await until the new home is among those that are told when the region is freed.
        plan = self._plan(record, version, holdings, attempts)
        if plan is None:
            if not attempts.refused:
                raise Again("no page server has joined that could be its new home")
            attempts.refused.clear()  # they may have room by and by,
            if (plan := self._plan(record, version, holdings, attempts)) is not None:
                n_blocks = sum(len(take.blocks) for take in plan.takes)
                n_blocks += len(plan.from_source) + len(plan.from_group)
                await self._make_room(plan.home, n_blocks * BLOCK_BYTES)  # or now
            raise Again("no node has room to be its new home")
        if plan.lost and (is_away := self._stored.why(region)):
            raise Again(is_away)
        if plan.lost and silent:
            raise Again("a page server that may have blocks of it does not answer")
        if plan.lost and self._repairs.is_awaited(region):
            raise Again("other pieces of its group have no home yet")
        members = attempts.group.versions if attempts.group is not None else ()
        if any(self._core.homes_of(each)[0] in silent for each in members):
            raise Again("the home of another piece of its group does not answer")
        attempts.mates = self._repairs.mates(region, bool(plan.lost))
        n_taken = sum(len(take.blocks) for take in plan.takes)
        n_made = n_taken + len(plan.from_source) + len(plan.from_group)
        goes_on = record.in_file or self._repairs.is_opened_part(region)
        if plan.lost and not n_made and not goes_on:
            raise self._loss(record, why, plan, attempts).all_of_it()
        logger.info(
            "variable %d: %s; its new home is %#x, %d blocks come from its group, %d from caches "
            "and %d from its source, %d are lost",
            *(region, why, plan.home),
            *(len(plan.from_group), n_taken, len(plan.from_source), len(plan.lost)),
        )
        attempts.heading.enter_context(self._core.heading(region, plan.home))
        attempts.heading.callback(self._load.subtract, [plan.home])
        self._load[plan.home] += 1
        homes = (plan.home,) * len(record.homes)
        record = replace(record, version=version, homes=homes, term=record.term + 1)
        self._core.lookup(region, plan.home)
        await self._stage(region, plan, staged)
        return record, plan

    def _runs_source(self, region: int, plan: rebuild_plan.RebuildPlan) -> bool:
        """Whether something is run for it, which takes nobody knows how long."""
        source = self._sources.get(self._core.whole_of(region))
        return bool(plan.from_source) and (source is None or source.kind == CALL)

    async def _ask_all(self, region: int) -> tuple[list[rebuild_plan.Holding], list[int]]:
        """A writer that died after its commit was made has told its page server nothing, which has
        the layer all the same."""
        since = max(self._log.newest(region) - COMMITS_SAID, self._log.horizon(region))
        commits = self._log.published(region, since)
        servers = [info.server_id for info in self._core.servers()]
        return await all_holdings(self._servers, servers, region, commits)

    def _plan(
        self,
        record: RegionRecord,
        version: int,
        holdings: list[rebuild_plan.Holding],
        attempts: Attempts,
    ) -> rebuild_plan.RebuildPlan | None:
        region = record.region
        making_at = attempts.made[0] if attempts.made is not None else 0

        # A group's parity that is made again is there as well.
        hollow = self._hollow.get(region) if self._core.others_of(region) else None
        known = [info.server_id for info in self._core.servers()]
        known = [each for each in known if each != hollow] or known
        servers = rebuild_plan.preferred(
            [each for each in known if each not in attempts.refused],
            lambda each: not self._is_leaving(each),
            lambda each: not self._is_suspected(each),
        )

        def changed_since(older: int) -> BitMap | None:
            return self._log.changes(region, older, version) if older <= version else None

        found = attempts.group = self._repairs.repairable(region)
        attempts.number = secrets.randbits(63) | 1  # what is said of the last one is late
        return rebuild_plan.plan(
            -(-record.length_bytes // BLOCK_BYTES),
            [held for held in holdings if self._servers.why_lost(held.server_id) is None],
            changed_since,
            has_source=self._has_source(region) and attempts.failed is None,
            servers=self._core.apart(region, servers) or servers,
            # Where its source runs already it goes on.
            load=lambda server_id: -1 if server_id == making_at else self._load[server_id],
            from_group=found.blocks if found is not None else None,
            is_in_file=record.in_file,
        )

    def _has_source(self, region: int) -> bool:
        record = self._core.record_of(region)
        if record is not None and record.is_parity:
            return False
        return self._core.whole_of(region) in self._sources or region in self._shared

    def _loss(
        self, record: RegionRecord, why: str, plan: rebuild_plan.RebuildPlan, attempts: Attempts
    ) -> BlockLoss:
        label, n_blocks = self._log.label(record.region), -(-record.length_bytes // BLOCK_BYTES)
        return BlockLoss(
            label=label,
            why=why,
            lost=plan.lost,
            n_blocks=n_blocks,
            failed=attempts.failed,
            has_source=self._has_source(record.region),
        )

    def _lost_by(
        self, record: RegionRecord, why: str, plan: rebuild_plan.RebuildPlan, attempts: Attempts
    ) -> dict[int, LostBlocks]:
        """What is lost of which regions when this is the home."""
        if not plan.lost:
            return {}
        found = self._loss(record, why, plan, attempts).blocks()
        # A parity as well: the next commit to such a block does not know what was there.
        return {record.region: found} | {
            each: together(self._losses.of(each), found, self._log.n_blocks(each))
            for each in self._repairs.stale_parity(record.region)
        }

    async def _stage(
        self, region: int, plan: rebuild_plan.RebuildPlan, staged: list[tuple[int, int, int]]
    ) -> None:
        for take in plan.takes:
            if take.server_id == plan.home:
                continue
            commit_id = secrets.randbits(64) | 1
            call = self._servers.stage_cached(
                take.server_id, region, take.version, commit_id, bytes(take.blocks.serialize())
            )
            layer_bytes = await self._needed(take.server_id, call, STAGE_S)
            self._staged.add(commit_id)
            staged.append((take.server_id, commit_id, layer_bytes))

    async def _make(
        self, region: int, plan: rebuild_plan.RebuildPlan, attempts: Attempts
    ) -> list[Any]:
        """What the source makes, once it is there. Takes the time that it takes.

        Raises:
            Again: The new home is lost, or the source runs still: the next try waits for it.
        """
        turn = self._sources_of.setdefault(plan.home, asyncio.Semaphore(SOURCES_AT_ONCE))
        source = self._sources.get(self._core.whole_of(region))
        self._put_off[region] = f"what makes it again is run on the node of {plan.home:#x}"
        async with turn:
            if attempts.made is None or attempts.made[0] != plan.home:
                if source is not None:
                    made = self._servers.make_again(plan.home, source)
                else:
                    made = self._servers.bring(plan.home, self._shared[region][1])
                attempts.made = (plan.home, made)
            made = attempts.made[1]
            try:
                await self._watched(plan.home, self._servers.until_made(made), SOURCE_S)
            except asyncio.TimeoutError:
                raise Again(f"what makes it again has not ended within {SOURCE_S:g} s") from None
        return made

    async def _prepare(
        self,
        record: RegionRecord,
        plan: rebuild_plan.RebuildPlan,
        takes: tuple[tuple[int, int, int], ...],
        attempts: Attempts,
        made: list[Any],
    ) -> None:
        region = record.region
        order = rebuild_plan.order_of(
            record,
            plan,
            takes,
            before_bytes=self._core.before_bytes(region),
            attempt=attempts.number,
            source=self._sources.get(self._core.whole_of(region)),
            digest=self._shared[region][0].digest if region in self._shared else b"",
        )
        try:
            call = self._servers.rebuild(plan.home, order, made)
            await self._needed(plan.home, call, REBUILD_S, attempts.refused)
        except errors.SourceError as failure:
            attempts.failed, attempts.made = failure, None
            raise Again(failure.message) from failure
        except Again:
            attempts.made = None  # it may be what failed: for want of memory, say
            raise

    async def _bring(
        self, record: RegionRecord, plan: rebuild_plan.RebuildPlan, attempts: Attempts
    ) -> None:
        """What its group makes: the home that is prepared has all then.

        Raises:
            Again: It failed for now.
        """
        if not plan.from_group or attempts.group is None:
            return
        try:
            await self._repairs.bring(record, plan.home, attempts.number, attempts.group)
        except GiverFull as full:
            await self._make_room(full.server_id, LAYER_BLOCKS * BLOCK_BYTES)
            raise Again(f"its group does not make it now: {full}") from full
        except NO_ROOM as failure:
            attempts.refused.add(plan.home)
            raise Again(str(failure)) from failure
        except Exception as failure:  # any: homes that give may be restarting, or lost
            raise Again(f"its group does not make it now: {failure!r}") from failure

    async def _activate(self, record: RegionRecord) -> None:
        """The new home serves from here on; the others are told as a favour: they ask."""
        home = record.homes[0]
        pause_s = PAUSE_S
        while self._core.state(record.region) is RegionState.READY:
            try:
                await self._watched(home, self._servers.rehome(home, record), TELL_S)
                break
            except Exception as failure:  # any: it may be restarting
                if self._servers.why_lost(home) is not None:
                    raise Again("the new home is lost too") from failure
                if isinstance(failure, errors.HomeLostError):
                    self._hollow[record.region] = home
                    raise Again("the new home has nothing of it any more") from failure
                logger.warning("the new home %#x cannot be told yet: %r", home, failure)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MOST_S)
        self._rehomed(home)
        self._tell_known(record, but=home)

    def _tell_known(self, record: RegionRecord, but: int = 0) -> None:
        for server_id in self._core.known_to(record.region):
            if server_id != but:
                self._background.spawn(self._tell(server_id, record))

    def _tell_all(self, region: int) -> None:
        """Commits have written all that was lost: nobody need ask for it any more."""
        self._make_parities_again(region)
        record = self._core.record_of(region)
        if record is None or self._refuses(region) or self._why(region):
            return  # who looks it up is told then
        self._tell_known(self._newest(record))

    async def _activate_again(self, region: int) -> None:
        record = self._core.record_of(region)
        try:
            if record is not None:
                await self._activate(self._newest(record))
            return
        except Again as failure:
            logger.warning("variable %d: %s", region, failure)
        finally:
            self._activating.discard(region)
        await self._rebuild(region)

    # -- calls

    async def _tell(self, server_id: int, record: RegionRecord) -> None:
        await self._say(server_id, self._servers.rehome(server_id, record), "of a new home")

    async def _drop_prepared(self, server_id: int, region: int) -> None:
        """Tells a server of the verdict. One that does not hear of it learns it from the first who
        needs a block."""
        await told_in_the_end(
            lambda: self._servers.rebuild_drop(server_id, region),
            lambda: region not in self._lost or self._servers.why_lost(server_id) is not None,
            f"page server {server_id:#x} was not told of a verdict",
        )

    async def _drop(self, server_id: int, commit_id: int, region: int) -> None:
        await self._say(server_id, self._servers.drop(server_id, commit_id, [region]), "to drop it")
