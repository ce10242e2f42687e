"""The power is cut under the files of a store, without Ray: what was answered is there, whole."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ANSWER_S, until
from tests.support import store_journal, store_layers
from tests.support.driver_script import ROOT
from tests.support.power_cut import PowerCutDisk, power_cut_disk

pytestmark = [pytest.mark.lab, pytest.mark.root, pytest.mark.slow]

DISK_BYTES = 512 << 20
LONGEST_S = 0.4
SEED = int(os.environ.get("CLAMOR_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
LONG = (pytest.mark.soak, pytest.mark.timeout(3600))  # for `make soak`


def cut_once(
    disk: PowerCutDisk, command: list[str], openings: Callable[[], int], rng: random.Random
) -> None:
    """A process looks for what the one before was told, goes on, and its power is cut."""
    before = openings()
    with subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            until(lambda: openings() > before or child.poll() is not None, ANSWER_S)
            time.sleep(rng.uniform(0, LONGEST_S))
            has_ended = child.poll() is not None
            if not has_ended:
                disk.cut([child.pid])
        finally:
            child.kill()
        assert child.stderr is not None
        said = child.stderr.read()
    assert not has_ended, said


@pytest.mark.parametrize("n_cuts", [8, pytest.param(200, marks=LONG)])
def test_what_was_decided_is_there_after_power_cuts(tmp_path: Path, n_cuts: int) -> None:
    print(f"seed {SEED}")
    rng, log = random.Random(SEED), tmp_path / "log"
    with power_cut_disk(tmp_path / "disk", DISK_BYTES) as disk:
        command = ["tests.support.store_layers", str(disk.path), str(log), str(SEED)]
        for _ in range(n_cuts):
            cut_once(disk, command, lambda: store_layers.Decided(log).openings, rng)
            disk.restore()
        decided = store_layers.Decided(log)
        print(f"{decided.newest} commits, {len(decided.kept)} regions")
        assert decided.openings == n_cuts  # each has found what was decided before
        assert decided.newest > n_cuts


@pytest.mark.parametrize("fold_bytes", [64 << 10, 4 << 20])
@pytest.mark.parametrize("n_cuts", [4, pytest.param(100, marks=LONG)])
def test_a_journal_has_what_it_has_answered_after_power_cuts(
    tmp_path: Path, n_cuts: int, fold_bytes: int
) -> None:
    print(f"seed {SEED}")
    rng, log = random.Random(SEED), tmp_path / "log"
    with power_cut_disk(tmp_path / "disk", DISK_BYTES) as disk:
        command = ["tests.support.store_journal", str(disk.path), str(log), str(fold_bytes)]
        for _ in range(n_cuts):
            cut_once(disk, command, lambda: store_journal.answered(log)[1], rng)
            disk.restore()
        n_answered, n_openings = store_journal.answered(log)
        print(f"{n_answered} commits")
        assert n_openings == n_cuts
        assert n_answered > n_cuts
