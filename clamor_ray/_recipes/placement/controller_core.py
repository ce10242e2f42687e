"""Where slices are, who takes part, and from where the job begins again. Pure.

The controller has the authoritative map. It pushes each step to all workers, in one order, and
waits for nobody (Canary, section 5.2). While nothing moves it sends nothing.

    join_all, leave_all, move, schedule, checkpoint    what users and clusters ask for
    on_report, on_heartbeat, on_lost, tick     what happens
    take_outgoing                              orders for workers: each worker's, in this order
    take_hurried                               steps of the map that go to some in advance

A worker that leaves stays until its slices have gone and have come elsewhere, until nobody sends to
it any more (`Parted`), and until what it has sent has come (`Drained`).

While a checkpoint runs the map does not change: what is asked for then is done behind it.

How the map changes is in `placing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

from clamor_ray import errors
from clamor_ray._recipes.placement.checkpoints import Checkpoints, Phase
from clamor_ray._recipes.placement.heartbeats import Agreement
from clamor_ray._recipes.placement.messages import (
    Arrived,
    Begin,
    Checkpoint,
    Drained,
    Envelope,
    Heartbeat,
    Lost,
    MapUpdate,
    Order,
    Parted,
    Report,
    Resume,
    Slice,
    Stop,
    Whereabouts,
)
from clamor_ray._recipes.placement.partition_map import PartitionMap
from clamor_ray._recipes.placement.placing import Placing
from clamor_ray._recipes.placement.rows import (
    NOTHING_MOVED,
    near,
    place,
    slice_of,
    slices_of,
)
from clamor_ray._recipes.placement.schedule import Schedule, leaving, round_robin
from clamor_ray._recipes.program.tables import Tables
from clamor_ray._recipes.progress.rounds import Done


class ControllerCore(Placing):
    """See the file's head. Not thread-safe. The first call is `begin` or `learn`.

    Args:
        tables: The program.
        functions: Scheduling functions, called one after the other.
        every_s: They are called so often; None: only when workers join and leave, and on request.
        checkpoint_every_s: None: only on request.
        checkpoint_deadline_s: A checkpoint that takes longer has failed.
        lost_after_s: A worker without heartbeat for so long is lost.
        last: The last checkpoint, where there is one.
        first_name: Of checkpoints: none has been called so before.
    """

    def __init__(
        self,
        tables: Tables,
        functions: Sequence[Schedule] = (),
        every_s: float | None = None,
        checkpoint_every_s: float | None = None,
        checkpoint_deadline_s: float = 60.0,
        lost_after_s: float = 10.0,
        last: Checkpoint | None = None,
        first_name: int = 1,
    ) -> None:
        super().__init__(tables, (round_robin(), leaving(), *functions), lost_after_s)
        self.checkpoints = Checkpoints(last, first_name, checkpoint_deadline_s)
        self.failure = ""  # why the job cannot go on
        self._every_s = every_s
        self._checkpoint_every_s = checkpoint_every_s
        self._has_ticked = False
        self._scheduled_s = self._checkpoint_s = 0.0
        self._agreement = Agreement()
        self._later: list[Callable[[], object]] = []

    # -- a job begins, or a controller

    def begin(
        self, workers: Mapping[str, Any], cached: Mapping[Slice, Mapping[str, int]] | None = None
    ) -> None:
        """The job begins, at the last checkpoint where there is one, on workers with addresses.

        Args:
            cached: Bytes of slices that are on workers' nodes already; see `near`.
        """
        self._check(bool(workers), "A job needs a worker.")
        is_fresh = self.checkpoints.last is None
        first = near(self._tables, cached, workers) if cached and is_fresh else {}
        self._begin_run(dict(workers), first)

    def learn(self, answers: Sequence[Whereabouts]) -> None:
        """A controller takes over, where another one was lost: `begin` is not called.

        Args:
            answers: Of all workers that live.
        """
        self._check(bool(answers), "No worker of the job lives.")
        best = max(answers, key=lambda each: (each.run, each.update.version))
        self.run = best.run
        self.map.apply(best.update)
        there = {each.worker for each in answers}
        self._check(bool(self.map.workers & there), "No worker of the newest run lives.")
        if left := there - self.map.workers:  # or they counted as lost
            self._farewells.begin(left, self._next_version(is_whole=True), there)
        if self.map.workers - there or any(each.run != best.run for each in answers):
            self._begin_again(self.map.workers & there)
            return
        # Not all may know the newest version, and an old one may be on its way: this is newer.
        self._push(self.map.assigned, dict(self.map.addresses), best.update.left, is_whole=True)
        here = {slice: each.worker for each in answers for slice in each.here}
        for slice in slices_of(self._tables):
            if here.get(slice) != self.map.worker_of(slice):
                self._migrations.begin(slice, here.get(slice), self.map.version)
        self._tell_all(Resume())  # of a checkpoint that the old controller has begun

    # -- what is asked for

    def join(self, worker: str, address: Any) -> None:
        """See `join_all`."""
        self.join_all({worker: address})

    def join_all(self, workers: Mapping[str, Any]) -> None:
        """Workers are new.

        Args:
            workers: Name -> address.

        Raises:
            ProgramError: One of that name takes part, or has left. None joins.
        """
        for worker in workers:
            self._check(worker not in self.map.addresses, f"There is, or was, a worker {worker}.")
        joining = dict(workers)
        self._soon(lambda: self._join(joining))

    def leave(self, worker: str) -> None:
        """See `leave_all`."""
        self.leave_all([worker])

    def leave_all(self, workers: Collection[str]) -> None:
        """Workers are to end. `take_gone` says when they may.

        Raises:
            ProgramError: One takes no part, or no other stays. None leaves.
        """
        for worker in workers:
            self._check_takes_part(worker)
        others = self.map.workers - self.leaving - set(workers)
        last = ", ".join(sorted(workers))
        is_last = "is the last worker" if len(workers) == 1 else "are the last workers"
        self._check(bool(others), f"{last} {is_last}.")
        self.leaving |= set(workers)
        self._soon(self._schedule)

    def move(self, dataset: int, index: int, worker: str) -> bool:
        """A partition, and those that are with it, go to a worker.

        Returns:
            Whether they do: what is there, or moves already, does not.

        Raises:
            ProgramError: No such partition or worker, or the worker leaves.
        """
        self._check_takes_part(worker)
        self._check(worker not in self.leaving, f"{worker} leaves.")
        slice = slice_of(self._tables, dataset, index)
        if slice in self._migrations.slices or self.map.worker_of(slice) == worker:
            return False
        self._soon(lambda: self._move({slice: worker}))
        return True

    def schedule(self) -> None:
        """Calls the scheduling functions, each with what those before it have moved. Raises what
        they raise, and ProgramError where one answers what cannot be."""
        self._soon(self._schedule)

    def checkpoint(self, now_s: float) -> bool:
        """Begins one. False: one runs already."""
        if self.checkpoints.phase is not Phase.RESTS:
            return False
        order = self.checkpoints.begin(self.map.workers, self.map.version, now_s)
        self._tell_all(order, self.map.workers)
        return True

    # -- what happens

    def on_report(self, report: Report) -> None:
        """Safe to call again."""
        if report.run != self.run:
            return
        if isinstance(report, Arrived):
            self._on_arrived((report.group, report.index), report.worker, report.version)
        elif isinstance(report, Parted):
            done = self._farewells.on_parted(report.worker, report.version)
            self._outgoing += [(worker, Stop()) for worker in done]
        elif isinstance(report, Drained):
            done = self._farewells.on_drained(report.worker)
            self._outgoing += [(worker, Stop()) for worker in done]
        elif isinstance(report, Lost):
            self.on_lost(report.lost)
        else:
            self._after_checkpoint(self.checkpoints.on_report(report))

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> int:
        """A worker lives. What it is answered: no slice anywhere needs a stage with a lower number.

        A slice that is on its way is in no heartbeat. So the answer is of those in which all slices
        are in their places, by the newest map.
        """
        worker = heartbeat.worker
        if heartbeat.run != self.run or not self._is_member(worker):
            return 0
        self._heartbeats.take(heartbeat, now_s)
        if worker in self.map.workers:
            self._agreement.take(heartbeat, self.map.version)
        if heartbeat.is_settled and heartbeat.version == self.map.version:
            for slice in self.map.slices_of(worker) & self._migrations.slices:
                self._on_arrived(slice, worker, heartbeat.version)
        return self._agreement.floor(self.map.version, len(self.map.workers))

    def on_lost(self, worker: str) -> None:
        """A worker does not answer. The job begins again at its last checkpoint."""
        if not self._is_member(worker):
            return
        if self.map.workers == {worker}:
            self.failure = f"{worker} was the last worker, and it is lost."
            return
        self._begin_again(self.map.workers - {worker})

    def tick(self, now_s: float) -> None:
        """Time goes on, by any clock that does not go back."""
        if not self._has_ticked:
            self._scheduled_s = self._checkpoint_s = now_s
            self._has_ticked = True
        for worker in self._heartbeats.lost(self.members, now_s):
            self.on_lost(worker)
        self._after_checkpoint(self.checkpoints.tick(now_s))
        if self._may_leave:
            self._soon(self._let_leave)
        if self._every_s is not None and now_s - self._scheduled_s >= self._every_s:
            self._scheduled_s = now_s
            self.schedule()
            self._heartbeats.begin_interval()
        every_s = self._checkpoint_every_s
        if every_s is not None and now_s - self._checkpoint_s >= every_s and not self.is_complete:
            self._checkpoint_s = now_s
            self.checkpoint(now_s)

    # -- what the runtime takes

    def take_outgoing(self) -> list[tuple[str, Order]]:
        """Worker and order."""
        going, self._outgoing = self._outgoing, []
        return going

    def take_hurried(self) -> list[tuple[str, Envelope]]:
        """What those that lose or get slices are told in advance, by any way that is fast: some of
        the orders. It may be lost, come twice, and overtake orders."""
        going, self._hurried = self._hurried, []
        return going

    def take_gone(self) -> list[str]:
        """Workers that have left, and have nothing more: they may end."""
        return self._farewells.take_gone()

    @property
    def is_complete(self) -> bool:
        """Whether the program has ended everywhere, as the last heartbeats say."""
        return self._agreement.is_complete(self.map.version, len(self.map.workers))

    @property
    def is_settled(self) -> bool:
        """Whether all slices are in their places, as the last heartbeats say."""
        return self._agreement.is_settled(self.map.version, len(self.map.workers))

    @property
    def done(self) -> Done | None:
        """What has run everywhere, as the last heartbeats say. None: something moves, or a slice
        has come to a worker that was ahead of it."""
        settled = self._agreement.settled(self.map.version, len(self.map.workers))
        said = [each for each in settled if each.done is not None]
        last = min(said, key=lambda each: each.floor, default=None)
        if last is None or last.done is None or last.done.number >= last.floor:
            return None
        return last.done

    # -- who takes part

    def _begin_again(self, workers: Set[str]) -> None:
        addresses = {each: self.map.addresses[each] for each in workers}
        self._begin_run(addresses, self.map.assigned)

    def _begin_run(self, workers: dict[str, Any], assigned: dict[Slice, str]) -> None:
        version = self.map.version + 1
        self.run += 1
        self.map = PartitionMap()
        self._farewells.end()
        self._heartbeats.forget_all()
        self._agreement.forget_all()
        self._migrations.forget_all()
        self._outgoing, self._hurried = [], []
        self.leaving &= workers.keys()
        self._may_leave = set()
        if not workers.keys() - self.leaving:
            self.leaving = set()  # those that were to stay are lost
        if self.checkpoints.phase is not Phase.RESTS:
            self.checkpoints.fail("A worker was lost.")
        placed = place(self._tables, self._functions, assigned, workers, self.leaving)
        update = MapUpdate(version, placed, workers, is_whole=True)
        self.map.apply(update)
        begin = Begin(self.run, update, loads=True, checkpoint=self.checkpoints.last)
        self._outgoing += [(worker, begin) for worker in sorted(workers)]
        self._let_leave_without_slices()
        self._do_later()  # what was asked for while a checkpoint ran, which has failed

    def _on_arrived(self, slice: Slice, worker: str, version: int) -> None:
        if self.map.worker_of(slice) != worker:
            return
        migration = self._migrations.end(slice, version)
        if migration is None:
            return
        whence = migration.whence
        if worker in self.leaving:
            self._soon(self._schedule)  # what has come to one that leaves goes on
        elif whence is not None and whence in self.leaving and self._has_nothing(whence):
            self._may_leave.add(whence)
            if self._may_leave == self.leaving:  # else `tick` lets go those that are ready by then
                self._soon(self._let_leave)

    # -- checkpoints

    def _soon(self, what: Callable[[], None]) -> None:
        """Now, or behind the checkpoint that runs: during one the map does not change."""
        if self.checkpoints.phase is Phase.RESTS:
            what()
        else:
            self._later.append(what)

    def _after_checkpoint(self, order: Order | None) -> None:
        if order is None:
            return
        self._tell_all(order)
        if self.checkpoints.phase is Phase.RESTS:
            self._do_later()

    def _do_later(self) -> None:
        later, self._later = self._later, []
        for what in later:
            what()

    # -- what is asked for and cannot be

    def _check_takes_part(self, worker: str) -> None:
        if worker not in self.map.workers:
            there = ", ".join(sorted(self.map.workers))
            self._check(False, f"{worker} takes no part; these do: {there}.")

    def _check(self, is_right: bool, message: str) -> None:
        if not is_right:
            raise errors.ProgramError(message, hint=NOTHING_MOVED)
