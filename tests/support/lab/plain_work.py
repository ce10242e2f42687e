"""Work on a cluster of two nodes, the second of which is in a container, with kills; as any user.

`python -m tests.support.lab.plain_work FILE` writes what it found to FILE, as JSON. Everything that
it reads is checked on the way: `x` and `y` are two variables, on two nodes, and x + y is 0 in
every snapshot.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import clamor_ray as clamor
from clamor_ray import errors
from tests.support.lab import plain_user
from tests.support.lab.cluster import OBJECT_STORE_BYTES, LocalCluster, local_cluster, node_resource
from tests.support.session_rig import keepers

N_BLOCKS = 400
PER_BLOCK = 512  # int64
TRANSFERS = 15
TASK_S = 150.0
# The trap that a worker is told to use, and its node.
WORKERS = {"plain": ("auto", 0), "without userfaultfd": ("sigsegv", 0), "container": ("auto", 1)}


def there(function: Any, worker: str, **options: Any) -> Any:
    import ray

    trap, node = WORKERS[worker]
    return ray.remote(function).options(
        num_cpus=0,
        max_retries=5,
        resources={node_resource(node): 0.001},
        runtime_env={"env_vars": {"CLAMOR_TRAP": trap}},
        **options,
    )


def rights() -> dict[str, Any]:
    """What a worker has: the trap and why, its user, and what the kernel says to some calls."""
    found = clamor.init()
    return {
        "trap": found.trap,
        "reason": found.trap_reason,
        "refused": {
            name: plain_user.refused(name)
            for name in ("userfaultfd", "pidfd_getfd", "process_vm_readv", "unshare", "bpf")
        },
        **status(os.getpid()),
    }


def status(pid: int) -> dict[str, str]:
    """The kernel's words on a process: its users, its rights, and whether it has a filter."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {name: words[name] for name in ("Uid", "CapEff", "Seccomp")}


def make(sign: int) -> list[Any]:
    return [clamor.put(sign * np.repeat(np.arange(1, N_BLOCKS + 1), PER_BLOCK))]


def is_balanced(x: Any, y: Any, blocks: Any) -> bool:
    """Touches these blocks alone, in this order."""
    rows = np.asarray(blocks) * PER_BLOCK
    return all(bool((x[r : r + PER_BLOCK] + y[r : r + PER_BLOCK] == 0).all()) for r in rows)


def transfer(refs: list[Any], seed: int, dies: str) -> int:
    """Transactions over both, and commits of the third. Once it dies in the middle of one."""
    x, y, z = refs
    rng = np.random.default_rng(seed)

    def once(number: int) -> None:
        with clamor.transaction(x._latest(), y._latest()) as (mine, yours):
            blocks = rng.integers(0, N_BLOCKS, 6)
            if not is_balanced(mine, yours, blocks):
                raise ValueError(f"blocks {blocks} of {x._latest().version}: torn")
            for block in blocks[:3]:
                rows = slice(int(block) * PER_BLOCK, (int(block) + 1) * PER_BLOCK)
                mine[rows] += number + 1
                yours[rows] -= number + 1
            if number == TRANSFERS // 2 and not Path(dies).exists():
                Path(dies).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    for number in range(TRANSFERS):
        clamor.retry(once, number, attempts=200, most_s=0.1)
        clamor.retry(set_row, z, seed, number + 1, attempts=200, most_s=0.1)
        time.sleep(0.05)  # so that there is somebody when servers are killed
    return TRANSFERS


def set_row(z: Any, row: int, value: int) -> None:
    with clamor.update(z._latest()) as array:
        array[row * PER_BLOCK] = value


def look(refs: list[Any], seed: int) -> dict[str, Any]:
    """Every block of the newest snapshot, in any order; then of the first version."""
    x, y, z = (ref._latest() for ref in refs)
    order = np.random.default_rng(seed).permutation(N_BLOCKS)
    with clamor.transaction(x, y) as (mine, yours):
        balanced = is_balanced(mine, yours, order)
        total = int(mine.sum())
    return {
        "balanced": balanced,
        "total": total,
        "rows": z.get()[: len(WORKERS) * PER_BLOCK : PER_BLOCK].tolist(),
        "versions": [x.version, y.version, z.version],
    }


def kill_servers(lab: LocalCluster, scope: str) -> list[list[int]]:
    """Each once: its process before, and the one that is there after."""
    found = []
    for node in range(2):
        before = lab.page_server_pid(node, TASK_S, scope)
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + TASK_S
        while (after := lab.page_server_pid(node, TASK_S, scope)) == before:
            if time.monotonic() > deadline:
                raise errors.WaitTimeoutError(f"no new page server of node {node}")
            time.sleep(0.05)
        found.append([before, after])
    return found


def work(lab: LocalCluster, folder: Path) -> dict[str, Any]:
    import ray

    def ask(references: dict[str, Any]) -> dict[str, Any]:
        found = ray.get(list(references.values()), timeout=TASK_S)
        return dict(zip(references, found, strict=True))

    scope = clamor.init().scope
    (x,) = make(1)
    (y,) = ray.get(there(make, "container").remote(-1), timeout=TASK_S)
    refs = [x, y, clamor.zeros(len(WORKERS) * PER_BLOCK, np.int64)]
    found: dict[str, Any] = {"workers": ask({w: there(rights, w).remote() for w in WORKERS})}
    tasks = {
        worker: there(transfer, worker).remote(refs, n, str(folder / f"died-{n}"))
        for n, worker in enumerate(WORKERS)
    }
    deadline = time.monotonic() + TASK_S
    while len(list(folder.glob("died-*"))) < len(WORKERS) and time.monotonic() < deadline:
        time.sleep(0.02)
    found["servers"] = kill_servers(lab, scope)
    found["transfers"] = ask(tasks)
    found["looks"] = ask({w: there(look, w).remote(refs, n) for n, w in enumerate(WORKERS)})
    found["died"] = sorted(path.name for path in folder.glob("died-*"))
    found["page servers"] = [status(after) for _, after in found["servers"]]
    found["keepers"] = [status(pid) for pid in sorted(keepers(scope))]
    for ref in refs:
        clamor.free(ref)
    clamor.shutdown(force=True)
    return found


def main(file: str) -> None:
    # The main thread, which is to start the second node, enters the container. What it has started
    # before stays outside: the first node, and the thread that is the driver from then on.
    with ThreadPoolExecutor(1) as driver, local_cluster(1, log_to_driver=False) as lab:
        driver.submit(os.getpid).result()
        plain_user.enter_container()
        lab.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        found = driver.submit(work, lab, Path(file).parent).result()
    Path(file).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
