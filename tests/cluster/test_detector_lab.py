"""Peers that are dead, stopped, slow or cut off: which are lost, and how soon that is found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray._protocol.messages import ServerInfo, ServerLost
from clamor_ray._session import process_sessions
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, netns_cluster, require_lab
from tests.support.lab.cluster import RAY_HEALTH_CHECK_PERIOD_MS, node_resource
from tests.support.processes import stop

pytestmark = [pytest.mark.lab, pytest.mark.slow]

TASK_S = 90.0
SILENT_S = 6.0  # φ is beyond 8 after about one
N = 1 << 20


@pytest.fixture
def lab() -> Iterator[LocalCluster]:
    """Ray's own health checks: a node that is silent is dead for it after 15 s."""
    require_lab("local")
    with local_cluster(3, health_check_period_ms=RAY_HEALTH_CHECK_PERIOD_MS) as lab:
        clamor.init()
        yield lab


def on(index: int, function: Callable[..., Any], *arguments: Any) -> Any:
    task = ray.remote(function).options(num_cpus=0, resources={node_resource(index): 0.01})
    return ray.get(task.remote(*arguments), timeout=TASK_S)


def put_some(seed: int) -> Any:
    return clamor.put(np.random.default_rng(seed).integers(0, 1 << 60, N))


def sum_of(ref: Any) -> int:
    return int(np.array(ref.get()).sum())


def server_at(lab: LocalCluster, index: int) -> ServerInfo:
    (info,) = (n.info for n in clamor.stats().nodes if n.node_id == lab.node_ids[index])
    return info


def located(server_id: int) -> Any:
    registry = process_sessions.current().registry
    return ray.get(registry.locate.remote(server_id, 0), timeout=TASK_S)


def home_of(ref: Any) -> str:
    homes = [node for node, entry in clamor.stats().region(ref).items() if entry.is_home]
    return str(homes[0]) if homes else ""


def is_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())


def say(what: str, **figures: float) -> None:
    print(json.dumps({"what": what, **{name: round(s, 2) for name, s in figures.items()}}))


@pytest.mark.parametrize("asked", [False, True])
def test_a_dead_node_is_found_before_ray_calls_it_dead(lab: LocalCluster, asked: bool) -> None:
    """With and without somebody who needs a block of it. What others have is there again, too."""
    ref = on(1, put_some, 3)
    expected = on(2, sum_of, ref)
    server_id, node_id = server_at(lab, 1).server_id, lab.node_ids[1]
    lab.kill_node(1)
    killed_s = time.monotonic()
    if asked:
        assert sum_of(ref) == expected
        read_s = time.monotonic() - killed_s
    until(lambda: isinstance(located(server_id), ServerLost), 60)
    found_s = time.monotonic() - killed_s
    until(lambda: home_of(ref) == lab.node_ids[2], 60)
    rebuilt_s = time.monotonic() - killed_s
    assert is_alive(node_id)  # as Ray says
    reason = located(server_id).reason
    assert "has ended, and the raylet of its node" in reason, reason
    if not asked:
        assert sum_of(ref) == expected
        read_s = time.monotonic() - killed_s
    assert is_alive(node_id)
    until(lambda: not is_alive(node_id), 60)
    ray_s = time.monotonic() - killed_s
    say("a node is killed", found_s=found_s, rebuilt_s=rebuilt_s, read_s=read_s, ray_s=ray_s)
    assert located(server_id).reason == reason
    assert on(2, sum_of, ref) == expected


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        stop(pid)
    try:
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("what", ["page server", "node"])
def test_what_is_stopped_is_not_lost(lab: LocalCluster, what: str) -> None:
    """Also where its raylet is stopped with it: as a machine that is paused for a migration."""
    ref = on(1, put_some, 4)
    info = server_at(lab, 1)
    with stopped([info.pid] if what == "page server" else lab.processes(1)):
        deadline = time.monotonic() + SILENT_S
        while time.monotonic() < deadline:
            assert isinstance(located(info.server_id), ServerInfo)
            time.sleep(0.2)
    assert sum_of(ref) == on(1, sum_of, ref)
    assert home_of(ref) == lab.node_ids[1]
    assert located(info.server_id) == info  # not even restarted


def test_what_is_slow_is_not_lost(lab: LocalCluster) -> None:
    """It runs for a tenth of the time."""
    ref = on(1, put_some, 5)
    info = server_at(lab, 1)
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        with stopped([info.pid]):
            time.sleep(0.9)
        time.sleep(0.1)
        assert isinstance(located(info.server_id), ServerInfo)
    assert sum_of(ref) == on(1, sum_of, ref)
    assert home_of(ref) == lab.node_ids[1]
    assert located(info.server_id) == info


# ------------------------------------------------------------------ networks

# A driver on node 0; a variable on node 1. Each line that it gets makes it read another variable.
_READS = """
import json, sys, time
import numpy as np, ray
import clamor_ray as clamor
from clamor_ray._session import process_sessions

ray.init(address="auto", log_to_driver=False)
clamor.init()
N = 1 << 17

def put_all(n):
    return [clamor.put(np.arange(N) * (i + 1)) for i in range(n)]

there = ray.remote(put_all).options(num_cpus=0, resources={"node1": 0.01})
refs = ray.get(there.remote(8), timeout=90)
node = next(n for n in ray.nodes() if "node1" in n["Resources"])["NodeID"]
(info,) = (n.info for n in clamor.stats().nodes if n.node_id == node)
registry = process_sessions.current().registry
print("READY", flush=True)
for i, line in enumerate(sys.stdin):
    began = time.monotonic()
    total = int(np.array(refs[i].get()).sum())
    took = time.monotonic() - began
    assert total == N * (N - 1) // 2 * (i + 1), (i, total)
    where = ray.get(registry.locate.remote(info.server_id, 0), timeout=90)
    homes = [at for at, entry in clamor.stats().region(refs[i]).items() if entry.is_home]
    print(json.dumps([round(took, 2), where == info, homes == [node]]), flush=True)
clamor.shutdown()
print("END", flush=True)
"""


class Reader:
    """A driver that reads what it is told to read."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._expect("READY")

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.strip() == word, line

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("read\n")
        self._process.stdin.flush()

    def end(self) -> float:
        """Seconds; the home is the same as before, and nobody was lost."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        took_s, is_same, is_home = json.loads(line)
        assert is_same, "its page server was lost, or started again"
        assert is_home
        return float(took_s)

    def read(self) -> float:
        self.begin()
        return self.end()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._expect("END")
        assert self._process.wait(60) == 0


LOSSY = "INPUT -i eth0 -m statistic --mode random --probability 0.1 -j DROP"
CUT = "INPUT -i eth0 -j DROP"


@contextlib.contextmanager
def filtered(namespace: str, rule: str) -> Iterator[None]:
    """Packets to that node are dropped so."""
    command = ["ip", "netns", "exec", namespace, "iptables"]
    subprocess.run([*command, "-A", *rule.split()], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run([*command, "-D", *rule.split()], check=True, timeout=30)


@pytest.mark.root
def test_what_a_bad_network_delays_is_not_lost() -> None:
    """100 ms each way on all links; then one that loses packets, and is cut for seconds: there, no
    host refuses a connection, so only Ray could say that the node is dead."""
    require_lab("netns")
    with netns_cluster(2, rate="", round_trip_ms=200.0) as lab:
        reader = Reader(lab.start([sys.executable, "-c", _READS]))
        slow_s = reader.read()
        with filtered(lab.namespaces[1], LOSSY):
            lossy_s = [reader.read() for _ in range(2)]
        with filtered(lab.namespaces[1], CUT):
            reader.begin()
            time.sleep(SILENT_S)
        cut_s = reader.end()
        again_s = reader.read()
        reader.close()
    say("a bad network", slow_s=slow_s, lossy_s=max(lossy_s), cut_s=cut_s, again_s=again_s)
    assert cut_s > SILENT_S - 1.0  # it was waited for
