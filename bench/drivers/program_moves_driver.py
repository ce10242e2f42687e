"""The driver of `program_moves`, in the namespace of the first host: one session.

python -m bench.drivers.program_moves_driver OPTIONS_AS_JSON      prints one JSON object per run
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.drivers import program_rounds
from bench.support import common
from bench.support.common import emit, note
from bench.support.links import NS_PER_S, LinkEnd, Links, namespace

TIMEOUT_S = 120.0
MOVERS = 0  # the number of the dataset that moves
HOME = 1  # the host that partitions leave; the driver and the controller are on the first
EIGHT = 8
AT_HOME_S = 0.5e-3  # a task
ELSEWHERE_S = 20e-3  # where nothing is measured until all have come back
HEAD = 4  # words of a partition that tasks write: rounds, host, end of the last one, news
HEARD_S = 2.0  # until the controller has heard that all have come: by a heartbeat, at the latest
MS_PER_S = 1e3


@dataclasses.dataclass(frozen=True)
class Options:
    """Of one session's runs."""

    hosts: int
    repetitions: int  # of each
    moves: int  # of one partition, and of eight
    partition_bytes: int  # of one that moves
    work_s: float  # of a task, while nobody is slow
    partitions: int  # of rounds, on each of four nodes
    factor: float  # by which one node is slower
    ratio: float  # of `clamor.schedule.stragglers`
    rounds: int  # of which a median is taken
    stable_s: float  # while messages are counted
    only: Sequence[str]  # figures


class Ordered:
    """A scheduling function: it moves all partitions, each to another worker, when a file asks for
    it, and says when. The controller calls it, so its answer is the order."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(
        self, workers: Sequence[Any], partitions: Sequence[Any], leaving: frozenset[str]
    ) -> Mapping[tuple[int, int], str]:
        wanted = Path(self.folder, "wanted")
        if not wanted.exists():
            return {}
        wanted.unlink()
        movers = [row for row in partitions if row.dataset == MOVERS]
        has = {row.worker for row in movers}
        others = [row.worker for row in workers if row.worker not in has]
        moves = {(row.dataset, row.index): others[row.index % len(others)] for row in movers}
        append(self.folder, "orders", {"ordered_ns": time.monotonic_ns()})
        return moves


def append(folder: str, name: str, record: dict[str, Any]) -> None:
    """A line; lines of several processes do not mix."""
    with Path(folder, name).open("a") as file:
        file.write(json.dumps(record) + "\n")


def lines(folder: str, name: str) -> list[dict[str, Any]]:
    path = Path(folder, name)
    found = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in found if line.endswith("\n")]


def mover(folder: str, n_partitions: int, n_bytes: int, n_hosts: int, home: int) -> tuple[Any, Any]:
    """A program whose tasks follow each other, and say when their partition has come to a host:
    the program, and its partitions."""
    import clamor_ray as clamor

    program = clamor.Program()
    parts = program.dataset(
        [
            np.concatenate(
                [np.zeros(HEAD, np.int64), common.make_array(n_bytes, n + 1).view(np.int64)]
            )
            for n in range(n_partitions)
        ]
    )

    def look(t: Any, part: Any) -> None:
        began_ns = time.monotonic_ns()
        here = namespace()
        if part[3]:  # not in the first task, whose cores others may need now
            common.verify("a partition", part[HEAD:].view(np.uint64), words(part, t.index))
            part[3] = 0
        if part[1] != here:
            came = {"index": t.index, "began_ns": began_ns, "ended_ns": int(part[2])}
            append(folder, "came", {**came, "host": here})
            part[1], part[3] = here, 1
        part[0] += 1
        time.sleep(AT_HOME_S if here == home else ELSEWHERE_S)
        part[2] = time.monotonic_ns()

    def stay(t: Any, part: int) -> None:
        pass

    # A worker that has nothing would be given some at once.
    program.stage(stay, writes=[program.dataset(range(n_hosts))])
    with program.loop(max=10**12):
        program.stage(look, writes=[parts])
    return program, parts


def words(part: Any, index: int) -> Any:
    return common.expected_words(0, len(part) - HEAD, index + 1)


class Session:
    """A session, on hosts in the order of their addresses."""

    def __init__(self, options: Options) -> None:
        import ray

        import clamor_ray as clamor

        ray.init(address="auto", log_to_driver=False, logging_level="error")
        self.options = options
        self.trap = clamor.init().trap
        nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]),
            key=lambda node: [int(part) for part in node["NodeManagerAddress"].split(".")],
        )
        self.nodes = [node["NodeID"] for node in nodes]
        self.links = Links([self._end(host) for host in range(options.hosts)])

    def _end(self, host: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(self.nodes[host], soft=False)
        return ray.remote(LinkEnd).options(num_cpus=0, scheduling_strategy=where).remote()

    def migrations(self, n_partitions: int) -> None:
        """Partitions go from one host to others, all at once, and come back."""
        with tempfile.TemporaryDirectory(prefix="bench-moves-") as folder:
            home = self.links.namespaces[HOME]
            program, parts = mover(
                folder, n_partitions, self.options.partition_bytes, len(self.nodes), home
            )
            job = program.run(cpus=1, schedule=[Ordered(folder)])
            try:
                for number in range(self.options.moves + 1):
                    back_s = self._gather(job, parts, folder, home)
                    found = self._scatter(folder, n_partitions)
                    # The first makes connections, and is no repetition.
                    emit({"run": "migrate", "repetition": number, **found, "back_s": back_s})
            finally:
                job.stop()

    def _gather(self, job: Any, parts: Any, folder: str, home: int) -> float | None:
        """All go home, if they are not there: seconds from the driver's call, where it is one."""
        n = parts.n_partitions
        at = {each["index"]: each["host"] for each in lines(folder, "came")}
        away = [index for index in range(n) if at.get(index) != home]
        time.sleep(HEARD_S)  # while the controller thinks that it moves, it moves nowhere else
        asked_ns = time.monotonic_ns()
        for index in away:
            job.move(parts, index, self.nodes[HOME])

        def back() -> dict[int, dict[str, Any]]:
            return {each["index"]: each for each in lines(folder, "came")}

        program_rounds.until(
            lambda: len(back()) == n and all(each["host"] == home for each in back().values())
        )
        time.sleep(0.1)  # what they have brought is looked at
        return (back()[0]["began_ns"] - asked_ns) / NS_PER_S if away == [0] and n == 1 else None

    def _scatter(self, folder: str, n: int) -> dict[str, Any]:
        """All go away at once: how long that takes, and the links alone."""
        others = [host for host in range(self.options.hosts) if host != HOME]
        to = [others[index % len(others)] for index in range(n)]
        link_s = self.links.seconds({HOME: [(each, self.options.partition_bytes) for each in to]})
        before = len(lines(folder, "came"))
        Path(folder, "wanted").touch()
        program_rounds.until(lambda: len(lines(folder, "came")) == before + n)
        ordered_ns = lines(folder, "orders")[-1]["ordered_ns"]
        came = lines(folder, "came")[before:]
        return {
            "partitions": n,
            "total_ms": max(each["began_ns"] - ordered_ns for each in came) / 1e6,
            "link_ms": link_s * MS_PER_S,
            # In which a partition has no task, though it had one after the other.
            "stopped_ms": max(each["began_ns"] - max(ordered_ns, each["ended_ns"]) for each in came)
            / 1e6,
        }


def main() -> int:
    import clamor_ray as clamor

    options = Options(**json.loads(sys.argv[1]))
    session = Session(options)
    emit({"trap": session.trap})
    for n in (1, EIGHT) if "migrate" in options.only else ():
        note(f"{n} at once")
        session.migrations(n)
    rounds = {"straggler": program_rounds.straggler, "elastic": program_rounds.elastic}
    for number in range(options.repetitions):
        for name in [each for each in rounds if each in options.only]:
            note(f"{name}, repetition {number + 1}")
            emit(rounds[name](session, number))
    clamor.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
