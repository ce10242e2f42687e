"""The power of a store's disk is cut while a driver commits: what was answered is there, whole."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import clamor_ray as clamor
from tests.conftest import until
from tests.support import store_commits, store_openings
from tests.support.driver_script import ROOT
from tests.support.lab import local_cluster, require_lab
from tests.support.power_cut import PowerCutDisk, power_cut_disk

pytestmark = [pytest.mark.lab, pytest.mark.root]

DISK_BYTES = 1 << 30
N_NODES = 3
OPEN_S = 150.0
LONGEST_S = 3.0  # of commits, before a cut at a random moment
SEEN_S = 40.0  # so long a cut waits for its file: a checkpoint comes after 20 s
LOOK_S = 0.0002
SEED = int(os.environ.get("CLAMOR_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
LONG = (pytest.mark.soak, pytest.mark.timeout(3600))  # for `make soak`

# A file of that kind has come, or has been written to: then the power is cut.
KINDS = {
    "layer that is being made": re.compile(r"layers/\..*"),
    "layer": re.compile(r"layers/\d+-[0-9a-f]{16}\.layer"),
    "layer of a commit": re.compile(r"layers/\d+-[0-9a-f]{16}-\d+\.layer"),
    "base that is being made": re.compile(r"regions/\..*"),
    "base": re.compile(r"regions/\d+\.base"),
    "checksums": re.compile(r"regions/\d+\.sums"),
    "journal": re.compile(r"journal.*"),
}
GATE = ("random", "layer", "layer of a commit")


class Cutter(threading.Thread):
    """Cuts the power at its moment."""

    def __init__(
        self,
        disk: PowerCutDisk,
        kind: str,
        log: Path,
        rng: random.Random,
        processes: Callable[[], set[int]],
    ) -> None:
        super().__init__(daemon=True)
        self._disk, self._store, self._log = disk, disk.path / "s", log
        self._processes = processes
        self._kind, self._after_s = kind, rng.uniform(0, LONGEST_S)
        self._skipped = rng.randrange(40)  # files of the kind
        self.saw = ""
        self.has_cut = False

    def run(self) -> None:
        before = self._log.read_text().count("did") if self._log.exists() else 0
        until(lambda: self._log.exists() and self._log.read_text().count("did") > before, OPEN_S)
        pids = self._processes()  # they are many: that takes a while
        if self._kind == "random":
            time.sleep(self._after_s)
        else:
            self._wait_for(KINDS[self._kind])
        self._disk.cut(pids)
        self.has_cut = True

    def _files(self) -> Iterator[tuple[str, int]]:
        """Each with the moment of its last change."""
        for directory in (*self._store.rglob("layers"), *self._store.rglob("regions")):
            for entry in os.scandir(directory):
                try:
                    yield f"{directory.name}/{entry.name}", entry.stat().st_mtime_ns
                except FileNotFoundError:
                    continue
        for entry in os.scandir(self._store / store_openings.SESSION / "registry"):
            yield entry.name, entry.stat().st_mtime_ns

    def _wait_for(self, pattern: re.Pattern[str]) -> None:
        deadline, seen = time.monotonic() + SEEN_S, set(self._files())
        while time.monotonic() < deadline:
            for name, changed_ns in self._files():
                if (name, changed_ns) not in seen and pattern.fullmatch(name):
                    seen.add((name, changed_ns))
                    self._skipped -= 1
                    if self._skipped < 0:
                        self.saw = name
                        return
            time.sleep(LOOK_S)


def commit_until_cut(disk: PowerCutDisk, log: Path, kind: str, rng: random.Random) -> str:
    """One opening, in a cluster of its own, that ends with a cut and kill -9; what was seen."""
    store = disk.path / "s"
    with local_cluster(N_NODES, connect=False) as lab:
        command = [sys.executable, "-m", "tests.support.store_commits", str(store), str(log)]
        with (log.parent / "errors").open("w+") as errors_file:
            driver = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **lab.environment},
                stdout=subprocess.PIPE,
                stderr=errors_file,
                text=True,
            )
            try:
                assert driver.stdout is not None
                scope = next((line.strip() for line in driver.stdout if is_scope(line)), "")
                cutter = Cutter(
                    *(disk, kind, log, rng),
                    lambda: {driver.pid} | store_openings.processes(lab, scope),
                )
                cutter.start()
                while cutter.is_alive() and driver.poll() is None:
                    time.sleep(0.02)
                # Once the power is cut, a commit that fails is right; before, nothing may fail.
                if not cutter.has_cut:
                    time.sleep(0.1)
                errors_file.seek(0)
                assert cutter.has_cut, f"no cut, and the driver says: {errors_file.read()}"
            finally:
                driver.kill()
                driver.communicate(timeout=30)
                store_openings.crash(lab, scope or "no scope")
    disk.restore()
    return cutter.saw


def is_scope(line: str) -> bool:
    return re.fullmatch(r"[\w.-]+", line.strip()) is not None


def open_and_check(disk: PowerCutDisk, log: Path) -> None:
    """In this process, and in an orderly way; at the end a node is lost, and all is read again."""
    with local_cluster(N_NODES) as lab:
        store_openings.in_time(disk.path / "s")
        n = store_commits.check(store_commits.said_in(log))
        lab.kill_node(N_NODES - 1)
        raid = np.asarray(clamor.open("raid").get())
        assert np.array_equal(raid, store_commits.model("raid", n)), "parity does not agree"
        clamor.shutdown(session=store_openings.SESSION)


def cut_often(tmp_path: Path, kinds: list[str]) -> None:
    """Each opening begins with a check of what the ones before were answered: the driver's."""
    require_lab("local")
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    log = tmp_path / "log"
    with power_cut_disk(tmp_path / "disk", DISK_BYTES) as disk:
        for number, kind in enumerate(kinds):
            saw = commit_until_cut(disk, log, kind, rng)
            said = store_commits.said_in(log)
            print(f"cut {number}: {kind} {saw}: {said.did} answered, {said.tried} begun")
        open_and_check(disk, log)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_what_was_answered_is_there_after_power_cuts(tmp_path: Path) -> None:
    cut_often(tmp_path, list(GATE))


@pytest.mark.parametrize("n_cuts", [pytest.param(40, marks=LONG)])
def test_it_is_cut_again_and_again(tmp_path: Path, n_cuts: int) -> None:
    kinds = ["random", *KINDS]
    cut_often(tmp_path, [kinds[n % len(kinds)] for n in range(n_cuts)])
