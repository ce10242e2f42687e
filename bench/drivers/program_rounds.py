"""Rounds of `program_moves`: tasks that sleep. One node is slowed, or some come and go.

A round is that of k-means: a value is sent to all tasks, each sends something back, and the next
round begins when all of it has come.
"""

from __future__ import annotations

import contextlib
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.support import common
from bench.support.links import namespace

WAIT_S: Final = 90.0
LOOK_S: Final = 0.02
NODES: Final = 4
WARM_ROUNDS: Final = 5
SETTLE_S: Final = 60.0
QUIET_CALLS: Final = 4  # of scheduling functions, in which nothing has moved
NEAR: Final = 1.15  # a round at the full rate takes at most so many times their median
IN_A_ROW: Final = 5
_TIME = struct.Struct("<d")


def until(is_so: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Waits for it."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it was not so within {timeout_s:.0f} s")
        time.sleep(LOOK_S)


def say_end(folder: str) -> None:
    """A round has ended."""
    with Path(folder, "rounds").open("ab") as file:
        file.write(_TIME.pack(time.monotonic()))


class Watch:
    """A scheduling function that moves nothing: it says how many slices each worker has, or gets,
    when those before it have moved what they move."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(
        self, workers: Sequence[Any], partitions: Sequence[Any], leaving: frozenset[str]
    ) -> Mapping[tuple[int, int], str]:
        from bench.drivers.program_moves_driver import append

        slices = {(row.group, row.index): row.worker for row in partitions}
        at = {row.worker: list(slices.values()).count(row.worker) for row in workers}
        append(self.folder, "calls", {"s": time.monotonic(), "slices": at})
        return {}


class Rebalance:
    """`clamor.schedule.stragglers`, from the moment on that a node is slow: before, it would move
    partitions for what the machine's other work does to a second."""

    def __init__(self, folder: str, ratio: float) -> None:
        import clamor_ray as clamor

        self.folder = folder
        self.move = clamor.schedule.stragglers(ratio)

    def __call__(
        self, workers: Sequence[Any], partitions: Sequence[Any], leaving: frozenset[str]
    ) -> Mapping[tuple[int, int], str]:
        is_on = any(Path(self.folder).glob("slow-*"))
        return self.move(workers, partitions, leaving) if is_on else {}


class Rounds:
    """A program of rounds, while it runs.

    Args:
        folder: Where its tasks say what they do, and look for what they are told.
        n_partitions, n_bytes: Of them, and of each.
        work_s: That a task sleeps.
        factor: So many times as long on a host that is slow.
    """

    def __init__(
        self, folder: str, n_partitions: int, n_bytes: int, work_s: float, factor: float
    ) -> None:
        import clamor_ray as clamor

        self.folder = folder
        self.program = program = clamor.Program()
        self.parts = parts = program.dataset(
            [
                np.concatenate([np.zeros(1, np.uint64), common.make_array(n_bytes, n + 1)])
                for n in range(n_partitions)
            ]
        )
        self.count = count = program.value(0)

        def begin(t: Any, count: int) -> None:
            t.broadcast(count)

        def compute(t: Any, part: Any) -> None:
            common.verify("rounds", t.recv(), [int(part[0])])
            is_slow = Path(folder, f"slow-{namespace()}").exists()
            time.sleep(work_s * (factor if is_slow else 1.0))
            part[0] += 1
            t.send(0, 1)

        def end(t: Any, count: int) -> int:
            common.verify("tasks of a round", sum(t.recv()), n_partitions)
            say_end(folder)
            return count + 1

        def is_over(t: Any, count: int) -> bool:
            return Path(folder, "over").exists()

        with program.loop() as loop:
            program.stage(begin, reads=[count])
            program.stage(compute, writes=[parts])
            program.stage(end, writes=[count])
            loop.until(is_over, reads=[count])

    def ends_s(self) -> list[float]:
        """When each round has ended."""
        path = Path(self.folder, "rounds")
        data = path.read_bytes() if path.exists() else b""
        whole = len(data) - len(data) % _TIME.size
        return [each for (each,) in _TIME.iter_unpack(data[:whole])]

    def more(self, n: int) -> list[tuple[float, float]]:
        """Begin and end of the next n rounds."""
        first = len(self.ends_s())
        until(lambda: len(self.ends_s()) > first + n)
        return spans(self.ends_s()[first : first + n + 1])

    def calls(self) -> list[dict[str, Any]]:
        """What `Watch` has said."""
        from bench.drivers.program_moves_driver import lines

        return lines(self.folder, "calls")

    def finish(self, job: Any) -> int:
        """Ends the loop, and looks at what it has made: rounds."""
        Path(self.folder, "over").touch()
        n_rounds = int(job.result(self.count, WAIT_S))
        common.verify("rounds", len(self.ends_s()), n_rounds)
        for index, part in enumerate(job.result(self.parts, WAIT_S)):
            common.verify("rounds of a partition", part[0], n_rounds)
            want = common.expected_words(0, len(part) - 1, index + 1)
            common.verify("a partition", part[1:], want)
        return n_rounds


@contextlib.contextmanager
def running(
    n_partitions: int,
    n_bytes: int,
    work_s: float,
    workers: int,
    factor: float = 1.0,
    ratio: float | None = None,
) -> Iterator[tuple[Rounds, Any]]:
    """A program of rounds, and its job, that is stopped at the end.

    Args:
        n_partitions, n_bytes, work_s, factor: See `Rounds`.
        workers: Nodes.
        ratio: Of `Rebalance`; None: nothing is moved for the sake of speed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-rounds-") as folder:
        rounds = Rounds(folder, n_partitions, n_bytes, work_s, factor)
        schedule = [] if ratio is None else [Rebalance(folder, ratio)]
        job = rounds.program.run(cpus=1, workers=workers, schedule=[*schedule, Watch(folder)])
        try:
            rounds.more(WARM_ROUNDS)
            yield rounds, job
        finally:
            job.stop()


def spans(ends_s: Sequence[float]) -> list[tuple[float, float]]:
    return list(pairwise(ends_s))


def median_s(rounds: Sequence[tuple[float, float]]) -> float:
    return statistics.median(end - begin for begin, end in rounds)


def full_from(rounds: Sequence[tuple[float, float]], full_s: float) -> float:
    """When the first of some rounds in a row that take about `full_s` has begun."""
    for first in range(len(rounds) - IN_A_ROW + 1):
        row = rounds[first : first + IN_A_ROW]
        if all(end - begin <= NEAR * full_s for begin, end in row):
            return row[0][0]
    raise RuntimeError(f"no {IN_A_ROW} rounds in a row took about {full_s:.3f} s")


def best_ratio(n_partitions: int, n_nodes: int, factor: float) -> float:
    """The least that a round with one slow node can take / an undisturbed one, by arithmetic: whole
    partitions, and nothing but their tasks."""
    even = -(-n_partitions // n_nodes)
    return min(
        max(factor * slow, -(-(n_partitions - slow) // (n_nodes - 1))) / even
        for slow in range(n_partitions + 1)
    )


def straggler(session: Any, number: int) -> dict[str, Any]:
    """One of four nodes becomes slow, and partitions are moved."""
    options = session.options
    n = NODES * options.partitions
    how = {"factor": options.factor, "ratio": options.ratio}
    with running(n, 4096, options.work_s, NODES, **how) as (rounds, job):
        before_s = median_s(rounds.more(options.rounds))
        nodes = [each.node_id for each in job.stats().workers if each.node_id != session.nodes[0]]
        slow = session.nodes.index(nodes[number % len(nodes)])
        n_calls = len(rounds.calls())
        until(lambda: len(rounds.calls()) > n_calls)  # the next is two seconds away
        even = rounds.calls()[-1]["slices"]
        slowed_s = time.monotonic()
        Path(rounds.folder, f"slow-{session.links.namespaces[slow]}").touch()
        until(lambda: rounds.calls()[-1]["slices"] != even)
        moved_s = next(
            each["s"] for each in rounds.calls() if each["s"] > slowed_s and each["slices"] != even
        )

        def is_settled() -> bool:
            if time.monotonic() > slowed_s + SETTLE_S:
                return True  # what the machine does besides makes it move one to and fro
            last = [each["slices"] for each in rounds.calls()[-QUIET_CALLS - 1 :]]
            return all(each == last[0] for each in last)

        until(is_settled)
        settled = rounds.calls()[-1]["slices"]
        settled_s = next(each["s"] for each in rounds.calls() if each["slices"] == settled)
        after_s = median_s(rounds.more(options.rounds))
        # A round that was under way when the node became slow is neither.
        slowed = [each for each in spans(rounds.ends_s()) if each[0] > slowed_s]
        at_once = [each for each in slowed if each[1] < moved_s] or slowed[:1]
        n_moves = job.stats().moves
        n_rounds = rounds.finish(job)
    return {
        "run": "straggler",
        "repetition": number,
        "before_s": before_s,
        "at_once_s": median_s(at_once),
        "after_s": after_s,
        "moves": n_moves,
        "slices": sorted(settled.values()),
        "settled_after_s": settled_s - slowed_s,
        "best_ratio": best_ratio(n, NODES, options.factor),
        "rounds": n_rounds,
    }


def stable_messages(job: Any, seconds: float) -> dict[str, float]:
    """To and from the controller while nothing moves, each second, by kind."""
    began_s, before = time.monotonic(), job.stats().by_kind
    time.sleep(seconds)
    after, took_s = job.stats().by_kind, time.monotonic() - began_s
    return {kind: (n - before.get(kind, 0)) / took_s for kind, n in after.items()}


def elastic(session: Any, number: int) -> dict[str, Any]:
    """2 to 4 to 2 nodes while it runs."""
    options = session.options
    n, n_bytes = NODES * options.partitions, options.partition_bytes
    with running(n, n_bytes, options.work_s, NODES // 2) as (rounds, job):
        two_s = [median_s(rounds.more(options.rounds))]
        first = len(rounds.ends_s())
        asked_s = time.monotonic()
        job.scale(NODES)
        began_s = time.monotonic()
        until(lambda: spread_of(job.stats()) == (NODES, 1))
        four_s = median_s(rounds.more(2 * options.rounds)[options.rounds :])
        full_s = full_from(
            [each for each in spans(rounds.ends_s()[first:]) if each[1] > asked_s], four_s
        )
        messages = stable_messages(job, options.stable_s)
        n_moved = job.stats().moves
        has = [session.nodes.index(each.node_id) for each in job.stats().workers]
        left_s = time.monotonic()
        job.scale(NODES // 2)
        until(lambda: len(job.stats().workers) == NODES // 2)
        gone_s = time.monotonic()
        two_s.append(median_s(rounds.more(options.rounds)))
        n_rounds = rounds.finish(job)
    old, new = has[: NODES // 2], has[NODES // 2 :]
    part = n // NODES // (NODES // 2) * n_bytes  # from each of those to each of these
    link_s = session.links.seconds({host: [(to, part) for to in new] for host in old})
    return {
        "run": "elastic",
        "repetition": number,
        "two_s": two_s,
        "four_s": four_s,
        "began_s": began_s - asked_s,
        "full_s": full_s - asked_s,
        "link_s": link_s,
        "gone_s": gone_s - left_s,
        "moves": n_moved,
        "messages": messages,
        "rounds": n_rounds,
    }


def spread_of(stats: Any) -> tuple[int, int]:
    """Workers, and by how many slices the fullest exceeds the emptiest: 1, as a value is one."""
    slices = [each.n_slices for each in stats.workers]
    return len(slices), max(slices) - min(slices)
