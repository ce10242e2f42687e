"""The head is killed, and Ray's state was nowhere else: the cluster is over, and a session with it.

What it leaves: errors that say so, and no process, socket or file of ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from clamor_ray.cli.output import NOT_CHECKED
from tests.cluster.test_named_sessions import of_scope
from tests.conftest import ANSWER_S, until
from tests.support.driver_script import ROOT, lines_of
from tests.support.lab import require_lab
from tests.support.lab.restarted_head import HeadLab, address_of, restarted_head

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

DRIVER = 1  # whose node that is
# How long Ray's processes wait for their GCS, and how often raylets ask whether it knows them: 60 s
# by themselves. A driver goes on in that time, on a busy machine too.
SOON = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    "RAY_raylet_liveness_self_check_interval_ms": "2000",
}
STATUS_S = 60.0
CLAMOR = Path(sys.executable).with_name("clamor")

BEGIN = f"""
import os, sys, time
import numpy as np, ray
import clamor_ray as clamor
from clamor_ray.actors.process.journals import journal_directory
from tests.support.lab.cluster import node_resource

def make():
    return [clamor.put(np.full(10**5, i)) for i in range(4)]

def driver():
    ray.init(
        address=os.environ["RAY_ADDRESS"], _node_ip_address={address_of(DRIVER)!r},
        log_to_driver=False,
    )
    scope = clamor.init().scope
    mine = make()
    theirs = ray.get(ray.remote(num_cpus=0, resources={{node_resource(2): 0.01}})(make).remote())
    held = theirs[0].get()
    held.sum()
    print(scope, journal_directory(scope), flush=True)
    sys.stdin.readline()
    return mine, theirs, held
mine, theirs, held = driver()
"""
# While the head is away; when it is back, and Ray has ended what was before.
GOES_ON = """
assert [int(ref.get().sum()) for ref in mine + theirs] == 2 * [i * 10**5 for i in range(4)]
clamor.add_at(theirs[1], [0], 1)
assert int(theirs[1].refresh().get()[0]) == 2
print("went on", flush=True)
sys.stdin.readline()
"""
ENDED = """
def refused(call):
    try:
        call()
    except clamor.errors.ClamorError as error:
        return type(error).__name__ + ": " + str(error)
    return "nothing"
assert int(held.sum()) == 0
far = theirs[3]
for call in (lambda: clamor.put(np.ones(10**5)), lambda: clamor.add_at(mine[0], [0], 1)):
    print(refused(call).replace("\\n", " "), flush=True)
del held
clamor.shutdown(force=True)
ray.shutdown()
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
clamor.init()
assert int(clamor.put(np.ones(10**5)).get().sum()) == 10**5
print("SessionEnded" in refused(far.get), flush=True)
clamor.shutdown()
"""


def started(lab: HeadLab, script: str) -> tuple[subprocess.Popen[str], str, Path]:
    """A driver on another node than the head, which waits; its session's scope, and journal."""
    driver = subprocess.Popen(
        [sys.executable, "-c", BEGIN + script],
        cwd=ROOT,
        env={**os.environ, **lab.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    late = threading.Timer(ANSWER_S, driver.kill)
    late.start()
    scope, journal = driver.stdout.readline().split()
    late.cancel()
    return driver, scope, Path(journal)


def go_on(driver: subprocess.Popen[str]) -> None:
    assert driver.stdin is not None
    driver.stdin.write("\n")
    driver.stdin.flush()


def status(lab: HeadLab) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CLAMOR), "status"],
        env={**os.environ, **lab.environment},
        capture_output=True,
        text=True,
        timeout=STATUS_S,
        check=False,
    )


def raylets_have_ended(lab: HeadLab) -> bool:
    nodes = [lab._nodes[index] for index in lab.alive() if index]
    return all(n.all_processes["raylet"][0].process.poll() is not None for n in nodes)


@pytest.mark.parametrize("comes_back", [True, False], ids=["back", "gone"])
def test_a_session_ends_with_its_cluster(comes_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    require_lab("local")
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)
    with restarted_head(3, redis=False) as lab:
        driver, scope, journal = started(lab, GOES_ON + ENDED)
        assert driver.stdout is not None
        try:
            assert of_scope(scope)
            assert journal.is_dir()
            lab.kill_head()
            go_on(driver)
            assert any(line == "went on\n" for line in driver.stdout)  # Ray says things, too
            told = status(lab)
            assert told.returncode == NOT_CHECKED
            assert "No Ray cluster answers at" in told.stderr
            assert "Traceback" not in told.stderr
            if comes_back:
                lab.start_head()
            until(lambda: raylets_have_ended(lab), ANSWER_S)
            until(lambda: not (of_scope(scope) or journal.exists()), ANSWER_S)
            if not comes_back:  # Ray ends the driver
                assert driver.wait(ANSWER_S) != 0
                return
            told = status(lab)
            assert (told.returncode, told.stderr) == (0, "")
            assert "No session" in told.stdout
            said, _ = driver.communicate("\n", timeout=ANSWER_S)
            *refused, last = lines_of(said)
            assert len(refused) == 2
            for line in refused:
                assert line.startswith("RayletEndedError: This process is cut off from its session")
                assert "ray.init()" in line
            assert last == "True"
            assert driver.returncode == 0
        finally:
            driver.kill()
            driver.wait(ANSWER_S)
    until(lambda: not of_scope(scope), ANSWER_S)
