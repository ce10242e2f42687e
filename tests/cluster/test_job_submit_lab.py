"""`ray job submit`, as a user calls it: into a cluster of three raylets that asks for a token."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest

from clamor_ray.workloads.data import places
from tests.support.lab import LocalCluster, local_cluster, require_lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

JOB_S = 200.0
N_PLACES, N_QUERIES = 3000, 200

BEGIN = """
import numpy as np
import clamor_ray as clamor

clamor.init(session="prices", lifetime="detached")
clamor.put(np.arange(100_000), name="table")
"""

USE = """
import ray
import clamor_ray as clamor
from rows import SIZE  # a module of the working directory

clamor.init(session="prices")
table = clamor.open("table")
with clamor.update(table) as array:
    array[7] = 1000


@clamor.remote
def total(array, n):
    from rows import SIZE

    assert SIZE == n
    return int(array[:n].sum())


print("total", ray.get(total.options(scheduling_strategy="SPREAD").remote(table, SIZE)))
"""

END = """
import ray
import clamor_ray as clamor

ray.init()
clamor.shutdown(session="prices")
clamor.init(session="prices")
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    # A job connects to the cluster that was started last below Ray's folder, and tests that run
    # beside this one start clusters, too.
    with (
        tempfile.TemporaryDirectory() as own,
        mock.patch.dict(os.environ, RAY_TMPDIR=own),
        local_cluster(3, connect=False, dashboard=True) as lab,
    ):
        assert lab.environment["RAY_AUTH_MODE"] == "token"
        yield lab


def submitted(
    lab: LocalCluster, directory: Path, *command: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `ray job submit` says and returns, which waits for the job's end and shows its log."""
    return subprocess.run(
        [
            *(str(Path(sys.executable).with_name("ray")), "job", "submit"),
            *("--address", lab.dashboard, "--working-dir", str(directory)),
            *("--", sys.executable, *command),
        ],
        env={**os.environ, **lab.environment, **environment},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )


def succeeded(lab: LocalCluster, directory: Path, *command: str) -> str:
    done = submitted(lab, directory, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "succeeded" in done.stdout
    return done.stdout


def test_the_nearest_places_of_parquet_files(lab: LocalCluster, tmp_path: Path) -> None:
    data = tmp_path / "data"  # goes to the cluster; the job finds it where it starts
    data.mkdir()
    list(places.write_places(data / "places.parquet", N_PLACES, seed=1, metadata_bytes=256))
    places.write_queries(data / "queries.parquet", N_QUERIES, seed=2)
    out = tmp_path / "out" / "result.parquet"
    command = "-m clamor_ray.workloads.knn places.parquet queries.parquet -k 5 --tasks 9"
    said = succeeded(lab, data, *command.split(), "--out", str(out))
    assert f"attaching to {lab.address}" in said
    assert "answers equal brute force" in said
    assert f"all {N_QUERIES} metadata checksums are right" in said
    assert "node 3" in said
    assert str(out) in said
    result = pq.read_table(out)
    assert result.num_rows == N_QUERIES
    assert len(result.column("nearest")[0]) == 5


def test_a_job_that_fails_says_why(lab: LocalCluster, tmp_path: Path) -> None:
    command = "-m clamor_ray.workloads.knn places.parquet queries.parquet"
    failed = submitted(lab, tmp_path, *command.split(), "--dir", str(tmp_path / "out"))
    assert failed.returncode == 1
    assert "error: places.parquet: no such file" in failed.stdout
    assert "failed with exit code 2" in failed.stdout + failed.stderr


def test_a_wrong_token_is_refused(lab: LocalCluster, tmp_path: Path) -> None:
    refused = submitted(lab, tmp_path, "-c", "print('it', 'ran')", RAY_AUTH_TOKEN="0" * 64)
    assert refused.returncode != 0
    assert "token is missing or incorrect" in refused.stdout + refused.stderr
    assert "it ran" not in refused.stdout


def test_a_session_that_another_job_has_made(lab: LocalCluster, tmp_path: Path) -> None:
    for name, script in (("begin", BEGIN), ("use", USE), ("end", END)):
        (tmp_path / f"{name}.py").write_text(script)
    (tmp_path / "rows.py").write_text("SIZE = 100\n")
    succeeded(lab, tmp_path, "begin.py")
    assert f"total {sum(range(100)) - 7 + 1000}" in succeeded(lab, tmp_path, "use.py")
    failed = submitted(lab, tmp_path, "end.py")
    assert failed.returncode == 1
    assert "NoSuchSessionError: No session of this cluster is named 'prices'." in failed.stdout
