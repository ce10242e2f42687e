"""Which task of a stage is started where, and when again. State and event: no Ray, no clock.

* A task goes where its last read set and its input are, and waits `locality_wait_s` for that node
  (delay scheduling, Zaharia et al., EuroSys 2010); then any node with a free slot will do. What is
  more than a node's share of the stage does not wait for it: a stage ends with its last task, and
  what has moved once is there the next time.
* A task that has run for `multiplier` times the median of its stage's tasks, once `quantile` of
  them are done, gets one copy, on another node (Clamor section 5.4; VOLUME section II-C). Whichever
  ends first wins; the other is cancelled, and its slot stays taken until it is really over. A node
  whose task lost to its copy is slow: for `slow_s` nothing is started there but what finds no
  other node: tasks that wait while, for as long as makes a task slow, none begins or ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Scheduling = Literal["locality", "deterministic", "ray"]


@dataclass(frozen=True)
class Policy:
    """How tasks are placed.

    Args:
        scheduling: "locality", "deterministic" (partition -> node by its number) or "ray".
        locality_wait_s: for a preferred node that is busy.
        speculation: whether tasks that take long get a copy.
        multiplier: of the median, from which on a task takes long.
        quantile: part of the tasks that must be done before that is judged.
        least_s: no task is copied before it has run for that long.
        cold_s: and on a node where none of ours has ended yet, for that much longer: there a
            process has to start first.
        slow_s: for how long a node is avoided where a task lost to its copy.
        patience_s: for how long tasks wait for better nodes than slow ones before any has ended.
        most_in_flight: of "ray", where slots are Ray's business.
    """

    scheduling: Scheduling = "locality"
    locality_wait_s: float = 1.0
    speculation: bool = True
    multiplier: float = 1.5
    quantile: float = 0.5
    least_s: float = 1.0
    cold_s: float = 5.0
    slow_s: float = 60.0
    patience_s: float = 10.0
    most_in_flight: int = 1000


def group_of(task: int, n_groups: int) -> int:
    """Which of n groups a task belongs to, whatever happens; "deterministic" places tasks so.

    Example:
        >>> [group_of(task, 3) for task in range(4)]
        [0, 1, 2, 0]
    """
    return task % n_groups


class Start(NamedTuple):
    """Run a task; node None: wherever Ray likes."""

    task: int
    attempt: int
    node: str | None


class Cancel(NamedTuple):
    """Another attempt of the task has won."""

    task: int
    attempt: int


@dataclass
class Slots:
    """Free places for tasks, by node; what is left of a cancelled attempt keeps its place.

    Args:
        total: places of each node.
        taken: of those.
        warm: nodes where a task has ended.
        slow: until when nodes are avoided.
    """

    total: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    warm: set[str] = field(default_factory=set)
    slow: dict[str, float] = field(default_factory=dict)

    def good(self, now_s: float) -> dict[str, int]:
        """Places of the nodes that are not slow; of all, where all are."""
        slow = {node for node, until_s in self.slow.items() if now_s < until_s}
        return {node: n for node, n in self.total.items() if node not in slow} or self.total

    def set_nodes(self, total: Mapping[str, int]) -> None:
        """The nodes that are alive, with their places."""
        self.total = dict(total)
        self.taken = {node: n for node, n in self.taken.items() if node in total}

    def free(self, node: str) -> int:
        return self.total.get(node, 0) - self.taken.get(node, 0)

    def take(self, node: str | None) -> None:
        if node is not None:
            self.taken[node] = self.taken.get(node, 0) + 1

    def give(self, node: str | None) -> None:
        if node is not None and self.taken.get(node, 0) > 0:
            self.taken[node] -= 1

    def freest(self, now_s: float, avoid: str | None = None, slow_too: bool = False) -> str | None:
        """The node with the most free places; None where there is none."""
        others = [] if slow_too else [node for node in self.good(now_s) if node != avoid]
        others = others or [node for node in self.total if node != avoid]
        nodes = [node for node in others if self.free(node) > 0]
        return max(nodes, key=lambda node: (self.free(node), node)) if nodes else None


@dataclass
class _Running:
    node: str | None
    since_s: float


def place_of(task: int, nodes: Iterable[str]) -> str:
    """The node that a partition belongs to: the same of the same nodes, and of no other's business.

    Example:
        >>> place_of(0, ["a", "b"]) == place_of(0, ["b", "a"])
        True
    """
    ordered = sorted(nodes)
    return ordered[group_of(task, len(ordered))]


class StageSchedule:
    """The tasks of one stage.

    Args:
        tasks: their numbers.
        preferred: the node of each where it would like to run, or None.
        slots: of the cluster; shared by all stages of a process.
        policy: see there.
        now_s: a clock that only goes forward.

    Example:
        >>> slots = Slots({"a": 1, "b": 1})
        >>> stage = StageSchedule([0, 1, 2], {0: "a", 1: "a", 2: "b"}, slots, Policy(), 0.0)
        >>> stage.start(0.0)            # task 1 waits for node a
        [Start(task=0, attempt=0, node='a'), Start(task=2, attempt=0, node='b')]
        >>> stage.finished(2, 0, took_s=0.1, now_s=0.1)
        []
        >>> stage.start(1.5)
        [Start(task=1, attempt=0, node='b')]
    """

    def __init__(
        self,
        tasks: Sequence[int],
        preferred: Mapping[int, str | None],
        slots: Slots,
        policy: Policy,
        now_s: float,
    ) -> None:
        self._slots = slots
        self._policy = policy
        self._began_s = now_s
        self._moved_s = now_s  # when a task last began or ended
        self._waiting: dict[int, None] = dict.fromkeys(tasks)
        self._preferred = self._shared_out(tasks, preferred, now_s)
        self._n_tasks = len(tasks)
        self._running: dict[int, dict[int, _Running]] = {}
        self._attempts: dict[int, int] = {}
        self._done: dict[int, float] = {}

    def _shared_out(
        self, tasks: Sequence[int], preferred: Mapping[int, str | None], now_s: float
    ) -> dict[int, str | None]:
        """What tasks prefer, but of no node more than its share, and nothing of slow ones."""
        places = self._slots.good(now_s)
        n_places = sum(places.values())
        left = {node: -(-len(tasks) * n // n_places) for node, n in places.items()}
        found: dict[int, str | None] = {}
        for task in tasks:
            node = preferred.get(task)
            if node is not None and left.get(node, 0) > 0:
                left[node] -= 1
                found[task] = node
            else:
                found[task] = None
        return found

    @property
    def is_over(self) -> bool:
        return len(self._done) == self._n_tasks

    @property
    def n_running(self) -> int:
        return sum(len(attempts) for attempts in self._running.values())

    # -- starting

    def start(self, now_s: float) -> list[Start]:
        """What is to be started now."""
        if self._policy.scheduling == "ray":
            starts = self._start_anywhere(now_s)
        else:
            starts = self._start_placed(now_s)
        return starts + self._start_copies(now_s)

    def _start_anywhere(self, now_s: float) -> list[Start]:
        # No more than can run: a task that Ray keeps waiting would be taken for a slow one.
        places = sum(self._slots.total.values()) or self._policy.most_in_flight
        room = min(places, self._policy.most_in_flight) - self.n_running
        return [self._begin(task, None, now_s) for task in list(self._waiting)[: max(0, room)]]

    def _start_placed(self, now_s: float) -> list[Start]:
        starts: list[Start] = []
        fixed = self._policy.scheduling == "deterministic"
        for task in list(self._waiting):
            node = self._place_of(task) if fixed else self._preferred[task]
            if node is not None and self._slots.free(node) > 0:
                starts.append(self._begin(task, node, now_s))
        if fixed:
            if not self._slots.total and self._waiting:
                starts += self._start_anywhere(now_s)
            return starts
        waited = now_s - self._began_s >= self._policy.locality_wait_s
        for task in list(self._waiting):
            likes = self._preferred[task]
            if likes is not None and likes in self._slots.total and not waited:
                continue
            node = self._slots.freest(now_s, slow_too=now_s >= self._stands_s)
            if node is None:
                break
            starts.append(self._begin(task, node, now_s))
        if not self._slots.total:  # no node has a CPU for it: Ray says so, or finds one
            starts += self._start_anywhere(now_s)
        return starts

    @property
    def _stands_s(self) -> float:
        """When nothing has moved for long: a slow node is better than none."""
        policy = self._policy
        if not self._done:  # how long a task takes is not known
            return self._moved_s + policy.patience_s
        usual_s = statistics.median(self._done.values())
        return self._moved_s + max(policy.least_s, policy.multiplier * usual_s)

    def _place_of(self, task: int) -> str | None:
        return place_of(task, self._slots.total) if self._slots.total else None

    def _begin(self, task: int, node: str | None, now_s: float) -> Start:
        self._waiting.pop(task, None)
        self._moved_s = now_s
        attempt = self._attempts.get(task, 0)
        self._attempts[task] = attempt + 1
        self._running.setdefault(task, {})[attempt] = _Running(node, now_s)
        self._slots.take(node)
        return Start(task, attempt, node)

    # -- copies

    def _slow_after_s(self) -> float | None:
        policy = self._policy
        if not policy.speculation or self._n_tasks < 2:
            return None
        if len(self._done) < max(1, policy.quantile * self._n_tasks):
            return None
        return max(policy.least_s, policy.multiplier * statistics.median(self._done.values()))

    def _cold_s(self, node: str | None) -> float:
        return 0.0 if node is None or node in self._slots.warm else self._policy.cold_s

    def _start_copies(self, now_s: float) -> list[Start]:
        slow_s = self._slow_after_s()
        if slow_s is None or self._waiting:
            return []
        starts = []
        for task, attempts in list(self._running.items()):
            if len(attempts) != 1 or self._attempts[task] > 1:
                continue
            (first,) = attempts.values()
            if now_s - first.since_s < slow_s + self._cold_s(first.node):
                continue
            node = self._slots.freest(now_s, avoid=first.node)
            if node is None and self._policy.scheduling != "ray":
                break
            starts.append(self._begin(task, node, now_s))
        return starts

    def wake_s(self, now_s: float) -> float | None:
        """Seconds until `start` may have more to say without an event; None: never."""
        waits = []
        if self._waiting and self._policy.scheduling == "locality":
            waits.append(self._began_s + self._policy.locality_wait_s - now_s)
            waits.append(self._stands_s - now_s)
        slow_s = self._slow_after_s()
        if slow_s is not None:
            waits += [
                running.since_s + slow_s + self._cold_s(running.node) - now_s
                for task, attempts in self._running.items()
                if self._attempts[task] == 1
                for running in attempts.values()
            ]
        ahead = [wait for wait in waits if wait > 0]
        return min(ahead) if ahead else None

    # -- events

    def finished(self, task: int, attempt: int, took_s: float, now_s: float) -> list[Cancel]:
        """An attempt has a result. The first one's counts.

        Args:
            took_s: its own time, without what it waited to be started.
            now_s: the clock.
        """
        self._moved_s = now_s
        ended = self._running[task].pop(attempt)
        node = ended.node
        self._slots.give(node)
        if node is not None:
            self._slots.warm.add(node)
        others = self._running.pop(task, {})
        losers = list(others)
        if attempt > 0 and 0 in others and (slow := others[0].node) is not None:
            self._slots.slow[slow] = now_s + self._policy.slow_s
        # As long as a running one is judged by: where all wait for processes to start, or for the
        # processor, none of them is slow.
        self._done.setdefault(task, max(took_s, now_s - ended.since_s))
        return [Cancel(task, loser) for loser in losers]

    def failed(self, task: int, attempt: int) -> bool:
        """An attempt has ended without a result. Whether none is left that could have one."""
        running = self._running[task].pop(attempt)
        self._slots.give(running.node)
        if self._running[task]:
            return False
        del self._running[task]
        return True
