"""The power is cut under the files of a store: what was decided is there, and nothing else."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ANSWER_S, until
from tests.support import store_layers
from tests.support.driver_script import ROOT
from tests.support.power_cut import PowerCutDisk, power_cut_disk

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.slow]

DISK_BYTES = 512 << 20
LONGEST_S = 0.4
SEED = int(os.environ.get("CLAMOR_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
LONG = (pytest.mark.soak, pytest.mark.timeout(3600))  # for `make soak`


def openings(log: Path) -> int:
    return store_layers.Decided(log).openings


def cut_once(disk: PowerCutDisk, log: Path, rng: random.Random) -> None:
    """A process brings back what there is, goes on, and its power is cut."""
    before = openings(log)
    command = [sys.executable, "-m", "tests.support.store_layers"]
    with subprocess.Popen(
        [*command, str(disk.path), str(log), str(SEED)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            until(lambda: openings(log) > before or child.poll() is not None, ANSWER_S)
            time.sleep(rng.uniform(0, LONGEST_S))
            has_ended = child.poll() is not None
            if not has_ended:
                disk.cut()
        finally:
            child.kill()
        assert child.stderr is not None
        said = child.stderr.read()
    assert not has_ended, said  # once the power is cut it may


@pytest.mark.parametrize("n_cuts", [8, pytest.param(200, marks=LONG)])
def test_what_was_decided_is_there_after_power_cuts(tmp_path: Path, n_cuts: int) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    log = tmp_path / "log"
    with power_cut_disk(tmp_path / "disk", DISK_BYTES) as disk:
        for _ in range(n_cuts):
            cut_once(disk, log, rng)
            disk.restore()
        decided = store_layers.Decided(log)
        print(f"{decided.newest} commits, {len(decided.kept)} regions")
        assert decided.openings == n_cuts  # each has found what was decided before
        assert decided.newest > n_cuts
