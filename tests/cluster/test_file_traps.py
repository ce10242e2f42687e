"""Variables that are files, local or in S3: read over every trap, changed, and what goes wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ClamorCluster, until
from tests.support.s3_rig import ENVIRONMENT, Proxy, moto_server, proxy_before

pytestmark = pytest.mark.lab

WORDS = 512  # of 8 bytes: a row is a block
N_ROWS = 600
BEGIN = 1  # the header's block: rows lie across two blocks


def content(seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(1, 1 << 60, (N_ROWS, WORDS))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", content())
    return tmp_path / "x.npy"


@pytest.fixture(scope="module")
def s3() -> Iterator[Proxy]:
    with moto_server() as port, proxy_before(port) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3: Proxy) -> Iterator[Proxy]:
    s3.heal()
    yield s3
    s3.heal()


OPTIONS = {
    "access_key_id": ENVIRONMENT["AWS_ACCESS_KEY_ID"],
    "secret_access_key": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    "region": ENVIRONMENT["AWS_REGION"],
}


def store(proxy: Proxy, body: bytes, key: str = "x.npy") -> str:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=proxy.endpoint,
        aws_access_key_id=OPTIONS["access_key_id"],
        aws_secret_access_key=OPTIONS["secret_access_key"],
        region_name=OPTIONS["region"],
    )
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key=key, Body=body)
    return f"s3://bucket/{key}"


def from_s3(proxy: Proxy, body: bytes, key: str = "x.npy") -> Any:
    options = {**OPTIONS, "endpoint": proxy.endpoint}
    return clamor.from_file(store(proxy, body, key), storage_options=options)


# ------------------------------------------------------ one contract, over every trap


def apply(ref: list[Any], function: Any, *arguments: Any) -> Any:
    """In a task, which would get a reference itself as its object."""
    return function(ref[0], *arguments)


def rows_and_sum(ref: Any, rows: list[int]) -> tuple[Any, int]:
    array = ref.get()
    return np.array(array[rows]), int(np.asarray(array).sum())


def test_touches_see_the_file(clamor_cluster: ClamorCluster, trap: str, path: Path) -> None:
    ref, expected, rows = clamor.from_file(path), content(), [599, 0, 17, 300]
    got, total = clamor_cluster.run_in_trap(trap, rows_and_sum, ref, rows)
    assert np.array_equal(got, expected[rows])
    assert total == expected.sum()
    assert clamor_cluster.region(ref).home_bytes == 0  # no home is in the way
    assert np.array_equal(np.array(ref.get()), expected)  # here, where the home is
    clamor.free(ref)


def gather_and_prefetch(ref: Any, rows: list[int]) -> tuple[Any, int, int]:
    got = clamor.gather(ref, rows)
    view = ref.get()[100:200]
    clamor.prefetch(view)
    before = sum(node.engine.faults for node in clamor.stats().nodes)
    total = int(np.asarray(view).sum())
    return np.array(got), total, sum(node.engine.faults for node in clamor.stats().nodes) - before


def test_rows_and_ranges(clamor_cluster: ClamorCluster, trap: str, path: Path) -> None:
    ref, expected, rows = clamor.from_file(path), content(), [5, 599, 17, 5]
    got, total, n_faults = clamor_cluster.run_in_trap(trap, gather_and_prefetch, ref, rows)
    assert np.array_equal(got, expected[rows])
    assert (total, n_faults) == (expected[100:200].sum(), 0)
    assert clamor_cluster.region(ref).present_blocks < 130  # and no more than that
    clamor.free(ref)


def write_rows(ref: Any, first: int, value: int) -> int:
    with clamor.update(ref) as array:
        array[first : first + 10] = value
    return int(ref.refresh().version)


def all_versions(ref: Any, newest: int) -> list[Any]:
    return [np.array(ref.at(version).get()) for version in range(newest, -1, -1)]


def check_versions(found: list[Any], written: list[tuple[int, int]]) -> None:
    expected = content()
    for version, array in enumerate(reversed(found)):
        if version:
            first, value = written[version - 1]
            expected[first : first + 10] = value
        wrong = np.flatnonzero((array != expected).any(axis=1))
        assert not len(wrong), (version, wrong[:5])


def test_updates_and_old_versions(clamor_cluster: ClamorCluster, trap: str, path: Path) -> None:
    ref, written = clamor.from_file(path), [(3, -1), (590, -2), (8, -3)]
    before = path.read_bytes()
    assert write_rows(ref, *written[0]) == 1
    assert clamor_cluster.run_in_trap(trap, write_rows, ref, *written[1]) == 2
    assert clamor_cluster.run_in_trap(trap, write_rows, ref, *written[2]) == 3
    check_versions(clamor_cluster.run_in_trap(trap, all_versions, ref, 3), written)
    check_versions(all_versions(ref, 3), written)
    assert path.read_bytes() == before  # the file is never written
    clamor.free(ref)


def in_a_child(ref: Any) -> tuple[int, int]:
    array = ref.get()
    begin = int(array[0, 0])
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writer, int(np.asarray(array[200:]).sum() % (1 << 31)).to_bytes(8, "little"))
        os._exit(0)
    os.close(writer)
    said = os.read(reader, 8)
    os.close(reader)
    assert os.waitpid(pid, 0)[1] == 0
    return begin, int.from_bytes(said, "little")


def test_children_read_it_too(clamor_cluster: ClamorCluster, trap: str, path: Path) -> None:
    ref, expected = clamor.from_file(path), content()
    got = clamor_cluster.run_in_trap(trap, in_a_child, ref)
    assert got == (expected[0, 0], expected[200:].sum() % (1 << 31))
    clamor.free(ref)


def of_a_table(ref: Any) -> tuple[int, str, int]:
    table = ref.get()
    return table["n"].to_numpy().sum(), table["text"][1234].as_py(), len(table)


def test_an_arrow_file(clamor_cluster: ClamorCluster, trap: str, tmp_path: Path) -> None:
    table = pa.table({"n": np.arange(50_000), "text": [f"text {i}" for i in range(50_000)]})
    feather.write_feather(table, str(tmp_path / "t.arrow"), compression="uncompressed")
    ref = clamor.from_file(tmp_path / "t.arrow", name="a table")
    found = clamor_cluster.run_in_trap(trap, of_a_table, clamor.open("a table"))
    assert found == (np.arange(50_000).sum(), "text 1234", 50_000)
    assert ref.get().equals(table)
    clamor.free(ref)


def open_then_read(ref: list[Any], opened: str, freed: str) -> int:
    array = ref[0].get()
    Path(opened).touch()
    until(Path(freed).exists)
    return int(np.asarray(array).sum())


@pytest.mark.parametrize("node", [0, 1])
def test_who_has_it_open_reads_what_was_freed(
    clamor_cluster: ClamorCluster, path: Path, node: int
) -> None:
    import ray

    ref, opened, freed = clamor.from_file(path), path.with_name("opened"), path.with_name("freed")
    task = clamor_cluster.remote(open_then_read, node=node, max_retries=0)
    total = task.remote([ref], str(opened), str(freed))
    until(opened.exists)
    clamor.free(ref)
    freed.touch()
    assert ray.get(total, timeout=60) == content().sum()


# ------------------------------------------------------------------ what goes wrong


def touch_all(ref: Any) -> int:
    return int(np.asarray(ref.get()).sum())


def prefetch_all(ref: Any) -> str:
    try:
        clamor.prefetch(ref)
    except errors.FileReadError as failure:
        return f"{type(failure).__name__}: {failure}"
    return "all is there"


def test_a_file_that_changes(clamor_cluster: ClamorCluster, trap: str, path: Path) -> None:
    import ray

    ref, expected = clamor.from_file(path), content()
    half = clamor_cluster.run_in_trap(trap, rows_and_sum_of_half, ref)
    assert half == expected[:300].sum()
    np.save(path, content(2))
    said = clamor_cluster.run_in_trap(trap, prefetch_all, ref)
    assert said.startswith("FileChangedError")
    assert str(path) in said
    assert "new variable" in said
    # What was read before stays as it was.
    assert clamor_cluster.run_in_trap(trap, rows_and_sum_of_half, ref) == half
    # A touch ends the process, and Ray's next try of the task says why.
    task = clamor_cluster.remote(apply, max_retries=1)
    with pytest.raises(errors.FileChangedError):
        ray.get(task.remote([ref], touch_all), timeout=60)
    clamor.free(ref)


def rows_and_sum_of_half(ref: Any) -> int:
    return int(np.asarray(ref.get()[:300]).sum())


def test_an_array_in_s3(clamor_cluster: ClamorCluster, bucket: Proxy, path: Path) -> None:
    ref, expected = from_s3(bucket, path.read_bytes()), content()
    bucket.fail("503", method="GET", path="x.npy", times=5)
    bucket.fail("cut", method="GET", path="x.npy", times=3)
    bucket.fail("close", method="GET", path="x.npy", times=3)
    got, total = clamor_cluster.run(apply, [ref], rows_and_sum, [5, 599])
    assert np.array_equal(got, expected[[5, 599]])
    assert total == expected.sum()
    assert all(fault.hits == fault.times for fault in bucket.faults)
    assert write_rows(ref, 100, -1) == 1
    expected[100:110] = -1
    assert clamor_cluster.run(apply, [ref], touch_all) == expected.sum()
    clamor.free(ref)


def test_many_ranges_are_in_flight(
    clamor_cluster: ClamorCluster, bucket: Proxy, path: Path
) -> None:
    ref, expected = from_s3(bucket, path.read_bytes()), content()
    rows = list(range(0, N_ROWS, 9))
    bucket.latency_s = 0.2
    began = time.monotonic()
    got = clamor.gather(ref, rows)
    took_s = time.monotonic() - began
    assert np.array_equal(got, expected[rows])
    assert took_s < 0.2 * len(rows) / 8, took_s
    clamor.free(ref)


def test_an_object_that_changes_while_ranges_are_in_flight(
    clamor_cluster: ClamorCluster, bucket: Proxy, path: Path
) -> None:
    """Each block that anybody has is the old one's, whatever was in flight."""
    old, new = content(), content(2)
    ref = from_s3(bucket, path.read_bytes(), "changes.npy")
    np.save(path, new)
    body, seen = path.read_bytes(), threading.Semaphore(0)
    bucket.passed = lambda method, where: seen.release() if method == "GET" else None
    bucket.latency_s = 0.05

    def replace() -> None:
        for _ in range(20):  # the others are on their way
            assert seen.acquire(timeout=60)
        store(bucket, body, "changes.npy")

    thread = threading.Thread(target=replace)
    thread.start()

    def read_on() -> None:
        for first in range(0, N_ROWS, 2):
            clamor.gather(ref, list(range(first, N_ROWS, 97)))

    with pytest.raises(errors.FileChangedError, match="ETag"):
        read_on()
    thread.join()
    n_right = 0
    for row in range(0, N_ROWS, 7):
        try:
            got = clamor.gather(ref, [row])
        except errors.FileChangedError:
            continue
        assert np.array_equal(got[0], old[row]), row
        n_right += 1
    assert 0 < n_right < len(range(0, N_ROWS, 7))
    clamor.free(ref)


@pytest.mark.parametrize("how", ["403", "expired"])
def test_credentials_that_expire(
    clamor_cluster: ClamorCluster, bucket: Proxy, path: Path, how: str
) -> None:
    ref, expected = from_s3(bucket, path.read_bytes()), content()
    assert clamor_cluster.run(apply, [ref], rows_and_sum_of_half) == expected[:300].sum()
    bucket.fail(how, method="GET")
    said = clamor_cluster.run(apply, [ref], prefetch_all)
    assert said.startswith("FileAccessError")
    assert "storage_options" in said
    assert OPTIONS["secret_access_key"] not in said.replace("bucket/x.npy", "")
    bucket.heal()  # others are good, or the same again
    assert clamor_cluster.run(apply, [ref], touch_all) == expected.sum()
    clamor.free(ref)
