"""What one worker does: its slices, the messages to and from them, and slices that move. Pure.

A message goes to the worker that has the receiver's slice, as this worker's map says, and carries
the map's version. What comes with a newer version than ours is held until we have that. What comes
for a slice that is not ours goes on (Canary, section 5.4). So it arrives: each hop knows more.

A slice that the map gives to another worker begins nothing more; when nothing runs on it, it goes,
with all that has run on it and all messages for it (section 4.4). Messages for a slice that is ours
and has not come wait here (`_early`), and go on if the map changes its mind.

A decision goes from who has made it to all others. A new worker gets the earlier ones from who has
made them, and all from the oldest worker. What a worker that has left has decided is passed on: it
may not have heard of those that are new.

The runtime, one call at a time:

    start, on_update, on_order, on_message, ran / sent_away + decided, tick
        what happens; then it looks at all of these:
    take_outgoing      envelopes for other workers
    take_departures    slices that go; for each it calls depart() with the data
    take_arrivals      slices that have come; it stores the data of each, then calls arrived()
    take_store         slices to store for a checkpoint; then it calls stored()
    take_reports       for the controller

Where other processes end tasks: the runtime empties the matcher's outbox before it calls `tick`, so
that a worker that leaves keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from clamor_ray._recipes.matching.matcher import ReadyTask
from clamor_ray._recipes.matching.state import SliceState
from clamor_ray._recipes.placement.links import Links
from clamor_ray._recipes.placement.local_matcher import LocalMatcher
from clamor_ray._recipes.placement.messages import (
    Arrived,
    Begin,
    Decision,
    Decisions,
    Drained,
    Envelope,
    Heartbeat,
    Lost,
    MapUpdate,
    Order,
    Packet,
    Parted,
    Report,
    Slice,
    SliceCame,
    Stop,
    Whereabouts,
)
from clamor_ray._recipes.placement.partition_map import Changes, PartitionMap
from clamor_ray._recipes.placement.worker_pause import WorkerPause
from clamor_ray._recipes.program.tables import Tables
from clamor_ray._recipes.progress.rounds import RoundCounter


class WorkerCore:
    """See the file's head. Not thread-safe: one caller at a time.

    Args:
        me: This worker's name.
        tables: The program.
        matcher: Of this node, with nothing in it.
        run: The job's, counted: a new one needs a new core and a new matcher.
        resend_s, lost_after_s: See `Links`.
    """

    def __init__(
        self,
        me: str,
        tables: Tables,
        matcher: LocalMatcher,
        run: int = 1,
        resend_s: float = 1.0,
        lost_after_s: float = 10.0,
    ) -> None:
        self.me = me
        self.run = run
        self.map = PartitionMap()
        self.lost_workers: set[str] = set()
        self._tables = tables
        self._matcher = matcher
        self._links = Links(run, resend_s, lost_after_s)
        self._here: set[Slice] = set()  # in the matcher
        self._leaving: set[Slice] = set()  # of those: held, something runs still
        self._departing: list[tuple[int, int, str, SliceState]] = []
        self._departed: set[Slice] = set()  # with the runtime, which calls depart()
        self._arrivals: list[tuple[int, int, Any]] = []
        self._arriving: dict[Slice, SliceState] = {}  # with the runtime, which calls arrived()
        # By number of the stage, and sender.
        self._early: dict[Slice, dict[tuple[int, int], list[bytes]]] = {}
        self._held: list[Packet | SliceCame] = []  # newer than our map
        self._decisions: dict[int, bool] = {}
        self._made: dict[int, bool] = {}  # of those: here
        self._to_part: set[str] = set()  # have left, and something that was sent there has not come
        self._parts = False  # the controller waits for it
        self._pause = WorkerPause(run, me, matcher)
        self._rounds = RoundCounter(tables)
        self._stops = False
        self._reports: list[Report] = []

    # -- what the controller says

    def start(
        self,
        update: MapUpdate,
        given: Mapping[Slice, SliceState],
        decisions: Mapping[int, bool] | None = None,
    ) -> None:
        """The first call.

        Args:
            update: The whole map.
            given: The slices that are here; their data is stored. None, where the job runs already.
            decisions: Of the checkpoint at which the job begins.
        """
        for number, value in (decisions or {}).items():
            self._learn(number, value)
        for (group, index), state in given.items():
            self._matcher.add(group, index, state)
            self._here.add((group, index))
        self.on_update(update)

    def on_update(self, update: MapUpdate) -> None:
        """A step of the map. Safe to call again, early, and late."""
        changes = self.map.apply(update)
        for slice in changes.moved & self._here:
            self._stay_or_go(slice)
        for slice in [each for each in self._early if self.map.worker_of(each) != self.me]:
            for (number, sender), messages in self._early.pop(slice).items():
                self._route(number, slice[0], sender, {slice[1]: messages})
        self._tell_new(changes)
        self._to_part |= changes.left - {self.me}
        self._parts = self._parts or bool(changes.left - {self.me})
        held, self._held = self._held, []
        for content in held:
            self._on_content(content)
        self._look()

    def on_order(self, order: Order) -> None:
        """Anything that the controller says, but for `Begin`."""
        assert not isinstance(order, Begin), "a new run needs a new core"
        if isinstance(order, MapUpdate):
            self.on_update(order)
        elif isinstance(order, Stop):
            self._stops = True
        else:
            self._pause.on_order(order)
        self._look()

    def on_floor(self, before: int) -> None:
        """No slice anywhere needs a stage with a lower number."""
        self._matcher.forget(before)

    # -- what other workers say

    def on_message(self, sender: str, envelope: Envelope) -> None:
        """An envelope has come. Safe to call again."""
        if isinstance(envelope.content, MapUpdate):
            if envelope.run == self.run:
                self.on_update(envelope.content)
            return
        content = self._links.accept(sender, envelope)
        if isinstance(content, Decision | Decisions):
            self._learn_from(sender, content)
        elif content is not None:
            self._on_content(content)

    def _on_content(self, content: Packet | SliceCame | Any) -> None:
        if content.version > self.map.version:
            self._held.append(content)
        elif isinstance(content, Packet):
            self._route(content.number, content.group, content.sender, content.messages)
        else:
            self._place(content)

    # -- what tasks do

    def ran(
        self, task: ReadyTask, sent: Mapping[int, list[bytes]], decision: bool | None = None
    ) -> None:
        """A task that this process has taken has run.

        Args:
            task: It counts as running until now.
            sent: What it has sent, by the index of the receiver.
            decision: What it has answered, where its stage decides.
        """
        stage = self._tables.stages[task.stage]
        if stage.sends:
            after = self._matcher.next_stage(task.number)
            assert after is not None
            away = self._matcher.close_all(task, sent)
            group = self._tables.stages[after].group
            messages = {index: sent.get(index, []) for index in away}
            self.sent_away(task.number + 1, group, task.index, messages)
        if decision is not None:
            self._matcher.decide(task.number, decision)
            self.decided(task.number, decision)
        self._matcher.finish([task])
        self._depart_if_idle()

    def sent_away(
        self, number: int, group: int, sender: int, messages: Mapping[int, list[bytes]]
    ) -> None:
        """A task of this node has sent to slices that were not here (of the matcher's outbox)."""
        self._route(number, group, sender, messages)

    def decided(self, number: int, value: bool) -> None:
        """A task of this node has answered, and its matcher knows (of the matcher's outbox)."""
        self._decisions[number] = self._made[number] = value
        self._tell_all(Decision(number, value))

    # -- time

    def tick(self, now_s: float) -> None:
        """Time goes on. To be called about every `resend_s`, and oftener while something moves, or
        a checkpoint runs.

        Args:
            now_s: Of any clock that does not go back.
        """
        for worker in self._links.tick(now_s) - self.lost_workers:
            self.lost_workers.add(worker)
            self._reports.append(Lost(self.run, self.me, worker))
        self._look()

    # -- what the runtime takes

    def take_outgoing(self) -> list[tuple[str, Envelope]]:
        """Worker and envelope. They may be lost, come twice, and overtake each other."""
        return self._links.take(self.map.addresses)

    def take_departures(self) -> list[tuple[int, int, str, SliceState]]:
        """Group, index and next worker of slices that go now, and what `depart` is to be given."""
        going, self._departing = self._departing, []
        return going

    def depart(self, group: int, index: int, to: str, state: SliceState, data: Any = None) -> None:
        """The data of a slice that goes. It goes where the map says now."""
        del to
        self._departed.discard((group, index))
        self._place(
            SliceCame(group=group, index=index, version=self.map.version, state=state, data=data)
        )

    def take_arrivals(self) -> list[tuple[int, int, Any]]:
        """Group, index and data of slices that have come. Nothing runs on them yet."""
        come, self._arrivals = self._arrivals, []
        return come

    def arrived(self, group: int, index: int) -> None:
        """The data of a slice that has come is stored: tasks may find it."""
        slice = (group, index)
        self._matcher.add(group, index, self._arriving.pop(slice))
        self._here.add(slice)
        for (number, sender), messages in self._early.pop(slice, {}).items():
            self._matcher.close(number, group, index, sender, messages)
        self._reports.append(Arrived(self.run, self.me, group, index, self.map.version))
        self._stay_or_go(slice)
        self._look()

    def take_store(self) -> tuple[int, dict[Slice, SliceState]] | None:
        """A checkpoint's name, and the slices to store, once. Nothing runs, or begins."""
        return self._pause.take_store()

    def stored(self, checkpoint: int, slices: Iterable[Slice], error: str = "") -> None:
        """The slices of a checkpoint are on disk.

        Args:
            checkpoint: Its name.
            slices: Which.
            error: Why they are not; empty: they are.
        """
        # Of a decision that another process has made nobody else may have heard yet.
        known = {**self._decisions, **self._matcher.decisions}
        self._reports.append(self._pause.stored(checkpoint, slices, known, error))

    def take_reports(self) -> list[Report]:
        """For the controller. Where one is lost, the next heartbeat, or `Resume`, mends it."""
        said, self._reports = self._reports, []
        return said

    @property
    def address(self) -> Mapping[str, Any]:
        """Of each worker, as the controller was told it."""
        return self.map.addresses

    @property
    def is_settled(self) -> bool:
        """Whether all slices that the map gives to this worker are here, and no others."""
        return not self._leaving and len(self._here) == self.map.n_slices_of(self.me)

    def heartbeat(self, seconds: Mapping[Slice, float], cpu: float) -> Heartbeat:
        """For the controller; it answers with the number for `on_floor`."""
        floor = self._matcher.floor
        # Of a decision that another process has made the outbox may have the news still.
        known = {**self._decisions, **self._matcher.decisions}
        return Heartbeat(
            run=self.run,
            worker=self.me,
            version=self.map.version,
            is_settled=self.is_settled,
            is_complete=self._matcher.is_complete,
            floor=floor,
            seconds=seconds,
            cpu=cpu,
            # Who has nothing is past all that it knows.
            done=self._rounds.advance(floor - 1, known) if self._here else None,
        )

    def whereabouts(self) -> Whereabouts:
        """For a new controller. What is reported later must go to that one."""
        return Whereabouts(self.run, self.me, self.map.whole(), frozenset(self._here))

    # -- inside

    def _learn(self, number: int, value: bool) -> bool:
        """Whether that is news."""
        if number in self._decisions:
            return False
        self._decisions[number] = value
        self._matcher.decide(number, value)
        return True

    def _learn_from(self, sender: str, content: Decision | Decisions) -> None:
        log = content.log if isinstance(content, Decisions) else {content.number: content.value}
        news = {number: value for number, value in log.items() if self._learn(number, value)}
        if news and self.map.has_left(sender):
            self._tell_all(Decisions(news))

    def _tell_all(self, content: Decision | Decisions) -> None:
        for worker in self.map.workers - {self.me}:
            self._links.send(worker, content)

    def _tell_new(self, changes: Changes) -> None:
        if not changes.joined or not self._decisions:
            return
        oldest = next((each for each in self.map.workers if each not in changes.joined), None)
        # Who leaves by the same steps may be the one that others take for the oldest.
        tells_all = self.me == oldest or self.me in changes.left
        log = dict(self._decisions if tells_all else self._made)
        for worker in (changes.joined - {self.me}) if log else ():
            self._links.send(worker, Decisions(log))

    def _route(
        self, number: int, group: int, sender: int, messages: Mapping[int, list[bytes]]
    ) -> None:
        """What is closed to a slice that is here goes along with it, wherever that goes."""
        away: dict[str, dict[int, list[bytes]]] = {}
        for index, each in messages.items():
            slice = (group, index)
            worker = self.map.worker_of(slice)
            if slice in self._here:
                self._matcher.close(number, group, index, sender, each)
            elif worker == self.me:
                self._early.setdefault(slice, {}).setdefault((number, sender), each)
            else:
                away.setdefault(worker, {})[index] = each
        for worker, part in away.items():
            self._links.send(
                worker,
                Packet(
                    number=number,
                    group=group,
                    sender=sender,
                    version=self.map.version,
                    messages=part,
                ),
            )

    def _place(self, came: SliceCame) -> None:
        slice = (came.group, came.index)
        worker = self.map.worker_of(slice)
        if worker == self.me:
            self._arriving[slice] = came.state
            self._arrivals.append((came.group, came.index, came.data))
        else:
            self._links.send(worker, replace(came, version=self.map.version))

    def _stay_or_go(self, slice: Slice) -> None:
        if self.map.worker_of(slice) != self.me:
            self._leaving.add(slice)
            self._depart_if_idle()
        elif slice in self._leaving:
            self._leaving.discard(slice)
            self._matcher.release(*slice)

    def _depart_if_idle(self) -> None:
        for slice in list(self._leaving):
            if self._matcher.hold(*slice):
                state = self._matcher.remove(*slice)
                self._leaving.discard(slice)
                self._here.discard(slice)
                self._departed.add(slice)
                self._departing.append((*slice, self.map.worker_of(slice), state))

    def _look(self) -> None:
        """What may be so now, though nobody says when: other processes finish tasks."""
        self._depart_if_idle()
        self._to_part = {each for each in self._to_part if not self._links.is_quiet(each)}
        if self._parts and not self._to_part:
            self._parts = False
            self._reports.append(Parted(self.run, self.me, self.map.version))
        answer = self._pause.look(self.map.version, self.is_settled, self._here)
        if answer is not None:
            self._reports.append(answer)
        has = self._here or self._departed or self._arriving or self._early or self._held
        if self._stops and not has and self._links.is_quiet():
            self._stops = False
            self._reports.append(Drained(self.run, self.me))
