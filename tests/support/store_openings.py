"""Openings of a store: each in a Ray cluster that is new, which ends in one of several ways."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clamor_ray as clamor
from tests.support import driver_script
from tests.support.lab import LocalCluster, local_cluster
from tests.support.processes import end, stop

SESSION = "kept"
DRIVER_S = 200.0
IN_USE_S = 60.0  # what a cluster has left may take so long to leave
BEGIN = """
import json
import numpy as np, ray
import clamor_ray as clamor
from tests.support import stored
ray.init(log_to_driver=False)
found = clamor.init(store={store!r}, session={session!r})
"""


def attach(store: Path) -> Any:
    """This process's part of an opening."""
    return clamor.init(store=str(store), session=SESSION)


@contextlib.contextmanager
def opening(store: Path, n_nodes: int = 1, *, orderly: bool = True) -> Iterator[LocalCluster]:
    """The store, open in a new cluster, to which this process is connected.

    Args:
        store: its path.
        n_nodes: of the cluster.
        orderly: whether the session ends before the cluster does.
    """
    with local_cluster(n_nodes) as lab:
        try:
            scope = in_time(store)
            yield lab
            if orderly:
                clamor.shutdown(session=SESSION)
        finally:
            clamor.shutdown()
    end(of_scope(scope))


def in_time(store: Path) -> str:
    """Opens it; who had it open a moment ago may still be about to leave."""
    deadline = time.monotonic() + IN_USE_S
    while True:
        try:
            return str(attach(store).scope)
        except clamor.errors.StoreInUseError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def of_scope(scope: str) -> set[int]:
    """Processes that are named after the session: keepers, and those that watch its journal."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if scope.encode() in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
    return found


def processes(lab: LocalCluster, scope: str) -> set[int]:
    """All of the cluster and of the session, but this one."""
    pids = set(lab.head_processes()) | of_scope(scope)
    for index in lab.alive():
        pids.update(lab.processes(index))
    return pids - {os.getpid()}


def crash(lab: LocalCluster, scope: str) -> None:
    """SIGKILL to all processes of the cluster and of the session, before any sees another die."""
    pids = processes(lab, scope)
    stop(*pids)
    end(pids)


def run(lab: LocalCluster, store: Path, script: str) -> Any:
    """What a driver of its own says in its last line: JSON. It leaves the session as it is.

    Args:
        lab: its cluster.
        store: is open once the script begins, which has `found`, what `clamor.init` returned.
        script: prints that line.
    """
    begin = BEGIN.format(store=str(store), session=SESSION)
    printed = driver_script.run(begin + script, timeout_s=DRIVER_S, lab=lab)
    return json.loads(driver_script.lines_of(printed)[-1])


def node_directories(store: Path) -> list[Path]:
    """Of all page servers that there have been."""
    return sorted((store / SESSION).glob("node-*"))
