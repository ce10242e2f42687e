"""Writers and readers on several nodes at once, and while our processes are killed.

What they did and saw is recorded, and checked for snapshot isolation (tests/lab/isolation.py).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clamor_ray as clamor
from clamor_ray import _session
from tests.lab import LocalCluster, local_cluster, require_lab
from tests.lab.cluster import node_resource
from tests.lab.histories import Job, blank, histories, look_at_all, read, write
from tests.lab.isolation import Abort, Begin, Commit, Plain, check

pytestmark = [pytest.mark.lab, pytest.mark.slow]

N_NODES = 3
N_BLOCKS = 512
TASK_S = 120.0
SEED = int(os.environ.get("CLAMOR_TEST_SEED") or random.SystemRandom().randrange(1 << 32))


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(N_NODES) as lab:
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


def finish(refs: dict[str, Any], folder: Path, rng: random.Random) -> Counter[str]:
    """Looks at everything from every node, and checks the whole history."""
    import ray

    newest = {name: ref.refresh().version for name, ref in refs.items()}
    job = Job(refs, N_BLOCKS, str(folder), 0, 0)
    some = {
        name: sorted({0, last, *(rng.sample(range(last + 1), min(last + 1, 60)))})
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


def test_snapshot_isolation_under_load(lab: LocalCluster, tmp_path: Path) -> None:
    import ray

    print(f"seed {SEED}")
    rng = random.Random(SEED)
    refs = variables()

    def job() -> Job:
        return Job(refs, N_BLOCKS, str(tmp_path), rng.randrange(1 << 32), 12.0)

    writers = [there(write, n % N_NODES).remote(job()) for n in range(4)]
    readers = [there(read, n, trap_of(n)).remote(job()) for n in range(N_NODES)]
    ray.get([*writers, *readers], timeout=TASK_S)
    counts = finish(refs, tmp_path, rng)
    assert counts[Commit.__name__] > 100
    assert counts["of several"] > 20
    assert counts[Abort.__name__] > 0
    assert counts[Plain.__name__] > 1000
    nodes = clamor.stats().nodes
    assert sum(node.engine.advances for node in nodes) > 0
    assert sum(node.engine.forks for node in nodes) > 0


def kill_somebody(lab: LocalCluster, rng: random.Random) -> str:
    """SIGKILL to a page server, or the registry, of this cluster."""
    victim = rng.randrange(N_NODES + 1)
    if victim == N_NODES:
        pid, name = int(_session.current().call("ping")), "registry"
    else:
        pid, name = lab.page_server_pid(victim), f"page server {victim}"
    os.kill(pid, signal.SIGKILL)
    return name


def test_a_storm_of_kills(lab: LocalCluster, tmp_path: Path) -> None:
    import ray

    print(f"seed {SEED}")
    rng = random.Random(SEED + 1)
    refs = variables()

    def start(node: int) -> Any:
        work = read if rng.random() < 0.3 else write
        job = Job(refs, N_BLOCKS, str(tmp_path), rng.randrange(1 << 32), rng.uniform(1.0, 4.0))
        return there(work, node, trap_of(node), max_retries=10).remote(job)

    # Workers and page servers start before the storm does.
    begin = Job(refs, N_BLOCKS, str(tmp_path), 0, 0.1)
    ray.get([there(read, n, trap_of(n)).remote(begin) for n in range(N_NODES)], timeout=TASK_S)
    running = {start(n % N_NODES): n % N_NODES for n in range(5)}
    killed: list[str] = []
    done = 0
    deadline = time.monotonic() + 45.0
    kill_at = time.monotonic() + 1.0
    while running:
        ready, _ = ray.wait(list(running), timeout=0.2)
        for reference in ready:
            node = running.pop(reference)
            ray.get(reference)  # no task fails for good
            done += 1
            if time.monotonic() < deadline:
                running[start(node)] = node
        now = time.monotonic()
        assert now < deadline + TASK_S, f"{len(running)} tasks never end; killed: {killed}"
        if kill_at < now < deadline:
            killed.append(kill_somebody(lab, rng))
            kill_at = time.monotonic() + rng.uniform(0.1, 3.0)
    print(f"seed {SEED}: {done} tasks, killed {killed}")
    counts = finish(refs, tmp_path, rng)
    assert len(killed) > 5
    assert done > 10
    assert counts[Begin.__name__] > 100
