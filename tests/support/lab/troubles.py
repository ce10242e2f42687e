"""Kinds of trouble for a storm: generators that make some and say what they did.

`next()` strikes once; what does not kill has passed by then. `close()` undoes what is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path

from clamor_ray._session import process_sessions
from tests.support.lab.cluster import LocalCluster
from tests.support.processes import end, stop
from tests.support.session_rig import keepers

MOST_STOPPED_S = 4.0  # far below every patience of ours
MOST_LIMITED_S = 2.0
MOST_FULL_S = 3.0
NO_TASK_S = 20.0  # so long a storm waits for a task to begin
RESTART_S = 90.0
HEADROOM = 4  # descriptors, at most, that are left to a page server


def registry_pid(scope: str | None = None) -> int:
    return int(process_sessions.current(scope).rpc.ping())


def server_pid(lab: LocalCluster, node: int, scope: str | None = None) -> int:
    """Of that session, or of ours. It may be on its way back, on a machine that has much to do."""
    return lab.page_server_pid(node, RESTART_S, process_sessions.current(scope).scope)


def keeper_pids(lab: LocalCluster, node: int) -> list[int]:
    """The keepers of one node: one, or none while nobody has started it again."""
    return keepers(process_sessions.current().scope, lab.node_ids[node])


def in_turn(
    rng: random.Random, troubles: Mapping[str, Iterator[str]]
) -> Generator[str, None, None]:
    """Each of them once, in any order, and again."""
    names = sorted(troubles)
    while True:
        rng.shuffle(names)
        for name in names:
            yield f"{name}: {next(troubles[name])}"


def kills(
    lab: LocalCluster, rng: random.Random, n_nodes: int, scope: str | None = None
) -> Generator[str, None, None]:
    """SIGKILL to a page server, or the registry, of that session, or of ours."""
    while True:
        victim = rng.randrange(n_nodes + 1)
        if victim == n_nodes:
            os.kill(registry_pid(scope), signal.SIGKILL)
            yield "registry"
        else:
            os.kill(server_pid(lab, victim, scope), signal.SIGKILL)
            yield f"page server {victim}"


def keeper_kills(
    lab: LocalCluster, rng: random.Random, n_nodes: int, given_all: Callable[[int], None]
) -> Generator[str, None, None]:
    """SIGKILL to a keeper of ours, alone: its page server lives, and gives the next one everything.

    Args:
        given_all: returns when that node's new keeper has all; who dies before that loses memory.
    """
    while True:
        node = rng.randrange(n_nodes)
        server_pid(lab, node)  # one that starts again has to take everything back first
        (keeper,) = keeper_pids(lab, node)
        os.kill(keeper, signal.SIGKILL)
        deadline = time.monotonic() + RESTART_S
        while not set(keeper_pids(lab, node)) - {keeper}:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no keeper of node {node} in {RESTART_S:g} s")
            time.sleep(0.02)
        given_all(node)
        yield f"keeper of {node}"


def task_pids(lab: LocalCluster, node: int, function: str) -> list[int]:
    """Processes of a node that run a task of that function right now."""
    found = []
    for pid in lab.processes(node):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{function}".encode()):
                found.append(pid)
    return found


def task_kills(
    lab: LocalCluster, rng: random.Random, n_nodes: int, function: str
) -> Generator[str, None, None]:
    """SIGKILL to a process that runs a task of that function, wherever in it it is just now."""
    while True:
        deadline = time.monotonic() + NO_TASK_S
        while not (
            pids := [(n, pid) for n in range(n_nodes) for pid in task_pids(lab, n, function)]
        ):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if not pids:
            yield "no task"
            continue
        node, pid = rng.choice(pids)
        with contextlib.suppress(ProcessLookupError):  # it ends by itself
            os.kill(pid, signal.SIGKILL)
        yield f"a task on node {node}"


def both(lab: LocalCluster, node: int) -> Generator[str, None, None]:
    """SIGKILL to a page server and its keeper at once: what only they had is gone."""
    while True:
        server = server_pid(lab, node)
        pids = [server, *keeper_pids(lab, node)]
        # Stopped first: else the server may give everything to a new keeper between two kills.
        stop(*pids)
        end(pids)
        yield f"{len(pids)} processes of node {node}"


def stops(lab: LocalCluster, rng: random.Random, n_nodes: int) -> Generator[str, None, None]:
    """SIGSTOP to one of ours, for a moment."""
    victims = {f"page server {n}": server_pid(lab, n) for n in range(n_nodes)}
    victims["registry"] = registry_pid()
    for node in range(n_nodes):
        victims |= {f"keeper of {node}": pid for pid in keeper_pids(lab, node)}
    stopped = 0
    try:
        while True:
            name = rng.choice(sorted(victims))
            stopped = victims[name]
            stop(stopped)
            time.sleep(rng.uniform(0.1, MOST_STOPPED_S))
            os.kill(stopped, signal.SIGCONT)
            yield name
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)


def few_descriptors(
    lab: LocalCluster, rng: random.Random, n_nodes: int, while_few: Callable[[int], None]
) -> Generator[str, None, None]:
    """A page server that cannot open more than a few files, for a moment, in which `while_few` is
    called with its node: each node's once, in any order, and again."""
    pids = [server_pid(lab, n) for n in range(n_nodes)]
    were = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids}
    todo: list[int] = []
    try:
        while True:
            todo = todo or rng.sample(range(n_nodes), n_nodes)
            node = todo.pop()
            pid = pids[node]
            highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
            left = rng.randrange(HEADROOM)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1 + left, were[pid][1]))
            while_few(node)
            time.sleep(rng.uniform(0.1, MOST_LIMITED_S))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, were[pid])
            yield f"{left} descriptors for page server {node}"
    finally:
        for pid, limits in were.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def fill(filler: Path) -> None:
    """A file takes all that is free on its disk."""
    with filler.open("ab", buffering=0) as file:
        for n_bytes in (1 << 20, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(n_bytes)):
                    pass


def full_disk(
    directory: Path, rng: random.Random, while_full: Callable[[], None]
) -> Generator[str, None, None]:
    """No byte left where the journal is, for a moment, in which `while_full` is called."""
    filler = directory / "filler"
    try:
        while True:
            fill(filler)
            while_full()
            time.sleep(rng.uniform(0.1, MOST_FULL_S))
            filler.unlink()
            yield f"full for {directory.name}"
    finally:
        filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(directory: Path, n_bytes: int) -> Iterator[None]:
    """A file system of its own there. Root only."""
    directory.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={n_bytes},mode=0700", "none", str(directory)]
    subprocess.run(mount, check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True, timeout=30)
        with contextlib.suppress(FileNotFoundError):  # whose it is may have removed it by now
            directory.rmdir()
