"""The sockets of a node: another user cannot take their names, and none of them stays."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol import names
from tests.conftest import ANSWER_S, until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.processes import stop
from tests.support.session_rig import keepers

NOBODY = 65534
pytestmark = pytest.mark.lab

# Another user, who takes the name as soon as nobody has it: as an abstract one, and as a file.
_STRANGER = """
import os, socket, sys, time

abstract, path, link = sys.argv[1:]
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print("here", flush=True)
taken = []
while os.getppid() != 1:
    for name in ("\\0" + abstract, path):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(name)
            sock.listen(1)
        except OSError:
            sock.close()
        else:
            taken.append(sock)
            print("taken", repr(name), flush=True)
    for attempt in (lambda: os.unlink(path), lambda: os.rename(os.path.dirname(path), link)):
        try:
            attempt()
        except OSError:
            continue
        print("taken", path, flush=True)
    time.sleep(0.0005)
"""


@contextlib.contextmanager
def stranger(name: str) -> Iterator[subprocess.Popen[str]]:
    """One who tries to take a socket's name until the block ends."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    words = (name.removeprefix("/"), name if name.startswith("/") else f"/tmp/{name}", "/tmp/x")
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _STRANGER, *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "here\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        yield lab


@pytest.fixture
def below() -> Iterator[str]:
    """A short one: the kernel takes 107 bytes for a socket's path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield directory


@pytest.fixture
def session(cluster: LocalCluster) -> Iterator[clamor.InitResult]:
    yield clamor.init()
    clamor.shutdown()


def on_node_1(function: Any) -> Any:
    return clamor.remote(function).options(num_cpus=0, resources={node_resource(1): 0.001})


def put_there(value: int) -> list[Any]:
    return [clamor.put(np.full(1 << 20, value, np.uint8))]


def total_of(array: Any) -> int:
    return int(array.sum(dtype=np.int64))


def info_of(cluster: LocalCluster, index: int) -> Any:
    (found,) = [
        node.info for node in clamor.stats().nodes if node.info.node_id == cluster.node_ids[index]
    ]
    return found


def test_a_stranger_does_not_hold_up_a_page_server_that_is_started_again(
    cluster: LocalCluster, session: clamor.InitResult
) -> None:
    (ref,) = ray.get(on_node_1(put_there).remote(3), timeout=ANSWER_S)
    home = info_of(cluster, 1)
    with stranger(home.socket_name) as other:
        os.kill(home.pid, signal.SIGKILL)
        until(lambda: cluster.page_server_pid(1, ANSWER_S) != home.pid)
        assert ray.get(on_node_1(total_of).remote(ref), timeout=ANSWER_S) == 3 << 20
        assert total_of(ref.get()) == 3 << 20
        assert other.poll() is None
    clamor.free(ref)


def files_of(scope: str, below: str = names.SOCKETS_BELOW) -> list[str]:
    return [name for name in os.listdir(names.socket_directory(below)) if name.startswith(scope)]


def test_what_killed_processes_leave_goes_with_the_session(
    cluster: LocalCluster, session: clamor.InitResult
) -> None:
    """Page servers that were killed, with and without their keepers."""
    (ref,) = ray.get(on_node_1(put_there).remote(5), timeout=ANSWER_S)
    home = info_of(cluster, 1)
    directory = os.lstat(names.socket_directory(names.SOCKETS_BELOW))
    assert stat.S_IMODE(directory.st_mode) == 0o700
    assert len(files_of(session.scope)) == 6  # two nodes: a page server's two, and a keeper's
    (keeper,) = [
        pid
        for pid in keepers(session.scope)
        if home.socket_name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    stop(home.pid)  # so that it starts no other
    os.kill(keeper, signal.SIGKILL)
    os.kill(home.pid, signal.SIGKILL)
    until(lambda: cluster.page_server_pid(1, ANSWER_S) != home.pid)
    until(lambda: len(files_of(session.scope)) == 6)  # and none of the keeper that was
    clamor.free(ref)
    clamor.shutdown()
    until(lambda: not files_of(session.scope))


def test_the_directory_is_somebody_elses(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    theirs = Path(names.socket_directory(below))
    theirs.mkdir(0o700)
    os.chown(theirs, NOBODY, NOBODY)
    monkeypatch.setenv("CLAMOR_SOCKET_DIR", below)
    begun_s = time.monotonic()
    with pytest.raises(errors.DeniedError, match=f"{theirs} belongs to user {NOBODY}") as caught:
        clamor.init()
    assert time.monotonic() - begun_s < ANSWER_S
    assert "CLAMOR_SOCKET_DIR" in caught.value.hint
    theirs.rmdir()


def spawned_total(ref: Any) -> int:
    """In a process that Ray did not start."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return int(pool.apply_async(get_total, (ref[0],)).get(ANSWER_S))


def get_total(ref: Any) -> int:
    return total_of(ref.get())


def test_another_directory_of_the_driver_is_found_by_workers(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """And by what they start, though the environment of neither names it."""
    monkeypatch.setenv("CLAMOR_SOCKET_DIR", below)
    session = clamor.init()
    try:
        ref = clamor.put(np.full(1 << 20, 2, np.uint8))
        assert ray.get(on_node_1(total_of).remote(ref), timeout=ANSWER_S) == 2 << 20
        assert ray.get(on_node_1(spawned_total).remote([ref]), timeout=ANSWER_S) == 2 << 20
        assert len(files_of(session.scope, below)) == 6
        assert not files_of(session.scope)
    finally:
        clamor.shutdown()
    until(lambda: not files_of(session.scope, below))


def test_somebody_removes_the_directory_while_a_session_runs(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """New processes attach within seconds; a server that is killed then finds its keeper."""
    monkeypatch.setenv("CLAMOR_SOCKET_DIR", below)
    session = clamor.init()
    directory = names.socket_directory(below)
    try:
        (ref,) = ray.get(on_node_1(put_there).remote(7), timeout=ANSWER_S)
        home, alive = info_of(cluster, 1), keepers(session.scope)
        shutil.rmtree(directory)
        assert ray.get(on_node_1(total_of).remote(ref), timeout=ANSWER_S) == 7 << 20
        until(lambda: os.path.isdir(directory) and len(files_of(session.scope, below)) == 6, 10.0)
        assert ray.get(on_node_1(spawned_total).remote([ref]), timeout=ANSWER_S) == 7 << 20
        shutil.rmtree(directory)  # and this time nobody has had the time to see it
        os.kill(home.pid, signal.SIGKILL)
        until(lambda: cluster.page_server_pid(1, ANSWER_S) != home.pid)
        assert ray.get(on_node_1(total_of).remote(ref), timeout=ANSWER_S) == 7 << 20
        assert keepers(session.scope) == alive
    finally:
        clamor.shutdown()
    until(lambda: not files_of(session.scope, below))
