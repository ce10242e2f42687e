"""Several raylets on the loopback device: no root, no shaping, one driver in this process."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from tests.support.lab import forked_workers
from tests.support.lab.auth import authenticated

T = TypeVar("T")

START_TRIES = 3
LATE = "timed out during startup"  # how Ray says that a node did not start in time
OBJECT_STORE_BYTES = 150 << 20
HEALTH_CHECK_PERIOD_MS = 200
RAY_HEALTH_CHECK_PERIOD_MS = 3000  # what Ray does by itself: benches measure that
IDLE_WORKERS = 8
RAY_IDLE_WORKERS = -1  # likewise


def node_resource(index: int) -> str:
    """The custom resource that only node ``index`` has: ``options(resources={name: 0.01})``."""
    return f"node{index}"


def children_of_all() -> dict[int, list[int]]:
    """Whom each process has started; a worker that is a fork, who has asked for it."""
    children: dict[int, list[int]] = {}
    forked = forked_workers.parents()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command's name may hold spaces and brackets: count from the last one.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parent = forked.get(int(entry.name), parent)
                children.setdefault(parent, []).append(int(entry.name))
    return children


def descendants(pid: int) -> list[int]:
    """All processes below one, by who started whom."""
    children = children_of_all()
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


LOW_PORTS = range(10_000, 32_000)  # below those that the kernel gives away by itself


def agent_ports(taken: int | None = None) -> dict[str, int]:
    """Ports of a node's agents, by Ray's names, which nobody has.

    Args:
        taken: one that is another's, who may not listen yet.
    """
    ports: dict[str, int] = {}
    for name in ("metrics_agent", "metrics_export", "dashboard_agent_listen", "runtime_env_agent"):
        while name not in ports:
            port = random.SystemRandom().choice(LOW_PORTS)
            with contextlib.suppress(OSError), socket.socket() as sock:
                sock.bind(("", port))
                if port not in (taken, *ports.values()):
                    ports[name] = port
    return {f"{name}_port": port for name, port in ports.items()}


# Instead of an agent: what it is started with is nothing to it, and it ends with whoever started
# it.
IDLE = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", "exec sleep infinity"]
_AGENT_COMMAND = "_build_python_executable_command_memory_profileable"
SETUP_WORKER = Path(__file__).with_name("setup_worker.py")


def add(cluster: Any, *, metrics: bool = False, **options: Any) -> Any:
    """Another node of Ray's cluster, which waits for nothing that nobody needs.

    By itself Ray starts an API server, which is the dashboard's, for each head, also one without
    a dashboard, and waits for it; and an agent of the dashboard for each node, which measures all
    processes for nobody, and whose end is the node's. A raylet waits until its agents have imported
    all that they want and say their ports, and ends where a busy machine has given them no time:
    here it is told. The nodes have one machine, and one agent for runtime environments: the head's,
    which nobody kills. Workers that have such an environment import Ray once, not twice.

    Its workers are forks of a process that has imported Ray: see `worker_server.py`.

    How that is done is Ray's own affair, and not in every Ray that the library takes. Without it
    nodes start later, and nothing else is different.
    """
    from ray import _raylet
    from ray._private import ray_constants, services
    from ray._private.node import Node

    head = cluster.head_node
    ports = agent_ports(head and head.runtime_env_agent_port)
    dashboard = bool(options.get("include_dashboard"))
    has_agent = dashboard or metrics
    start = Node.start_raylet
    start_process = services.start_ray_process
    tell = getattr(_raylet, "persist_port", None)
    python_command = getattr(services, _AGENT_COMMAND, None)

    def agent_command(component: str, *arguments: Any, **how: Any) -> Any:
        if component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT and not has_agent:
            return IDLE
        if component == ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT and head is not None:
            return IDLE
        return python_command(component, *arguments, **how)

    def start_raylet(node: Any, *arguments: Any, **how: Any) -> Any:
        for name, port in ports.items() if tell is not None else ():
            tell(node.get_session_dir_path(), node.node_id, name, port)
        return start(node, *arguments, **how)

    def start_ray_process(command: list[str], process_type: str, **how: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = forked_workers.raylet_command(command)
            variables = (how.get("env_updates") or {}) | forked_workers.environment()
            how["env_updates"] = variables
        return start_process(command, process_type, **how)

    idle = python_command is not None and tell is not None and shutil.which(IDLE[0]) is not None
    if head is not None and idle:
        ports["runtime_env_agent_port"] = head.runtime_env_agent_port
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(Node, "start_raylet", start_raylet))
        patches.enter_context(mock.patch.object(services, "start_ray_process", start_ray_process))
        if not dashboard:
            patches.enter_context(mock.patch.object(Node, "start_api_server"))
        if idle:
            patches.enter_context(mock.patch.object(services, _AGENT_COMMAND, agent_command))
        return cluster.add_node(**ports, setup_worker_path=str(SETUP_WORKER), **options)


@dataclass
class LocalCluster:
    """Handle of a running cluster; node 0 is the head, and the driver's.

    Args:
        address: For ``ray.init(address=...)`` and RAY_ADDRESS.
        node_ids: Ray's hex ids, by index; dead nodes keep theirs.
        environment: What another process needs to connect.
    """

    address: str
    node_ids: tuple[str, ...]
    environment: dict[str, str]
    _cluster: Any = field(repr=False)
    _nodes: list[Any] = field(repr=False)

    @property
    def dashboard(self) -> str:
        """Its address, where the cluster has one: `ray job submit` asks it."""
        return f"http://{self._cluster.head_node.webui_url}"

    def alive(self) -> list[int]:
        """Indices of the nodes that nobody has killed."""
        return [index for index, node in enumerate(self._nodes) if node is not None]

    def processes(self, index: int) -> list[int]:
        """Ids of a node's raylet and of all below it."""
        node = self._nodes[index]
        if node is None:
            raise ValueError(f"node {index} is dead already")
        raylet = node.all_processes["raylet"][0].process.pid
        return [raylet, *descendants(raylet)]

    def head_processes(self) -> list[int]:
        """Ids of all that the head has started: GCS, raylet, and all below."""
        started = [each.process.pid for of in self._nodes[0].all_processes.values() for each in of]
        return [pid for one in started for pid in (one, *descendants(one))]

    def kill_node(self, index: int) -> None:
        """Ends a node as a crash would: the raylet and all below it by SIGKILL, at once."""
        if index == 0:
            raise ValueError("node 0 is the head and the driver's")
        _, *below = self.processes(index)
        node, self._nodes[index] = self._nodes[index], None
        self._cluster.remove_node(node, allow_graceful=False)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def add_node(self, **arguments: Any) -> int:
        """Another node, as an autoscaler would add it; returns its index."""
        index = len(self._nodes)
        own = {"resources": {node_resource(index): 1}, **arguments}
        node = in_time(lambda: add(self._cluster, **own))
        self._nodes.append(node)
        self.node_ids = (*self.node_ids, node.node_id)
        return index

    def page_server(self, index: int, scope: str = "") -> Any:
        """The handle of a node's page server: of that session, where there are several."""
        import ray

        suffix = self.node_ids[index][:16]
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["name"].startswith(f"page-server-{scope}") and actor["name"].endswith(suffix):
                return ray.get_actor(actor["name"], namespace=actor["namespace"])
        raise LookupError(f"node {index} has no page server")

    def page_server_pid(self, index: int, timeout_s: float = 30.0, scope: str = "") -> int:
        """The process of a node's page server, restarted or not."""
        import ray

        return int(ray.get(self.page_server(index, scope).ping.remote(), timeout=timeout_s))


def in_time(start: Callable[[], T]) -> T:
    """What it returns once all that it starts is there in time.

    Ray gives a node 30 s to start, which no setting changes and a busy machine may need. Then what
    the late one has started is ended, and made anew.
    """
    for left in reversed(range(START_TRIES)):
        before = children_of_all().get(os.getpid(), [])
        try:
            return start()
        except Exception as failure:
            late = set(children_of_all().get(os.getpid(), [])) - set(before)
            for pid in [each for one in late for each in (one, *descendants(one))]:
                with contextlib.suppress(ProcessLookupError):  # Ray forgets those of a late node
                    os.kill(pid, signal.SIGKILL)
            if LATE not in str(failure) or not left:
                raise
    raise AssertionError("START_TRIES is 0")


def started(options: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    """Ray's cluster and its nodes, one for each set of options, the head first."""
    from ray.cluster_utils import Cluster

    def start() -> tuple[Any, list[Any]]:
        cluster = Cluster(shutdown_at_exit=True)
        try:
            return cluster, [add(cluster, **each) for each in options]
        except Exception:
            cluster.shutdown()
            raise

    return in_time(start)


@contextlib.contextmanager
def bare_cluster() -> Iterator[None]:
    """One raylet, and this process connected to it; ends as `ray.shutdown()` ends a cluster that
    `ray.init()` has started. Of a session in it nobody takes care."""
    import ray

    with authenticated():
        cluster, _ = started([{"num_cpus": 1, "no_monitor": True, "include_log_monitor": False}])
        try:
            ray.init(address=cluster.address)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextlib.contextmanager
def local_cluster(
    n_nodes: int,
    num_cpus: int = 1,
    object_store_memory: int = OBJECT_STORE_BYTES,
    connect: bool = True,
    log_to_driver: bool = False,
    health_check_period_ms: int = HEALTH_CHECK_PERIOD_MS,
    dashboard: bool = False,
    idle_workers: int = IDLE_WORKERS,
    metrics: bool = False,
) -> Iterator[LocalCluster]:
    """Starts n raylets, connects this process to the first, and ends them all.

    Args:
        n_nodes: At least 1; node i has the custom resource ``node<i>``.
        num_cpus: Of each node.
        object_store_memory: Of each node, in bytes.
        connect: Whether to call ``ray.init`` here.
        log_to_driver: Whether what workers and raylets say is printed here, on stdout: by a process
            that looks into all their files ten times a second.
        health_check_period_ms: How often Ray asks each node whether it lives, and how long it gives
            a new one before; after five refusals in a row the node is dead. Ray's own: 3000, 5000.
        dashboard: Whether Ray's dashboard runs, on any free port: its state API asks it.
        idle_workers: So many processes a node may have, its actors among them, before Ray ends idle
            workers of it. By itself, -1, it ends them where there are more processes than CPUs, and
            the next task has to start another one.
        metrics: Whether Ray's agents export metrics, new ones each second.
    """
    import ray

    import clamor_ray

    head = {
        "no_monitor": True,  # nothing is scaled here
        "include_dashboard": dashboard,
        "include_log_monitor": log_to_driver,
        **({"dashboard_port": 0} if dashboard else {}),
        "_system_config": {
            "health_check_period_ms": health_check_period_ms,
            "health_check_initial_delay_ms": health_check_period_ms,
            "num_workers_soft_limit": idle_workers,
            # Nobody reads them here, and the thread that collects them in Ray 2.60 ended a worker
            # once (SIGSEGV in opentelemetry's TemporalMetricStorage::buildMetrics).
            "enable_metrics_collection": metrics,
            **({"metrics_report_interval_ms": 1000} if metrics else {}),
        },
    }
    with authenticated() as environment:
        options = [
            {
                "num_cpus": num_cpus,
                "object_store_memory": object_store_memory,
                "resources": {node_resource(index): 1},
                "metrics": metrics,
                **(head if index == 0 else {}),
            }
            for index in range(n_nodes)
        ]
        cluster, nodes = started(options)
        try:
            if connect:
                ray.init(address=cluster.address, log_to_driver=log_to_driver)
            yield LocalCluster(
                address=cluster.address,
                node_ids=tuple(node.node_id for node in nodes),
                environment={**environment, "RAY_ADDRESS": cluster.address},
                _cluster=cluster,
                _nodes=list(nodes),
            )
        finally:
            clamor_ray.shutdown()  # what a test that failed has left
            ray.shutdown()
            cluster.shutdown()
