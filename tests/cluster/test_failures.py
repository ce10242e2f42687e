"""What happens when something dies: docs/failure.md, on a cluster of real processes.

Every wait here has a deadline, and everything that was read is compared with what was put.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol import names
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.processes import stop

pytestmark = pytest.mark.lab

BLOCK = 4096
TASK_S = 90.0
LONG = (pytest.mark.soak, pytest.mark.timeout(1200))  # for `make soak`
EXIT_NO_DATA = 70


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)  # other processes have no way to tell us


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        clamor.init()
        yield lab


def engine_of(node_id: str) -> dict[str, int]:
    (node,) = (node for node in clamor.stats().nodes if node.node_id == node_id)
    assert node.error == "", node.error
    return dict(node.engine)


def pid_of(node_id: str) -> int:
    """The node's page server, once it listens and answers."""
    found: list[int] = []

    def answers() -> bool:
        found[:] = [
            node.info.pid
            for node in clamor.stats().nodes
            if node.node_id == node_id
            and not node.error
            and Path(f"/proc/{node.info.pid}").exists()
        ]
        return bool(found)

    until(answers, "a page server answers")
    return found[0]


def blocks_of(image: npt.NDArray[np.uint8], chosen: npt.NDArray[np.int64]) -> Any:
    return image.reshape(-1, BLOCK)[chosen]


# ---------------------------------------------------------------- page servers


@clamor.remote(num_cpus=0, max_retries=3)
def read_blocks(image: npt.NDArray[np.uint8], seed: int, count: int, begun: str) -> Any:
    """Scattered single touches; says in a file that it has begun."""
    order = np.random.default_rng(seed).permutation(image.size // BLOCK)[:count]
    Path(begun).touch()
    out = np.empty((count, BLOCK), np.uint8)
    for at, block in enumerate(order):
        out[at] = image[block * BLOCK : (block + 1) * BLOCK]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("deaths", [4, pytest.param(20, marks=LONG)])
def test_page_servers_die_at_random_moments(lab: LocalCluster, tmp_path: Path, deaths: int) -> None:
    import ray

    rng = random.Random(20240607)
    n_blocks, count = 4096, 1500

    def read(ref: Any, node: int, trap: str, seed: int, begun: Path) -> Any:
        return read_blocks.options(
            resources={node_resource(node): 0.01}, runtime_env={"env_vars": {"CLAMOR_TRAP": trap}}
        ).remote(ref, seed, count, str(begun))

    readers = [(1, "uffd"), (1, "sigsegv"), (0, "uffd")]
    faults = 0
    for turn in range(deaths + 1):  # the first starts the workers, and nobody dies
        image = np.random.default_rng(turn).integers(1, 256, n_blocks * BLOCK, dtype=np.uint8)
        ref = clamor.put(image)
        begun = [tmp_path / f"{turn}-{i}" for i in range(len(readers))]
        answers = [
            read(ref, node, trap, 100 * turn + i, begun[i])
            for i, (node, trap) in enumerate(readers)
        ]
        if turn:
            victim = lab.node_ids[turn % 2]
            pid = pid_of(victim)
            until(lambda begun=begun: any(path.exists() for path in begun), "a task begins", TASK_S)
            time.sleep(rng.uniform(0.0, 0.15))  # the moment is the point
            os.kill(pid, signal.SIGKILL)
        for i, found in enumerate(ray.get(answers, timeout=TASK_S)):
            order = np.random.default_rng(100 * turn + i).permutation(n_blocks)[:count]
            assert np.array_equal(found, blocks_of(image, order)), (turn, readers[i])
        if turn:
            until(
                lambda victim=victim, pid=pid: pid_of(victim) != pid,
                "the page server is started again",
            )
        faults += engine_of(lab.node_ids[1])["faults"]
        # The home's own memory came through its keeper.
        assert np.array_equal(ref.get(), image)
        clamor.free(ref)
    assert faults > 0


@pytest.mark.parametrize("moment", ["before it read the fault", "after it asked the home"])
def test_a_page_server_dies(moment: str, lab: LocalCluster) -> None:
    ref = clamor.put(np.full(4 << 20, 9, np.uint8))
    home, reader = (pid_of(node_id) for node_id in lab.node_ids[:2])
    (info,) = (n.info for n in clamor.stats().nodes if n.node_id == lab.node_ids[1])
    processes = [stopped_process(info.socket_name, trap, ref) for trap in ("uffd", "sigsegv")]
    sleeps = reader if moment.startswith("before") else home
    stop(sleeps)
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        time.sleep(0.3)  # until they stand at the block: it is stopped, so nobody can say
        os.kill(reader, signal.SIGKILL)
    finally:
        if sleeps == home:
            os.kill(home, signal.SIGCONT)
    for process in processes:
        assert process.communicate(timeout=TASK_S) == ("read 9\n", "")
        assert process.returncode == 0
    assert pid_of(lab.node_ids[1]) != reader
    clamor.free(ref)


def test_a_page_server_dies_while_a_region_is_built(lab: LocalCluster) -> None:
    home = lab.node_ids[0]
    pid = pid_of(home)
    given_up = pytest.raises(errors.ServerUnavailableError, match="while it was built")
    with given_up, clamor.build(1 << 20) as region:
        ref = region.publish(region.zeros(1000))
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid_of(home) != pid, "the page server is started again")
    with pytest.raises(errors.FreedError):
        ref.get()
    with clamor.build(1 << 20) as region:  # build it again, says the message
        ref = region.publish(region.zeros(1000))
    assert not ref.get().any()
    clamor.free(ref)


# -------------------------------------------------------------------- workers

# Each child is a client of its own, stops at blocks that nobody has, and is killed there.
_DYING = """
import ctypes, json, os, random, signal, sys, time
import numpy
from clamor_ray._native import client as _native

what = json.loads(sys.argv[1])
rng = random.Random(what["seed"])
for number in range(what["deaths"]):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            trap = "sigsegv" if number % 4 == 3 else "uffd"
            client = _native.Client(what["socket"], trap=trap)
            mapping = client.map(what["region"], 0, what["address"], what["length"])
            os.write(tell, b"!")
            touch = ctypes.c_uint8.from_address
            while True:
                at = rng.randrange(what["length"] // 4096) * 4096
                assert touch(mapping.address + at).value == 0
        except BaseException as failure:
            os.write(2, repr(failure).encode())
            os._exit(3)
    os.close(tell)
    assert os.read(ready, 1) == b"!", number
    os.close(ready)
    time.sleep(rng.uniform(0.0, 0.002))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (number, status)
"""


def kernel_objects(pid: int) -> dict[str, int]:
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


@pytest.mark.slow
def test_a_thousand_deaths_leave_nothing(
    lab: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    with monkeypatch.context() as roomy:  # so that it is one region
        roomy.setattr("clamor_ray._objects.memory.available_bytes", lambda: 128 << 30)
        big = clamor.zeros(64 << 30, np.uint8)  # absent everywhere: each touch is a fault

    @clamor.remote(num_cpus=0, resources={node_resource(1): 0.01})
    def first(array: Any) -> int:
        return int(array[0])

    assert ray.get(first.remote(big), timeout=TASK_S) == 0
    node = lab.node_ids[1]
    pid = pid_of(node)
    (info,) = (n.info for n in clamor.stats().nodes if n.node_id == node)

    def die(deaths: int, seed: int) -> None:
        what = {
            "socket": info.socket_name,
            "region": big._region,
            "address": big._base_address,
            "length": big._length_bytes,
            "deaths": deaths,
            "seed": seed,
        }
        subprocess.run([sys.executable, "-c", _DYING, json.dumps(what)], check=True, timeout=TASK_S)

    before = engine_of(node)

    def settled() -> bool:
        # Less is right too: Ray ends workers of other tests, which have leases of their own.
        engine = engine_of(node)
        counted = ("clients", "mappings", "faults_waiting")
        return all(engine[name] <= before[name] for name in counted)

    die(50, 1)  # what is made once is made
    until(settled, "the dead are forgotten")
    objects, faults = kernel_objects(pid), engine_of(node)["faults"]
    die(950, 2)
    until(settled, "the dead are forgotten")
    assert pid_of(node) == pid
    assert engine_of(node)["faults"] - faults > 950  # they did fault
    # Python's pool of threads may still have grown a little; a leak would be of hundreds.
    for kind, n_after in kernel_objects(pid).items():
        assert n_after <= objects[kind] + 20, (kind, objects, n_after)
    assert engine_of(node)["faults_failed"] == 0
    clamor.free(big)


# --------------------------------------------------------------------- homes

_STOPPED = """
import ctypes, sys
from clamor_ray._native import client as _native

socket, trap, region, address, length = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
client = _native.Client(socket, trap=trap)
mapping = client.map(region, 0, address, length)
print("mapped", flush=True)
sys.stdin.readline()
print("read", ctypes.c_uint8.from_address(mapping.address + length // 2).value, flush=True)
"""


def stopped_process(socket: str, trap: str, ref: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", _STOPPED, socket, trap),
            *(str(ref._region), str(ref._base_address), str(ref._length_bytes)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    return process


HOME_LOST_S = 45.0


def test_a_lost_home_is_told_to_all_who_wait(lab: LocalCluster) -> None:
    import ray

    index = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    there = {node_resource(index): 0.01}

    @ray.remote(num_cpus=0, resources=there)
    def make() -> list[Any]:
        return [clamor.put(np.full(8 << 20, 7 + i, np.uint8)) for i in range(3)]

    opened, by_tasks, unopened = ray.get(make.remote(), timeout=TASK_S)

    @clamor.remote(num_cpus=0, max_retries=0, resources={node_resource(1): 0.01})
    def touch(array: Any, go: str) -> int:
        Path(go).with_suffix(".mapped").touch()
        deadline = time.monotonic() + TASK_S
        while not Path(go).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return int(array[array.size // 2])

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        go = Path(folder, "go")
        array = opened.get()
        assert array[0] == 7
        (here,) = (n.info for n in clamor.stats().nodes if n.node_id == lab.node_ids[0])
        (lost,) = (n.info for n in clamor.stats().nodes if n.node_id == lab.node_ids[index])
        processes = {
            trap: stopped_process(here.socket_name, trap, opened) for trap in ("uffd", "sigsegv")
        }
        task = touch.remote(by_tasks, str(go))
        until(lambda: go.with_suffix(".mapped").exists(), "the task has its array", TASK_S)

        lab.kill_node(index)
        begin = time.monotonic()
        go.touch()
        messages = {}
        with ThreadPoolExecutor(8) as pool:
            ended = {
                trap: pool.submit(process.communicate, "go\n", HOME_LOST_S)
                for trap, process in processes.items()
            }

            def prefetch() -> None:
                with pytest.raises(errors.HomeLostError):
                    clamor.prefetch(array, timeout=HOME_LOST_S)

            def get() -> None:
                with pytest.raises(errors.HomeLostError):
                    unopened.get()

            for done in (pool.submit(prefetch), pool.submit(get)):
                done.result(2 * HOME_LOST_S)
            for trap, output in ended.items():
                out, messages[trap] = output.result(2 * HOME_LOST_S)
                assert out == "", trap  # it never read anything
        for trap, process in processes.items():
            assert process.returncode == EXIT_NO_DATA, (trap, messages[trap])
            block = opened._length_bytes // 2 // BLOCK
            assert f"variable {opened._region} version 0 block {block}" in messages[trap]
            # Its new home is asked, which has what this node had read; or nobody.
            assert "no page server that is known has the blocks" in messages[trap]
            assert re.search(r"server 0x[0-9a-f]+ (is lost|does not have)", messages[trap])
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(task, timeout=HOME_LOST_S)
        assert time.monotonic() - begin < HOME_LOST_S
    # What lives elsewhere is not affected, and the dead node's keeper has left with its raylet.
    until(lambda: lost.socket_name.encode() not in b"".join(command_lines()), "its keeper leaves")
    other = clamor.put(np.arange(1 << 20))
    assert other.get()[4711] == 4711
    clamor.free(other)


# -------------------------------------------------------------- what stays behind


def command_lines() -> Iterator[bytes]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield (entry / "cmdline").read_bytes()


def traces(scope: str, pids: list[int]) -> list[str]:
    """What is left of a session: its processes and its sockets."""
    found = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}/stat").exists()]
    mark = f"/{scope}-"
    found += [line.decode() for line in command_lines() if mark.encode() in line]
    found += [line for line in Path("/proc/net/unix").read_text().splitlines() if mark in line]
    sockets = Path(names.socket_directory(names.SOCKETS_BELOW)).iterdir()
    found += [str(path) for path in sockets if path.name.startswith(f"{scope}-")]
    return found


_DRIVER = """
import json, os, sys, time
import numpy as np, ray
import clamor_ray as clamor

ray.init(address="auto", log_to_driver=False)
scope = clamor.init().scope
ref = clamor.put(np.ones(4 << 20, np.uint8))

@clamor.remote(num_cpus=0, resources={"node1": 0.01})
def total(array):
    return int(array.sum())

assert ray.get(total.remote(ref), timeout=60) == 4 << 20
pids = [node.info.pid for node in clamor.stats().nodes]
print("SESSION", json.dumps([scope, pids]), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["returns", "killed"])
def test_nothing_stays_of_a_driver_that(end: str, lab: LocalCluster) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **lab.environment, "CLAMOR_ORPHAN_S": "5"},
        cwd=Path(__file__).parents[2],
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    try:
        said = []
        for line in driver.stdout:
            said.append(line)
            if line.startswith("SESSION "):
                break
        assert said, f"the driver ended with {driver.wait(TASK_S)}"
        assert said[-1].startswith("SESSION "), said
        scope, pids = json.loads(said[-1].removeprefix("SESSION "))
        assert len(pids) == 2
        # Two servers, two keepers, their listening sockets, and the files of those.
        assert len(traces(scope, pids)) >= 12
        if end == "killed":
            driver.kill()
        else:
            driver.stdin.close()
        driver.wait(TASK_S)
        until(lambda: not traces(scope, pids), f"all of {scope} is gone", 40)
    finally:
        driver.kill()
        driver.wait(TASK_S)
        driver.stdout.close()
    # This module's own session lives on beside it.
    assert clamor.stats().nodes


def test_the_limit_of_descriptors_is_raised_for_servers(lab: LocalCluster) -> None:
    pid = pid_of(lab.node_ids[0])
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == hard
