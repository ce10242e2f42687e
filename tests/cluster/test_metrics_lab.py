"""Metrics of a session under load, as Prometheus has them: each panel and each rule has data."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import yaml

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.metrics import NODE_METRICS, SESSION_METRICS
from clamor_ray.cli import ports
from tests.conftest import until
from tests.project.test_monitoring import generate
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.availability import missing
from tests.support.lab.cluster import node_resource

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

CACHE_BYTES = 8 << 20
N = 4 << 20  # of int64: four times the cache
SEEN_S = 90.0
ANSWER_S = 10.0
START_S = 100.0
DOCTOR_S = 60.0


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    # `clamor doctor` looks at the node that was started last below Ray's folder.
    with (
        tempfile.TemporaryDirectory() as own,
        mock.patch.dict(os.environ, RAY_TMPDIR=own),
        local_cluster(2, metrics=True) as lab,
    ):
        yield lab


@pytest.fixture
def session(lab: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its scope, by which its metrics are told from those of the tests before."""
    monkeypatch.setenv("CLAMOR_CACHE_BYTES", str(CACHE_BYTES))
    yield clamor.init().scope
    clamor.shutdown()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Prometheus:
    """Debian's, which asks Ray's agents each second."""

    def __init__(self, directory: Path) -> None:
        import ray

        targets = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes()]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": targets}]}],
        }
        file = directory / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        port = _free_port()
        self._address = f"http://127.0.0.1:{port}"
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory}/data"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """What an expression gives now.

        Raises:
            OSError: It does not answer, or the expression makes no sense.
        """
        asked = urllib.parse.urlencode({"query": expression})
        address = f"{self._address}/api/v1/query?{asked}"
        with urllib.request.urlopen(address, timeout=ANSWER_S) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return list(said["data"]["result"])

    def has(self, expression: str) -> bool:
        with suppress(OSError):
            return bool(self.ask(expression))
        return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@pytest.fixture
def prometheus(lab: LocalCluster, tmp_path: Path) -> Iterator[Prometheus]:
    if shutil.which("prometheus") is None:
        missing("prometheus is not installed (Debian: prometheus)")
    prometheus = Prometheus(tmp_path)
    yield prometheus
    prometheus.close()


def sum_of(array: Any) -> int:
    return int(array.sum())


def change(ref: clamor.GlobalRef[Any]) -> None:
    with clamor.update(ref) as array:
        array[0] += 1


def loads(ref: clamor.GlobalRef[Any], small: clamor.GlobalRef[Any]) -> None:
    """Faults, evictions, commits, and one that another was before."""
    import ray

    on_node = {"num_cpus": 0, "resources": {node_resource(1): 0.001}}
    read = clamor.remote(replay=False)(sum_of).options(**on_node)
    total = ray.get(read.remote(ref), timeout=60)
    assert total == int(ref.get().sum())
    late = clamor.update(small)
    array = late.begin()
    array[0] += 1
    with futures.ThreadPoolExecutor(1) as other:  # a thread has one of a variable at a time
        other.submit(change, small).result(30)
    with pytest.raises(errors.CommitConflict):
        late.commit()


def test_each_panel_and_rule_has_data(session: str, prometheus: Prometheus) -> None:
    ref = clamor.put(np.arange(N))
    small = clamor.put(np.zeros(1000))
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            loads(ref, small)

    panels = [line for panel in generate.PANELS for _, line in panel.lines]
    rules = [part for alert in generate.ALERTS for part in (alert.value, alert.above)]
    with futures.ThreadPoolExecutor(1) as pool:
        worked = pool.submit(work)
        try:
            lacking = [
                generate.expression(each, f'session="{session}"').replace("$__rate_interval", "30s")
                for each in panels + rules
            ]
            deadline = time.monotonic() + SEEN_S
            while lacking and time.monotonic() < deadline and not worked.done():
                time.sleep(1.0)
                lacking = [each for each in lacking if not prometheus.has(each)]
        finally:
            over.set()
        worked.result(120)
    assert lacking == []
    for alert in generate.ALERTS:  # both sides have the same labels, and the rule is evaluated
        prometheus.ask(generate.expression(f"{alert.value} > bool {alert.above}", ""))
        prometheus.ask(generate.expression(f"{alert.value} > {alert.above}{alert.also}", ""))
    compared = generate.expression(
        "{clamor_faults} > bool 0 * {clamor_processes}", f'session="{session}"'
    )
    assert len(prometheus.ask(compared)) == 2


def test_what_is_said_is_so(lab: LocalCluster, session: str, prometheus: Prometheus) -> None:
    ref, small = clamor.put(np.arange(N), name="index"), clamor.put(np.zeros(1000))
    loads(ref, small)
    stats = clamor.stats()

    labels = f'session="{session}"'

    def now(name: str) -> dict[str, float]:
        with suppress(OSError):
            found = prometheus.ask(generate.expression(f"{{clamor_{name}}}", labels))
            return {
                of["metric"].get("node", of["metric"]["session"]): float(of["value"][1])
                for of in found
            }
        return {}

    until(lambda: now("commits") == {session: 1.0}, SEEN_S)
    until(lambda: now("commit_conflicts") == {session: 1.0}, SEEN_S)
    until(lambda: now("variables") == {session: 2.0}, SEEN_S)
    for node in stats.nodes:
        received = float(node.engine.bytes_received)
        until(lambda: now("received_bytes").get(node.node_id, -1.0) >= received, SEEN_S)  # noqa: B023
        assert now("cache_budget_bytes")[node.node_id] == CACHE_BYTES
    assert now("home_bytes")[lab.node_ids[0]] >= N * 8
    assert now("fault_wait_seconds")[lab.node_ids[1]] > 0
    assert all(metric.help for metric in (*NODE_METRICS, *SESSION_METRICS))


def test_a_session_without_metrics(
    session: str, prometheus: Prometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    clamor.shutdown()
    monkeypatch.setenv("CLAMOR_METRICS", "off")
    scope = clamor.init().scope
    until(lambda: prometheus.has('{__name__=~"ray_.*"}'), SEEN_S)
    time.sleep(5.0)
    assert prometheus.ask(f'{{__name__=~"ray_clamor_.*", session="{scope}"}}') == []


def _of_login_session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                found.append(int(entry.name))
    return found


def doctor(port: str | int, status: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "clamor_ray.cli.main", "doctor", ports.OPTION, str(port)],
        capture_output=True,
        text=True,
        timeout=DOCTOR_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_a_port_that_is_taken_is_said_by_doctor(lab: LocalCluster, session: str) -> None:
    import ray

    ref = clamor.put(np.arange(1000))
    port_of_ray = next(node["MetricsExportPort"] for node in ray.nodes())
    assert f"on {port_of_ray} Ray's agent of a node serves metrics" in doctor(port_of_ray, 0)
    before = {node["NodeID"] for node in ray.nodes()}
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ray_start = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1"),
                *(f"--address={lab.address}", f"{ports.OPTION}={port}"),
                f"--object-store-memory={150 << 20}",
            ],
            env={**os.environ, **lab.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:  # it waits for the node for 30 s, and then ends with 1
            until(lambda: bool(list(ports.of_last_start())), START_S)
            found = doctor(port, status=1)
            assert ray_start.poll() != 0
        finally:
            for pid in _of_login_session(ray_start.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ray_start.wait(START_S)
    assert f"{port} is taken by process {os.getpid()} (" in found
    assert "a node of Ray did not start here at " in found
    assert {node["NodeID"] for node in ray.nodes() if node["Alive"]} <= before
    assert int(ref.get()[3]) == 3  # the others go on
    # What is over is no reason not to begin.
    assert f"{port} is free" in doctor(port, status=0)
