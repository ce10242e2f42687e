"""A small cache, peers that serve each other, commits, gathers and prefetches, while page servers
are killed: every value is checked against what was committed, and nothing is left.

And what a user sees of a budget that does not fit.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray._session import process_sessions
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.lab.histories import (
    PER_BLOCK,
    Job,
    blank,
    histories,
    look_at_all,
    value_of,
    write,
)
from tests.support.lab.isolation import Begin, Commit, Plain, check
from tests.support.session_rig import keepers

pytestmark = pytest.mark.lab

N_NODES = 3
N_BLOCKS = 512  # of each variable: 2 MiB
BUDGET_BYTES = 1 << 20
SHORT_STORM_S, STORM_S = 6.0, 30.0
REST_S = 0.05  # of the tasks of a short one: they would take the cores that restarts need
LONG = (pytest.mark.soak, pytest.mark.timeout(1200))  # for `make soak`
TASK_S = 120.0
ROWS_PER_BLOCK = 16
SEED = int(os.environ.get("CLAMOR_TEST_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(N_NODES) as lab:
        yield lab


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    yield
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


def make_in_session_of(known: Any) -> Any:
    """In a worker that an earlier test's session may have used."""
    assert known.get()[0] == 0
    return make()


# ---------------------------------------------------------------- everything at once


def rows_of(array: Any, blocks: list[int], per_block: int) -> dict[int, int]:
    """What a gather of some rows of each block says that the block's value is."""
    table = array.reshape(N_BLOCKS * per_block, -1)
    ids = np.array([[b * per_block + i % per_block for i in range(3)] for b in blocks])
    rows = clamor.gather(table, ids).reshape(len(blocks), -1)
    assert (rows == rows[:, :1]).all(), "rows of one block differ"
    return {block: int(row[0]) for block, row in zip(blocks, rows, strict=True)}


def read_in_all_ways(job: Job) -> int:
    """Snapshots, by faults, prefetches and gathers; how many."""
    recorder, rng = job.recorder(), random.Random(job.seed)
    deadline = time.monotonic() + job.seconds
    done = 0
    while time.monotonic() < deadline:
        name = rng.choice(sorted(job.refs))
        ref = job.refs[name]._latest()
        if rng.random() < 0.4:
            ref = ref.at(max(0, ref.version - rng.randrange(30)))
        array = ref.get()
        blocks = sorted(rng.sample(range(N_BLOCKS), 60))
        way = rng.randrange(4)
        if way < 2:
            found = rows_of(array, blocks, 1 if way else ROWS_PER_BLOCK)
        else:
            if way == 2:
                clamor.prefetch([array[b * PER_BLOCK : (b + 1) * PER_BLOCK] for b in blocks])
            found = {block: value_of(array, block) for block in blocks}
        for block, value in found.items():
            recorder.plain(name, ref.version, block, value)
        del array
        done += 1
        job.rest(rng)
    return done


def regions_open_in(pid: int) -> list[str]:
    """Descriptors and mappings of regions, layers or gathers that a process has."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            link = os.readlink(entry)
        except FileNotFoundError:
            continue
        found.append(link)
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    names = ("/memfd:clamor ", "/memfd:clamor-layer")
    return [entry for entry in [*found, *lines] if any(name in f"{entry} " for name in names)]


def what_is_left(lab: LocalCluster, n_nodes: int) -> list[str]:
    """Leases, generations, layers and cached blocks at any node, and memory of them."""
    gc.collect()
    found = []
    for index, node in enumerate(clamor.stats().nodes):
        engine = node.engine
        if (
            node.error
            or engine.mappings
            or engine.regions
            or engine.generations
            or engine.layers
            or engine.cached_bytes
            or engine.fetches_in_flight
            or engine.faults_waiting
        ):
            found.append(f"node {index}: {node.error or engine}")
    servers = [lab.page_server_pid(i) for i in range(n_nodes)]
    for pid in [os.getpid(), *servers]:
        found += [f"process {pid}: {entry}" for entry in regions_open_in(pid)]
    return found


def nothing_is_left(lab: LocalCluster, n_nodes: int = N_NODES) -> None:
    """Waits for it; says what there is where that never becomes true."""
    deadline = time.monotonic() + TASK_S
    while found := what_is_left(lab, n_nodes):
        assert time.monotonic() < deadline, "\n".join(found)
        time.sleep(0.3)  # each look asks every page server, and collects garbage


def own_threads() -> list[str]:
    """Threads of this process that the library has started."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if name.startswith("clamor")]


@pytest.mark.parametrize("seconds", [SHORT_STORM_S, pytest.param(STORM_S, marks=LONG)])
def test_chaos(lab: LocalCluster, tmp_path: Path, seconds: float) -> None:
    import ray

    print(f"seed {SEED}")
    rng = random.Random(SEED)
    rest_s = REST_S if seconds == SHORT_STORM_S else 0.0
    clamor.init(cache_bytes=BUDGET_BYTES, cache_policy="sieve", replication="random")
    scope = process_sessions.current().scope
    refs = {"x": make(), "y": ray.get(there(make, 1).remote(), timeout=TASK_S)}

    def start(node: int, seconds: float) -> Any:
        work = write if rng.random() < 0.3 else read_in_all_ways
        job = Job(refs, N_BLOCKS, str(tmp_path), rng.randrange(1 << 32), seconds, rest_s)
        return there(work, node, trap_of(node), max_retries=10).remote(job)

    # Workers and page servers start before the storm does.
    ray.get([start(n, 0.1) for n in range(N_NODES)], timeout=TASK_S)
    running = {start(n % N_NODES, 2.0): n % N_NODES for n in range(4)}
    killed: list[int] = []
    kill_at, deadline = time.monotonic() + 1.0, time.monotonic() + seconds
    last = deadline + TASK_S

    def enough() -> bool:
        events = Counter(type(event) for event in histories(tmp_path))
        return len(killed) >= 3 and events[Commit] > 10 and events[Plain] > 1000

    while running:
        if deadline < time.monotonic() < last and not enough():
            deadline = min(last, time.monotonic() + 2.0)  # a slow machine: the storm lasts longer
        ready, _ = ray.wait(list(running), timeout=0.2)
        for reference in ready:
            node = running.pop(reference)
            assert ray.get(reference) > 0  # no task fails for good
            if time.monotonic() < deadline:
                running[start(node, rng.uniform(1.0, 3.0))] = node
        now = time.monotonic()
        assert now < deadline + TASK_S, f"{len(running)} tasks never end; killed: {killed}"
        if kill_at < now < deadline:
            killed.append(rng.randrange(N_NODES))
            os.kill(lab.page_server_pid(killed[-1]), signal.SIGKILL)
            kill_at = now + rng.uniform(0.5, 3.0)
    ends = {name: [ref.refresh().version] for name, ref in refs.items()}
    job = Job(refs, N_BLOCKS, str(tmp_path), 0, 0)
    ray.get([there(look_at_all, n).remote(job, ends) for n in range(N_NODES)], timeout=TASK_S)
    events = histories(tmp_path)
    found = check(events)
    assert found == [], "\n".join([f"seed {SEED}", *(v.text for v in found[:20])])
    counts = {kind: sum(isinstance(e, kind) for e in events) for kind in (Begin, Commit, Plain)}
    engines = [node.engine for node in clamor.stats().nodes]
    print(f"seed {SEED}: {counts}, killed {killed}, versions {ends}")
    assert len(killed) >= 3
    assert counts[Commit] > 10
    assert counts[Plain] > 1000
    assert sum(engine.evicted_blocks for engine in engines) > 0
    for ref in refs.values():
        clamor.free(ref)
    nothing_is_left(lab, n_nodes=2)
    clamor.shutdown()
    until(lambda: not keepers(scope))
    until(lambda: not own_threads())
    assert regions_open_in(os.getpid()) == []


# --------------------------------------------------------------- what a user sees

SCAN_S = 4.0  # more than the engine takes to judge


def scan(array: Any, seconds: float) -> set[int]:
    """Reads a number of each block, again and again; the sums that it saw."""
    deadline = time.monotonic() + seconds
    sums = set()
    while time.monotonic() < deadline:
        sums.add(int(array[::PER_BLOCK].sum()))
    return sums


def warnings_of_thrash(lab: LocalCluster) -> list[str]:
    """What page servers have said of it in this cluster's logs."""
    import ray

    folder = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    lines = [
        line
        for path in folder.glob("worker-*.err")
        for line in path.read_text(errors="replace").splitlines()
    ]
    return [line for line in lines if "CLAMOR_CACHE_BYTES" in line]


def test_a_budget_below_what_a_task_uses(lab: LocalCluster) -> None:
    import ray

    clamor.init(cache_bytes=BUDGET_BYTES)
    blocks = 3 * BUDGET_BYTES // 2 // 4096
    before = len(warnings_of_thrash(lab))
    ref = clamor.put(np.arange(blocks * PER_BLOCK))
    expected = {int(np.arange(0, blocks * PER_BLOCK, PER_BLOCK).sum())}
    task = clamor.remote(num_cpus=0, resources={node_resource(1): 0.001})(scan)

    def thrashes() -> bool:
        assert ray.get(task.remote(ref, SCAN_S), timeout=TASK_S) == expected  # it finishes
        return bool(clamor.stats().thrashing)

    until(thrashes)
    (node,) = clamor.stats().thrashing
    assert node.node_id == lab.node_ids[1]
    assert node.engine.refetched_blocks > blocks
    assert ray.get(task.remote(ref, SCAN_S), timeout=TASK_S) == expected
    until(lambda: len(warnings_of_thrash(lab)) > before)
    time.sleep(0.5)  # for a second one, which must not come
    assert len(warnings_of_thrash(lab)) == before + 1
    clamor.free(ref)


def test_a_last_word_that_is_lost_with_the_page_server(
    lab: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer tells once what became of its layer. The next page server asks the registry."""
    import ray

    monkeypatch.setenv("CLAMOR_REATTACH_S", "5")  # for so long a freed region is not called idle
    clamor.init()
    known = clamor.put(blank(N_BLOCKS))
    ref = ray.get(there(make_in_session_of, 1).remote(known), timeout=TASK_S)
    client = process_sessions.current().client
    monkeypatch.setattr(client, "resolve", lambda *_: None)
    with clamor.update(ref) as array:
        array[:PER_BLOCK] = 7
    here = lab.node_ids[0]
    (engine,) = (node.engine for node in clamor.stats().nodes if node.node_id == here)
    assert engine.layers == 1
    os.kill(lab.page_server_pid(0), signal.SIGKILL)
    del array
    clamor.free(ref)
    clamor.free(known)
    nothing_is_left(lab, n_nodes=2)
