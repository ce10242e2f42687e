"""Raylets in network namespaces, joined by a bridge, each behind a link with a rate of its own.

    clamorlab-<pid>-0     clamorlab-<pid>-1    ...      one namespace per node: eth0, 10.77.0.<i+1>
        eth0 (tbf)            eth0 (tbf)
         |                     |
        p0 (tbf)              p1 (tbf)                  in clamorlab-<pid>-br, with the bridge

eth0 and p<i> are a veth pair; where links have a delay, a pair of `delay.py`.

The bridge lives in a namespace too, so that the host's own network is never touched: everything
vanishes with the namespaces. The names carry the maker's process id, which is how a later run
knows what a crashed one left behind. The nodes share a file system, and so the directory of our
Unix sockets: their names carry the node's id.

Needs root. Everything that is ended is found by namespace, never by a process's name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.lab.auth import token_environment
from tests.support.lab.cluster import OBJECT_STORE_BYTES, node_resource

PREFIX = "clamorlab"
CONGESTION_CONTROL = "cubic"
SUBNET = "10.77.0"
GCS_PORT = 6379
ROOT = Path(__file__).parents[3]

TOOL_S = 30.0
START_S = 120.0
STOP_S = 10.0

_NAME = re.compile(rf"{PREFIX}-(\d+)-(\w+)")


class LabError(RuntimeError):
    """A tool that the lab needs failed; the text is what it said."""


def _tool(*arguments: str, timeout_s: float = TOOL_S) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _namespaces() -> list[str]:
    lines = _tool("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if _NAME.match(line)]


def _pids_in(namespace: str) -> list[int]:
    return [int(pid) for pid in _tool("ip", "netns", "pids", namespace).split()]


def _remove(namespaces: Sequence[str]) -> None:
    """Ends what runs in the namespaces (ours by their names), then deletes them."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + STOP_S
        for namespace in namespaces:
            for pid in _pids_in(namespace):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
        while any(_pids_in(namespace) for namespace in namespaces):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)  # processes of others end when they do
    for namespace in namespaces:
        _tool("ip", "netns", "del", namespace)


def remove_stale() -> list[str]:
    """Removes the namespaces of labs whose process is gone; returns their names."""
    stale = []
    for name in _namespaces():
        match = _NAME.match(name)
        if match and not Path("/proc", match[1]).exists():
            stale.append(name)
    _remove(stale)
    return stale


@dataclass(frozen=True)
class NetnsCluster:
    """Handle of a running cluster; drivers run in node 0's namespace.

    Args:
        address: For ``ray.init(address=...)`` inside the namespaces.
        node_ids: Ray's hex ids, by index.
        namespaces: One per node, by index.
        rate: Of every link, in tc's notation; empty for no shaping.
        environment: What a process inside needs to connect.
    """

    address: str
    node_ids: tuple[str, ...]
    namespaces: tuple[str, ...]
    rate: str
    environment: Mapping[str, str]

    def run(
        self,
        command: Sequence[str],
        node: int = 0,
        timeout_s: float = 300.0,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in a node's namespace and returns what it printed.

        Raises:
            LabError: It failed; the text is the end of its output.
        """
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespaces[node], *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=ROOT,
            env={**os.environ, **self.environment, **(environment or {})},
        )
        if done.returncode != 0:
            raise LabError(
                f"{' '.join(command)[:200]} ended with {done.returncode}: "
                f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
            )
        return done

    def start(
        self,
        command: Sequence[str],
        node: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a command in a node's namespace, with pipes to its stdin and from its stdout.

        It ends with the cluster at the latest.
        """
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces[node], *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **self.environment, **(environment or {})},
        )

    def node_address(self, node: int) -> str:
        """The IP address of a node."""
        return _address_of(node)

    def run_python(self, program: str, *arguments: str, timeout_s: float = 300.0) -> str:
        """Runs a driver program on node 0; returns what it printed."""
        return self.run([sys.executable, "-c", program, *arguments], timeout_s=timeout_s).stdout

    def received_bytes(self, node: int) -> int:
        """What the node's link has carried towards it."""
        return self._link(node)["rx"]["bytes"]

    def sent_bytes(self, node: int) -> int:
        """What the node's link has carried away from it."""
        return self._link(node)["tx"]["bytes"]

    def _link(self, node: int) -> dict[str, dict[str, int]]:
        shown = _tool("ip", "-n", self.namespaces[node], "-s", "-j", "link", "show", "dev", "eth0")
        stats: dict[str, dict[str, int]] = json.loads(shown)[0]["stats64"]
        return stats

    def shaped_bytes(self, node: int) -> int:
        """What has passed the token bucket on the node's way out; 0 without shaping."""
        shown = _tool("tc", "-n", self.namespaces[node], "-s", "-j", "qdisc", "show", "dev", "eth0")
        return sum(int(q["bytes"]) for q in json.loads(shown) if q["kind"] == "tbf")

    def kill_node(self, index: int) -> None:
        """Ends a node as a crash would: every process in its namespace by SIGKILL."""
        if index == 0:
            raise ValueError("node 0 is the head")
        deadline = time.monotonic() + STOP_S
        while pids := _pids_in(self.namespaces[index]):
            if time.monotonic() > deadline:
                raise LabError(f"node {index}: processes {pids} do not end")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)  # init collects them when it does


def _address_of(index: int) -> str:
    return f"{SUBNET}.{index + 1}"


def _start_delays(
    ending: contextlib.ExitStack, n_nodes: int, bridge: str, round_trip_ms: float
) -> None:
    """Makes near<i> and far<i> in the bridge's namespace; their process ends with that."""
    each_us = round(round_trip_ms * 1000 / 4)  # there and back, two links each time
    program = (sys.executable, "-m", "tests.support.lab.delay", str(n_nodes), str(each_us))
    wires = subprocess.Popen(
        ["ip", "netns", "exec", bridge, *program], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    ending.callback(wires.wait, STOP_S)
    assert wires.stdout is not None
    with wires.stdout:
        if wires.stdout.readline() != "ready\n":
            raise LabError("links cannot have a delay here: see above")


def _make_network(
    ending: contextlib.ExitStack,
    names: Sequence[str],
    bridge: str,
    rate: str,
    round_trip_ms: float,
) -> None:
    _tool("ip", "netns", "add", bridge)
    _tool("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
    _tool("ip", "-n", bridge, "link", "set", "br0", "up")
    if round_trip_ms:
        _start_delays(ending, len(names), bridge, round_trip_ms)
    for index, name in enumerate(names):
        port = f"p{index}"
        _tool("ip", "netns", "add", name)
        if round_trip_ms:
            peer = f"near{index}"
            _tool("ip", "-n", bridge, "link", "set", f"far{index}", "name", port)
        else:
            _tool("ip", "-n", bridge, "link", "add", port, "type", "veth")
            shown = _tool("ip", "-n", bridge, "-j", "link", "show", "dev", port)
            peer = json.loads(shown)[0]["link"]
        _tool("ip", "-n", bridge, "link", "set", peer, "netns", name, "name", "eth0")
        _tool("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
        _tool("ip", "-n", name, "addr", "add", f"{_address_of(index)}/24", "dev", "eth0")
        _tool("ip", "-n", name, "link", "set", "lo", "up")
        _tool("ip", "-n", name, "link", "set", "eth0", "up")
        # As on most machines, also where this one has another.
        _tool(
            *("ip", "-n", name, "route", "replace", f"{SUBNET}.0/24", "dev", "eth0"),
            *("src", _address_of(index), "congctl", CONGESTION_CONTROL),
        )
        if rate:
            for namespace, device in ((name, "eth0"), (bridge, port)):
                _tool(
                    *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root"),
                    *("tbf", "rate", rate, "burst", "256kb", "latency", "50ms"),
                )


@contextlib.contextmanager
def network(
    n_nodes: int, rate: str = "1gbit", round_trip_ms: float = 0.0
) -> Iterator[tuple[str, ...]]:
    """The namespaces of n nodes, joined; without them, and what runs in them, at the end.

    Args:
        n_nodes: At least 1.
        rate, round_trip_ms: As of `netns_cluster`.
    """
    remove_stale()
    prefix = f"{PREFIX}-{os.getpid()}"
    names = tuple(f"{prefix}-{index}" for index in range(n_nodes))
    bridge = f"{prefix}-br"
    with contextlib.ExitStack() as ending:
        try:
            _make_network(ending, names, bridge, rate, round_trip_ms)
            yield names
        finally:
            made = {*names, bridge}
            _remove([name for name in _namespaces() if name in made])


_LIST_NODES = """
import json, ray
ray.init(address="auto", logging_level="error", log_to_driver=False)
ids = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
print("NODES", json.dumps(ids))
"""


@contextlib.contextmanager
def netns_cluster(
    n_nodes: int,
    num_cpus: int = 1,
    object_store_memory: int = OBJECT_STORE_BYTES,
    rate: str = "1gbit",
    round_trip_ms: float = 0.0,
) -> Iterator[NetnsCluster]:
    """Starts n raylets in namespaces of their own, and removes all of it.

    Args:
        n_nodes: At least 1; node i has the custom resource ``node<i>``.
        num_cpus: Of each node.
        object_store_memory: Of each node, in bytes.
        rate: Of each node's link, both ways, in tc's notation ("1gbit"); "" for none.
        round_trip_ms: That links add to each round trip between two nodes.
    """
    # Ray's sockets are in it: sun_path has room for 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="cl-", dir="/tmp"))
    environment = {
        **token_environment(),
        "RAY_ADDRESS": f"{_address_of(0)}:{GCS_PORT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(
            part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part
        ),
    }
    with contextlib.ExitStack() as ending:
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        names = ending.enter_context(network(n_nodes, rate, round_trip_ms))
        cluster = NetnsCluster(
            address=environment["RAY_ADDRESS"],
            node_ids=(),
            namespaces=names,
            rate=rate,
            environment=environment,
        )

        def start_node(index: int) -> None:
            where = (
                ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
                if index == 0
                else [f"--address={cluster.address}"]
            )
            cluster.run(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", *where),
                    f"--node-ip-address={_address_of(index)}",
                    f"--temp-dir={folder / str(index)}",
                    f"--num-cpus={num_cpus}",
                    f"--object-store-memory={object_store_memory}",
                    f"--resources={json.dumps({node_resource(index): 1})}",
                    "--disable-usage-stats",
                ],
                node=index,
                timeout_s=START_S,
            )

        start_node(0)
        with ThreadPoolExecutor(max_workers=2) as others:
            for started in [others.submit(start_node, index) for index in range(1, n_nodes)]:
                started.result()
        printed = cluster.run_python(_LIST_NODES, timeout_s=START_S)
        line = next(line for line in printed.splitlines() if line.startswith("NODES "))
        ids = json.loads(line.removeprefix("NODES "))
        yield NetnsCluster(
            address=cluster.address,
            node_ids=tuple(ids[_address_of(index)] for index in range(n_nodes)),
            namespaces=cluster.namespaces,
            rate=rate,
            environment=environment,
        )
