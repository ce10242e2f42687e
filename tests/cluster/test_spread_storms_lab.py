"""Variables that are spread over nodes, while the registry, page servers and nodes go."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._objects.block_sets import runs
from clamor_ray._session import process_sessions
from tests.cluster.test_moves_lab import (
    on,
)
from tests.cluster.test_spread_lab import N, change, homes_of
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab

pytestmark = pytest.mark.lab


@pytest.fixture
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


def regions_at(lab: LocalCluster, index: int) -> set[int]:
    """What is homed on a node."""
    (found,) = [node for node in clamor.stats().nodes if node.node_id == lab.node_ids[index]]
    return {each.region for each in found.regions if each.is_home}


def test_the_registry_is_killed(lab: LocalCluster) -> None:
    ref = clamor.put(np.arange(N), home="spread", name="kept")
    with clamor.update(ref) as array:
        array[0] = array[N - 1] = -5
    os.kill(process_sessions.current().rpc.ping(), signal.SIGKILL)
    assert np.array_equal(ref.get()[1:5], [1, 2, 3, 4])
    found = clamor.open("kept")
    assert found.version == 1
    assert (int(found.get()[0]), int(found.get()[N - 1])) == (-5, -5)
    assert int(found.at(0).get()[N - 1]) == N - 1
    assert on(2, change, found, 7, 1, 9) == 2
    assert int(found.refresh().get()[7]) == 9


def test_a_node_dies_and_a_source_makes_its_pieces_again(lab: LocalCluster) -> None:
    def make() -> Any:
        return np.arange(N)

    ref = clamor.put(make(), home="spread", source=make)
    zeros = clamor.zeros(N, np.int64, home="spread")
    with clamor.update(ref) as array:
        array[3] = -3
    lab.kill_node(2)
    expected = make()
    expected[3] = -3
    assert np.array_equal(on(1, lambda ref: np.array(ref.get()), ref), expected)
    assert not on(1, lambda ref: np.array(ref.get()), zeros).any()
    assert lab.node_ids[2] not in homes_of(ref)


def test_pieces_that_nobody_has_are_lost_and_the_others_are_read(lab: LocalCluster) -> None:
    ref = clamor.put(np.arange(N), home="spread")
    there = regions_at(lab, 2)
    gone = BitMap()
    for piece in ref._piece_versions():
        if piece.region in there:
            first = (piece.base_address - ref._base_address) // 4096
            gone |= BitMap(range(first, first + piece.length_bytes // 4096))
    assert 0 < len(gone) < ref._length_bytes // 4096
    int(ref.get()[0])  # the stream, and some blocks after it, are here wherever the first piece is
    lab.kill_node(2)
    # The prefetch may come before it is known what is lost, or after that of some pieces or all.
    array: Any = None

    def read() -> None:
        nonlocal array
        with pytest.raises(errors.HomeLostError, match=f"Blocks of variable {ref._region} are"):
            clamor.prefetch(ref)
        ends = [first + n - 1 for first, n in runs(gone)]
        until(lambda: set(ends) <= set(lost_blocks(ref)))
        array = ref.get()

    with pytest.warns(errors.LostBlocksWarning, match=f"Blocks of variable {ref._region}") as said:
        read()
    lost = lost_blocks(ref)
    assert lost <= gone
    assert len(gone - lost) < 200
    assert said.list[-1].message.runs == tuple(runs(lost))  # type: ignore[union-attr]
    offset = ref._plan.buffers[0][0]
    is_lost = np.isin((np.arange(N) * 8 + offset) // 4096, np.array(lost))
    with pytest.raises(errors.HomeLostError, match="are on no node"):
        clamor.gather(array, np.flatnonzero(is_lost)[-3:])
    # The others are read by touch and by rows, here and elsewhere.
    there = np.flatnonzero(~is_lost)
    assert np.array_equal(array[there], there)
    assert np.array_equal(on(1, lambda ref, ids: clamor.gather(ref.get(), ids), ref, there), there)
    # They are changed, and what is lost is made whole.
    with clamor.update(ref) as changed:
        changed[there[-1]] = -1
    with clamor.update(ref, lost=0) as changed:
        changed[is_lost] = np.flatnonzero(is_lost)
    expected = np.arange(N)
    expected[there[-1]] = -1
    assert np.array_equal(on(1, read_without_a_loss, ref), expected)


def lost_blocks(ref: Any) -> BitMap:
    found = process_sessions.current().rpc.lost_blocks(ref._region)
    return BitMap() if found is None else BitMap.deserialize(found.blocks)


def read_without_a_loss(ref: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.LostBlocksWarning)
        return np.array(ref.get())
