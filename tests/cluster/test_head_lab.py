"""The head of the cluster is killed and started again, while a session lives on other nodes.

With Ray's state in Redis (GCS fault tolerance) it goes on. Without, Ray ends what there was.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from tests.cluster.test_named_sessions import of_scope
from tests.conftest import ANSWER_S, until
from tests.support.lab import require_lab
from tests.support.lab.cluster import node_resource
from tests.support.lab.restarted_head import HeadLab, restarted_head

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

N = 4
WORDS = 5 * 10**5
DRIVER, WORKER = 1, 2  # whose nodes these are
AWAY_S = 20.0  # a call that needs the head waits for it; all others take far less


@pytest.fixture(scope="module")
def lab() -> Iterator[HeadLab]:
    require_lab("local")
    with restarted_head(3, redis=True) as lab:
        lab.connect(DRIVER)
        clamor.init()
        yield lab
        clamor.shutdown(force=True)


class Reader:
    """An actor on another node than the driver's."""

    def hold(self, refs: list[Any]) -> int:
        self.refs = refs
        self.resident = refs[0].get()
        return int(self.resident.sum())

    def put(self) -> list[Any]:
        return [clamor.put(np.full(WORDS, i)) for i in range(N)]

    def sums(self, refs: list[Any]) -> list[int]:
        return [int(ref.refresh().get().sum()) for ref in refs]

    def resident_sum(self) -> int:
        return int(self.resident.sum())

    def add(self, ref: Any, index: int) -> int:
        with clamor.update(ref) as array:
            array[index] += 1
        return int(ref.refresh().get()[index])


def on(index: int, what: Any) -> Any:
    import ray

    return ray.remote(what).options(num_cpus=0, resources={node_resource(index): 0.01})


def answer(reference: Any, timeout_s: float = ANSWER_S) -> Any:
    import ray

    return ray.get(reference, timeout=timeout_s)


def sums(refs: list[Any]) -> list[int]:
    return [int(ref.refresh().get().sum()) for ref in refs]


def add(ref: Any, index: int) -> int:
    with clamor.update(ref) as array:
        array[index] += 1
    return int(ref.refresh().get()[index])


def alive() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def nodes_of(refs: list[Any]) -> set[str]:
    homes = {info.region: info.nodes for info in clamor.variables()}
    return {node for ref in refs for node in homes[ref._region]}


@pytest.mark.parametrize("whole", [False, True], ids=["gcs", "head"])
def test_a_session_goes_on_while_the_head_is_away(lab: HeadLab, whole: bool) -> None:
    reader = on(WORKER, Reader).remote()
    refs = [clamor.put(np.full(WORDS, i)) for i in range(N)]
    assert answer(reader.hold.remote(refs)) == 0
    theirs = answer(reader.put.remote())
    assert add(refs[1], 0) == 2  # of version 1, before
    expected = [i * WORDS for i in range(N)]
    expected[1] += 1
    with lab.head_away() if whole else lab.gcs_away():
        # Nobody of ours needs it for that: blocks that are here, blocks of others, commits.
        assert answer(reader.resident_sum.remote(), AWAY_S) == 0
        assert answer(reader.sums.remote(refs), AWAY_S) == expected
        assert sums(theirs) == [i * WORDS for i in range(N)]
        assert answer(reader.add.remote(refs[2], 5), AWAY_S) == 3
        assert add(theirs[3], 7) == 4
        expected[2] += 1
        made = clamor.put(np.full(WORDS, 9), name=f"made while it is away {whole}")
        assert answer(reader.sums.remote([made]), AWAY_S) == [9 * WORDS]
    # What was committed before and meanwhile is there, and all goes on.
    assert sums(refs) == answer(reader.sums.remote(refs)) == expected
    assert sums(theirs) == [0, WORDS, 2 * WORDS, 3 * WORDS + 1]
    assert int(clamor.open(f"made while it is away {whole}").get().sum()) == 9 * WORDS
    assert answer(reader.add.remote(refs[0], 1)) == 1
    expected[0] += 1
    until(lambda: set(lab.node_ids) <= alive(), ANSWER_S)
    # Nodes that are new get their page servers: the next head, and another one.
    for index in (0, lab.add_node(num_cpus=1, object_store_memory=150 << 20)):
        task = on(index, sums)
        assert answer(task.remote(refs)) == expected
    moved = clamor.drain(lab.node_ids[WORKER], timeout=ANSWER_S)
    assert moved.moved >= N
    assert lab.node_ids[WORKER] not in nodes_of(theirs)
    assert clamor.cancel_drain(lab.node_ids[WORKER])
    assert sums(theirs) == [0, WORDS, 2 * WORDS, 3 * WORDS + 1]


def test_registry_and_page_server_are_killed_while_it_is_away(lab: HeadLab) -> None:
    """Ray starts them again when the head is back. Calls wait for that."""
    reader, writer = on(WORKER, Reader).remote(), on(DRIVER, Reader).remote()
    refs = answer(reader.put.remote())
    assert answer(writer.sums.remote(refs)) == [i * WORDS for i in range(N)]
    resident = refs[0].get()
    assert int(resident.sum()) == 0
    registry = int(process_sessions.current().rpc.ping())
    server = lab.page_server_pid(WORKER)
    with lab.gcs_away():
        os.kill(registry, signal.SIGKILL)
        os.kill(server, signal.SIGKILL)
        assert int(resident.sum()) == 0
        # Who waits gets an error of ours in its time, and goes on afterwards.
        with pytest.raises(errors.WaitTimeoutError, match="did not answer within 2 s"):
            process_sessions.current().rpc.ping(timeout_s=2.0)
        adding = writer.add.remote(refs[1], 0)  # a new task would have to be known to Ray's GCS
    assert answer(adding) == 2
    assert sums(refs) == [0, WORDS + 1, 2 * WORDS, 3 * WORDS]
    assert answer(reader.sums.remote(refs)) == [0, WORDS + 1, 2 * WORDS, 3 * WORDS]
    assert int(process_sessions.current().rpc.ping()) != registry
    assert lab.page_server_pid(WORKER) != server


def make_session(name: str) -> str:
    scope = str(clamor.init(session=name, lifetime="detached").scope)
    clamor.put(np.arange(WORDS), name="index")
    return scope


class Attached:
    """An actor that uses a session by its name."""

    def attach(self, name: str) -> int:
        clamor.init(session=name)
        self.ref = clamor.open("index")
        return int(self.ref.get()[7])

    def change(self) -> str:
        try:
            clamor.add_at(self.ref, [7], 1)
        except errors.ClamorError as error:
            return type(error).__name__
        return ""


def put_on_the_head() -> tuple[Any, Any]:
    """What nobody else will have, and what a copy of is elsewhere."""
    return clamor.put(np.full(WORDS, 1)), clamor.put(np.full(WORDS, 2), redundancy="raid1")


def test_what_was_on_the_head_ends_with_it(lab: HeadLab) -> None:
    """Its variables, and sessions that were made there: a journal is on one node."""
    plain, copied = answer(on(0, put_on_the_head).remote())
    assert nodes_of([plain]) == {lab.node_ids[0]}
    scope = answer(on(0, make_session).remote("of the head"))
    user = on(WORKER, Attached).remote()
    assert answer(user.attach.remote("of the head")) == 7
    with lab.head_away():
        pass
    assert int(copied.get().sum()) == 2 * WORDS
    with pytest.raises(errors.HomeLostError):
        clamor.prefetch(plain)
    until(lambda: answer(user.change.remote()) == "SessionEndedError", ANSWER_S)
    until(lambda: not of_scope(scope), ANSWER_S)
    again = answer(on(0, make_session).remote("of the head"))
    assert again != scope
    clamor.shutdown(session="of the head")
    until(lambda: not of_scope(again), ANSWER_S)
