"""Ray's autoscaler adds nodes and removes them again, and every byte is read after it."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray.actors.moves import ray_nodes
from tests.cluster.test_ray_nodes import drain_node
from tests.conftest import until
from tests.support.lab import require_lab
from tests.support.lab.autoscaled import autoscaled_cluster

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]

UP_S = 120.0
DOWN_S = 120.0
IDLE_NODE_S = 2.0
WORDS = 10**5
SPREAD_WORDS = 2 * 10**6  # several pieces, of which this node and the new one have some
N_MOST = 3  # nodes beside the driver's
NOTICE_S = 15.0  # between the word that a machine goes and its end
CHANGED_WORDS = 1000
PAUSE_S = 0.2


@pytest.fixture(
    params=[pytest.param(1, marks=pytest.mark.soak), 2], ids=["autoscaler v1", "autoscaler v2"]
)
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    require_lab("local")
    monkeypatch.setenv("CLAMOR_IDLE_NODE_S", str(IDLE_NODE_S))
    with (
        tempfile.TemporaryDirectory(prefix="cl-as-", ignore_cleanup_errors=True) as directory,
        autoscaled_cluster(request.param, Path(directory), n_most=N_MOST),
    ):
        clamor.init()
        yield


def alive() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def homes_of(ref: Any) -> set[str]:
    return {node_id for node_id, entry in clamor.stats().region(ref).items() if entry.is_home}


class Worker:
    """Has a node of one CPU for itself as long as it lives."""

    def put(self, n: int) -> tuple[str, list[Any], Any]:
        import ray

        made = [clamor.put(np.full(WORDS, i)) for i in range(n)]
        spread = clamor.put(np.arange(SPREAD_WORDS), home="spread")
        return ray.get_runtime_context().get_node_id(), made, spread

    def sums(self, refs: list[Any]) -> list[int]:
        return [int(ref.get().sum()) for ref in refs]


class Reader:
    """Changes a part of each variable again and again, and compares every byte with a plain
    array."""

    def __init__(self) -> None:
        self.rounds = 0
        self.failure: BaseException | None = None
        self._expected: dict[Any, np.ndarray] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def add(self, ref: Any) -> None:
        with self._lock:
            self._expected[ref] = np.arange(SPREAD_WORDS)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        rng = np.random.default_rng(5)
        try:
            while not self._stop.wait(PAUSE_S):
                with self._lock:
                    variables = list(self._expected.items())
                for ref, expected in variables:
                    first = int(rng.integers(0, SPREAD_WORDS - CHANGED_WORDS))
                    with clamor.update(ref) as array:
                        array[first : first + CHANGED_WORDS] += 1
                    expected[first : first + CHANGED_WORDS] += 1
                    assert np.array_equal(ref.get(), expected)
                self.rounds += 1
        except BaseException as failure:
            self.failure = failure

    def goes_on(self) -> None:
        rounds = self.rounds
        until(lambda: self.rounds > rounds + 1 or self.failure is not None)

    def sums(self) -> list[int]:
        """That others must see, once it has ended."""
        return [int(expected.sum()) for expected in self._expected.values()]


def is_taken_back(node_id: str, refs: list[Any]) -> None:
    """Its homes move off before it goes."""
    assert drain_node(node_id, int((time.time() + NOTICE_S) * 1000))
    until(lambda: all(node_id not in homes_of(ref) for ref in refs), NOTICE_S)
    until(lambda: node_id not in alive(), DOWN_S)


def test_one_node_to_four_and_back_twice(cluster: None) -> None:
    import ray

    here = ray.get_runtime_context().get_node_id()
    assert alive() == {here}
    start = ray.remote(num_cpus=1)(Worker).remote
    reader = Reader()
    plain: list[Any] = []
    spread: list[Any] = []
    seen: set[str] = set()
    with reader.running():
        for n_nodes in (N_MOST, 1):
            workers = [start() for _ in range(n_nodes)]
            found = ray.get([worker.put.remote(5) for worker in workers], timeout=UP_S)
            nodes = {node_id for node_id, _, _ in found}
            assert len(nodes) == n_nodes
            assert not nodes & seen
            seen |= nodes
            until(ray_nodes.is_autoscaled, UP_S)  # says Ray, once it has a node
            for _, made, pieces in found:
                plain += made
                spread.append(pieces)
                reader.add(pieces)
            assert any(homes_of(pieces) & nodes for _, _, pieces in found)  # new nodes take homes
            wanted = [i * WORDS for i in range(5)] * (len(plain) // 5)
            sums = [worker.sums.remote(plain) for worker in workers]
            assert ray.get(sums, timeout=UP_S) == [wanted] * n_nodes  # and have caches
            if n_nodes > 1:  # a machine that is taken back
                ray.kill(workers.pop(0))
                is_taken_back(found[0][0], plain + spread)
            del workers
            until(lambda: alive() == {here}, DOWN_S)  # Ray has removed them, not we
            reader.goes_on()
            assert [node.node_id for node in clamor.stats().nodes] == [here]
            assert Worker().sums(plain) == wanted
            assert all(homes_of(ref) == {here} for ref in plain + spread)
    assert Worker().sums(spread) == reader.sums()
    moves = clamor.stats().moves
    assert moves.finished >= len(plain)
    assert moves.left == len(seen)
