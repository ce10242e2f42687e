"""`split_aggregate` and `aggregate` of arrays on two nodes."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import tempfile
import threading
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.attempt_record import AttemptRecord
from clamor_ray._protocol.split_aggregation import NotYet, RingPlan
from clamor_ray._session import process_sessions
from clamor_ray.collection import collection
from clamor_ray.collection.plan.pins import Pins
from clamor_ray.collection.run import mergers, split
from tests.conftest import ClamorCluster, until
from tests.support import driver_script
from tests.support.processes import stop

pytestmark = pytest.mark.usefixtures("clamor_cluster")

LARGE = 40_003  # elements of an array that `aggregate` merges on its nodes here


@pytest.fixture(autouse=True)
def a_low_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "LEAST_BYTES", 64 << 10)


def add(total: Any, item: Any) -> Any:
    total += item
    return total


def part(value: Any, index: int, n: int) -> Any:
    return value[len(value) * index // n : len(value) * (index + 1) // n]


def rows(n: int, partitions: int) -> clamor.DataCollection:
    """Items 0 to n - 1, on both nodes."""
    placed = clamor.from_numpy(np.arange(n), partitions=partitions)
    return placed.options(scheduling="deterministic", speculation=False)


def attempts(col: clamor.DataCollection, stage: str) -> list[AttemptRecord]:
    """What the lineage registry knows of attempts on a collection's results."""
    packed = process_sessions.current().rpc.attempts_of(Pins.of(col._node).number)
    records = [AttemptRecord.of(record) for record in packed]
    return [record for record in records if record.stage == stage]


SUMS = (np.add, "sum", lambda a, b: a + b)


# Each value of one with each of another.
@pytest.mark.parametrize(
    ("n_elements", "parallelism", "reduce_op"),
    [
        (n_elements, parallelism, SUMS[(i + j) % 3])
        for i, n_elements in enumerate((1, 7, 1000))
        for j, parallelism in enumerate((1, 3, 40))
    ],
)
def test_sums_of_arrays(n_elements: int, parallelism: int, reduce_op: Any) -> None:
    total = rows(60, 6).split_aggregate(
        np.zeros(n_elements, np.int64),
        add,
        part,
        reduce_op,
        np.concatenate,
        parallelism=parallelism,
    )
    assert total.tolist() == [sum(range(60))] * n_elements


def test_functions_get_what_the_interface_says() -> None:
    seen: list[Any] = []

    def concat(segments: list[Any]) -> Any:
        seen.extend(segments)
        return np.concatenate(segments)

    def checked_part(value: Any, index: int, n: int) -> Any:
        assert n == 6  # parallelism times the nodes
        return part(value, index, n)

    made = rows(8, 4).split_aggregate(
        np.zeros(12), add, checked_part, np.add, concat, parallelism=3
    )
    assert made.tolist() == [28.0] * 12
    assert [segment.shape for segment in seen] == [(2,)] * 6


@pytest.mark.parametrize(
    ("op", "expected"), [("max", 5), (np.minimum, -3), (operator.mul, 45), ("prod", 45)]
)
def test_other_operations(op: Any, expected: int) -> None:
    def last(_: Any, item: Any) -> Any:
        return np.full(5, item - 4, np.int32)

    # The partitions' last items make -3, -1, 1, 3 and 5.
    made = rows(10, 5).split_aggregate(np.zeros(5, np.int32), last, part, op, np.concatenate)
    assert made.tolist() == [expected] * 5


def test_any_objects_split() -> None:
    class Counts:
        def __init__(self) -> None:
            self.odd: dict[int, int] = {}
            self.n = 0

        def add(self, item: int) -> Counts:
            self.odd[item % 5] = self.odd.get(item % 5, 0) + 1
            self.n += 1
            return self

    def take(counts: Counts, index: int, n: int) -> dict[str, Any]:
        share = {key: value for key, value in counts.odd.items() if key % n == index}
        return {"n": counts.n if index == 0 else 0, "odd": share}

    def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        one["n"] += other["n"]
        for key, value in other["odd"].items():
            one["odd"][key] = one["odd"].get(key, 0) + value
        return one  # changed in place, as in Sparker's figure 7

    def together(segments: list[dict[str, Any]]) -> Any:
        odd: dict[int, int] = {}
        for segment in segments:
            odd.update(segment["odd"])
        return sum(segment["n"] for segment in segments), odd

    items = clamor.from_items(range(50), partitions=7)
    zero = Counts()
    for _ in range(2):  # zero is untouched
        made = items.split_aggregate(zero, Counts.add, take, merge, together, parallelism=2)
        assert made == (50, dict.fromkeys(range(5), 10))


def test_arrays_that_c_does_not_know() -> None:
    made = rows(10, 4).split_aggregate(np.zeros(5, complex), add, part, np.add, np.concatenate)
    assert made.tolist() == [45 + 0j] * 5


@pytest.mark.parametrize("zero", [np.zeros(0), np.zeros((0, 4)), np.zeros((3, 0), np.int64)])
def test_empty_arrays(zero: Any) -> None:
    def keep(total: Any, item: Any) -> Any:
        return total

    made = rows(6, 3).split_aggregate(zero, keep, part, np.add, np.concatenate)
    assert (made.shape, made.dtype) == (zero.shape, zero.dtype)


def test_a_collection_of_nothing() -> None:
    empty = clamor.from_items([], partitions=3)
    made = empty.split_aggregate(np.zeros(5), add, part, np.add, np.concatenate)
    assert made.tolist() == [0.0] * 5
    large = empty.aggregate(np.ones(LARGE), add, np.maximum)
    assert (large == 1).all()


def test_fewer_partitions_than_nodes() -> None:
    for partitions in (1, 2):
        made = rows(4, partitions).split_aggregate(np.zeros(9), add, part, "sum", np.concatenate)
        assert made.tolist() == [6.0] * 9


def test_nan_infinity_and_overflow_are_numpys() -> None:
    def put(total: Any, item: int) -> Any:
        total[item] = [np.nan, np.inf, -np.inf, 1e308, 1e308][item]
        total[item - 1] += 1e308
        return total

    found = rows(5, 5).split_aggregate(np.zeros(5), put, part, np.add, np.concatenate)
    np.testing.assert_array_equal(found, [np.nan, np.inf, -np.inf, np.inf, np.inf])

    def most(total: Any, item: int) -> Any:
        return total + np.int64(2**62)

    wrapped = rows(2, 2).split_aggregate(np.zeros(3, np.int64), most, part, np.add, np.concatenate)
    assert wrapped.tolist() == [-(2**63)] * 3


# ------------------------------------------------------------------ aggregate


@pytest.mark.parametrize("comb_op", [np.add, operator.add, operator.iadd])
@pytest.mark.parametrize("n_elements", [3, LARGE])
def test_aggregate_of_arrays_is_what_it_was(comb_op: Any, n_elements: int) -> None:
    col = rows(20, 4)
    zero = np.zeros(n_elements)
    made = col.aggregate(zero, add, comb_op)
    assert (made == 190).all()
    assert made.shape == (n_elements,)
    made[0] = 3  # it is the caller's
    assert not zero.any()
    # The registry is told on a thread; one node may have run all of it.
    until(lambda: bool(attempts(col, "merge")) == (n_elements == LARGE))


@pytest.mark.parametrize("least_bytes", [1 << 20, 1 << 40])
def test_large_results_that_cannot_be_split_take_the_tree(
    monkeypatch: pytest.MonkeyPatch, least_bytes: int
) -> None:
    monkeypatch.setattr(collection, "TREE_BYTES", least_bytes)
    col = rows(20, 9)
    zero = {"a": np.zeros(40_000), "n": 0}

    def add_to(total: Any, item: int) -> Any:
        return {"a": total["a"] + item, "n": total["n"] + 1}

    def both(one: Any, other: Any) -> Any:
        return {"a": one["a"] + other["a"], "n": one["n"] + other["n"]}

    made = col.aggregate(zero, add_to, both)
    assert (made["a"] == 190).all()
    assert made["n"] == 20
    combining = 3 if least_bytes < 1 << 30 else 0  # tasks, of nine results
    until(lambda: len(attempts(col, "combine")) == combining)


def test_a_zero_that_is_not_neutral_counts_as_it_did() -> None:
    made = rows(20, 4).aggregate(np.ones(LARGE), add, np.add)
    assert (made == 190 + 4 + 1).all()  # for each partition, and once at the end


def test_what_does_not_fit_goes_to_the_driver_as_it_did() -> None:
    def grows(total: Any, item: int) -> Any:
        return np.ones((1, LARGE)) if item % 2 else np.full(LARGE, 2.0)

    col = rows(4, 4)
    made = col.aggregate(np.zeros(LARGE), grows, np.add)
    assert made.shape == (1, LARGE)
    assert (made == 6).all()
    by_function = col.aggregate(np.zeros(LARGE), add, lambda a, b: a + b)
    assert (by_function == 6).all()
    assert col.aggregate([], lambda a, x: [*a, int(x)], operator.add) == [0, 1, 2, 3]
    assert attempts(col, "merge") == []


def test_all_dtypes() -> None:
    for dtype in (np.float16, np.float32, np.float64, np.int32, np.int64):
        made = rows(8, 4).aggregate(np.zeros(LARGE, dtype), add, np.add)
        assert (made == 28).all()
        assert made.dtype == dtype


def test_large_zeros_do_not_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    from clamor_ray.collection.data import folds

    assert folds.packed_zero(np.zeros(10**7)) == ((10**7,), np.dtype(float))
    for travels in (np.zeros(3), -np.zeros(10**5), np.ones(10**5), np.zeros((300, 300)).T, 0):
        assert folds.packed_zero(travels) is travels


# ------------------------------------------------------------------ what goes wrong


def bad(*args: Any) -> Any:
    raise ZeroDivisionError("on purpose")


@pytest.mark.parametrize("which", ["seq_op", "split_op", "reduce_op", "concat_op"])
def test_the_function_that_raises_is_named(which: str) -> None:
    functions: dict[str, Any] = {
        "seq_op": add,
        "split_op": part,
        "reduce_op": lambda a, b: a + b,
        "concat_op": np.concatenate,
    }
    col = rows(8, 4)
    with pytest.raises(errors.FunctionFailedError) as caught:
        col.split_aggregate(np.zeros(4), *{**functions, which: bad}.values())
    assert f"{which} (bad) raised" in str(caught.value)
    assert "ZeroDivisionError: on purpose" in str(caught.value)
    assert 'raise ZeroDivisionError("on purpose")' in str(caught.value)
    assert caught.value.cause == "ZeroDivisionError"
    assert col.split_aggregate(np.zeros(4), *functions.values()).tolist() == [28.0] * 4


def test_a_reduce_op_that_raises_between_nodes_only() -> None:
    def picky(one: Any, other: Any) -> Any:
        if len(one) and one.max() > 5 and other.max() > 5:
            raise ZeroDivisionError("too much")
        return one + other

    placed = [split.place_of(p, mergers_nodes()) for p in range(8)]
    first, second = placed.index(mergers_nodes()[0]), placed.index(mergers_nodes()[1])

    def at_both(total: Any, item: int) -> Any:
        return np.full(4, 9.0) if item in (first, second) else total

    with pytest.raises(errors.FunctionFailedError, match=r"reduce_op \(picky\) raised, between"):
        rows(8, 8).split_aggregate(np.zeros(4), at_both, part, picky, np.concatenate)
    made = rows(8, 8).split_aggregate(np.zeros(4), add, part, np.add, np.concatenate)
    assert made.tolist() == [28.0] * 4


def mergers_nodes() -> list[str]:
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])


def test_shapes_that_differ_are_named() -> None:
    def grows(total: Any, item: int) -> Any:
        return np.zeros(4 + item // 3)

    with pytest.raises(errors.CollectiveMismatchError) as caught:
        rows(4, 4).split_aggregate(np.zeros(4), grows, lambda u, i, n: u, np.add, list)
    assert "Partition" in str(caught.value)
    assert "of shape (4,)" in str(caught.value)
    assert "of shape (5,)" in str(caught.value)


def test_dtypes_that_differ_between_nodes_only_are_named() -> None:
    nodes = mergers_nodes()

    def by_node(total: Any, item: int) -> Any:
        at = ray.get_runtime_context().get_node_id()
        return np.zeros(4, np.float32 if at == nodes[0] else np.float64)

    with pytest.raises(errors.CollectiveMismatchError) as caught:
        rows(8, 8).split_aggregate(np.zeros(4), by_node, part, np.add, np.concatenate)
    assert "float32" in str(caught.value)
    assert "float64" in str(caught.value)


def test_arguments_that_are_none() -> None:
    col = rows(4, 2)
    zero = np.zeros(3)
    for parallelism in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match="parallelism"):
            col.split_aggregate(zero, add, part, np.add, list, parallelism=parallelism)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mean"):
        col.split_aggregate(zero, add, part, "mean", list)
    with pytest.raises(TypeError):
        col.split_aggregate(zero, add, 3, np.add, list)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        col.split_aggregate(zero, add, part, 3, list)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        col.split_aggregate(zero, add, part, np.add, 3)  # type: ignore[arg-type]


def test_what_cannot_be_pickled() -> None:
    lock = threading.Lock()
    col = rows(4, 4)

    def closes_over(value: Any, index: int, n: int) -> Any:
        return lock

    with pytest.raises(errors.UnpicklableError, match="'lock', which it closes over"):
        col.split_aggregate(np.zeros(4), add, closes_over, np.add, list)

    def makes_one(value: Any, index: int, n: int) -> Any:
        return threading.Lock()

    with pytest.raises(errors.FunctionFailedError, match="pickle"):
        col.split_aggregate(np.zeros(4), add, makes_one, lambda a, b: a, list)
    made = col.split_aggregate(np.zeros(4), add, part, lambda a, b: a + b, np.concatenate)
    assert made.tolist() == [6.0] * 4


# ------------------------------------------------------------------ actors


def test_an_error_of_ours_that_a_function_raises_is_no_lost_actor() -> None:
    def closed(value: Any, index: int, n: int) -> Any:
        raise errors.ClosedError("on purpose")

    with pytest.raises(errors.ClosedError, match=r"on purpose.* split_op \(closed\) raised it"):
        rows(1, 1).split_aggregate(np.zeros(4), add, closed, np.add, list)


def test_an_exit_in_reduce_op_ends_no_actor(actors: dict[str, Any]) -> None:
    def ends(one: Any, other: Any) -> Any:
        raise SystemExit(3)

    before = pids(actors)
    with pytest.raises(errors.FunctionFailedError, match=r"reduce_op \(ends\) raised"):
        rows(8, 8).split_aggregate(np.zeros(4), add, part, ends, list)
    assert pids(mergers.all(process_sessions.current())) == before


def test_an_action_goes_on_while_a_merge_waits_for_its_object(actors: dict[str, Any]) -> None:
    @ray.remote(num_cpus=0)
    def waits_for(path: str) -> Any:
        until(lambda: os.path.exists(path), 60.0)
        return np.ones(3)

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "go")
        one, how = waits_for.remote(path), split.Recipe("sum").packed(1)
        (actor, *_) = actors.values()
        call = actor.merge.remote(1, how, [(0, None, one)], 0.1)
        made = rows(8, 8).split_aggregate(np.zeros(4), add, part, np.add, np.concatenate)
        assert made.tolist() == [28.0] * 4  # its merges come after that one
        assert ray.get(call, timeout=60) == NotYet()
        with open(path, "w"):
            pass
        ray.get(one, timeout=60)
        assert ray.get(actor.merge.remote(1, how, [(0, None, one)]), timeout=60).dtype == "float64"
        actor.clear.remote(1)


def test_a_result_that_is_not_there_yet_is_asked_for_again(
    actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[float] = []
    merge_call = split.Merging._merge_call

    def first_too_early(self: Any, partition: int, handle: Any, fetch_s: float) -> Any:
        sent.append(fetch_s)
        if fetch_s == split.FETCH_S:
            return ray.put(NotYet())
        return merge_call(self, partition, handle, fetch_s)

    monkeypatch.setattr(split.Merging, "_merge_call", first_too_early)
    made = rows(3, 3).split_aggregate(np.zeros(4), add, part, np.add, np.concatenate)
    assert made.tolist() == [3.0] * 4
    assert sent == [split.FETCH_S] * 3 + [2 * split.FETCH_S] * 3


@pytest.fixture
def actors() -> dict[str, Any]:
    """The session's actors, all of which have a process."""
    rows(8, 8).split_aggregate(np.zeros(4), add, part, np.add, np.concatenate)
    found = mergers.all(process_sessions.current())
    assert sorted(found) == mergers_nodes()
    return found


def pids(actors: dict[str, Any]) -> dict[str, int]:
    return {node: ray.get(actor.ping.remote(), timeout=60) for node, actor in actors.items()}


def test_actors_and_the_ring_stay_from_call_to_call(actors: dict[str, Any]) -> None:
    def ring_of(actor: Any) -> str:
        return str(actor._rings.names())

    def names() -> set[str]:
        return {ray.get(each.call.remote(ring_of), timeout=60) for each in actors.values()}

    before, processes = names(), pids(actors)
    assert len(before) == 1
    for _ in range(3):
        rows(8, 8).split_aggregate(np.zeros(4), add, part, np.add, np.concatenate)
    assert names() == before
    assert pids(mergers.all(process_sessions.current())) == processes


def test_actors_are_pinned_and_take_no_cpu(actors: dict[str, Any]) -> None:
    def where(actor: Any) -> tuple[str, float]:
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_assigned_resources().get("CPU", 0.0)

    for node, actor in actors.items():
        assert ray.get(actor.call.remote(where), timeout=60) == (node, 0.0)


def test_an_actor_that_is_dead_between_two_calls_is_made_again(actors: dict[str, Any]) -> None:
    (victim, *_) = actors
    before = pids(actors)
    os.kill(before[victim], signal.SIGKILL)
    made = rows(8, 8).split_aggregate(np.zeros(4), add, part, np.add, np.concatenate)
    assert made.tolist() == [28.0] * 4
    after = pids(mergers.all(process_sessions.current()))
    assert after[victim] != before[victim]
    assert {node: after[node] for node in before if node != victim} == {
        node: before[node] for node in before if node != victim
    }


def test_a_member_that_never_comes_delays_no_other_run(actors: dict[str, Any]) -> None:
    (actor, *_) = actors.values()
    how = split.Recipe("sum").packed(1)
    one = ray.put(np.ones(3))
    ray.get(actor.merge.remote(1, how, [(0, None, one)]), timeout=60)
    waits = actor.reduce.remote(1, [0], RingPlan("nobody-comes", 2, 0, 1), 500.0)
    made = rows(8, 8).split_aggregate(np.zeros(4), add, part, np.add, np.concatenate)
    assert made.tolist() == [28.0] * 4
    assert ray.wait([waits], timeout=0)[0] == []
    ray.kill(actor)


def test_an_actor_that_hangs_is_replaced(
    actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "QUIET_S", 1.0)
    monkeypatch.setattr(split, "PING_S", 2.0)
    victim = mergers_nodes()[1]
    before = pids(actors)[victim]
    stop(before)
    try:
        made = rows(8, 8).split_aggregate(np.zeros(4), add, part, np.add, np.concatenate)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(before, signal.SIGCONT)
    assert made.tolist() == [28.0] * 4
    assert pids(mergers.all(process_sessions.current()))[victim] != before


def test_nothing_is_left_in_actors_when_an_action_fails(actors: dict[str, Any]) -> None:
    def fails(total: Any, item: int) -> Any:
        if item == 7:
            raise ZeroDivisionError("late")
        return total

    with pytest.raises(errors.FunctionFailedError):
        rows(8, 8).split_aggregate(np.zeros(4), fails, part, np.add, np.concatenate)

    def n_runs(actor: Any) -> int:
        return len(actor._runs._runs)

    until(
        lambda: not any(ray.get([each.call.remote(n_runs) for each in actors.values()], timeout=60))
    )


def test_a_variable_in_split_op_is_read_at_its_version() -> None:
    scale = clamor.put(np.arange(10_000.0))

    def scaled(value: Any, index: int, n: int) -> Any:
        return part(value * scale.get()[3], index, n)

    made = rows(8, 4).split_aggregate(np.zeros(4), add, scaled, np.add, np.concatenate)
    assert made.tolist() == [84.0] * 4


def test_same_bits_on_every_run() -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((12, 3000)) * 10.0 ** rng.integers(-9, 9, (12, 1))
    col = clamor.from_numpy(values, partitions=12).options(scheduling="deterministic")
    found = {
        col.split_aggregate(np.zeros(3000), add, part, np.add, np.concatenate).tobytes()
        for _ in range(6)
    }
    assert len(found) == 1
    # Order matters for these numbers: the test can fail.
    assert values[::-1].sum(axis=0).tobytes() != values.sum(axis=0).tobytes()


def test_merges_are_in_the_lineage_registry(clamor_cluster: ClamorCluster) -> None:
    col = rows(8, 8)
    col.split_aggregate(np.zeros(4), add, part, np.add, np.concatenate)
    until(lambda: len(attempts(col, "merge")) == 2)
    records = attempts(col, "merge")
    assert {record.node_id for record in records} == set(clamor_cluster.lab.node_ids)
    assert {record.outcome for record in records} == {"done"}
    assert sum(int(record.inputs.split()[0]) for record in records) == 8


@pytest.mark.parametrize("action", ["aggregate", "tree_aggregate"])
def test_comb_op_may_change_its_first_argument(action: str) -> None:
    def keep(one: Any, other: Any) -> Any:
        if one is None:
            return other
        one += other
        return one

    for zero, comb_op in ((np.zeros(LARGE), operator.iadd), (None, keep)):
        col = rows(8, 8).map(lambda item: np.full(LARGE, float(item)))
        made = getattr(col, action)(zero, keep, comb_op if action[0] == "t" else keep)
        assert (made == 28).all()
    assert (col.reduce(keep) == 28).all()


@pytest.mark.parametrize("action", ["aggregate", "tree_aggregate", "reduce"])
def test_a_comb_op_that_raises_on_the_driver_is_named(action: str) -> None:
    args = () if action == "reduce" else (0, operator.add)
    with pytest.raises(errors.FunctionFailedError, match=r"\(bad\) raised, on the driver"):
        getattr(rows(2, 2), action)(*args, bad)


def test_parallelism_may_be_numpys() -> None:
    made = rows(4, 2).split_aggregate(
        np.zeros(4), add, part, np.add, np.concatenate, parallelism=np.int64(2)
    )
    assert made.tolist() == [6.0] * 4


ENDS = """
import time
import numpy as np, ray
ray.init()
import clamor_ray as clamor
from clamor_ray._session import process_sessions
from clamor_ray.collection.run import mergers

clamor.init()
rows = clamor.from_items(range(4), partitions=2)
made = rows.split_aggregate(
    np.zeros(4), lambda total, x: total + x, lambda a, i, n: np.array_split(a, n)[i], np.add,
    np.concatenate,
)
assert made.tolist() == [6.0] * 4
scope = process_sessions.current().scope
assert mergers._names_alive(scope)
clamor.shutdown()
deadline = time.monotonic() + 60
while mergers._names_alive(scope):
    assert time.monotonic() < deadline
    time.sleep(0.05)
print("gone")
"""


def test_actors_end_with_the_session(clamor_cluster: ClamorCluster) -> None:
    # In a driver of its own: the others here share a session.
    assert driver_script.run(ENDS, lab=clamor_cluster.lab).strip().endswith("gone")


def test_several_processes_at_once(clamor_cluster: ClamorCluster) -> None:
    """Each has its own runs at the same actors, and all share their rings' threads."""

    def many(seed: int) -> list[int]:
        made = []
        for i in range(5):
            col = clamor.from_items(range(12), partitions=6).map(lambda item, s=seed + i: item * s)
            total = col.split_aggregate(
                np.zeros(20_000, np.int64), add, part, np.add, np.concatenate
            )
            assert (total == total[0]).all()
            made.append(int(total[0]))
        return made

    task = ray.remote(num_cpus=0)(many)
    running = [task.remote(100 * process) for process in range(3)]
    here = many(1000)
    for base, found in zip(
        [0, 100, 200, 1000], [*ray.get(running, timeout=300), here], strict=True
    ):
        assert found == [66 * (base + i) for i in range(5)]
