"""Backups in an object store: the same, and what its requests may do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._backup import writer
from clamor_ray._backup.directory import Directory
from clamor_ray.collection.io import files
from tests.collection import test_sources_s3
from tests.support.backups import drop_all, new_session
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.s3_rig import ENVIRONMENT, Proxy

pytestmark = pytest.mark.lab

moto, served = test_sources_s3.moto, test_sources_s3.served
s3, bucket = test_sources_s3.s3, test_sources_s3.bucket
MIB = 1 << 20


@pytest.fixture(scope="module")
def two() -> Iterator[LocalCluster]:
    require_lab("local")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)  # workers have credentials of their own
        with local_cluster(2) as lab:
            clamor.init()
            yield lab


@pytest.fixture(autouse=True)
def no_names(two: LocalCluster) -> Iterator[None]:
    yield
    drop_all()


def numbers(path: str) -> list[int]:
    return Directory.at(path).numbers()


def test_there_and_back(two: LocalCluster, s3: Proxy, bucket: str) -> None:
    path = f"s3://{bucket}/some/backup"
    content = np.random.default_rng(1).integers(0, 1 << 40, 6 * MIB)
    ref = clamor.put(content, name="large", home="spread")
    clamor.put({"inner": clamor.put(np.arange(1000)), "ref": ref}, name="holder")
    first = clamor.checkpoint(path)
    assert first.bytes_written > content.nbytes
    puts = [asked for asked in s3.asked if asked.method == "PUT" and "/data/" in asked.path]
    assert len(puts) > 1  # a file of 32 MiB at most each
    with clamor.update(ref) as x:
        x[0] = 1
    content[0] = 1
    second = clamor.checkpoint(path, keep=1)
    assert 0 < second.bytes_written < 5 * MIB
    assert numbers(path) == [2]
    new_session()
    back = clamor.restore(path)
    assert np.array_equal(back["large"].get(), content)
    assert back["holder"].get()["inner"].get()[999] == 999
    assert back["holder"].get()["ref"] == back["large"]
    # With a file system of the caller's, too.
    store, root = files.locate(path)
    drop_all()
    again = clamor.restore(root, filesystem=store.filesystem())
    assert np.array_equal(again["large"].get(), content)


def test_credentials_that_are_wrong_or_expire(
    two: LocalCluster, s3: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"s3://{bucket}/backup"
    ref = clamor.put(np.arange(10**5), name="kept")
    clamor.checkpoint(path)
    with clamor.update(ref) as x:
        x[:] = -1
    # From the beginning; in the midst; and just before the end.
    for where in ("", "/data/", "checkpoint-"):
        s3.fail("403", path=where, method="" if not where else "PUT")
        with pytest.raises(errors.StorageError, match="refused") as caught:
            clamor.checkpoint(path)
        assert "credentials" in caught.value.hint
        s3.heal()
        assert numbers(path) == [1]
    s3.fail("close", path="checkpoint-", method="PUT")
    with pytest.raises(errors.StorageError, match="writing it: failed"):
        clamor.checkpoint(path)
    s3.heal()
    assert numbers(path) == [1]
    drop_all()
    assert np.array_equal(clamor.restore(path)["kept"].get(), np.arange(10**5))
    drop_all()
    s3.fail("403", path="/data/", method="GET")
    before = {info.region for info in clamor.variables()}
    with pytest.raises(errors.StorageError, match="reading it: refused"):
        clamor.restore(path)
    assert {info.region for info in clamor.variables()} <= before
    s3.heal()
    with pytest.raises(errors.StorageError, match="refused"):
        clamor.checkpoint("s3://no-such-bucket/backup")


def test_one_writer_at_a_time(
    two: LocalCluster, s3: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BEAT_S", 0.5)
    monkeypatch.setattr(writer, "DEAD_S", 3.0)
    path = f"s3://{bucket}/backup"
    directory = Directory.at(path)
    clamor.put(np.arange(10**5), name="one")
    with (
        writer.writing(directory),
        pytest.raises(errors.BackupInUseError, match="writes into s3://"),
    ):
        clamor.checkpoint(path)
    assert clamor.checkpoint(path).number == 1
    # One that was killed has left its object, and says nothing any more.
    directory.write(writer.OBJECT, [b'{"owner": "dead", "beat": 7}'])
    began_s = time.monotonic()
    assert clamor.checkpoint(path).number == 2
    assert time.monotonic() - began_s >= writer.DEAD_S


def test_two_that_began_in_the_same_moment(
    two: LocalCluster, s3: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BEAT_S", 0.2)
    directory = Directory.at(f"s3://{bucket}/backup")
    seen: list[Any] = []
    first = writer._Beats(directory)
    try:
        other = writer._Beats(directory)  # it has not seen the first one's object
        try:
            ended = threading.Event()
            for each in (first, other):
                try:
                    for _ in range(5):
                        each.check()
                        ended.wait(0.3)
                except errors.BackupInUseError as error:
                    seen.append(error)
        finally:
            other.close()
    finally:
        first.close()
    assert seen  # at most one of them goes on
