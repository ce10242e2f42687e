"""A node is killed while it is drained, by `clamor.drain` or by Ray, at any moment of that."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.messages import DrainResult
from clamor_ray._protocol.ray_state import alive_nodes
from tests.cluster.test_ray_nodes import drain_node
from tests.conftest import ANSWER_S, until
from tests.support.lab import LocalCluster, local_cluster, require_lab, worker_logs
from tests.support.lab.cluster import node_resource

pytestmark = pytest.mark.lab

LONG = (pytest.mark.soak, pytest.mark.timeout(1200))  # for `make soak`
N = 8
WORDS = 5 * 10**5
DRAIN_S = 150.0  # far more than anything here takes: who needs it all has hung
SOON_S = 60.0
MOST_PAUSE_S = 0.05


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


def on(index: int, function: Any, *arguments: Any) -> Any:
    import ray

    task = ray.remote(function).options(num_cpus=0, resources={node_resource(index): 0.01})
    return ray.get(task.remote(*arguments), timeout=ANSWER_S)


def put_there() -> tuple[list[Any], list[Any], list[Any]]:
    """Variables that nobody will have read, that others have read, and that have redundancy."""
    plain, read = ([clamor.put(np.full(WORDS, i)) for i in range(N)] for _ in range(2))
    return plain, read, [clamor.put(np.full(WORDS, i), redundancy="raid1") for i in range(N)]


def are_whole(refs: list[Any]) -> list[bool]:
    """Which of them are; the others have raised `HomeLostError`."""
    found = []
    for i, ref in enumerate(refs):
        try:
            clamor.prefetch(ref, timeout=SOON_S)
            assert (ref.get() == i).all()
            found.append(True)
        except errors.HomeLostError:
            found.append(False)
    return found


def homed_elsewhere(refs: list[Any], node_id: str) -> list[bool]:
    nodes = {info.region: info.nodes for info in clamor.variables()}
    return [node_id not in nodes[ref._region] for ref in refs]


def ends_of(node_id: str, ends: list[Any]) -> None:
    try:
        ends.append(clamor.drain(node_id, timeout=DRAIN_S))
    except errors.ClamorError as error:
        ends.append(error)


class Holder:
    """Without it Ray's drain would end the node at once."""

    def ping(self) -> bool:
        return True


def a_round(lab: LocalCluster, rng: random.Random, by_ray: bool) -> str:
    """Kills one node while it is drained; says how the drain ended."""
    import ray

    began_s = time.time()
    victim = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    node_id = lab.node_ids[victim]
    plain, read, raid = on(victim, put_there)
    assert all(on(1, are_whole, read))
    before = clamor.stats().moves.finished
    n_moves = rng.randrange(3 * N)
    ends: list[Any] = []
    drain = threading.Thread(target=ends_of, args=(node_id, ends))
    holder = ray.remote(Holder).options(num_cpus=0, resources={node_resource(victim): 0.01})
    if by_ray:
        held = holder.remote()
        assert ray.get(held.ping.remote(), timeout=ANSWER_S)
        assert drain_node(node_id, int((time.time() + 10 * DRAIN_S) * 1000))
    else:
        drain.start()
    until(lambda: clamor.stats().moves.finished >= before + n_moves or bool(ends), SOON_S)
    time.sleep(rng.uniform(0.0, MOST_PAUSE_S))
    safe = homed_elsewhere(plain, node_id)
    lab.kill_node(victim)
    found = {index: on(index, are_whole, plain) for index in (0, 1)}
    assert found[0] == found[1]
    assert all(is_whole for is_whole, was_safe in zip(found[0], safe, strict=True) if was_safe)
    for index in (0, 1):
        assert all(on(index, are_whole, [*read])), "another node has read them"
        assert all(on(index, are_whole, [*raid])), "they have redundancy"
    # What was safe is changed as before, too.
    for i, ref in enumerate(plain):
        if found[0][i]:
            clamor.add_at(ref, [0], 1)
            assert int(ref.refresh().get()[0]) == i + 1
    until(lambda: node_id not in alive_nodes(), SOON_S)  # the registry may know it before Ray does
    with pytest.raises(errors.NoSuchNodeError):
        clamor.drain(node_id)
    said = f"round: {n_moves} moves, {sum(safe)} safe, {sum(found[0])} whole of {N}"
    if by_ray:
        # Between the look at what is safe and the kill the rest may have gone, too.
        if not all(found[0]):
            text = f"Ray takes node {node_id} away, and it was not empty. Node {node_id} was lost"
            until(lambda: worker_logs.have(text, began_s), SOON_S)
        return said
    drain.join(SOON_S)
    assert ends, "the drain has not ended"
    (end,) = ends
    if isinstance(end, DrainResult):
        assert all(found[0]), end
    else:
        assert isinstance(end, errors.NodeLostError), end
        assert f"Node {node_id} was lost while it was drained" in str(end)
    return f"{said}; {end}"


def rounds(lab: LocalCluster, seed: int, n_rounds: int) -> None:
    rng = random.Random(seed)
    for turn in range(n_rounds):
        print(a_round(lab, rng, by_ray=turn % 2 == 1), flush=True)
    # A drain of a node that lives goes on as ever.
    refs = on(2, put_there)[0]
    assert clamor.drain(lab.node_ids[2], timeout=DRAIN_S).moved >= N
    assert all(homed_elsewhere(refs, lab.node_ids[2]))
    assert clamor.cancel_drain(lab.node_ids[2])
    assert all(on(1, are_whole, refs))


@pytest.mark.parametrize(
    ("seed", "n_rounds"), [(48, 2), pytest.param(2, 30, marks=LONG)], ids=["gate", "soak"]
)
def test_a_node_is_killed_while_it_is_drained(lab: LocalCluster, seed: int, n_rounds: int) -> None:
    rounds(lab, seed, n_rounds)
