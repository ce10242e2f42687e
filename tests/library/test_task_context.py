"""What an attempt read: exact where the trap can tell, and never less than what was touched."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray._tasks import task_context
from clamor_ray._tasks.task_context import TaskContext, recording
from tests.conftest import ANSWER_S, ClamorCluster

pytestmark = pytest.mark.lab

PER_BLOCK = 512
N_BLOCKS = 4096


@pytest.fixture(params=[0, 1], ids=["home", "away"])
def node(request: pytest.FixtureRequest) -> int:
    """Where the attempt runs; the variable's home is node 0."""
    return int(request.param)


@pytest.fixture
def ref(clamor_cluster: ClamorCluster) -> Iterator[Any]:
    """Block i + 1 of the region is row i: the first block is the pickle stream's."""
    ref = clamor.put(np.arange(N_BLOCKS * PER_BLOCK).reshape(N_BLOCKS, PER_BLOCK))
    assert ref._plan.buffers[0][0] == 4096
    yield ref
    clamor.free(ref)


def blocks_of(attempt: TaskContext, ref: Any) -> list[int] | None:
    """Without the stream's; None: all."""
    from pyroaring import BitMap

    (read,) = (read for read in attempt.reads() if read[:2] == (ref._region, ref.version))
    if read.blocks is None:
        return None
    blocks = list(BitMap.deserialize(read.blocks))
    assert blocks[0] == 0, "the stream's block"
    return [block - 1 for block in blocks[1:]]


def reads_of(reads: list[Any], *refs: Any) -> list[Any]:
    """Those of these variables: a worker may have arrays of others, in functions of other files'
    tests, which Ray keeps."""
    return [read for read in reads if read.region in {ref._region for ref in refs}]


def run(cluster: ClamorCluster, node: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """As a task that the library knows nothing of."""
    import ray

    from tests.support.lab.cluster import node_resource

    task = ray.remote(function).options(num_cpus=0, resources={node_resource(node): 0.001})
    return ray.get(task.remote(*arguments), timeout=ANSWER_S)


# ------------------------------------------------------------------ by every way


def by_get(ref: Any) -> Any:
    with recording(None) as attempt:
        x = ref.get()
        assert int(x[7, 0] + x[1000:1003, 3].sum()) > 0
    return blocks_of(attempt, ref)


def by_argument(ref: Any) -> Any:
    @clamor.remote
    def unused() -> None: ...

    from clamor_ray._tasks.remote import resolving

    def touch(x: Any) -> int:
        return int(x[7, 0] + x[1000:1003, 3].sum())

    with recording(None) as attempt:
        assert resolving(touch)(ref) > 0
    return blocks_of(attempt, ref)


def by_two_opens(ref: Any) -> Any:
    with recording(None) as attempt:
        first = int(ref.get()[7, 0])
        second = ref.get()
        assert first + int(second[1000:1003, 3].sum()) > 0
    return blocks_of(attempt, ref)


def by_another_thread(ref: Any) -> Any:
    def touch() -> None:
        found.append(int(ref.get()[7, 0]))

    found: list[int] = []
    with recording(None) as attempt:
        thread = threading.Thread(target=touch)
        thread.start()
        thread.join(ANSWER_S)
        assert int(ref.get()[1000:1003, 3].sum()) + found[0] > 0
    return blocks_of(attempt, ref)


def by_latest(ref: Any) -> Any:
    with recording(None) as attempt:
        mine = ref.at(0)._thawed().refresh()._latest()
        x = mine.get()
        assert int(x[7, 0] + x[1000:1003, 3].sum()) > 0
    return blocks_of(attempt, ref)


def by_private_copy(ref: Any) -> Any:
    with recording(None) as attempt:
        x = ref.get("c")
        x[7, 0] = 5
        assert int(x[1000:1003, 3].sum()) > 0
    return blocks_of(attempt, ref)


def by_aio(ref: Any) -> Any:
    async def read() -> int:
        x = await clamor.aio.get(ref)
        return int(x[7, 0] + x[1000:1003, 3].sum())

    with recording(None) as attempt:
        assert asyncio.run(read()) > 0
    return blocks_of(attempt, ref)


def by_gather(ref: Any) -> Any:
    with recording(None) as attempt:
        rows = clamor.gather(ref, [1001, 7, 1000, 1002, 7])
        assert rows[1, 0] == 7 * PER_BLOCK
    return blocks_of(attempt, ref)


def by_gather_of_small_rows(ref: Any) -> Any:
    with recording(None) as attempt:
        x = ref.get().reshape(-1, 8)
        rows = asyncio.run(clamor.aio.gather(x, np.array([7, 1000, 1001, 1002]) * 64))
        assert rows[0, 0] == 7 * PER_BLOCK
    return blocks_of(attempt, ref)


WAYS = [
    by_get,
    by_argument,
    by_two_opens,
    by_another_thread,
    by_latest,
    by_private_copy,
    by_aio,
    by_gather,
    by_gather_of_small_rows,
]


@pytest.mark.parametrize("way", WAYS)
def test_just_what_was_touched(
    clamor_cluster: ClamorCluster, node: int, ref: Any, way: Callable[[Any], Any]
) -> None:
    assert run(clamor_cluster, node, way, ref) == [7, 1000, 1001, 1002]


@pytest.mark.parametrize("way", [by_get, by_two_opens, by_private_copy, by_gather])
def test_never_less_with_any_trap(
    clamor_cluster: ClamorCluster, trap: str, ref: Any, way: Callable[[Any], Any]
) -> None:
    got = clamor_cluster.run_in_trap(trap, way, ref)
    assert {7, 1000, 1001, 1002} <= set(got)
    if trap != "sigsegv" or way is by_gather:
        assert len(got) == 4
    assert len(got) < N_BLOCKS / 8


# ------------------------------------------------------------------ what lives on


def live_on(ref: Any) -> Any:
    """Each attempt sees what it touched, though the object was opened by an earlier one."""
    found = []
    with recording(None) as attempt:
        cached = ref.get()
        assert cached[7, 0] == 7 * PER_BLOCK
    found.append(blocks_of(attempt, ref))
    assert cached[2000, 0] > 0  # between attempts
    with recording(None) as attempt:
        assert cached[100, 0] == 100 * PER_BLOCK
    found.append(blocks_of(attempt, ref))
    with recording(None) as attempt:
        assert ref.get()[200, 0] == 200 * PER_BLOCK
        assert cached[300, 0] == 300 * PER_BLOCK
        del cached
    found.append(blocks_of(attempt, ref))
    return found


def test_objects_of_earlier_attempts_are_watched(
    clamor_cluster: ClamorCluster, node: int, ref: Any
) -> None:
    assert run(clamor_cluster, node, live_on, ref) == [[7], [100], [200, 300]]


def opened_before(ref: Any) -> Any:
    """Opened without exact reads, by which the kernel maps neighbours too."""
    cached = ref.get()
    assert cached[5, 0] > 0
    with recording(None) as attempt:
        assert cached[100, 0] + ref.get()[2000, 0] > 0
    return blocks_of(attempt, ref)


def test_mappings_that_were_not_exact_become_so(
    clamor_cluster: ClamorCluster, node: int, ref: Any
) -> None:
    assert run(clamor_cluster, node, opened_before, ref) == [100, 2000]


def nothing_is_read(ref: Any) -> Any:
    with recording(None) as attempt:
        clamor.prefetch(ref)
        assert ref._latest().version == 0
    return [read[:2] for read in attempt.reads() if read.blocks is None], blocks_of(attempt, ref)


def test_prefetching_is_not_reading(clamor_cluster: ClamorCluster, node: int, ref: Any) -> None:
    assert run(clamor_cluster, node, nothing_is_read, ref) == ([], [])


# ------------------------------------------------------------------ versions, maps, inline ones


def two_versions(ref: Any) -> Any:
    with recording(None) as attempt:
        old, new = ref.at(0).get(), ref.get()
        assert new[7, 0] == old[7, 0] + 1
        assert old[9, 0] == 9 * PER_BLOCK
    return blocks_of(attempt, ref.at(0)), blocks_of(attempt, ref)


def test_each_version_has_its_own(clamor_cluster: ClamorCluster, node: int, ref: Any) -> None:
    with clamor.update(ref) as x:
        x[7, 0] += 1
    assert run(clamor_cluster, node, two_versions, ref) == ([7, 9], [7])


def in_a_transaction(ref: Any) -> Any:
    with recording(None) as attempt:
        with clamor.update(ref) as x:
            x[60] = x[70, 0]
        assert attempt.commits == 1
    return blocks_of(attempt, ref.at(0))


def test_transactions_read_too(clamor_cluster: ClamorCluster, node: int, ref: Any) -> None:
    assert run(clamor_cluster, node, in_a_transaction, ref) == [60, 70]


def look_up(hm: Any, keys: list[int]) -> Any:
    with recording(None) as attempt:
        assert hm.get(keys).tolist() == [key * 2 for key in keys]
    return attempt.reads()


def test_look_ups_of_a_map(clamor_cluster: ClamorCluster, node: int) -> None:
    from pyroaring import BitMap

    keys = np.arange(200_000)
    hm = clamor.HashMap.build(keys, keys * 2)
    (read,) = reads_of(run(clamor_cluster, node, look_up, hm, [5]), hm.ref)
    blocks = BitMap.deserialize(read.blocks)
    assert (read.region, read.version) == (hm.ref._region, 0)
    assert 2 <= len(blocks) <= 4  # the stream and the header, and where the key is
    with clamor.update(hm) as table:
        table[5] = 10
        table[5] = 11
    changed = hm.ref.version
    assert changed == 1
    from clamor_ray._session import process_sessions

    dirty = BitMap.deserialize(process_sessions.current().rpc.changes(hm.ref._region, 0, 1))
    assert dirty & blocks, "who looked it up must be told"
    clamor.free(hm.ref)


def of_inline(small: Any, plain: Any) -> Any:
    cached = small.get()
    with recording(None) as attempt:
        assert plain.get() == {"a": 1}
    first = attempt.reads()
    del cached
    with recording(None) as attempt:
        assert small.get()[3] == 3
        with clamor.update(small) as x:
            x[0] = 9
    return first, attempt.reads()


def test_variables_in_their_references(clamor_cluster: ClamorCluster) -> None:
    small, plain = clamor.put(np.arange(10)), clamor.put({"a": 1})
    found = run(clamor_cluster, 1, of_inline, small, plain)
    first, second = (reads_of(each, small, plain) for each in found)
    # The first one's array is still alive: it counts.
    assert first == sorted([(small._region, 0, None), (plain._region, 0, None)])
    assert second == [(small._region, 0, None)]
    clamor.free(small)
    clamor.free(plain)


# ------------------------------------------------------------------ what cannot be exact


def in_a_child(ref: Any) -> Any:
    reader, writer = os.pipe()
    cached = ref.get()
    with recording(None) as attempt:
        child = os.fork()
        if not child:
            try:
                os.write(writer, int(cached[9, 0]).to_bytes(8, "little"))
            finally:
                os._exit(0)
        assert os.read(reader, 8) == (9 * PER_BLOCK).to_bytes(8, "little")
        os.waitpid(child, 0)
    with recording(None) as later:
        assert cached[7, 0] > 0
    return blocks_of(attempt, ref), later.reads()[0].blocks is None


def test_a_forked_child_may_have_read_all(
    clamor_cluster: ClamorCluster, node: int, ref: Any
) -> None:
    # A child that is gone reads nothing more.
    assert run(clamor_cluster, node, in_a_child, ref) == (None, False)


def child_that_opens(ref: Any) -> Any:
    reader, writer = os.pipe()
    with recording(None) as attempt:
        assert clamor.put(np.zeros(1)).get()[0] == 0
        child = os.fork()
        if not child:
            try:
                os.write(writer, int(ref.get()[9, 0]).to_bytes(8, "little"))
            finally:
                os._exit(0)
        assert os.read(reader, 8) == (9 * PER_BLOCK).to_bytes(8, "little")
        os.waitpid(child, 0)
    return blocks_of(attempt, ref)


def test_what_a_child_opens_counts(clamor_cluster: ClamorCluster, ref: Any) -> None:
    def attached_first(ref: Any) -> Any:
        clamor.init()
        ref.get()
        return child_that_opens(ref)

    assert run(clamor_cluster, 1, attached_first, ref) is None


def with_sets(ref: Any) -> Any:
    found = {}
    for read_set in ("coarse", "exact", "off"):
        with recording(None, read_set=read_set) as attempt:  # type: ignore[arg-type]
            assert ref.get()[100, 0] > 0
        found[read_set] = None if read_set == "off" else blocks_of(attempt, ref)
        assert bool(attempt.reads()) == (read_set != "off")
    return found


def test_coarse_is_more(clamor_cluster: ClamorCluster, ref: Any) -> None:
    found = run(clamor_cluster, 0, with_sets, ref)
    assert found["exact"] == [100]
    assert 100 in found["coarse"]
    assert len(found["coarse"]) > 1


def test_outside_of_an_attempt_nothing_is_recorded() -> None:
    assert task_context.current() is None
    assert not task_context.wants_exact()


# ------------------------------------------------------------------ by a client that says anything


class Client:
    """Gives the sets that a test says; notes what it was asked."""

    def __init__(self, mapped: Any, gone: Any = ()) -> None:
        self.mapped, self.gone = mapped, gone
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Callable[[int], Any]:
        def call(mapping_id: int) -> Any:
            self.asked.append(name)
            if isinstance(self.mapped, Exception) and name == "access_report_end":
                raise self.mapped
            runs = {"access_report_end": self.mapped, "evicted": self.gone}.get(name, ())
            return np.array(runs, np.uint64).reshape(-1, 2)

        return call


def read_by(client: Client, *tokens: int, ends: int | None = None) -> Any:
    from clamor_ray._native.client import Mapping
    from clamor_ray._objects.layout import Plan
    from clamor_ray._read.ref import GlobalRef

    plan = Plan(1 << 20, 100)
    ref: Any = GlobalRef(3, 5, 0x1100_0000_0000, 1 << 20, plan, "s", frozen=True)
    with recording(None) as attempt:
        for token in tokens:
            task_context.leased(client, token, Mapping(9, 0x1100_0000_0000, 1 << 20), ref)  # type: ignore[arg-type]
        if ends is not None:
            task_context.released(ends)
    return blocks_of(attempt, ref)


def test_what_was_evicted_counts() -> None:
    client = Client([(7, 2)], [(20, 1)])
    assert read_by(client, 1) == [6, 7, 19]
    begin = ["reads_exact", "evicted_begin", "access_report_begin"]
    # Asked for before the look it would miss what goes in between.
    assert client.asked == [*begin, "access_report_end", "evicted", "evicted_end"]


def test_leases_of_one_mapping_are_looked_at_once() -> None:
    client = Client([(7, 2)])
    assert read_by(client, 1, 2) == [6, 7]
    assert client.asked.count("access_report_end") == 1
    assert client.asked.count("access_report_drop") == 1
    assert client.asked.count("evicted_end") == 2


def test_a_lease_that_ends_is_looked_at_first() -> None:
    client = Client([(7, 2)])
    assert read_by(client, 1, ends=1) == [6, 7]
    assert client.asked.count("access_report_end") == 1


def test_where_reads_are_unknown_all_blocks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_by(Client(clamor.errors.ClosedError("closed")), 1) is None
    scanned = iter([100, 100])
    monkeypatch.setattr(task_context, "_reclaimed", lambda: next(scanned))
    assert read_by(Client([(7, 2)]), 1) == [6, 7]
    for looks in ([100, 101], [None, None]):  # pages were swapped out; nobody knows
        told = iter(looks)
        monkeypatch.setattr(task_context, "_reclaimed", lambda told=told: next(told))
        assert read_by(Client([(7, 2)]), 1) is None
