"""The disk that Ray's and the journal's files are on is full: whoever dies then starts again."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from clamor_ray.actors.process import keeper_process
from clamor_ray.actors.process.journal_watcher import RESERVE
from clamor_ray.actors.process.journals import journal_directory
from tests.conftest import ANSWER_S, until
from tests.support.lab import LocalCluster, local_cluster, require_lab, troubles

pytestmark = pytest.mark.lab

DISK_BYTES = 256 << 20
N_NUMBERS = 1 << 17
MOST_COMMITS = 20_000


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """All of Ray's files are there, and nothing else."""
    require_lab("local")
    if os.geteuid() != 0:
        pytest.skip("a small disk can only be mounted as root")
    disk = Path(tempfile.gettempdir(), f"cd{os.getpid()}")  # short: Ray has sockets below it
    with pytest.MonkeyPatch.context() as patches, troubles.small_disk(disk, DISK_BYTES):
        patches.setenv("RAY_TMPDIR", str(disk))
        yield disk


@pytest.fixture(scope="module")
def cluster(disk: Path) -> Iterator[LocalCluster]:
    with local_cluster(1, log_to_driver=False) as lab:
        clamor.init()
        yield lab


@pytest.fixture
def filler(cluster: LocalCluster, disk: Path) -> Iterator[Path]:
    """The path of a file that takes what is free; there is a whole reserve."""
    until(lambda: reserve_bytes() == keeper_process.RESERVE_BYTES, ANSWER_S)
    filler = disk / "filler"
    yield filler
    filler.unlink(missing_ok=True)


def reserve_bytes() -> int:
    path = journal_directory(process_sessions.current().scope) / RESERVE
    return path.stat().st_blocks * 512


def commit_until_refused(ref: clamor.GlobalRef[np.ndarray], filler: Path) -> None:
    """What Ray and the journal have had allocated before takes some commits more."""
    for n in range(MOST_COMMITS):
        troubles.fill(filler)
        with clamor.update(ref) as array:
            array[0] = n
    raise AssertionError("the journal is never full")


def test_the_registry_is_killed(cluster: LocalCluster, filler: Path) -> None:
    ref = clamor.put(np.arange(N_NUMBERS))
    total = int(np.arange(N_NUMBERS).sum())
    troubles.fill(filler)
    registry = troubles.registry_pid()
    os.kill(registry, signal.SIGKILL)
    assert int(ref.get().sum()) == total  # that is not asked
    began_s = time.monotonic()
    assert ray.get(process_sessions.current().registry.ping.remote(), timeout=ANSWER_S) != registry
    print(f"the registry answers after {time.monotonic() - began_s:.1f} s")
    assert filler.exists()
    with pytest.raises(errors.JournalFullError):
        commit_until_refused(ref, filler)
    assert int(ref._latest().get()[1:].sum()) == total
    filler.unlink()
    with clamor.update(ref) as array:
        array[0] = 7
    assert int(ref._latest().get()[0]) == 7
    until(lambda: reserve_bytes() == keeper_process.RESERVE_BYTES, ANSWER_S)
    clamor.free(ref)


def test_the_page_server_is_killed(cluster: LocalCluster, filler: Path) -> None:
    ref = clamor.put(np.arange(N_NUMBERS))
    troubles.fill(filler)
    server = cluster.page_server_pid(0)
    os.kill(server, signal.SIGKILL)
    assert cluster.page_server_pid(0, ANSWER_S) != server
    assert filler.exists()
    assert int(ref._latest().get().sum()) == int(np.arange(N_NUMBERS).sum())
    filler.unlink()
    clamor.free(ref)
