"""What a session shows to others, and what it leaves behind: no secret, no descriptor, no file.

One session for all; the last test ends it.
"""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray._protocol import names
from clamor_ray._session import process_sessions
from clamor_ray.actors.process.journals import journal_directory
from tests.cluster.test_failures import traces
from tests.conftest import ANSWER_S, until
from tests.support.lab import LocalCluster, local_cluster, require_lab, troubles
from tests.support.lab.cluster import node_resource
from tests.support.lab.traces import everywhere, holdings, pages
from tests.support.secret_forms import forms
from tests.support.session_rig import keepers, watchers

pytestmark = pytest.mark.lab

AT_ONCE = 250
ITEMS = 1024  # 8 KiB: what is smaller than a block travels in its reference
RAYS_OWN = 8  # connections of Ray's that come and go


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        with local_cluster(2, dashboard=True, connect=False) as lab:
            every_line = ray.LoggingConfig(log_level="DEBUG")
            ray.init(address=lab.address, logging_config=every_line, log_to_driver=False)
            clamor.init()
            yield lab
    finally:
        # Ray sets up the root of this process's loggers, and leaves it so for all later tests.
        root.setLevel(level)
        root.handlers[:] = handlers


def there(function: Any) -> Any:
    return ray.remote(function).options(num_cpus=0, resources={node_resource(1): 0.001})


class Reader:
    """One process of the other node, so that what it holds can be counted."""

    def pid(self) -> int:
        return os.getpid()

    def sums(self, refs: list[Any]) -> list[int]:
        return [int(ref.get().sum()) for ref in refs]


def churn(reader: Any, n: int) -> None:
    refs = [clamor.put(np.full(ITEMS, number)) for number in range(n)]
    sums = ray.get(reader.sums.remote(refs), timeout=ANSWER_S)
    assert sums == [ITEMS * number for number in range(n)]
    for ref in refs:
        clamor.free(ref)


def files_of(scope: str) -> list[str]:
    """By name: sockets, what is in /dev/shm, and the journal's."""
    sockets = Path(names.socket_directory(names.SOCKETS_BELOW)).glob(f"{scope}*")
    shared = Path("/dev/shm").glob(f"*{scope}*")
    return sorted(str(p) for p in (*sockets, *shared, *journal_directory(scope).rglob("*")))


def too_much(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    return {
        kind: (before[kind], n)
        for kind, n in after.items()
        if n > before[kind] + (RAYS_OWN if kind in ("socket", "pipe") else 0)
    }


@pytest.mark.parametrize("n_churned", [AT_ONCE, pytest.param(4 * AT_ONCE, marks=pytest.mark.soak)])
def test_variables_leave_nothing(lab: LocalCluster, n_churned: int) -> None:
    """Put here, read on the other node, freed: nobody holds more than before."""
    scope = process_sessions.current().scope
    reader = there(Reader).remote()
    held = clamor.put(np.arange(ITEMS))  # so that something is counted
    churn(reader, 50)  # what is made once is made
    pids = {f"page server {n}": lab.page_server_pid(n) for n in range(2)}
    pids |= {f"keeper {pid}": pid for pid in keepers(scope)}
    pids |= {f"watcher {pid}": pid for pid in watchers(journal_directory(scope))}
    pids |= {"registry": troubles.registry_pid(), "driver": os.getpid()}
    pids["reader"] = ray.get(reader.pid.remote(), timeout=ANSWER_S)
    assert len(pids) == 8

    def settled() -> bool:
        states = process_sessions.current().rpc.stats().regions_by_state
        return states == {**dict.fromkeys(states, 0), "ready": 1}

    until(settled)
    files = files_of(scope)
    assert len(files) > 4
    before = {name: holdings(pid) for name, pid in pids.items()}
    assert before["page server 0"]["memfd"] > 0
    assert sum(kinds["memfd"] for name, kinds in before.items() if "keeper" in name) > 0
    for _ in range(n_churned // AT_ONCE):
        churn(reader, AT_ONCE)
    left: dict[str, Any] = {}

    def as_before() -> bool:
        left.clear()
        left.update({name: too_much(before[name], holdings(pid)) for name, pid in pids.items()})
        left["files"] = [path for path in files_of(scope) if path not in files]
        return not any(left.values()) and settled()

    try:
        until(as_before, 30.0)
    except AssertionError:
        raise AssertionError(f"left of {n_churned} variables: {left}") from None
    assert held.get()[-1] == ITEMS - 1
    clamor.free(held)
    ray.kill(reader)


def put_there() -> list[Any]:
    return [clamor.put(np.full(1 << 16, 7)), clamor.zeros(1 << 16, np.int64)]


def change_there(refs: list[Any]) -> list[int]:
    with clamor.transaction(*(ref._latest() for ref in refs)) as arrays:
        for array in arrays:
            array[::512] += 1
        return [int(array[0]) for array in arrays]


def test_the_secret_is_nowhere(lab: LocalCluster) -> None:
    """After commits, after each of our processes was killed, and after a rebuild."""
    scope, secret = process_sessions.current().scope, process_sessions.current().rpc.secret()
    assert len(secret) == 32
    refs = ray.get(there(put_there).remote(), timeout=ANSWER_S)
    assert change_there(refs) == [8, 1]
    home = lab.page_server_pid(1)
    os.kill(home, signal.SIGKILL)
    os.kill(troubles.registry_pid(), signal.SIGKILL)
    (keeper,) = troubles.keeper_pids(lab, 0)
    os.kill(keeper, signal.SIGKILL)
    assert ray.get(there(change_there).remote(refs), timeout=ANSWER_S) == [9, 2]
    assert lab.page_server_pid(1) != home
    until(lambda: troubles.keeper_pids(lab, 0) not in ([], [keeper]))
    kept = clamor.put(np.arange(ITEMS))  # its seal waits until the new keeper has everything
    clamor.prefetch([ref._latest().get() for ref in refs])
    next(troubles.both(lab, 1))  # and now a rebuild
    assert ray.get(there(change_there).remote(refs), timeout=ANSWER_S) == [10, 3]
    assert process_sessions.current().rpc.secret() == secret

    ours = {lab.page_server_pid(n) for n in range(2)} | {*keepers(scope), troubles.registry_pid()}
    ours |= {*watchers(journal_directory(scope)), os.getpid()}
    node = ray._private.worker.global_worker.node
    dashboard = f"http://{node.address_info['webui_url']}"
    until(lambda: any(scope.encode() in said for _, said in pages(dashboard)))
    wanted, seen = forms(secret), Counter[str]()
    leaks: dict[str, list[str]] = {}
    for where, said in everywhere(Path(node.get_session_dir_path()), dashboard):
        if shown := [form for form, text in wanted.items() if text in said]:
            leaks[where] = shown
        kind, _, what = where.partition(" ")
        seen[kind] += scope.encode() in said  # it is ours, and it was looked at
        ours -= {int(what[3:])} if kind == "environ" and said else set()
        if b"the journal brought back" in said:
            seen["after a restart"] += 1
    assert leaks == {}
    assert ours == set()
    print(dict(seen))
    for kind in ("cmdline", "file", "our", "state", "page", "key", "after a restart"):
        assert seen[kind] > 0, kind
    for ref in (*refs, kept):
        clamor.free(ref)


def test_nothing_is_left_after_the_end(lab: LocalCluster) -> None:
    """No process, socket or file of ours: not on the disk, nor in /dev/shm."""
    attached = clamor.init()  # the session of the tests before, where these have run
    scope, journal = attached.scope, journal_directory(attached.scope)
    assert ray.get(there(put_there).remote(), timeout=ANSWER_S)
    pids = [lab.page_server_pid(n) for n in range(2)] + [troubles.registry_pid()]
    pids += [*keepers(scope), *watchers(journal)]
    assert len(pids) == 6
    assert len(traces(scope, pids)) >= 14
    clamor.shutdown()
    until(lambda: not traces(scope, pids) + files_of(scope))
    assert not journal.exists()
