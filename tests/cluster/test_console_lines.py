"""What page servers and the registry write to the driver's console, counted."""

from __future__ import annotations

import re

import pytest

from tests.support import driver_script

pytestmark = pytest.mark.lab

SCRIPT = """
import os
import signal
import time
import numpy as np
import ray
import clamor_ray as clamor
from clamor_ray._session import process_sessions
from tests.support.session_rig import keepers

ray.init(address="local", num_cpus=2, include_dashboard=False)
clamor.init()
refs = [clamor.put(np.full(8192, i, np.uint8)) for i in range(100)]
scope = process_sessions.current().scope
n_commits = 0
for _ in range(3):
    (keeper,) = keepers(scope)
    os.kill(keeper, signal.SIGKILL)
    until_s = time.monotonic() + 4.0
    while time.monotonic() < until_s or keepers(scope) in ([], [keeper]):
        with clamor.update(refs[n_commits % 100]) as array:
            array[0] += 1
        n_commits += 1
        assert time.monotonic() < until_s + 200
print("commits:", n_commits, flush=True)
time.sleep(2)  # Ray brings lines a little later
"""
MOST = 30  # some kinds of three lines


def test_a_keeper_that_dies_again_and_again_is_a_few_lines() -> None:
    said = driver_script.run(SCRIPT, timeout_s=280, with_stderr=True)
    lines = [line for line in said.splitlines() if re.search(r"\((PageServer|Registry)", line)]
    assert any("the keeper is gone: another one is started" in line for line in lines), said
    assert len(lines) <= MOST, "\n".join(lines)
    assert not [line for line in lines if line.rstrip().endswith(":")]
    assert int(re.search(r"commits: (\d+)", said)[1]) >= 100
