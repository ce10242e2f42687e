"""Writers and readers on several nodes at once, and while our processes are killed.

What they did and saw is recorded, and checked for snapshot isolation
(tests/support/lab/isolation.py).
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol import names
from clamor_ray._session import process_sessions
from clamor_ray.actors.process.journals import journal_directory
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, losses, require_lab, troubles
from tests.support.lab.cluster import node_resource
from tests.support.lab.histories import Job, blank, histories, look_at_all, read, write
from tests.support.lab.isolation import Abort, Begin, Commit, Plain, check
from tests.support.lab.second_driver import second_driver

pytestmark = [pytest.mark.lab, pytest.mark.slow]

N_NODES = 3
N_BLOCKS = 512
TASK_S = 120.0
LONGER_S = 120.0
LOSS_S = 300.0
STRIKE_S = 600.0
DISK_BYTES = 32 << 20
N_LOOKED_AT, FEW_LOOKED_AT = 60, 15  # versions of each variable, at the end
MOST_MADE = 3000  # more than the journal takes into what it has on the disk already
MOST_PUT = 2000  # more than a page server has numbers of descriptors free below its limit
# What the gate has time for; `make soak` runs the long ones.
SHORT_S = 4.0
REST_S = 0.05
LONG = (pytest.mark.soak, pytest.mark.timeout(1200))


def lasting(long_s: float) -> pytest.MarkDecorator:
    """How long a storm lasts: it is over when it has done its least, too."""
    return pytest.mark.parametrize("seconds", [SHORT_S, pytest.param(long_s, marks=LONG)])


SEED = int(os.environ.get("CLAMOR_TEST_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    import ray

    require_lab("local")
    with local_cluster(N_NODES) as lab, ExitStack() as stack:
        if os.geteuid() == 0:  # the journal has a disk of its own, which a test can fill
            context = ray.get_runtime_context()
            scope = names.new_scope(context.gcs_address, context.get_job_id())
            stack.enter_context(mock.patch.object(names, "new_scope", return_value=scope))
            stack.enter_context(troubles.small_disk(journal_directory(scope), DISK_BYTES))
        clamor.init()
        try:
            yield lab
        finally:
            clamor.shutdown()


def there(function: Any, node: int, trap: str = "uffd", **options: Any) -> Any:
    import ray

    return ray.remote(function).options(
        num_cpus=0,
        resources={node_resource(node): 0.001},
        runtime_env={"env_vars": {"CLAMOR_TRAP": trap}},
        **options,
    )


def trap_of(node: int) -> str:
    return "sigsegv" if node == N_NODES - 1 else "uffd"


def make() -> Any:
    return clamor.put(blank(N_BLOCKS))


def variables() -> dict[str, Any]:
    """Two, whose homes are two nodes."""
    import ray

    return {"x": make(), "y": ray.get(there(make, 1).remote(), timeout=TASK_S)}


def finish(refs: dict[str, Any], folder: Path, rng: random.Random, seconds: float) -> Counter[str]:
    """Looks at the last version from every node, at some others, and checks the whole history.

    Args:
        seconds: how long the storm had to last.
    """
    import ray

    newest = {name: ref.refresh().version for name, ref in refs.items()}
    n_looked_at = FEW_LOOKED_AT if seconds == SHORT_S else N_LOOKED_AT
    job = Job(refs, N_BLOCKS, str(folder), 0, 0)
    some = {
        name: sorted({0, last, *(rng.sample(range(last + 1), min(last + 1, n_looked_at)))})
        for name, last in newest.items()
    }
    look_at_all(job, some)
    ends = {name: [last] for name, last in newest.items()}
    ray.get([there(look_at_all, n).remote(job, ends) for n in range(N_NODES)], timeout=TASK_S)
    events = histories(folder)
    found = check(events)
    assert found == [], "\n".join([f"seed {SEED}", *(v.text for v in found[:20])])
    committed = [event for event in events if isinstance(event, Commit)]
    counts = Counter(type(event).__name__ for event in events)
    counts["of several"] = sum(len(event.versions) > 1 for event in committed)
    assert (
        newest
        == {name: max((e.versions.get(name, 0) for e in committed), default=0) for name in newest}
        or counts["Begin"] > counts["Commit"] + counts["Abort"]
    )  # somebody died before it could tell
    for ref in refs.values():
        clamor.free(ref)
    print(f"seed {SEED}: {dict(counts)}, versions {newest}")
    return counts


@pytest.mark.parametrize("seconds", [SHORT_S, pytest.param(12.0, marks=LONG)])
def test_snapshot_isolation_under_load(lab: LocalCluster, tmp_path: Path, seconds: float) -> None:
    import ray

    print(f"seed {SEED}")
    rng = random.Random(SEED)
    refs = variables()

    def job() -> Job:
        return Job(refs, N_BLOCKS, str(tmp_path), rng.randrange(1 << 32), seconds)

    last = time.monotonic() + LONGER_S
    while True:  # once, and on a slow machine until there was enough of each
        writers = [there(write, n % N_NODES).remote(job()) for n in range(4)]
        readers = [there(read, n, trap_of(n)).remote(job()) for n in range(N_NODES)]
        ray.get([*writers, *readers], timeout=TASK_S)
        seen = Counter(type(event) for event in histories(tmp_path))
        least = {Commit: 200, Abort: 10, Plain: 1000}
        if all(seen[kind] > few for kind, few in least.items()) or time.monotonic() > last:
            break
    counts = finish(refs, tmp_path, rng, seconds)
    assert counts[Commit.__name__] > 100
    assert counts["of several"] > 20
    assert counts[Abort.__name__] > 0
    assert counts[Plain.__name__] > 1000
    nodes = clamor.stats().nodes
    assert sum(node.engine.advances for node in nodes) > 0
    assert sum(node.engine.forks for node in nodes) > 0


def begin(folder: Path) -> dict[str, Any]:
    """Two variables. Workers and page servers start before the storm does."""
    import ray

    refs = variables()
    job = Job(refs, N_BLOCKS, str(folder), 0, 0.1)
    ray.get([there(read, n, trap_of(n)).remote(job) for n in range(N_NODES)], timeout=TASK_S)
    return refs


class Least(NamedTuple):
    """What has to happen in a storm before it may be over: of each kind so many.

    Args:
        troubles: that struck.
        tasks: that ended well.
        begun: transactions, of each set of variables.
        committed: likewise.
    """

    troubles: int
    tasks: int
    begun: int
    committed: int = 0

    def is_in(self, folder: Path) -> bool:
        """Whether workers have recorded as many transactions in the folder by now."""
        counts = Counter(type(event) for event in histories(folder))
        return counts[Begin] >= self.begun and counts[Commit] >= self.committed


def at_once(jobs: list[tuple[Any, Job]]) -> int:
    """All of them, each in a thread of its own: sessions that one process uses at once."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        return sum(each.result() for each in [threads.submit(work, job) for work, job in jobs])


def storm(
    sets: Sequence[tuple[dict[str, Any], Path]],
    rng: random.Random,
    trouble: Iterator[str],
    seconds: float,
    most_pause_s: float,
    least: Least,
) -> tuple[list[str], int, list[BaseException]]:
    """Tasks on all nodes while there is trouble: what it did, how many tasks ended well, and how
    the others ended. Each task uses all sets of variables, and records each in its folder.

    It lasts `seconds`, and on a slow machine until there was `least` of each, or LONGER_S more.
    In a short one tasks rest now and then: they would take the cores that restarts need.
    """
    import ray

    rest_s = REST_S if seconds == SHORT_S else 0.0

    def start(node: int) -> Any:
        length_s = rng.uniform(1.0, 4.0)
        jobs = [
            (
                read if rng.random() < 0.3 else write,
                Job(refs, N_BLOCKS, str(folder), rng.randrange(1 << 32), length_s, rest_s),
            )
            for refs, folder in sets
        ]
        return there(at_once, node, trap_of(node), max_retries=10).remote(jobs)

    def enough() -> bool:
        return (
            len(did) >= least.troubles
            and done >= least.tasks
            and all(least.is_in(folder) for _, folder in sets)
        )

    running = {start(n % N_NODES): n % N_NODES for n in range(5)}
    did: list[str] = []
    failed: list[BaseException] = []
    done = 0
    deadline = time.monotonic() + seconds
    last = deadline + LONGER_S
    strike_at = time.monotonic() + 1.0
    strike: Future[str] | None = None
    with ThreadPoolExecutor(1) as striker:  # tasks begin also while it is at it
        while running or strike is not None:
            if deadline < time.monotonic() < last and not enough():
                deadline = min(last, time.monotonic() + 2.0)
            ready, _ = ray.wait(list(running), timeout=0.2) if running else ([], [])
            for reference in ready:
                node = running.pop(reference)
                try:
                    ray.get(reference)
                    done += 1
                except Exception as error:
                    failed.append(error)
                if time.monotonic() < deadline:
                    running[start(node)] = node
            now = time.monotonic()
            if strike is not None and (strike.done() or not running):
                did.append(strike.result(timeout=STRIKE_S))
                strike = None
                strike_at = now + rng.uniform(0.1, most_pause_s)
            elif strike is None and strike_at < now < deadline:
                strike = striker.submit(next, trouble)
            late = f"{len(running)} tasks never end; trouble: {did}"
            assert strike is not None or now < max(deadline, strike_at) + TASK_S, late
    print(f"seed {SEED}: {done} tasks, {len(failed)} failed, trouble: {did}")
    return did, done, failed


def ours(lab: LocalCluster) -> dict[str, list[int]]:
    """The processes that no trouble may cost, where it does not kill."""
    found = {f"page server {n}": [troubles.server_pid(lab, n)] for n in range(N_NODES)}
    found |= {f"keeper {n}": troubles.keeper_pids(lab, n) for n in range(N_NODES)}
    return found | {"registry": [troubles.registry_pid()]}


def put_here() -> Any:
    return clamor.put(blank(1))


def put_and_free() -> None:
    clamor.free(put_here())


def kept_again(node: int) -> None:
    """Returns when the node's keeper has all that its page server has.

    A seal waits until the keeper has heard of it, and that hears everything in its order.
    """
    import ray

    ray.get(there(put_and_free, node, max_retries=10).remote(), timeout=TASK_S)


def task_kills(lab: LocalCluster, rng: random.Random) -> Iterator[str]:
    return troubles.task_kills(lab, rng, N_NODES, at_once.__name__)


@lasting(60.0)
def test_a_storm_of_kills(lab: LocalCluster, tmp_path: Path, seconds: float) -> None:
    """Each kind of process of ours, and those of the tasks that commit and read."""
    rng = random.Random(SEED + 1)
    refs = begin(tmp_path)
    trouble = troubles.in_turn(
        rng,
        {
            "servers": troubles.kills(lab, rng, N_NODES),
            "keepers": troubles.keeper_kills(lab, rng, N_NODES, kept_again),
            "tasks": task_kills(lab, rng),
        },
    )
    least = Least(3, 3, 31) if seconds == SHORT_S else Least(9, 11, 101)
    did, done, failed = storm([(refs, tmp_path)], rng, trouble, seconds, 3.0, least)
    assert failed == []  # no task fails for good
    counts = finish(refs, tmp_path, rng, seconds)
    assert len(did) >= least.troubles
    assert {what.split(":")[0] for what in did} == {"servers", "keepers", "tasks"}
    assert any("a task on" in what for what in did)
    assert done >= least.tasks
    assert counts[Begin.__name__] >= least.begun


@lasting(25.0)
def test_a_storm_of_stops(lab: LocalCluster, tmp_path: Path, seconds: float) -> None:
    """Nobody takes who is stopped for a moment for dead: no process is replaced, no task fails."""
    rng = random.Random(SEED + 2)
    refs = begin(tmp_path)
    before = ours(lab)
    trouble = troubles.stops(lab, rng, N_NODES)
    try:
        did, done, failed = storm([(refs, tmp_path)], rng, trouble, seconds, 1.0, Least(3, 1, 11))
    finally:
        trouble.close()
    assert failed == []
    assert ours(lab) == before
    counts = finish(refs, tmp_path, rng, seconds)
    assert len(did) > 1
    assert done > 0
    assert counts[Begin.__name__] > 10


@lasting(25.0)
def test_a_storm_of_few_descriptors(lab: LocalCluster, tmp_path: Path, seconds: float) -> None:
    """What cannot be opened is said by its name; nobody ends for it, and nothing is lost."""
    rng = random.Random(SEED + 3)
    refs = begin(tmp_path)
    before = ours(lab)
    refused = 0

    def while_few(node: int) -> None:
        nonlocal refused
        if node == 0:  # our own, where we are connected already
            made: list[Any] = []
            try:
                while len(made) < MOST_PUT:
                    made.append(put_here())
            except errors.DescriptorLimitError:
                refused += 1
            for ref in made:
                clamor.free(ref)

    trouble = troubles.few_descriptors(lab, rng, N_NODES, while_few)
    least = Least(N_NODES, 1, 11)  # each node once
    try:
        did, done, failed = storm([(refs, tmp_path)], rng, trouble, seconds, 1.0, least)
    finally:
        trouble.close()
    causes = Counter(type(getattr(error, "cause", error)).__name__ for error in failed)
    assert set(causes) <= {"DescriptorLimitError"}, failed[:3]
    assert ours(lab) == before
    counts = finish(refs, tmp_path, rng, seconds)
    assert len(did) >= least.troubles
    assert refused > 0  # there were few indeed
    assert done > 0
    assert counts[Begin.__name__] > 10


@lasting(25.0)
def test_a_storm_of_full_disks(lab: LocalCluster, tmp_path: Path, seconds: float) -> None:
    """Reads go on, and a commit is made when there is room again."""
    if os.geteuid() != 0:
        pytest.skip("the journal's disk is only small where we may mount one: as root")
    rng = random.Random(SEED + 4)
    refs = begin(tmp_path)
    before = ours(lab)
    made: list[Any] = []
    small = blank(2)
    refused = 0

    def while_full() -> None:
        nonlocal refused
        assert len(refs["x"]._latest().get()) == N_BLOCKS * 512  # to read needs no journal
        try:
            while len(made) < MOST_MADE:
                made.append(clamor.put(small))
        except errors.JournalFullError:
            refused += 1

    trouble = troubles.full_disk(
        journal_directory(process_sessions.current().scope), rng, while_full
    )
    least = Least(2, 1, 11, committed=6)
    try:
        did, done, failed = storm([(refs, tmp_path)], rng, trouble, seconds, 2.0, least)
    finally:
        trouble.close()
    assert failed == []
    assert ours(lab) == before
    counts = finish(refs, tmp_path, rng, seconds)
    assert len(did) > 1
    assert done > 0
    assert counts[Commit.__name__] >= least.committed
    assert refused > 0  # it was full indeed
    for ref in made:
        clamor.free(ref)


@lasting(40.0)
def test_a_storm_of_nodes_without_memory(lab: LocalCluster, tmp_path: Path, seconds: float) -> None:
    """Page server and keeper of a node that has no home go together: caches are all that is lost,
    so no task of any node fails for good."""
    rng = random.Random(SEED + 5)
    refs = begin(tmp_path)
    trouble = troubles.both(lab, N_NODES - 1)
    did, done, failed = storm([(refs, tmp_path)], rng, trouble, seconds, 8.0, Least(1, 1, 11))
    assert failed == []
    counts = finish(refs, tmp_path, rng, seconds)
    assert len(did) > 0
    assert done > 0
    assert counts[Begin.__name__] > 10


@lasting(45.0)
def test_a_storm_of_kills_in_two_sessions(
    lab: LocalCluster, tmp_path: Path, seconds: float
) -> None:
    """Of two drivers, whose variables each worker uses at once. What is killed of one session
    touches nothing of the other; the end of the second is none of the first."""
    import ray

    rng = random.Random(SEED + 6)
    folders = [tmp_path / "mine", tmp_path / "theirs"]
    for folder in folders:
        folder.mkdir()
    mine = begin(folders[0])
    with second_driver(lab, tmp_path) as theirs:
        scope = theirs["x"]._scope
        assert scope != mine["x"]._scope
        trouble = troubles.in_turn(
            rng,
            {
                "mine": troubles.kills(lab, rng, N_NODES),
                # Its third page server is there when a task has needed it: not at the beginning.
                "theirs": troubles.kills(lab, rng, N_NODES - 1, scope),
                "tasks": task_kills(lab, rng),  # each of which is in both sessions
            },
        )
        sets = list(zip((mine, theirs), folders, strict=True))
        did, done, failed = storm(sets, rng, trouble, seconds, 3.0, Least(3, 1, 11))
        assert failed == []
        counts = finish(theirs, folders[1], rng, seconds)
        assert counts[Begin.__name__] > 10
    job = Job(mine, N_BLOCKS, str(folders[0]), 0, 1.0)
    again = [there(write, n, trap_of(n), max_retries=10).remote(job) for n in range(N_NODES)]
    assert min(ray.get(again, timeout=TASK_S)) > 0  # the other session has ended, mine goes on
    counts = finish(mine, folders[0], rng, seconds)
    assert counts[Begin.__name__] > 10
    assert {what.split(":")[0] for what in did} == {"mine", "theirs", "tasks"}
    assert done > 0


def doomed(node: int, rng: random.Random) -> list[losses.Fate]:
    """Variables that are homed on a node which is about to lose its memory."""
    import ray

    first = rng.randrange(1, 1 << 40)
    other = rng.choice([n for n in range(N_NODES) if n != node])

    def do(at: int, function: Any, *arguments: Any) -> Any:
        task = there(function, at, trap_of(at), max_retries=10)
        return ray.get(task.remote(*arguments), timeout=LOSS_S)

    sources = (True, True, False, False, False)
    made, remade, read, part, alone = (do(node, losses.put, first, has) for has in sources)
    zeros = do(node, losses.put_zeros)
    do(other, losses.change, [remade], first)
    do(other, losses.touch, [read], losses.N_BLOCKS)
    do(other, losses.touch, [part], losses.N_READ)
    return [
        losses.Fate("zeros", zeros, losses.empty, first),
        losses.Fate("with a source", made, losses.numbered, first),
        losses.Fate("with a source, and changed", remade, losses.changed, first),
        losses.Fate("read elsewhere", read, losses.numbered, first),
        losses.Fate("read in part", part, losses.numbered, first, losses.N_READ),
        losses.Fate("nobody else has it", alone, losses.numbered, first, 0),
    ]


@lasting(40.0)
def test_a_storm_of_lost_homes(lab: LocalCluster, tmp_path: Path, seconds: float) -> None:
    """Page server and keeper of a node go together, with homes: what others have, or a source
    makes, comes back; lost is only what nobody has, and says so; then the node serves on."""
    import ray

    rng = random.Random(SEED + 7)
    refs = begin(tmp_path)
    node = N_NODES - 1
    both = troubles.both(lab, node)

    def strikes() -> Iterator[str]:
        while True:
            fates = doomed(node, rng)
            until(lambda: troubles.keeper_pids(lab, node) != [], LOSS_S)
            did = next(both)
            looks = {
                (fate.name, n): there(losses.look, n, trap_of(n), max_retries=10).remote(
                    [fate.ref], fate.expected, fate.first
                )
                for fate in fates
                for n in range(N_NODES)
            }
            answers = dict(zip(looks, ray.get(list(looks.values()), timeout=LOSS_S), strict=True))
            print(f"{did}: {answers}")
            wrong = {
                (fate.name, n): answers[fate.name, n]
                for fate in fates
                for n in range(N_NODES)
                if not fate.holds(answers[fate.name, n])
            }
            assert wrong == {}, f"seed {SEED}"
            for fate in fates:
                clamor.free(fate.ref)
            yield did

    did, done, failed = storm([(refs, tmp_path)], rng, strikes(), seconds, 2.0, Least(1, 1, 11))
    assert failed == []
    fates = doomed(node, rng)  # it serves on
    for fate in fates:
        seen = there(losses.look, 0).remote([fate.ref], fate.expected, fate.first)
        assert ray.get(seen, timeout=LOSS_S) == "right"
        clamor.free(fate.ref)
    counts = finish(refs, tmp_path, rng, seconds)
    assert len(did) > 0
    assert done > 0
    assert counts[Begin.__name__] > 10
