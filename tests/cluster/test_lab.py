"""Both forms of the lab, with plain Ray: what the other tests stand on."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from tests.conftest import until
from tests.support.lab import (
    cluster,
    forked_workers,
    lab_unavailable,
    local_cluster,
    netns_cluster,
    remove_stale,
    require_lab,
    setup_worker,
    worker_logs,
    worker_server,
)
from tests.support.lab.cluster import node_resource
from tests.support.lab.netns import network


class Echo:
    def where(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def say(self, word: str) -> str | None:
        print(word)
        return os.environ.get("LAB_WORD")


@pytest.mark.lab
def test_local_nodes_are_apart_and_can_die() -> None:
    require_lab("local")
    import ray

    with local_cluster(2) as lab:
        actors = [
            ray.remote(Echo).options(num_cpus=0, resources={node_resource(i): 0.01}).remote()
            for i in range(2)
        ]
        found = ray.get([actor.where.remote() for actor in actors], timeout=60)
        assert tuple(found) == lab.node_ids
        # One agent for all nodes makes their environments; what a worker prints is in its file.
        began_s = time.time()
        environment = {"env_vars": {"LAB_WORD": "of node 1"}}
        own = ray.remote(Echo).options(
            num_cpus=0, resources={node_resource(1): 0.01}, runtime_env=environment
        )
        assert ray.get(own.remote().say.remote("hear me"), timeout=60) == "of node 1"
        until(lambda: "hear me" in "".join(worker_logs.since(began_s).values()))
        assert worker_logs.since(time.time() + 60) == {}
        with pytest.raises(LookupError, match="node 1 has no page server"):
            lab.page_server_pid(1)
        lab.kill_node(1)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actors[1].where.remote(), timeout=60)
        assert ray.get(actors[0].where.remote(), timeout=60) == lab.node_ids[0]
        with pytest.raises(ValueError, match="dead already"):
            lab.kill_node(1)
    assert not ray.is_initialized()


def first_numbers() -> tuple[int, int, list[float]]:
    import random

    import numpy as np

    return os.getpid(), os.getppid(), [random.random(), float(np.random.random())]


@pytest.mark.lab
def test_workers_are_forks_and_live_as_long_as_their_launchers() -> None:
    require_lab("local")
    import ray

    with local_cluster(2) as lab:
        calls = [
            ray.remote(num_cpus=0, resources={node_resource(node): 0.01})(first_numbers)
            for node in (0, 1)
        ]
        firsts = ray.get([call.remote() for call in calls], timeout=60)
        (_, server, _), (_, other, _) = firsts
        assert server == other
        assert "worker_server.py" in Path(f"/proc/{server}/cmdline").read_text()
        drawn = [number for _, _, numbers in firsts for number in numbers]
        assert len(set(drawn)) == len(drawn)
        launchers = forked_workers.parents()
        titles = [Path(f"/proc/{pid}/cmdline").read_text() for pid in launchers]
        assert sum(title.startswith("ray::RuntimeEnvAgent") for title in titles) == 1
        for node, (pid, _, _) in enumerate(firsts):
            assert {pid, launchers[pid]} <= set(lab.processes(node))
        (mine, _, _), (theirs, _, _) = firsts
        os.kill(launchers[mine], signal.SIGKILL)
        os.kill(theirs, signal.SIGKILL)
        until(lambda: not {mine, theirs} & forked_workers.parents().keys(), 30)
        assert not Path(f"/proc/{launchers[theirs]}").exists()
        lives, _, _ = ray.get(calls[0].remote(), timeout=60)
        assert lives != mine


@pytest.mark.parametrize("variable", ["PYTHONPATH", "LD_PRELOAD", "OMP_NUM_THREADS"])
def test_what_is_read_at_a_start_asks_for_a_process_of_its_own(variable: str) -> None:
    assert worker_server.is_for_a_fork({"RAY_JOB_ID": "01"}, {})
    assert not worker_server.is_for_a_fork({variable: "1"}, {})
    assert not worker_server.is_for_a_fork({}, {variable: "1"})
    assert worker_server.is_for_a_fork({variable: "1"}, {variable: "1"})


@pytest.mark.parametrize(
    ("context", "is_rays"),
    [
        ({"env_vars": {"LAB_A": "a b'c $LAB_WORD", "LAB_B": "${LAB_WORD}/x:${NOBODY}"}}, 0),
        ({"env_vars": {"LAB_A": "a"}, "command_prefix": ["nice"]}, 1),
        ({"env_vars": {"LAB_A": "a"}, "py_executable": "/usr/bin/env python3"}, 1),
        ({"env_vars": {}}, 1),
    ],
)
def test_a_worker_is_set_up_as_rays_script_does_it(
    context: dict[str, object], is_rays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.runtime_env.context import RuntimeEnvContext

    texts = f"{setup_worker.CONTEXT}{RuntimeEnvContext(**context).serialize()}"
    worker = ["default_worker.py", "--name=it's", "--node-manager-port=1"]
    arguments = [*worker, f"{setup_worker.LANGUAGE}PYTHON", texts]
    monkeypatch.setattr(os, "environ", before := {**os.environ, "LAB_WORD": "word"})
    ours = dict(before)
    command = setup_worker.command(arguments, ours)
    if is_rays:
        assert command is None
        assert ours == before
        return

    class Became(Exception):
        pass

    def become(file: str, args: list[str]) -> None:
        raise Became(file, args)

    monkeypatch.setattr(os, "execvp", become)
    monkeypatch.setattr(sys, "argv", ["setup_worker.py", *arguments])
    with pytest.raises(Became) as became:
        runpy.run_module("ray._private.workers.setup_worker", run_name="__main__")
    _, (bash, option, line) = became.value.args
    assert (bash, option) == ("bash", "-c")
    said = line.replace("exec ", "printf '%s\\0' ", 1)  # what bash makes of it
    words = subprocess.run(["bash", "-c", said], capture_output=True, text=True, check=True).stdout
    assert command == words.split("\0")[:-1]
    assert ours == dict(os.environ)
    assert ours["LAB_B"] == "word/x:"


class LateCluster:
    """Ray's, whose second node does not start in time on the first tries."""

    n_late = 0
    head_node = None
    started: ClassVar[list[subprocess.Popen[bytes]]] = []

    def __init__(self, shutdown_at_exit: bool) -> None:
        self.nodes: list[object] = []

    def add_node(self, **options: object) -> object:
        if self.nodes and LateCluster.n_late:
            LateCluster.n_late -= 1
            self.started.append(subprocess.Popen(["sleep", "300"]))
            raise Exception("The current node timed out during startup. This could happen because")
        self.nodes.append(options["number"])
        return options["number"]

    def shutdown(self) -> None:
        self.nodes.clear()


def test_a_cluster_that_starts_late_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_utils.Cluster", LateCluster)
    LateCluster.n_late = 2
    made, nodes = cluster.started([{"number": 1}, {"number": 2}])
    assert made.nodes == nodes == [1, 2]
    assert len(LateCluster.started) == 2
    assert [late.wait(30) for late in LateCluster.started] == [-signal.SIGKILL] * 2
    LateCluster.n_late = 3
    with pytest.raises(Exception, match="timed out during startup"):
        cluster.started([{"number": 1}, {"number": 2}])
    assert [late.wait(30) for late in LateCluster.started] == [-signal.SIGKILL] * 5


TRANSFER = """
import hashlib, sys
import numpy as np, ray
ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=0)
def digest(array):
    return ray.get_runtime_context().get_node_id(), hashlib.sha256(array).hexdigest()

array = np.random.default_rng(7).integers(0, 256, int(sys.argv[1]), dtype=np.uint8)
where, found = ray.get(
    digest.options(resources={"node1": 0.01}).remote(ray.put(array)), timeout=120
)
assert found == hashlib.sha256(array).hexdigest()
print("NODE", where)
"""


@pytest.mark.lab
@pytest.mark.root
def test_namespaces_have_links_of_their_own() -> None:
    require_lab("netns")
    n_bytes = 32 << 20
    with netns_cluster(2, rate="1gbit") as lab:
        before = lab.received_bytes(1), lab.shaped_bytes(0)
        printed = lab.run_python(TRANSFER, str(n_bytes))
        assert f"NODE {lab.node_ids[1]}" in printed
        # It crossed the link once, and the token bucket saw it: nothing went round by loopback.
        assert n_bytes <= lab.received_bytes(1) - before[0] < 2 * n_bytes
        assert n_bytes <= lab.shaped_bytes(0) - before[1] < 2 * n_bytes
        names = lab.namespaces
        lab.kill_node(1)
        assert lab.run(["true"], node=1).returncode == 0  # the namespace outlives its node
    left = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=30
    )
    assert not any(name in left.stdout for name in names)


LISTEN = """
import socket
with socket.create_server(("10.77.0.2", 7777)) as server:
    connection, _ = server.accept()
    with connection:
        while part := connection.recv(1 << 20):
            connection.sendall(part)
"""

ECHO = """
import hashlib, random, socket, threading, time
def answer(n):
    parts = []
    while n:
        parts.append(connection.recv(n))
        n -= len(parts[-1])
    return b"".join(parts)
while True:
    try:
        connection = socket.create_connection(("10.77.0.2", 7777), timeout=60)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
with connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took = []
    for _ in range(50):
        start = time.monotonic()
        connection.sendall(b"x")
        answer(1)
        took.append(time.monotonic() - start)
    sent = random.Random(3).randbytes(16 << 20)
    sender = threading.Thread(target=connection.sendall, args=(sent,))
    sender.start()
    print("SAME", answer(len(sent)) == sent, "LEAST_MS", 1000 * min(took))
    sender.join()
"""


@pytest.mark.lab
@pytest.mark.root
def test_links_may_have_a_delay() -> None:
    require_lab("netns")
    with network(2, rate="1gbit", round_trip_ms=20.0) as names:
        listener, client = (
            subprocess.Popen(
                ["ip", "netns", "exec", names[node], sys.executable, "-c", program],
                stdout=subprocess.PIPE,
                text=True,
            )
            for node, program in ((1, LISTEN), (0, ECHO))
        )
        with listener, client:
            assert client.stdout is not None
            printed = client.stdout.read().split()
        assert (listener.returncode, client.returncode) == (0, 0)
    assert printed[:2] == ["SAME", "True"]
    # The machine's own share is little beside it; how much is not for a test to say.
    assert float(printed[3]) >= 20.0


@pytest.mark.lab
@pytest.mark.root
def test_what_a_crashed_lab_left_is_removed() -> None:
    require_lab("netns")
    highest = int(Path("/proc/sys/kernel/pid_max").read_text())
    name = f"clamorlab-{highest + 1}-0"  # no process can have this id
    subprocess.run(["ip", "netns", "add", name], check=True, timeout=30)
    left = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "1000"])
    assert name in remove_stale()
    assert left.wait(30) != 0
    assert remove_stale() == []


def test_a_lab_that_must_run_does_not_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.support.lab.availability.lab_unavailable", lambda form: "no such luck"
    )
    monkeypatch.setenv("CLAMOR_REQUIRE_LAB", "1")
    with pytest.raises(pytest.fail.Exception, match="no such luck"):
        require_lab("netns")
    monkeypatch.setenv("CLAMOR_REQUIRE_LAB", "0")
    with pytest.raises(pytest.skip.Exception, match="no such luck"):
        require_lab("netns")


def test_root_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert lab_unavailable("netns") == "network namespaces need root"
