"""Carries out commits: layers to their homes, decision, journal, and the homes told. No Ray.

One commit:

    answered before?  -> the same answer
    layers            -> every home that is not the writer's node fetches its layer, side by side;
                         then whose word is older than a second by now is asked once more
    decision          -> conflict check, journal, memory: without an await between them, so that
                         nothing can change in between. From here on the versions are public
    homes             -> are told in the background, in batches, until they acknowledge

One to a region whose home is just moving waits before the decision (``held_commits``); then its
layers go to the new home, and it is decided.

A commit whose homes are all on the writer's node, and whose layers have just been staged, never
waits: it is decided within its one call. In a session with a store each home must have its layer in
a file on its disk. The writer asks the one on its node for that, and says which process of it has
answered. That counts if this process has registered since the registry began, and no other one has
begun since; all others are asked from here. A home that begins anew from its directory must have
dropped none of those that a decision rests on: what it has answered before counts no more.

What is unsaid about a failure: nothing. A commit that raised is not in the journal, its layers are
where they were, and the same request may be sent again (after a conflict in vain).

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from typing import Any, Protocol

from clamor_ray import errors
from clamor_ray._objects import block_sets
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import CommitRequest, Committed, Publication, Write
from clamor_ray.actors.commits.brought_layers import BroughtLayers
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.held_commits import HeldCommits
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.commits.request_validation import check_request
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.process.background import BackgroundTasks

logger = logging.getLogger("clamor_ray.registry")

TICK_S = 0.1
TELL_MOST_S = 5.0
PULL_SHARE = 0.8  # of the caller's time; the rest is for the answer
LOOK_S = 3.0  # a home that is silent for so long is looked after
FRESH_S = 1.0  # a home that has said so long before the last one that it has a layer is asked again
RESENT_MARGIN_S = 10.0  # a caller waits at most so much longer than its request says
PULLS_AT_ONCE = 8  # from one commit's or several commits' point of view, at one home


async def no_room(server_id: int, needed_bytes: int, stay: Collection[int] = ()) -> bool:
    """Nobody makes any."""
    return False


class NotKnownYet(errors.ServerUnavailableError):
    """The page server has not registered since the registry began."""


class CommitHomes(Protocol):
    """The page servers, by id. Exceptions but those named mean: not now, try again."""

    def of(self, region: int) -> tuple[int, ...]:
        """The distinct homes of a region; none for one that is freed or unknown."""

    def why_lost(self, server_id: int) -> str | None:
        """The reason, for one that will not come back."""

    async def pull(self, home: int, commit_id: int, write: Write) -> None:
        """The home fetches the layer from where it is staged.

        Raises:
            OutOfMemoryError, DescriptorLimitError, NoSpaceError, StoreError, HomeLostError: As
                they say; no use in trying again now.
            CommitAbortedError: The layer is not where it was staged. Its writer stages another.
        """

    async def publish(self, home: int, items: list[Publication]) -> list[tuple[int, int]]:
        """Tells a home; the (region, version) that it knows now."""

    async def oldest_version(self, home: int, region: int) -> int:
        """The oldest version whose blocks the home keeps; 0 where it does not know the region."""

    async def drop(self, home: int, commit_id: int, regions: list[int]) -> None:
        """A home that fetched layers of a refused commit may drop them."""

    async def examine(self, home: int) -> None:
        """Finds out whether a home that does not answer is lost."""


class Commits:
    """See the file's head.

    Args:
        log: What is decided.
        journal: Where it is written first.
        homes: Who holds the blocks.
        timeout_s: How long a caller waits that does not say so.
        now_s: Wall clock: it goes on over a restart.
        losses: Which blocks are lost: those that a commit writes are whole again.
        restarted_s: When this process began, by the monotonic clock, where another one was sent
            commits before it.
        held: Regions whose commits wait.
        make_room: Has homes moved off a server until it has so many bytes of memory, and none of
            these regions: whether it has them now.
        keeps: It is a session with a store.
    """

    def __init__(
        self,
        log: CommitLog,
        journal: Journal,
        homes: CommitHomes,
        timeout_s: float,
        now_s: Callable[[], float] = time.time,
        losses: Losses | None = None,
        restarted_s: float | None = None,
        held: HeldCommits | None = None,
        make_room: Callable[[int, int, Collection[int]], Awaitable[bool]] = no_room,
        keeps: bool = False,
    ) -> None:
        self._log = log
        self._journal = journal
        self._homes = homes
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._losses = losses if losses is not None else Losses()
        self._restarted_s = restarted_s
        self._held = held if held is not None else HeldCommits()
        self._make_room = make_room
        self._keeps = keeps
        self._processes: dict[int, int] = {}  # of homes, that have registered here
        # Of commits that run: when which home answered for which region.
        self._answers: dict[int, dict[tuple[int, int], float]] = {}
        self._n_begins: dict[int, int] = {}  # by home
        self._running: dict[int, asyncio.Future[Committed]] = {}
        self._brought = BroughtLayers()
        self._pulling: dict[int, asyncio.Semaphore] = {}
        self._telling: set[int] = set()
        self._tidying = False
        self._background = BackgroundTasks(logger)
        self.n_made = self.n_conflicts = 0  # since this process began

    # -- commits

    def may_commit(self, request: CommitRequest) -> None:
        """Raises what ``commit`` would raise now for this request, layers apart."""
        check_request(request)
        if self._log.answered(request.commit_id) is None:
            self._check_homes(request)
            with self._counting_conflicts():
                self._log.prepare(request)

    @contextlib.contextmanager
    def _counting_conflicts(self) -> Iterator[None]:
        try:
            yield
        except errors.CommitConflict:
            self.n_conflicts += 1
            raise

    async def bring(self, request: CommitRequest) -> int:
        """The home of a region fetches its layer of a commit that will be asked for: a large one's
        layers go there one after the other, so the writer's node need not hold all of them.

        From then on and for the request's time the commit is not given up when somebody asks for
        its outcome, except by its writer.

        Args:
            request: With the one write whose layer it is.

        Returns:
            The home: it has the layer, and the writer's node need not.

        Raises:
            CommitAbortedError: The commit was given up.
            OutOfMemoryError, DescriptorLimitError, NoSpaceError, HomeLostError, WaitTimeoutError,
                CommitAbortedError: As ``commit``.
            FreedError: The region has no home: it was freed.
        """
        check_request(request)
        commit_id = request.commit_id
        loop = asyncio.get_running_loop()
        wait_s = request.timeout_s or self._timeout_s
        self._check_homes(request)
        if self._log.outcome(commit_id) is not None:
            raise errors.CommitAbortedError(
                f"Commit {commit_id:#x} was given up while its layers were on their way."
            )
        self._brought.hold(commit_id, loop.time(), loop.time() + wait_s)
        pulls = self._pulls_of(request)
        if not pulls:
            said = ", ".join(self._log.label(write.region) for write in request.writes)
            raise errors.FreedError(f"{said} was freed, or has no blocks in this commit.")
        others = [pull for pull in pulls if not self._is_own(pull)]
        for home, write in others:
            if not self._is_staged_at(home, write):
                self._brought.add(commit_id, home, write.region)
        await self._pull(request, others, {}, loop.time() + wait_s * PULL_SHARE)
        return pulls[0][0]

    async def commit(self, request: CommitRequest) -> Committed:
        """Makes all writes of a request the newest versions, or none.

        Raises:
            CommitConflict: Another commit was first. Sending it again is of no use.
            CommitAbortedError, FreedError, NoVersionError: See ``CommitLog.prepare``.
            OutOfMemoryError, DescriptorLimitError, NoSpaceError: A home has no room. The request
                may be sent again.
            HomeLostError: A home of one of the variables is gone.
            JournalFullError: The request may be sent again.
            ProtocolError: A request that makes no sense.
            WaitTimeoutError: A home did not answer in time. The request may be sent again.
        """
        check_request(request)
        commit_id = request.commit_id
        if (answer := self._log.answered(commit_id)) is not None:
            return answer
        if (running := self._running.get(commit_id)) is not None:
            return await asyncio.shield(running)
        with self._counting_conflicts():
            return await self._commit(request)

    async def _commit(self, request: CommitRequest) -> Committed:
        commit_id = request.commit_id
        self._check_homes(request)
        pulls = self._pulls_of(request)
        staged_ago_s = self._staged_ago_s(request)
        is_held = self._held.is_held(write.region for write in request.writes)
        if not is_held and all(map(self._is_own, pulls)) and staged_ago_s <= FRESH_S:
            return self._decide(request)
        running = self._running[commit_id] = asyncio.get_running_loop().create_future()
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            answer = await self._pull_and_decide(request, pulls, staged_ago_s)
            running.set_result(answer)
            return answer
        except asyncio.CancelledError:
            running.cancel()
            raise
        except Exception as failure:
            running.set_exception(failure)
            raise
        finally:
            del self._running[commit_id]

    def _staged_ago_s(self, request: CommitRequest) -> float:
        """How long ago its layers were staged, at most.

        Ray sends what the registry before was sent again as it was, with the age that was true
        then. While its caller may still wait for it, nobody can tell how old it is.
        """
        if self._restarted_s is not None:
            waits_s = (request.timeout_s or self._timeout_s) + RESENT_MARGIN_S
            if asyncio.get_running_loop().time() - self._restarted_s < waits_s:
                return math.inf
        return request.staged_ago_s

    def _pulls_of(self, request: CommitRequest) -> list[tuple[int, Write]]:
        """Who must have which layer."""
        return [
            (home, write)
            for write in request.writes
            for home in self._homes.of(write.region)
            if write.layer_bytes
        ]

    def _is_own(self, pull: tuple[int, Write]) -> bool:
        """Whether the home has it from a process of its node, and that is enough: staged is
        pulled."""
        home, write = pull
        is_kept = not self._keeps or (
            write.kept_by != 0 and write.kept_by == self._processes.get(home)
        )
        return is_kept and self._is_staged_at(home, write)

    @staticmethod
    def _is_staged_at(home: int, write: Write) -> bool:
        """Its writer drops it there, or says what became of it."""
        return home == write.staged_at

    def home_is(self, home: int, process: int) -> None:
        """A process of a page server has registered: what it says counts until the next one begins.
        To be called without an await after the registration came."""
        self._processes[home] = process

    def home_begins(self, home: int) -> None:
        """A home begins anew from what its directory has, and drops layers that were not committed:
        it is asked for them again. To be called before it is told what was."""
        self._n_begins[home] = self._n_begins.get(home, 0) + 1
        self._processes.pop(home, None)
        for answered_s in self._answers.values():
            for key in [key for key in answered_s if key[0] == home]:
                del answered_s[key]

    async def _pull_and_decide(
        self, request: CommitRequest, pulls: list[tuple[int, Write]], staged_ago_s: float
    ) -> Committed:
        self._log.prepare(request)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (request.timeout_s or self._timeout_s) * PULL_SHARE
        answered_s = self._answers[request.commit_id] = {}
        staged_s = loop.time() - staged_ago_s
        asked: set[tuple[int, int]] = set()  # homes and regions: also those that are homes no more
        try:
            while True:
                # Not where it was staged: its writer may look at it there, and drops it.
                asked.update(
                    (home, write.region)
                    for home, write in pulls
                    if not self._is_staged_at(home, write)
                )
                for home, write in filter(self._is_own, pulls):
                    answered_s.setdefault((home, write.region), staged_s)
                new = [
                    (home, write) for home, write in pulls if (home, write.region) not in answered_s
                ]
                await self._pull(request, new, answered_s, deadline)
                # Who answered long ago may have died since, with what only it and the writer's
                # node have: that drops it once the commit is made. One round, side by side: what
                # grows old while that runs is not asked for a third time, else where the answers
                # take a second there would be no end.
                now_s = loop.time()
                stale = [
                    (home, write)
                    for home, write in pulls
                    if now_s - answered_s.get((home, write.region), -math.inf) > FRESH_S
                ]
                await self._pull(request, stale, answered_s, deadline)
                waited = await self._until_released(request, deadline)
                self._check_homes(request)  # they may have been lost meanwhile,
                before = pulls
                pulls = self._pulls_of(request)  # or the region has got another one
                # After a wait what has been answered may be stale.
                have = (
                    each in before and (each[0], each[1].region) in answered_s for each in pulls
                )
                if not waited and all(have):
                    return self._decide(request, asked)
        except (errors.CommitConflict, errors.CommitAbortedError, errors.FreedError):
            self._drop(request.commit_id, asked)
            raise
        finally:
            del self._answers[request.commit_id]

    async def _until_released(self, request: CommitRequest, deadline: float) -> bool:
        """Waits while a home of its regions moves. Whether it had to; no await where not.

        Raises:
            WaitTimeoutError: It moves still. Nothing was committed.
        """
        regions = [write.region for write in request.writes]
        if not self._held.is_held(regions):
            return False
        if not await self._held.until_released(regions, deadline):
            moving = next(region for region in regions if self._held.is_held([region]))
            raise errors.WaitTimeoutError(
                f"The home of {self._log.label(moving)} moves to another node, and one of both "
                "nodes has not answered in time.",
                hint="Nothing was committed and the transaction is still open: commit again.",
            )
        return True

    def _decide(self, request: CommitRequest, asked: Collection[tuple[int, int]] = ()) -> Committed:
        """No await in here: what was checked is what is written.

        Args:
            asked: Who was asked to fetch a layer, of which region.
        """
        entries = self._log.prepare(request)
        for write in filter(lambda each: each.were_lost, request.writes):
            self._losses.check_conflict(write, self._log.label(write.region))
        now_s = self._now_s()
        # A delta makes no block whole.
        lost = self._losses.without(e for e in entries if not self._log.takes_deltas(e.region))
        self._journal.commit(request.commit_id, entries, now_s, lost)
        answer = self._log.apply(request.commit_id, entries, now_s)
        self.n_made += 1
        brought = self._brought.forget(request.commit_id)
        asked = {*asked, *((home, region) for home in brought for region in brought[home])}
        # Who has given the home away meanwhile is not told of the commit, and would keep its layer.
        self._drop(request.commit_id, [at for at in asked if at[0] not in self._homes.of(at[1])])
        self._losses.update(lost)
        self.tell_homes()
        self.tidy_soon()
        return answer

    def _check_homes(self, request: CommitRequest) -> None:
        for write in request.writes:
            for home in self._homes.of(write.region):
                self._check_home(home, write)

    def _check_home(self, home: int, write: Write) -> None:
        reason = self._homes.why_lost(home)
        if reason is not None:
            about = block_sets.of_variable(self._log.label(write.region), write.blocks)
            raise errors.HomeLostError(
                f"A commit to {about} cannot be made: its home {home:#x} is lost ({reason})."
            )

    # -- layers

    async def _pull(
        self,
        request: CommitRequest,
        pulls: list[tuple[int, Write]],
        answered_s: dict[tuple[int, int], float],
        deadline: float,
    ) -> None:
        """All of them, or the first failure once none runs any more. Notes when each answered."""
        loop = asyncio.get_running_loop()

        async def one(home: int, write: Write) -> None:
            again = (home, write.region) in answered_s
            n_begins = self._n_begins.get(home, 0)
            await self._pull_one(request.commit_id, home, write, deadline, again)
            if self._n_begins.get(home, 0) == n_begins:
                answered_s[home, write.region] = loop.time()

        outcomes = await asyncio.gather(
            *(one(home, write) for home, write in pulls), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _pull_one(
        self, commit_id: int, home: int, write: Write, deadline: float, again: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        # What is only asked about once more does not wait behind what is fetched.
        turn = (
            asyncio.Semaphore()
            if again
            else self._pulling.setdefault(home, asyncio.Semaphore(PULLS_AT_ONCE))
        )
        asked_s = loop.time()
        last = ""
        pause_s = TICK_S
        may_make_room = True
        while (left_s := deadline - loop.time()) > 0:
            try:
                await self._pull_watched(
                    self._pull_in_turn(turn, home, commit_id, write),
                    home,
                    write,
                    left_s,
                    again,
                )
                return
            except errors.OutOfMemoryError:
                if not may_make_room or not await self._has_room(home, write, deadline):
                    raise
                may_make_room = False
                continue
            except (
                errors.CommitAbortedError,
                errors.DescriptorLimitError,
                errors.NoSpaceError,
                errors.HomeLostError,
                errors.FreedError,
                errors.StoreError,
            ):
                raise
            except Exception as failure:  # any: the home may be restarting
                last = cause_of(failure)
                logger.warning("home %#x cannot fetch a layer yet: %r", home, failure)
                await self._homes.examine(home)
                self._check_home(home, write)
            await asyncio.sleep(min(pause_s, max(0.0, deadline - loop.time())))
            pause_s = min(2 * pause_s, 1.0)
        if not last:  # there was no time to ask it
            last = f"the time was over before it was asked{' once more' if again else ''}"
        raise errors.WaitTimeoutError(
            f"The home {home:#x} of {self._log.label(write.region)} did not fetch the changed "
            f"blocks within {loop.time() - asked_s:.0f} s: {last}.",
            hint="Nothing was committed and the transaction is still open: commit again, with a "
            "longer timeout (CLAMOR_CONTROL_TIMEOUT_S), or drop it.",
        )

    async def _has_room(self, home: int, write: Write, deadline: float) -> bool:
        """Whether there is room at a home for a layer, after other homes have moved away."""
        left_s = deadline - asyncio.get_running_loop().time()
        call = self._make_room(home, write.layer_bytes, (write.region,))
        try:
            return await asyncio.wait_for(call, left_s)
        except asyncio.TimeoutError:
            return False

    async def _pull_watched(
        self,
        work: Coroutine[Any, Any, None],
        home: int,
        write: Write,
        timeout_s: float,
        again: bool,
    ) -> None:
        """Waits for a pull, and looks after its home meanwhile: Ray goes on trying to reach one
        whose node is gone for longer than anybody wants to wait.

        Raises:
            HomeLostError: It is lost.
            WaitTimeoutError: It has not answered in time.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        pull = asyncio.ensure_future(work)
        try:
            while True:
                left_s = deadline - asyncio.get_running_loop().time()
                done, _ = await asyncio.wait({pull}, timeout=min(LOOK_S, left_s))
                if done:
                    return pull.result()
                if left_s <= LOOK_S:
                    asked = "was asked once more whether it has them, and " if again else ""
                    raise errors.WaitTimeoutError(
                        f"it is alive as far as Ray knows, {asked or 'and '}has not answered for "
                        f"{timeout_s:.1f} s: its process may be stopped, or its node overloaded or "
                        "cut off",
                        hint="",
                    )
                await self._homes.examine(home)
                self._check_home(home, write)
        finally:
            pull.cancel()

    async def _pull_in_turn(
        self, turn: asyncio.Semaphore, home: int, commit_id: int, write: Write
    ) -> None:
        async with turn:
            await self._homes.pull(home, commit_id, write)

    def _drop(self, commit_id: int, layers: Iterable[tuple[int, int]]) -> None:
        """Of homes and regions."""
        by_home: dict[int, list[int]] = {}
        for home, region in sorted(layers):
            by_home.setdefault(home, []).append(region)
        for home, regions in by_home.items():
            self._background.spawn(self._drop_at(home, commit_id, regions))

    async def _drop_at(self, home: int, commit_id: int, regions: list[int]) -> None:
        try:
            await asyncio.wait_for(self._homes.drop(home, commit_id, regions), self._timeout_s)
        except Exception as failure:  # any: the home asks by itself when nobody tells it
            logger.info("home %#x was not told to drop a layer: %r", home, failure)

    async def check_kept(self, region: int, version: int) -> None:
        """
        Raises:
            SnapshotExpired: A home says that it keeps the version's blocks no longer. One that does
                not answer soon says nothing: who reads them learns it.
        """
        for home in self._homes.of(region):
            try:
                oldest = await asyncio.wait_for(self._homes.oldest_version(home, region), LOOK_S)
            except Exception as failure:  # any: it may be restarting
                logger.info("home %#x does not say what it keeps: %r", home, failure)
                continue
            if version < oldest:
                raise errors.SnapshotExpired(
                    f"The blocks of version {version} of {self._log.label(region)} are kept no "
                    f"longer; the oldest that is kept is version {oldest}."
                )

    # -- outcomes

    async def outcome(self, commit_id: int, by_writer: bool = False) -> dict[int, int]:
        """The versions that a commit made; {}: none, and it never will.

        Args:
            by_writer: Who asks has brought its layers, or would have.

        Raises:
            JournalFullError: Ask again.
            ServerUnavailableError: Its writer is still at work: ask again.
        """
        if (running := self._running.get(commit_id)) is not None:
            with contextlib.suppress(errors.ClamorError, ValueError, asyncio.CancelledError):
                await asyncio.shield(running)
        found = self._log.outcome(commit_id)
        if found is None and not by_writer:
            self._brought.check(commit_id, asyncio.get_running_loop().time())
        if found is None:
            now_s = self._now_s()
            self._journal.abort(commit_id, now_s)
            self._log.abort(commit_id, now_s)
            self.tidy_soon()
            found = {}
        if not found:
            for home, regions in self._brought.forget(commit_id).items():
                self._background.spawn(self._drop_at(home, commit_id, list(regions)))
        return found

    # -- in the background

    def tell_homes(self) -> None:
        """Sees to it that homes with unknown versions are told soon."""
        for home in self._log.homes_behind():
            if home not in self._telling:
                self._telling.add(home)
                self._background.spawn(self._tell(home))

    async def tell_now(self, home: int) -> None:
        """Tells a home once what it has not acknowledged, without a pause before it.

        Raises:
            What the call raises.
        """
        if items := self._log.unacknowledged(home):
            self._acknowledge(home, await self._homes.publish(home, items))

    async def _tell(self, home: int) -> None:
        """Batches, every tick, until the home knows everything or is lost."""
        pause_s = TICK_S
        try:
            while True:
                await asyncio.sleep(pause_s)
                items = self._log.unacknowledged(home)
                if not items or self._homes.why_lost(home) is not None:
                    return
                pause_s = min(2 * pause_s, TELL_MOST_S)
                try:
                    known = await asyncio.wait_for(
                        self._homes.publish(home, items), self._timeout_s
                    )
                except Exception as failure:  # any: it is told again until it is lost
                    # A directory of a store may be away for long: nobody need read of it each time.
                    level = logging.INFO if isinstance(failure, NotKnownYet) else logging.WARNING
                    logger.log(level, "home %#x cannot be told of commits: %r", home, failure)
                    await self._homes.examine(home)
                    continue
                if self._acknowledge(home, known):
                    pause_s = TICK_S
        finally:
            self._telling.discard(home)

    def _acknowledge(self, home: int, known: Iterable[tuple[int, int]]) -> bool:
        news = [
            (region, home, version)
            for region, version in known
            if self._log.acknowledge(home, region, version)
        ]
        if news:
            try:
                self._journal.acknowledge(news)
            except errors.JournalFullError as failure:
                # After a restart the home is told once more; nothing else comes of it.
                logger.warning("%s", failure)
            self.tidy_soon()
        return bool(news)

    def retain(self, floors: dict[int, int | None]) -> None:
        """See ``CommitLog.retain``; what nobody needs any more goes."""
        self._log.retain(floors)
        self.tidy_soon()

    def tidy_soon(self) -> None:
        """Lets go of what is beyond the limits, at most once per tick."""
        if not self._tidying:
            self._tidying = True
            self._background.spawn(self._tidy())

    async def _tidy(self) -> None:
        try:
            await asyncio.sleep(TICK_S)
        finally:
            self._tidying = False
        trimmed = self._log.trim(self._now_s())
        for region, version in trimmed.retained:
            logger.warning(
                "variable %d: too many commits for what is remembered of them; of the versions "
                "that live collections could need, those below %d are known no longer",
                region,
                version,
            )
        pause_s = TICK_S
        while trimmed:
            try:
                self._journal.trim(trimmed)
                return
            except errors.JournalFullError as failure:
                logger.warning("%s", failure)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 60.0)

    async def close(self) -> None:
        """Ends what runs in the background."""
        await self._background.end()
