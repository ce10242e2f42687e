"""`clamor.gather` and `clamor.aio` through the page servers: what comes, and what moves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ANSWER_S, ClamorCluster, until
from tests.support.lab.cluster import node_resource
from tests.support.processes import stop

pytestmark = pytest.mark.lab

N, WIDTH = 40_000, 32  # rows of 256 bytes
TABLE = np.random.default_rng(0).integers(0, 1 << 60, (N, WIDTH))


def ids_of(n: int) -> Any:
    return np.random.default_rng(n).integers(-N, N, n)


def attach() -> str:
    return clamor.init().trap


@pytest.fixture(autouse=True, scope="module")
def page_servers(clamor_cluster: ClamorCluster) -> None:
    clamor_cluster.run(attach)


@pytest.fixture
def ref(clamor_cluster: ClamorCluster) -> Iterator[Any]:
    ref = clamor.put(TABLE)
    yield ref
    clamor.free(ref)


def gather_ref(refs: list[Any], ids: Any) -> Any:
    return clamor.gather(refs[0], ids)


def test_few_cold_rows_come_as_rows(clamor_cluster: ClamorCluster, ref: Any) -> None:
    ids = ids_of(300)
    before = clamor_cluster.engine(1)
    got = clamor_cluster.run(gather_ref, [ref], ids)
    np.testing.assert_array_equal(got, TABLE[ids])
    after = clamor_cluster.engine(1)
    assert after.rows_fetched - before.rows_fetched >= 290  # some ids name one row twice
    assert after.faults - before.faults <= 4  # the stream's
    # Rows of 256 bytes and their headers, not blocks of 4096.
    assert after.bytes_received - before.bytes_received < 300 * 1024
    assert clamor_cluster.engine(0).rows_served >= 290


def test_rows_that_lie_dense_come_as_blocks(clamor_cluster: ClamorCluster, ref: Any) -> None:
    ids = np.arange(5000, 15_000)
    before = clamor_cluster.engine(1)
    np.testing.assert_array_equal(clamor_cluster.run(gather_ref, [ref], ids), TABLE[ids])
    after = clamor_cluster.engine(1)
    received = after.bytes_received - before.bytes_received
    assert after.blocks_fetched - before.blocks_fetched >= 600
    assert received <= 1.2 * 10_000 * 256


def views(refs: list[Any], ids: Any, out: bool) -> list[Any]:
    table = refs[0].get()
    half = np.abs(ids) // 2
    sources = [
        (table[::2], half),
        (table[::-1], ids),
        (table[:, 4:9], ids.reshape(5, -1)),
        (table[:, ::5], ids),
        (table.view("i4,f4,S8")[::3], half // 2),
        (table[:, 0], ids),
        (table, np.int64(7)),
    ]
    if not out:
        return [clamor.gather(view, some) for view, some in sources]
    filled = []
    for view, some in sources:
        room = np.empty(np.shape(some) + view.shape[1:], view.dtype)
        assert clamor.gather(view, some, out=room) is room
        filled.append(room)
    return filled


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("node", [0, 1])
def test_views(clamor_cluster: ClamorCluster, ref: Any, node: int, out: bool) -> None:
    ids = ids_of(200)
    half = np.abs(ids) // 2
    expected = [
        TABLE[::2][half],
        TABLE[::-1][ids],
        TABLE[:, 4:9][ids.reshape(5, -1)],
        TABLE[:, ::5][ids],
        TABLE.view("i4,f4,S8")[::3][half // 2],
        TABLE[:, 0][ids],
        TABLE[7],
    ]
    for got, wanted in zip(
        clamor_cluster.run(views, [ref], ids, out, node=node), expected, strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
        assert got.dtype == wanted.dtype


def in_a_transaction(refs: list[Any]) -> Any:
    with clamor.update(refs[0]) as x:
        x[5] = -1
        x[20_000] = -2
        seen = clamor.gather(x, [4, 5, 20_000, -1])
        old = clamor.gather(refs[0], [5, 20_000])
    return seen, old, clamor.gather(refs[0], [5, 20_000])


def test_a_transaction_sees_what_it_wrote(clamor_cluster: ClamorCluster, ref: Any) -> None:
    seen, old, new = clamor_cluster.run(in_a_transaction, [ref])
    np.testing.assert_array_equal(seen[[0, 3]], TABLE[[4, -1]])
    assert seen[1:3, 0].tolist() == new[:, 0].tolist() == [-1, -2]
    np.testing.assert_array_equal(old, TABLE[[5, 20_000]])


def out_of_bounds(refs: list[Any], wrong: list[Any]) -> list[str]:
    array, said = refs[0].get(), []
    for ids in wrong:
        try:
            clamor.gather(array, ids)
        except IndexError as error:
            said.append(str(error))
    return said


def test_ids_out_of_range_move_nothing(clamor_cluster: ClamorCluster, ref: Any) -> None:
    clamor_cluster.run(gather_ref, [ref], [0])  # the stream is there
    before = clamor_cluster.engine(1)
    wrong = [[0, N], [-N - 1, 5], [0, 1 << 62], [1.5]]
    said = clamor_cluster.run(out_of_bounds, [ref], wrong)
    assert len(said) == len(wrong)
    assert said[0] == f"index {N} is out of bounds for axis 0 with size {N}"
    after = clamor_cluster.engine(1)
    assert after.rows_fetched == before.rows_fetched
    assert after.blocks_fetched == before.blocks_fetched


def take_arrow(refs: list[Any], ids: Any) -> Any:
    return clamor.gather(refs[0], ids).to_pydict()


def test_arrow_tables(clamor_cluster: ClamorCluster) -> None:
    table = pa.table({"a": np.arange(500_000), "b": [f"{i:09}" for i in range(500_000)]})
    ref = clamor.put(table)
    ids = np.random.default_rng(1).integers(0, 500_000, 40)
    before = clamor_cluster.engine(1)
    assert clamor_cluster.run(take_arrow, [ref], ids) == table.take(pa.array(ids)).to_pydict()
    after = clamor_cluster.engine(1)
    assert after.blocks_fetched - before.blocks_fetched < 400  # of 2,600
    assert after.prefetched_blocks > before.prefetched_blocks
    clamor.free(ref)


# ------------------------------------------------------------------ coroutines


class Replica:
    """As a Ray Serve replica: one loop, several requests at a time."""

    async def __init__(self) -> None:
        self.ticks = 0
        self.heart = asyncio.ensure_future(self.beat())

    async def beat(self) -> None:
        while True:
            self.ticks += 1
            await asyncio.sleep(0.001)

    async def count(self) -> int:
        return self.ticks

    async def rows(self, refs: list[Any], ids: Any) -> Any:
        return await clamor.aio.gather(refs[0], ids)

    async def all(self, refs: list[Any]) -> int:
        table = await clamor.aio.get(refs[0])
        await clamor.aio.prefetch(table)
        return int(table.sum())

    async def gives_up(self, refs: list[Any], ids: Any) -> str:
        try:
            await asyncio.wait_for(clamor.aio.gather(refs[0], ids), 0.05)
        except asyncio.TimeoutError:
            return "gave up"
        return "got them"


@pytest.mark.parametrize("method", ["rows", "all"])
def test_the_loop_of_an_actor_goes_on(clamor_cluster: ClamorCluster, ref: Any, method: str) -> None:
    import ray

    place = {"num_cpus": 0, "resources": {node_resource(1): 0.001}}
    others = clamor_cluster.engine(1).mappings  # of idle workers that earlier tests used
    actor = ray.remote(Replica).options(**place).remote()

    def count() -> int:
        return ray.get(actor.count.remote(), timeout=ANSWER_S)

    ids = ids_of(500)
    arguments = ([ref], ids) if method == "rows" else ([ref],)
    ray.get(actor.rows.remote([ref], [0]), timeout=ANSWER_S)  # attached, and the stream is there
    home = clamor_cluster.lab.page_server_pid(0)
    stop(home)  # its engine's threads, too: nothing is answered
    try:
        answer = getattr(actor, method).remote(*arguments)
        gave_up = actor.gives_up.remote([ref], ids)
        begin = count()
        until(lambda: count() > begin + 200)
        assert ray.get(gave_up, timeout=ANSWER_S) == "gave up"
        ready, _ = ray.wait([answer], timeout=0)
        assert not ready  # all of these turns it was held up
    finally:
        os.kill(home, signal.SIGCONT)
    got = ray.get(answer, timeout=ANSWER_S)
    np.testing.assert_array_equal(got, TABLE[ids] if method == "rows" else TABLE.sum())
    ray.kill(actor)
    until(lambda: clamor_cluster.engine(1).mappings <= others)


def test_a_home_that_is_gone(clamor_cluster: ClamorCluster, ref: Any) -> None:
    clamor.free(ref)
    with pytest.raises(errors.FreedError):
        clamor.gather(ref, [1])
