"""Nodes and servers go that have variables which are files: what is read then, and what is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.cluster.test_file_traps import (
    N_ROWS,
    WORDS,
    all_versions,
    check_versions,
    content,
    write_rows,
)
from tests.cluster.test_file_traps import path as path  # a fixture
from tests.cluster.test_moves_lab import home_of, on
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.troubles import registry_pid

pytestmark = [
    pytest.mark.lab,
    pytest.mark.filterwarnings("default::clamor_ray.errors.LostBlocksWarning"),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        clamor.init()
        yield lab


def make(path: str, *written: tuple[int, int]) -> Any:
    ref = clamor.from_file(path)
    for first, value in written:
        write_rows(ref, first, value)
    return ref


def newest_of(*written: tuple[int, int]) -> Any:
    expected = content()
    for first, value in written:
        expected[first : first + 10] = value
    return expected


def read(ref: Any) -> Any:
    array = ref.get()
    clamor.prefetch(array)
    return np.array(array)


def test_servers_are_killed(lab: LocalCluster, path: Path) -> None:
    written = [(3, -1), (590, -2)]
    ref = make(str(path), *written)
    check_versions(on(1, all_versions, ref, 2), written)
    for node in (0, 1):
        os.kill(lab.page_server_pid(node), 9)
        check_versions(on(node, all_versions, ref, 2), written)
    os.kill(registry_pid(), 9)
    other = make(str(path))
    assert np.array_equal(on(1, read, other), content())
    check_versions(on(1, all_versions, ref, 2), written)
    clamor.free(ref)
    clamor.free(other)


def test_a_home_that_moves(lab: LocalCluster, path: Path) -> None:
    node = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    written = [(3, -1), (590, -2), (8, -3)]
    ref, fresh = on(node, make, str(path), *written), on(node, make, str(path))
    clamor.drain(lab.node_ids[node], timeout=60)
    assert home_of(ref) != lab.node_ids[node]
    lab.kill_node(node)
    for index in (0, 1):
        assert np.array_equal(on(index, read, ref.refresh()), newest_of(*written))
        assert np.array_equal(on(index, read, ref.at(0)), content())
        assert np.array_equal(on(index, read, fresh), content())
        for version in (1, 2):  # right, or an error: their history goes as far as it can
            try:
                found = on(index, read, ref.at(version))
            except errors.SnapshotExpired:
                continue
            assert np.array_equal(found, newest_of(*written[:version])), version
    assert on(1, write_rows, ref, 100, -4) == 4
    for version, expected in ((3, newest_of(*written)), (4, newest_of(*written, (100, -4)))):
        assert np.array_equal(read(ref.at(version)), expected)
    clamor.free(ref)
    clamor.free(fresh)


def test_a_home_that_is_lost_at_version_0(lab: LocalCluster, path: Path) -> None:
    node = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    ref = on(node, make, str(path))
    lab.kill_node(node)
    for index in (0, 1):
        assert np.array_equal(on(index, read, ref), content())
    assert write_rows(ref, 5, -1) == 1
    assert np.array_equal(on(1, read, ref), newest_of((5, -1)))
    clamor.free(ref)


def test_what_was_written_is_lost_and_never_the_files(lab: LocalCluster, path: Path) -> None:
    node = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    ref = on(node, make, str(path), (100, -1), (400, -2))
    # Another node has the first rows of what was written, and many that were not.
    assert on(1, gather_sum, ref, list(range(105))) == newest_of((100, -1))[:105].sum()
    lab.kill_node(node)
    for index in (0, 1):
        assert np.array_equal(on(index, read, ref.at(0)), content())
        right, lost = on(index, which_are_there, ref, N_ROWS)
        # A row begins behind the header, so it lies in two blocks; the one before and the one after
        # what was written have a block of it.
        assert {*range(106, 110), *range(400, 410)} <= set(lost)
        assert set(lost) <= {*range(105, 111), *range(399, 411)}
        expected = newest_of((100, -1), (400, -2))
        assert all(np.array_equal(row, expected[index]) for index, row in right.items())
        assert len(right) > 500
    with pytest.raises(errors.HomeLostError):
        read(ref)
    with clamor.update(ref, lost=0) as array:
        array[100:110] = -5
    until(lambda: ref.refresh().version == 3)
    assert np.array_equal(clamor.gather(ref, [100, 109, 200])[:2], np.full((2, WORDS), -5))
    clamor.free(ref)


def gather_sum(ref: Any, rows: list[int]) -> int:
    return int(np.asarray(clamor.gather(ref, rows)).sum())


def which_are_there(ref: Any, n_rows: int) -> tuple[dict[int, Any], list[int]]:
    right, lost = {}, []
    for row in range(n_rows):
        try:
            right[row] = np.array(clamor.gather(ref, [row])[0])
        except errors.HomeLostError:
            lost.append(row)
    return right, lost


def test_a_node_without_the_file_asks_the_one_that_has_it(lab: LocalCluster, path: Path) -> None:
    import ray

    ref = clamor.from_file(path)
    read_there = lab.page_server(0).read_file.remote(ref._region, 4096, 8192)
    assert bytes(ray.get(read_there, timeout=60)) == path.read_bytes()[4096:12288]
    np.save(path, content(2))
    with pytest.raises(errors.FileChangedError):
        ray.get(lab.page_server(0).read_file.remote(ref._region, 4096, 8192), timeout=60)
    clamor.free(ref)
