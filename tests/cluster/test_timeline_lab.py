"""`clamor timeline` of a small job: where each span is, in what order, and beside Ray's own."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray._spans.record import LEAST_NS
from clamor_ray.actors.page_server.node_spans import FAULT_WAIT, PROCESS_WAIT
from tests.conftest import ClamorCluster, until
from tests.library.test_spans import check_form, rows_of, within
from tests.support import driver_script
from tests.support.lab import LocalCluster
from tests.support.lab.troubles import registry_pid
from tests.support.processes import stop

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

N = 1 << 20
RUN_S = 100.0
BUILT_BYTES = 8 << 20
WAIT_S = 20 * LEAST_NS / 1e9

Events = list[dict[str, Any]]


def scan(array: Any) -> str:
    """Reads all of it, fault by fault, and says which worker that was."""
    assert int(array.sum()) == N
    return ray.get_runtime_context().get_worker_id()


def build_in_vain() -> None:
    with clamor.build(1 << 20):
        time.sleep(WAIT_S)
        raise KeyError("of the block")


def held_up(pid: int, seconds: float) -> None:
    """A process does nothing for a while, from now on."""
    stop(pid)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()


def timeline(lab: LocalCluster, scope: str, *arguments: str, status: int = 0) -> Any:
    session = ("--session", scope)
    done = subprocess.run(
        [sys.executable, "-m", "clamor_ray.cli.main", "timeline", *session, *arguments],
        env={**os.environ, **lab.environment},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def asked(cluster: ClamorCluster) -> tuple[LocalCluster, str]:
    return cluster.lab, cluster.attached.scope


def trace_of(lab: LocalCluster, scope: str, *arguments: str) -> Events:
    """What `clamor timeline` says of a session."""
    found: Events = json.loads(timeline(lab, scope, "--format", "json", *arguments).stdout)
    check_form(found)
    return found


@pytest.fixture(scope="module")
def job(clamor_cluster: ClamorCluster) -> Iterator[tuple[float, str]]:
    """When it began, and the worker that has read. It waits, commits, loses a conflict, and runs a
    stage."""
    began_s = time.time()
    ref = clamor.put(np.ones(N, np.int64), name="of the timeline")
    reader = clamor_cluster.run(scan, ref)
    with clamor.update(ref) as array:
        array[0] += 1
        time.sleep(WAIT_S)
    loser = clamor.update(ref)
    loser.begin()[7] = 5

    def win() -> None:
        with clamor.update(ref) as array:
            array[7] = 6
            time.sleep(WAIT_S)

    winner = threading.Thread(target=win, name="winner")
    winner.start()
    winner.join(RUN_S)
    with pytest.raises(clamor.CommitConflict):
        loser.commit()
    with clamor.build(BUILT_BYTES) as region:
        built = region.empty(BUILT_BYTES // 16, np.int64)
        built[:] = 3
        time.sleep(WAIT_S)
        made = region.publish(built)
        held_up(registry_pid(), 10 * WAIT_S)  # it is asked when the block ends
    del built
    with pytest.raises(KeyError):
        build_in_vain()
    items = clamor.from_numpy(np.arange(40), partitions=2)
    assert items.map(lambda x: (time.sleep(0.002), x)[1]).sum() == 780
    yield began_s, reader
    clamor.free(ref)
    clamor.free(made)


def named(trace: Events, name: str, process: str) -> Events:
    rows = rows_of(trace)
    return [
        each
        for each in trace
        if each["ph"] == "X"
        and each["name"] == name
        and process in rows[each["pid"], each["tid"]][1]
    ]


def test_each_span_is_where_it_was(
    clamor_cluster: ClamorCluster, job: tuple[float, str], tmp_path: Path
) -> None:
    began_s, reader = job
    here, there = clamor_cluster.lab.node_ids[:2]
    driver = f"driver:{ray.get_runtime_context().get_worker_id()}"
    seen: dict[str, Any] = {}

    def all_is_there() -> bool:  # what a process has done is sent within a second
        trace = seen["trace"] = trace_of(*asked(clamor_cluster), "--with-ray")
        seen["stages"] = named(trace, "stage", driver)
        return bool(seen["stages"])

    until(all_is_there, RUN_S)
    trace = seen["trace"]
    name = "of the timeline"
    (put,) = named(trace, f"put {name}", driver)
    assert put["args"]["node_id"] == here
    assert put["args"]["bytes"] > 8 * N
    first, lost, second = named(trace, f"transaction {name}", driver)
    assert [e["args"]["status"] for e in (first, lost, second)] == [
        "committed",
        "aborted",
        "committed",
    ]
    assert min(first["dur"], second["dur"]) >= WAIT_S * 1e6
    assert lost["dur"] > second["dur"]  # it began before, and ended after
    rows = rows_of(trace)
    assert [rows[e["pid"], e["tid"]][1] for e in (first, lost, second)] == [
        driver,
        driver,
        f"{driver} (winner)",
    ]
    order = [put, first, lost, second, *seen["stages"]]
    assert order == sorted(order, key=lambda event: event["ts"])
    assert began_s * 1e6 <= put["ts"]
    for commit in named(trace, f"commit {name}", driver):
        whole = [e for e in (first, lost, second) if 0 <= commit["ts"] - e["ts"] <= e["dur"]]
        assert whole, commit
    assert seen["stages"][0]["args"]["tasks"] == 2
    waits = named(trace, f"{FAULT_WAIT} {name}", "page server")
    assert waits
    assert {event["args"]["node_id"] for event in waits} == {there}
    assert sum(event["args"]["faults"] for event in waits) > 0
    (whole,) = {rows[e["pid"], e["tid"]][1] for e in named(trace, PROCESS_WAIT, "worker:")}
    assert whole == f"worker:{reader} (faults)"
    # Ray's own, in the same rows.
    rays = [event for event in trace if event["ph"] == "X" and event["cat"] != "clamor"]
    executed = {rows[e["pid"], e["tid"]] for e in rays if e["cat"] == "task:execute"}
    assert any(reader in process for _, process in executed)
    opened = named(trace, f"open {name}", f"worker:{reader}")
    assert all(rows[e["pid"], e["tid"]] in executed for e in opened)
    assert any(rows[event["pid"], event["tid"]][1] == driver for event in rays)

    merged, out = tmp_path / "ray.json", tmp_path / "both.json"
    merged.write_text(json.dumps(ray.timeline()))
    said = timeline(*asked(clamor_cluster), "--merge", str(merged), "--out", str(out)).stdout
    assert f"transaction {name}" in said
    assert here[:12] in said
    both = json.loads(out.read_text())
    check_form(both)
    assert {"task:execute", f"transaction {name}"} <= {event["name"] for event in both}


def test_builds_and_stages(clamor_cluster: ClamorCluster, job: tuple[float, str]) -> None:
    here = clamor_cluster.lab.node_ids[0]
    driver = f"driver:{ray.get_runtime_context().get_worker_id()}"
    run = "clamor_ray.collection.run.task.run_packed"
    trace: Events = []

    def all_is_there() -> bool:  # the stage is our last, and Ray's own come in their time
        # Tests of another file may have used the same cluster, and driver, before.
        found = trace_of(*asked(clamor_cluster), "--with-ray")
        trace[:] = [each for each in found if each.get("ts", math.inf) >= job[0] * 1e6]
        return bool(named(trace, "stage", driver)) and len(named(trace, run, "worker:")) == 2

    until(all_is_there, RUN_S)
    (publish,) = (each for each in trace if each["name"].startswith("publish "))
    region = publish["args"]["region"]
    (build,) = named(trace, f"build (variable {region})", driver)
    (failed,) = named(trace, f"build (variable {region + 1})", driver)
    (stage,) = named(trace, "stage", driver)
    rows = rows_of(trace)
    for event in (build, publish, failed, stage):
        assert event["cat"] == "clamor"
        assert rows[event["pid"], event["tid"]][1] == driver
        assert (event["args"]["node_id"], event["args"]["os_pid"]) == (here, os.getpid())
    for event in (build, publish, failed):
        assert event["dur"] >= WAIT_S * 1e6
    assert build["ts"] + build["dur"] <= publish["ts"] + 0.5  # one after the other
    assert "error" not in build["args"]
    assert failed["args"]["error"] == "KeyError"
    assert (stage["args"]["stage"], stage["args"]["tasks"]) == ("sum", 2)
    executed = [event for event in trace if event.get("cat") == "task:execute"]
    for task in named(trace, run, "worker:"):
        row = (task["pid"], task["tid"])
        (execute,) = (e for e in executed if (e["pid"], e["tid"]) == row and within(e, task))
        assert within(execute, stage)


def test_only_the_last_of_it(clamor_cluster: ClamorCluster, job: tuple[float, str]) -> None:
    began_s, _ = job
    time.sleep(1.1)
    assert [e for e in trace_of(*asked(clamor_cluster), "--last", "0.001") if e["ph"] == "X"] == []
    whole = trace_of(*asked(clamor_cluster), "--last", str(time.time() - began_s + 60))
    assert any(event["name"].startswith("transaction") for event in whole)


def test_a_page_server_that_hangs_is_said(
    clamor_cluster: ClamorCluster, job: tuple[float, str]
) -> None:
    pid = clamor_cluster.lab.page_server_pid(1)
    stop(pid)
    try:
        done = timeline(*asked(clamor_cluster), "--timeout", "5", "--format", "json", status=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    node_id = clamor_cluster.lab.node_ids[1]
    assert f"Page server of node {node_id[:12]} did not answer: no answer in time." in done.stderr
    assert any(e["name"].startswith("transaction") for e in json.loads(done.stdout))


def test_what_is_asked_for_is_checked(clamor_cluster: ClamorCluster, tmp_path: Path) -> None:
    path = tmp_path / "no.json"
    path.write_text("nothing")
    said = timeline(*asked(clamor_cluster), "--merge", str(path), status=2).stderr
    assert "no.json is no Chrome trace" in said
    assert "Invalid value" in timeline(*asked(clamor_cluster), "--last", "0", status=2).stderr


OFF = """
import threading, time
import numpy as np, ray
import clamor_ray as clamor
from clamor_ray._protocol import names
from clamor_ray._protocol.rpc import unpack
from clamor_ray._session import process_sessions
from clamor_ray._spans import record
ray.init(log_to_driver=False)
node_id = clamor.init().node_id
with clamor.update(clamor.put(np.arange(10**6))) as array:
    array[0] = 1
    time.sleep(0.01)
scope = process_sessions.current().scope
server = ray.get_actor(names.page_server_name(scope, node_id), namespace=names.NAMESPACE)
((own, *others),) = unpack(ray.get(server.spans.remote()))
threads = [each.name for each in threading.enumerate()]
print(record.here.spans(), own[2], others, "clamor-spans" in threads)
"""


def test_none_are_recorded_where_nobody_wants_them(clamor_cluster: ClamorCluster) -> None:
    said = driver_script.run(OFF, lab=clamor_cluster.lab, CLAMOR_SPANS="off")
    assert driver_script.lines_of(said)[-1] == "[] [] [] False"
