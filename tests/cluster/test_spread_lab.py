"""Variables that are spread over nodes: what users do with one, while nodes and servers go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.names import server_id_of
from clamor_ray._session import process_sessions
from clamor_ray.collection.run import scatter_add_commit
from tests.cluster.test_moves_lab import (
    on,
)
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab

pytestmark = pytest.mark.lab

N = 3_000_000  # of 8 bytes: 12 pieces of 2 MiB


@pytest.fixture(scope="module")
def three() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


def homes_of(ref: Any) -> set[str]:
    return {node_id for node_id, entry in clamor.stats().region(ref).items() if entry.is_home}


def change(ref: Any, first: int, n: int, value: int) -> int:
    with clamor.update(ref) as array:
        array[first : first + n] = value
    return ref.version


def test_what_users_do_with_any_array(three: LocalCluster) -> None:
    content = np.arange(N, dtype=np.int64)
    ref = clamor.put(content, home="spread", name="spread")
    assert homes_of(ref) == set(three.node_ids)
    assert np.array_equal(ref.get(), content)
    (info,) = [info for info in clamor.variables() if info.name == "spread"]
    assert set(info.nodes) == homes_of(ref)
    assert info.nbytes == content.nbytes
    before = ref.snapshot()
    old = ref.get()
    # Changes in several pieces, here and elsewhere: each reader sees all of a version.
    with clamor.update(ref) as array:
        array[0] = array[N - 1] = array[N // 2] = -1
    content[[0, N - 1, N // 2]] = -1
    border = (2 << 20) // 8  # a piece ends about here
    assert on(2, change, ref, border - 1000, 2000, 7) == 2
    content[border - 1000 : border + 1000] = 7
    assert ref.refresh().version == 2
    assert np.array_equal(ref.get(), content)
    assert np.array_equal(on(1, lambda ref: np.array(ref.get()), ref), content)
    assert np.array_equal(old, np.arange(N))
    assert np.array_equal(before.get(), old)
    assert np.array_equal(ref.at(0).get(), old)
    assert int(ref.at(1).get()[border]) == border
    # Rows from all over.
    ids = np.random.default_rng(1).integers(0, N, 5000)
    assert np.array_equal(
        on(1, lambda ref, ids: clamor.gather(ref.get(), ids), ref, ids), content[ids]
    )
    assert np.array_equal(on(2, lambda ref, ids: ref.get()[ids], ref, ids), content[ids])
    clamor.prefetch(ref.get()[border - 5000 : border + 5000])
    clamor.add_at(ref, ids, 3)
    np.add.at(content, ids, 3)
    assert np.array_equal(ref.get(), content)
    # Two variables, one commit.
    other = clamor.put(np.zeros(1000))
    with clamor.transaction(ref, other) as (x, y):
        x[5] = 55
        y[5] = 55
    assert (int(ref.get()[5]), float(other.get()[5])) == (55, 55.0)
    content[5] = 55
    assert np.array_equal(clamor.open("spread").get(), content)
    shown = clamor.block_map(ref, "present", buckets=24)
    assert set(shown) == set(three.node_ids)
    assert sum(int(counts.sum()) for counts in shown.values()) >= content.nbytes // 4096
    ref.free()
    with pytest.raises(errors.FreedError):
        ref.get()
    assert int(old[3]) == 3  # what is read stays


def test_rows_of_tables_cross_pieces(three: LocalCluster) -> None:
    table = np.random.default_rng(0).random((6000, 125))  # rows of 1,000 bytes
    ref = clamor.put({"table": table, "name": "x"}, home="spread")
    ids = np.arange(0, 6000, 7)
    assert np.array_equal(on(1, lambda ref: np.array(ref.get()["table"]), ref), table)
    found = on(2, lambda ref, ids: ref.get()["table"][ids], ref, ids)
    assert np.array_equal(found, table[ids])
    assert ref.get()["name"] == "x"


def home_bytes() -> int:
    return sum(node.engine.home_bytes for node in clamor.stats().nodes)


def test_what_nobody_has_written_takes_no_memory(three: LocalCluster) -> None:
    before = home_bytes()
    ref = clamor.zeros(24 << 30, np.uint8, home="spread")
    assert homes_of(ref) == set(three.node_ids)
    assert len(ref._piece_versions()) >= 24
    assert home_bytes() - before <= 4096  # the stream's block
    assert change(ref, 20 << 30, 5000, 7) == 1
    assert home_bytes() - before <= 4 * 4096
    assert on(1, lambda ref: int(ref.get()[(20 << 30) + 4999]), ref) == 7
    ref.free()


def test_zeros_that_this_node_has_no_room_for_are_spread(
    three: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as small:
        small.setattr("clamor_ray._objects.memory.available_bytes", lambda: 8 << 20)
        large, little = clamor.zeros(N, np.int64), clamor.zeros(N // 10, np.int64)
    assert homes_of(large) == set(three.node_ids)
    assert homes_of(little) == {three.node_ids[0]}
    assert on(1, change, large, N - 10, 10, 3) == 1
    assert int(large.refresh().get()[N - 1]) == 3


def test_pieces_are_homed_where_they_are_first_written(three: LocalCluster) -> None:
    ref = clamor.zeros(N, np.int64, home="writers")
    pieces = ref._piece_versions()
    rows = [(piece.base_address - ref._base_address) // 8 for piece in pieces]
    for index in (1, 2):  # each writes two pieces; then somebody else does
        for at in (4 * index, 4 * index + 1):
            on(index, change, ref.at(), rows[at], 100, index)
    on(1, change, ref.at(), rows[8], 7, 5)
    nodes = {server_id_of(node): i for i, node in enumerate(three.node_ids)}
    rpc = process_sessions.current().rpc
    homes = {at: nodes[rpc.lookup(pieces[at].region).homes[0]] for at in (4, 5, 8, 9)}
    assert homes == {4: 1, 5: 1, 8: 2, 9: 2}
    expected = np.zeros(N, np.int64)
    for index in (1, 2):
        for at in (4 * index, 4 * index + 1):
            expected[rows[at] : rows[at] + 100] = index
    expected[rows[8] : rows[8] + 7] = 5
    for index in range(3):
        assert np.array_equal(on(index, lambda ref: np.array(ref.get()), ref.at()), expected)
    assert not ref.at(0).get().any()


def test_a_shared_object_stays_where_it_is_or_is_copied(three: LocalCluster) -> None:
    import ray

    object_ref = ray.put(np.arange(N))
    with pytest.raises(ValueError, match="copies nothing") as caught:
        clamor.share(object_ref, home="spread")
    assert "clamor.put(ray.get(object_ref), home='spread')" in str(caught.value)
    assert homes_of(clamor.share(object_ref)) == {three.node_ids[0]}
    copied = clamor.put(ray.get(object_ref), home="spread")  # as the error says
    assert homes_of(copied) == set(three.node_ids)
    assert on(1, lambda ref: int(ref.get()[N - 1]), copied) == N - 1


def test_a_hash_map(three: LocalCluster) -> None:
    keys = np.arange(100_000)
    m = clamor.HashMap.build(keys, keys * 3.0, home="spread")
    assert homes_of(m._ref) == set(three.node_ids)
    some = np.random.default_rng(3).integers(0, len(keys), 2000)
    assert np.array_equal(on(1, lambda m, some: m.get(some), m, some), some * 3.0)
    with clamor.update(m) as changed:
        changed[some[:10]] = 7.0
    found = on(2, lambda m, some: m.get(some), m, some[:10])
    assert np.array_equal(found, np.full(10, 7.0))


def test_the_first_commit_to_a_block_wins(three: LocalCluster) -> None:
    ref = clamor.zeros(N, np.int64, home="spread")
    began = ref.snapshot()
    assert change(ref, 10, 1, 1) == 1
    with pytest.raises(errors.CommitConflict), clamor.update(began) as array:
        array[10] = 2
    with clamor.update(began) as array:  # another block, of another piece
        array[N - 1] = 3
    newest = ref.at()
    assert newest.version == 2
    assert (int(newest.get()[10]), int(newest.get()[N - 1])) == (1, 3)


def test_it_goes_when_nobody_refers_to_it(three: LocalCluster) -> None:
    ref = clamor.put(np.arange(N), home="spread")
    regions = {ref._region, *(piece.region for piece in ref._piece_versions())}

    def there() -> set[int]:
        return regions & {each.region for node in clamor.stats().nodes for each in node.regions}

    assert len(there()) == len(regions) - 1  # its own has no bytes
    del ref
    until(lambda: not there())
    assert not regions & {info.region for info in clamor.variables()}
    with pytest.raises(ValueError, match="home is 'spread'"):
        clamor.put(np.zeros(1000), home="elsewhere")  # type: ignore[arg-type]


def test_what_tasks_add_is_applied_at_the_home_of_each_piece(
    three: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no node gets what is added to all pieces."""
    asked: list[Any] = []
    real = scatter_add_commit._commit

    def commit(session: Any, commit_id: int, writes: Any, began_s: float) -> Any:
        asked.append(list(writes))
        return real(session, commit_id, writes, began_s)

    monkeypatch.setattr(scatter_add_commit, "_commit", commit)
    ref = clamor.zeros(N, np.float64, home="spread")
    other = clamor.zeros((N // 10, 5), np.float64, home="spread")  # rows lie in two pieces
    ids = np.random.default_rng(2).integers(0, N, (6, 50_000))
    numbers = clamor.from_numpy(np.arange(6), partitions=6)

    def step(some: Any, ids: Any, variable: Any, crossing: Any) -> Any:
        for number in some:
            clamor.add_at(variable, ids[number], np.arange(50_000.0))
            clamor.add_at(crossing, ids[number] // 10, 1.0)
        return some

    numbers.map_batches(step, ids, ref, other).execute()
    (writes,) = asked
    staged_at = {write.region: write.staged_at for write in writes}
    pieces = [piece.region for piece in ref._piece_versions()]
    assert len(writes) == len(staged_at)
    rpc = process_sessions.current().rpc
    homes = {region: rpc.lookup(region).homes[0] for region in pieces}
    assert len(set(homes.values())) == 3
    assert {region: staged_at[region] for region in pieces} == homes
    assert (ref.refresh().version, other.refresh().version) == (1, 1)
    expected, counted = np.zeros(N), np.zeros((N // 10, 5))
    for each in ids:
        np.add.at(expected, each, np.arange(50_000.0))
        np.add.at(counted, each // 10, 1.0)
    assert np.array_equal(ref.get(), expected)
    assert np.array_equal(on(1, lambda ref: np.array(ref.get()), other), counted)
    # All of it, and its rows.
    numbers.map_batches(lambda some, w: (clamor.add(w, np.ones(N)), some)[1], ref).execute()
    expected += 6
    assert np.array_equal(on(2, lambda ref: np.array(ref.get()), ref.refresh()), expected)


def test_a_collection_reads_a_version_of_it(three: LocalCluster) -> None:
    """However many commits come after."""
    ref = clamor.put(np.ones(N), home="spread")
    rows = range(0, N, N // 100)
    found = clamor.from_items(rows).map(lambda row: float(ref.get()[row]))
    with clamor.update(ref) as array:
        array[:] = 2.0
    assert sum(found.collect()) == len(rows)
