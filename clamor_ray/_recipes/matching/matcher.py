"""Which tasks may run on a node now. Pure Python: the model of the matcher in C, and its fallback.

A task may begin when its slice is here and is not held, each partition that it accesses is as its
preconditions say (`Need`), and all senders of messages to it have closed (Canary, section 4.3). The
readers of a partition begin in the order of the program, and may run side by side: so their number
says which they are, also after the slice has moved.

    take()      -> tasks that may run; they have begun
    finish()    -> their partitions are as they left them, and tasks that waited for that may run
    close()     -> all messages of one sender to one task are here

A node knows a window of the order of stages: from the oldest that a slice anywhere may need, up to
the next decision that has not come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from clamor_ray._recipes.matching.state import Inbox, PartitionState, SliceState
from clamor_ray._recipes.program.sequence import Instance, Sequence
from clamor_ray._recipes.program.tables import Tables

WINDOW: Final = 1 << 16  # stages that are known at once
# Of a slice's stages, so many are looked at behind the first that has not begun, and so many of its
# tasks begin at most before one of them ends: so what is ready is bounded.
AHEAD: Final = 8


class ReadyTask(NamedTuple):
    """A task that may run. A tuple, because thousands a second are made.

    Args:
        number: Of its stage, in the order of all that run.
        stage: Of the tables.
        index: Of its partitions.
    """

    number: int
    stage: int
    index: int  # type: ignore[assignment]  # not tuple's method


@dataclass
class _Slice:
    """One that is here.

    Args:
        partitions: By dataset.
        first: The place, in the order of the group's stages, of the first that has not begun.
        running: The numbers of its tasks that have begun and not ended.
        is_held: Nothing new begins.
    """

    partitions: dict[int, PartitionState]
    first: int = 0
    running: set[int] = field(default_factory=set)
    is_held: bool = False


@dataclass
class _Order:
    """The stages of one group that are known. Those before `base` are forgotten."""

    base: int = 0
    instances: list[Instance] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.base + len(self.instances)

    def at(self, place: int) -> Instance:
        return self.instances[place - self.base]


class Matcher:
    """See the file's head. Not thread-safe: one caller at a time.

    Args:
        tables: The program.
        window: So many stages are known at once; at least 2.

    Example:
        >>> from clamor_ray._recipes.program.builder import Builder
        >>> p = Builder()
        >>> x = p.dataset([1, 2])
        >>> p.stage(lambda t, x: x + 1, writes=[x])
        >>> matcher = Matcher(p.tables())
        >>> matcher.add(0, 1, SliceState({0: PartitionState()}))
        >>> matcher.take(10)
        [ReadyTask(number=1, stage=0, index=1)]
    """

    def __init__(self, tables: Tables, window: int = WINDOW) -> None:
        self._tables = tables
        self._window = window
        self._sequence = Sequence(tables)
        self._instances: dict[int, Instance] = {}
        self._oldest = 1  # number that is known still
        self._orders = [_Order() for _ in range(tables.n_groups)]
        self._slices: dict[tuple[int, int], _Slice] = {}
        # By slice, and by the number of the stage. Also of slices that are about to come.
        self._inboxes: dict[tuple[int, int], dict[int, Inbox]] = {}
        self._ready: deque[ReadyTask] = deque()
        self._decisions: dict[int, bool] = {}
        self._limit: int | None = None
        self._extend()

    # -- what is here

    def add(self, group: int, index: int, state: SliceState) -> None:
        """A slice is here now, with what has come for it."""
        assert (group, index) not in self._slices
        order = self._orders[group]
        self._slices[group, index] = _Slice(state.partitions, order.base)
        here = self._inboxes.setdefault((group, index), {})
        for number, inbox in state.inboxes.items():
            into = here.setdefault(number, Inbox())
            for sender in inbox.closed:
                into.close(sender, inbox.messages.get(sender, []))
        at = self._slices[group, index]
        for number in [each for each in here if self._is_late(at, each)]:
            del here[number]
        self._match(group, index)

    def hold(self, group: int, index: int) -> bool:
        """Nothing new begins on a slice. Whether nothing runs on it."""
        held = self._slices[group, index]
        held.is_held = True
        kept = [task for task in self._ready if not self._is_of(task, group, index)]
        for task in self._ready:
            if self._is_of(task, group, index):
                self._take_back(task, held)
        self._ready = deque(kept)
        return not held.running

    def release(self, group: int, index: int) -> None:
        """A slice that was held stays."""
        self._slices[group, index].is_held = False
        self._match(group, index)

    def remove(self, group: int, index: int) -> SliceState:
        """A slice that is held, and on which nothing runs, goes: what has run on it, and the
        messages that have come for it."""
        gone = self._slices.pop((group, index))
        assert gone.is_held
        assert not gone.running
        return SliceState(gone.partitions, self._inboxes.pop((group, index), {}))

    @property
    def slices(self) -> list[tuple[int, int]]:
        """Group and index of all that are here."""
        return list(self._slices)

    # -- tasks

    def take(self, most: int) -> list[ReadyTask]:
        """Tasks that run from now on."""
        return [self._ready.popleft() for _ in range(min(most, len(self._ready)))]

    def finish(self, tasks: Iterable[ReadyTask]) -> None:
        """They have run; what they sent was closed before."""
        for task in tasks:
            instance = self._instances[task.number]
            group = self._tables.stages[task.stage].group
            at = self._slices[group, task.index]
            at.running.remove(task.number)
            for need in instance.needs:
                partition = at.partitions[need.dataset]
                if need.is_write:
                    at.partitions[need.dataset] = PartitionState(writer=task.number)
                else:
                    partition.finished += 1
            self._inboxes[group, task.index].pop(task.number, None)
            self._match(group, task.index)

    def next_stage(self, number: int) -> int | None:
        """The stage that comes after one that sends: it is known then."""
        following = self._instances.get(number + 1)
        return None if following is None else following.stage

    def messages(self, task: ReadyTask) -> list[bytes]:
        """What was sent to a task that runs, in the order of its senders."""
        group = self._tables.stages[task.stage].group
        inbox = self._inboxes[group, task.index].get(task.number)
        return inbox.in_order() if inbox is not None else []

    def close_all(self, task: ReadyTask, sent: Mapping[int, list[bytes]]) -> list[int]:
        """A task of a stage that sends has sent all: those of the next stage whose slices are here
        have it.

        Args:
            task: It runs still.
            sent: What it sent, by the index of the receiver. Who got nothing must know that too.

        Returns:
            The indices of the others, in order.
        """
        after = self._tables.stages[self._instances[task.number + 1].stage]
        away = []
        for index in range(after.n_tasks):
            if (after.group, index) in self._slices:
                messages = sent.get(index, [])
                self.close(task.number + 1, after.group, index, task.index, messages)
            else:
                away.append(index)
        return away

    def close(
        self, number: int, group: int, index: int, sender: int, messages: list[bytes]
    ) -> None:
        """A task of the stage before has sent all that it sends to one task.

        The slice of the receiver is here, or comes. What comes twice, or for a task that has begun,
        is dropped.

        Args:
            number: Of the receiver's stage. It need not be known here yet.
            group, index: Of the receiver's slice.
            sender: The index of the task that has sent.
            messages: In the order in which they were sent; there may be none.
        """
        at = self._slices.get((group, index))
        if number < self._oldest or (at is not None and self._is_late(at, number)):
            return
        inbox = self._inboxes.setdefault((group, index), {}).setdefault(number, Inbox())
        if not inbox.close(sender, messages) or at is None:
            return
        instance = self._instances.get(number)
        if instance is not None and len(inbox.closed) == instance.senders:
            self._match(group, index)

    # -- the order of stages

    def decide(self, number: int, value: bool) -> None:
        """A stage's answer has come. Safe to call again, early, and after `forget`."""
        if number >= self._oldest:
            self._decisions[number] = value
            self._extend()

    @property
    def decisions(self) -> dict[int, bool]:
        """All answers that have come, by number; those that `forget` names are gone."""
        return dict(self._decisions)

    @property
    def is_complete(self) -> bool:
        """Whether the program has ended, for all slices that are here."""
        return self._sequence.is_complete and all(
            not at.running and self._is_done(group, at) for (group, _), at in self._slices.items()
        )

    @property
    def furthest(self) -> int:
        """The number of the last stage that has begun on a slice that is here; 0: none has."""
        forgotten = self._oldest - 1  # those have run everywhere
        return max((forgotten, *(self._furthest(at) for at in self._slices.values())))

    @property
    def floor(self) -> int:
        """No slice that is here needs a stage with a lower number."""
        return min((self._floor(key[0], at) for key, at in self._slices.items()), default=0) or (
            self._sequence.n_known + 1
        )

    def forget(self, before: int) -> None:
        """No slice anywhere needs stages with lower numbers. One whose answer is waited for
        stays."""
        first, at = self._oldest, 0
        while self._oldest != at:  # a window that moves makes room for more that may be forgotten
            at = self._oldest
            self._forget_known(before)
            self._extend()
        if self._oldest > first:
            for inboxes in self._inboxes.values():
                for number in [each for each in inboxes if each < self._oldest]:
                    del inboxes[number]

    def _forget_known(self, before: int) -> None:
        of_group = [0] * len(self._orders)
        while self._oldest < before and self._oldest in self._instances:
            if self._oldest == self._sequence.decision:
                break
            instance = self._instances.pop(self._oldest)
            of_group[self._tables.stages[instance.stage].group] += 1
            self._decisions.pop(self._oldest, None)
            self._oldest += 1
        for order, n in zip(self._orders, of_group, strict=True):
            del order.instances[:n]
            order.base += n

    def stop_after(self, number: int | None) -> None:
        """Nothing later begins; None: everything may."""
        self._limit = number
        if number is not None:
            kept = deque(task for task in self._ready if task.number <= number)
            for task in self._ready:
                if task.number > number:
                    at = self._slices[self._tables.stages[task.stage].group, task.index]
                    self._take_back(task, at)
            self._ready = kept
        for group, index in list(self._slices):
            self._match(group, index)

    def has_reached(self, number: int) -> bool:
        """Whether all stages up to that number have run on all slices that are here, and what
        those have sent to these slices has come, wherever they have run."""
        after = self._instances.get(number + 1)
        last = self._instances.get(number)
        sends = last is not None and self._tables.stages[last.stage].sends
        if number > self._sequence.n_known or (after is None and sends):
            return False
        return all(
            not at.running
            and self._floor(group, at) > number
            and (after is None or self._has_messages(at, after, group, index))
            for (group, index), at in self._slices.items()
        )

    def _has_messages(self, at: _Slice, instance: Instance, group: int, index: int) -> bool:
        """Whether a slice needs no more of them."""
        if not instance.senders or self._tables.stages[instance.stage].group != group:
            return True
        inbox = self._inboxes[group, index].get(instance.number)
        is_full = inbox is not None and len(inbox.closed) == instance.senders
        return is_full or self._has_begun(at, instance)

    # -- matching

    def _extend(self) -> None:
        touched: set[int] = set()
        while True:
            awaited = self._sequence.decision
            if awaited is not None:
                if awaited not in self._decisions:
                    break
                self._sequence.decide(awaited, self._decisions[awaited])
            found = self._sequence.extend(self._window - len(self._instances))
            if not found:
                break
            for instance in found:
                self._instances[instance.number] = instance
                group = self._tables.stages[instance.stage].group
                self._orders[group].instances.append(instance)
                touched.add(group)
                before = self._instances.get(instance.number - 1)
                if before is not None and self._tables.stages[before.stage].sends:
                    # It may begin now: its next stage is known.
                    touched.add(self._tables.stages[before.stage].group)
        for group, index in list(self._slices):
            if group in touched:
                self._match(group, index)

    def _match(self, group: int, index: int) -> None:
        at = self._slices[group, index]
        order = self._orders[group]
        self._advance(order, at)
        if at.is_held:
            return
        begin = at.first - order.base
        for instance in order.instances[begin : begin + AHEAD]:
            if self._limit is not None and instance.number > self._limit:
                return
            if len(at.running) == AHEAD:
                return
            if self._may_begin(at, instance, index):
                self._begin(at, instance, index)

    def _advance(self, order: _Order, at: _Slice) -> None:
        at.first = max(at.first, order.base)
        while at.first < order.end and self._has_begun(at, order.at(at.first)):
            at.first += 1

    def _may_begin(self, at: _Slice, instance: Instance, index: int) -> bool:
        for dataset, is_write, writer, readers in instance.needs:
            partition = at.partitions[dataset]
            if partition.writing or partition.writer != writer or partition.started != readers:
                return False
            if is_write and partition.finished != readers:
                return False
        if self._tables.stages[instance.stage].sends and instance.number + 1 not in self._instances:
            return False  # the window ends here: nobody knows to whom it sends
        if not instance.senders:
            return True
        group = self._tables.stages[instance.stage].group
        inbox = self._inboxes[group, index].get(instance.number)
        return inbox is not None and len(inbox.closed) == instance.senders

    def _begin(self, at: _Slice, instance: Instance, index: int) -> None:
        at.running.add(instance.number)
        for need in instance.needs:
            partition = at.partitions[need.dataset]
            if need.is_write:
                partition.writing = instance.number
            else:
                partition.started += 1
        self._ready.append(ReadyTask(instance.number, instance.stage, index))

    def _take_back(self, task: ReadyTask, at: _Slice) -> None:
        """It has not run. Of the readers of a partition those that began last go first."""
        at.running.remove(task.number)
        for need in self._instances[task.number].needs:
            partition = at.partitions[need.dataset]
            if need.is_write:
                partition.writing = 0
            else:
                partition.started -= 1
        order = self._orders[self._tables.stages[task.stage].group]
        at.first = order.base

    # -- what a slice has behind it

    def _has_begun(self, at: _Slice, instance: Instance) -> bool:
        number = instance.number
        for dataset, is_write, writer, readers in instance.needs:
            partition = at.partitions[dataset]
            if is_write:
                if partition.writer >= number or partition.writing >= number:
                    return True
            elif partition.writer != writer:
                if partition.writer > writer:
                    return True
            elif partition.started > readers:
                return True
        return False

    def _is_done(self, group: int, at: _Slice) -> bool:
        order = self._orders[group]
        self._advance(order, at)
        return at.first == order.end

    def _furthest(self, at: _Slice) -> int:
        begun = 0
        for state in at.partitions.values():
            begun = max(begun, state.writer, state.writing)
        for order in self._orders:
            for instance in reversed(order.instances):
                if instance.number <= begun:
                    break
                if instance.needs[0].dataset in at.partitions and self._has_begun(at, instance):
                    return instance.number
        return begun

    def _floor(self, group: int, at: _Slice) -> int:
        """The first stage that has not begun, or still runs."""
        order = self._orders[group]
        self._advance(order, at)
        ends = self._sequence.n_known + 1
        first = order.at(at.first).number if at.first < order.end else ends
        return min((first, *at.running))

    def _is_late(self, at: _Slice, number: int) -> bool:
        """Whether the slice needs no message for that stage any more."""
        instance = self._instances.get(number)
        if instance is None:
            return number < self._oldest
        return self._has_begun(at, instance)

    def _is_of(self, task: ReadyTask, group: int, index: int) -> bool:
        return task.index == index and self._tables.stages[task.stage].group == group
