"""An embedding service on a detached session, over HTTP: under load, with updates and deaths."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve

import clamor_ray as clamor
from clamor_ray.workloads import serving
from clamor_ray.workloads.serving import client_rules, running, table
from clamor_ray.workloads.serving.bodies import encode_ids
from clamor_ray.workloads.serving.deployment import options_of
from clamor_ray.workloads.serving.updates import open_table, update_rows
from tests.conftest import ANSWER_S, until
from tests.support.driver_script import ROOT
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

SESSION, TABLE = "serving", "rows"
N_ROWS, DIM, N_REPLICAS = 20_000, 64, 2
HOME = 1  # the node that makes the table; driver, registry and Serve's proxy are on node 0
OPTIONS = {
    "session": SESSION,
    "table": TABLE,
    "n_rows": 0,  # replicas only attach
    "dim": DIM,
    "n_replicas": N_REPLICAS,
    "most_per_node": 1,
}


@dataclass(frozen=True)
class Service:
    """The application that runs.

    Args:
        url: of Serve's proxy.
        ref: the table.
    """

    lab: LocalCluster
    url: str
    ref: clamor.GlobalRef[Any]

    def post(self, path: str, body: bytes, content_type: str) -> bytes:
        headers = {"content-type": content_type}
        request = urllib.request.Request(f"{self.url}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    require_lab("local")
    with pytest.MonkeyPatch.context() as patch:
        # By itself the one proxy here would ask no replica but that of its own node.
        patch.setenv("RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING", "0")
        with local_cluster(3, num_cpus=2) as lab:
            yield from _running(lab)


def _running(lab: LocalCluster) -> Iterator[Service]:
    clamor.init(session=SESSION, lifetime="detached")

    @ray.remote(num_cpus=0, resources={node_resource(HOME): 0.001})
    def make() -> int:
        return open_table(SESSION, TABLE, (N_ROWS, DIM)).version

    assert ray.get(make.remote(), timeout=ANSWER_S) == 0
    url = running.start_http(running.free_port())
    try:
        running.deploy(options_of(OPTIONS))
        yield Service(lab, url, clamor.open(TABLE))
    finally:
        serve.shutdown()
        clamor.shutdown(session=SESSION)


def program(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A load program, which knows nothing of Ray."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@dataclasses.dataclass
class Background:
    """Look-ups that arrive at a fixed rate while a test does something else."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, service: Service, seconds: float, rate: float = 60.0) -> Background:
        load = ["--url", service.url, "--seconds", str(seconds), "--rate", str(rate)]
        module = "clamor_ray.workloads.serving.open_loop"
        return cls(program("-m", module, *load, "--clients", "8", "--ids", "32"))

    def record(self) -> dict[str, Any]:
        """What it has measured; every answer was right, and each request had one."""
        said, complained = self.process.communicate(timeout=ANSWER_S)
        assert self.process.returncode == 0, said + complained
        record: dict[str, Any] = json.loads(said)
        assert (record["n_wrong"], record["n_failed"]) == (0, 0)
        assert record["n"] > 50
        assert record["p999_ms"] >= record["p99_ms"] >= record["p50_ms"] > 0
        return record


def test_answers_are_right_as_bytes_and_as_json(service: Service) -> None:
    ids = np.array([0, 7, N_ROWS - 1, 7])
    body = service.post("/lookup", encode_ids(ids), "application/octet-stream")
    update = client_rules.check(body, ids, DIM)
    assert update == service.ref.get()["update"][0]
    said = json.loads(service.post("/lookup", b'{"ids": [3, 1]}', "application/json"))
    assert said["update"] == update
    right = table.rows_at(np.array([3, 1]), update, DIM)
    np.testing.assert_array_equal(np.array(said["rows"], np.float32), right)
    control = service.post("/control", encode_ids(ids), "application/octet-stream")
    assert len(control) == len(body)
    with pytest.raises(client_rules.WrongAnswer, match="rows"):
        client_rules.check(control, ids, DIM)


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/lookup", b"1234567", 400, "8 for each id"),
        ("/lookup", b"", 400, "ask for 1 to"),
        ("/lookup", encode_ids(np.array([N_ROWS])), 400, f"index {N_ROWS} is out of bounds"),
        ("/lookup", encode_ids(np.array([-1])), 400, "ids count from 0"),
        ("/rows", encode_ids(np.array([1])), 404, "POST to /lookup"),
    ],
)
def test_a_bad_request_is_told_what_to_send(
    service: Service, path: str, body: bytes, status: int, says: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as failed:
        service.post(path, body, "application/octet-stream")
    assert failed.value.code == status
    assert says in json.load(failed.value)["error"]


def home_of_a_new_session(name: str) -> str:
    """The node of its registry."""
    from clamor_ray._protocol import ray_state
    from clamor_ray._protocol.rpc import unpack

    open_table(name, TABLE, (100, DIM))
    registry: Any = ray_state.find_named_registry(name)
    _, node_id, *_ = unpack(ray.get(registry.spans.remote(), timeout=ANSWER_S))
    return str(node_id)


def test_a_replica_makes_a_session_on_the_head(service: Service) -> None:
    """Which stays: the session would go with the replica's node."""
    task = ray.remote(home_of_a_new_session).options(
        num_cpus=0,
        resources={node_resource(HOME): 0.01},
        runtime_env={"env_vars": {"CLAMOR_TEST_FRESH": "serving"}},
    )
    try:
        assert ray.get(task.remote("made"), timeout=ANSWER_S) == service.lab.node_ids[0]
    finally:
        clamor.shutdown(session="made")


def test_locust_finds_no_wrong_answer_while_rows_are_updated(
    service: Service, tmp_path: Path
) -> None:
    locustfile = Path(running.__file__).with_name("locustfile.py")
    users = ["--headless", "-u", "8", "-r", "8", "-t", "5s", "--host", service.url]
    before, n_updates = int(service.ref.get()["update"][0]), 0
    options = ["-f", str(locustfile), *users, "--json", "--only-summary"]
    locust = program("-m", "locust", *options, SERVING_REACHES=str(before + 1))
    while locust.poll() is None:
        update_rows(service.ref)
        n_updates += 1
        time.sleep(0.3)
    said, complained = locust.communicate(timeout=ANSWER_S)
    assert locust.returncode == 0, said + complained
    by_name = {each["name"]: each for each in json.loads(said)}
    assert by_name["/lookup"]["num_requests"] > 50, said
    assert by_name["/control"]["num_requests"] > 0
    assert sum(each["num_failures"] for each in by_name.values()) == 0
    # The replicas follow, each by itself.
    last = before + n_updates
    running.wait_for(service.url, N_REPLICAS, lambda said: said["update"] == last, ANSWER_S)
    changed = table.changed_rows(N_ROWS, last)
    for _ in range(2 * N_REPLICAS):
        body = service.post("/lookup", encode_ids(changed), "application/octet-stream")
        assert client_rules.check(body, changed, DIM) == last


def test_page_servers_are_killed_under_load(service: Service) -> None:
    """That of the table's home, and those of the replicas."""
    nodes = [said["node_id"] for said in running.replicas(service.url, N_REPLICAS).values()]
    load = Background.start(service, 6.0)
    for index in {HOME, *map(service.lab.node_ids.index, nodes)}:
        pid = service.lab.page_server_pid(index)
        os.kill(pid, signal.SIGKILL)
        number = update_rows(service.ref)
        until(lambda index=index, pid=pid: service.lab.page_server_pid(index) != pid, ANSWER_S)
    load.record()
    running.wait_for(service.url, N_REPLICAS, lambda said: said["update"] == number, ANSWER_S)


def test_the_home_is_drained_under_load(service: Service) -> None:
    load = Background.start(service, 5.0)
    time.sleep(1.0)
    result = clamor.drain(service.lab.node_ids[HOME], timeout=ANSWER_S)
    number = update_rows(service.ref)
    assert result.moved >= 1
    load.record()
    running.wait_for(service.url, N_REPLICAS, lambda said: said["update"] == number, ANSWER_S)


def test_replicas_are_replaced_while_the_session_lives(service: Service) -> None:
    before = running.replicas(service.url, N_REPLICAS)
    number = update_rows(service.ref)
    load = Background.start(service, 8.0)

    @ray.remote(num_cpus=0)
    def deploy() -> None:
        """As Serve deploys what a config file names: in a task, by its builder."""
        application = serving.app({**OPTIONS, "release": "2"})
        serve.run(application, name=running.APP_NAME, route_prefix="/")

    ray.get(deploy.remote(), timeout=ANSWER_S)
    after = running.wait_for(service.url, N_REPLICAS, lambda said: said["release"] == "2", ANSWER_S)
    load.record()
    assert {said["release"] for said in before.values()} == {"1"}
    assert not set(before) & set(after)
    assert {said["update"] for said in after.values()} == {number}
    number = update_rows(service.ref)
    running.wait_for(service.url, N_REPLICAS, lambda said: said["update"] == number, ANSWER_S)


@pytest.mark.soak
def test_a_drained_node_is_killed_under_load(service: Service) -> None:
    """With the replica on it. What is under way there is lost, and asked for again."""
    nodes = [said["node_id"] for said in running.replicas(service.url, N_REPLICAS).values()]
    goes = max(map(service.lab.node_ids.index, nodes))
    assert goes != 0
    load = Background.start(service, 40.0)
    clamor.drain(service.lab.node_ids[goes], timeout=ANSWER_S)
    update_rows(service.ref)
    service.lab.kill_node(goes)
    gone = service.lab.node_ids[goes]

    def lives_and_has(number: int) -> None:
        running.wait_for(
            service.url,
            N_REPLICAS,
            lambda said: said["update"] == number and said["node_id"] != gone,
            ANSWER_S,
        )

    lives_and_has(update_rows(service.ref))
    while load.process.poll() is None:
        update_rows(service.ref)
        time.sleep(0.5)
    record = load.record()
    assert len(record["updates"]) > 3
    lives_and_has(update_rows(service.ref))
