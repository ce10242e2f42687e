"""A variable goes when nobody refers to it any more, and not before."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._counting.pool import MOST
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session import process_sessions
from clamor_ray._write.spread_region import build
from tests.conftest import ANSWER_S, ClamorCluster, until

pytestmark = pytest.mark.lab

ITEMS = 2048  # 16 KiB: what is below a block travels in its reference
LOOKS_S = 1.5  # in which a variable would go that nobody held
# On an idle machine it takes a second or two, and 10 are promised. A busy one has no such promise.
GONE_S = 120.0


def put(value: int) -> GlobalRef[Any]:
    return clamor.put(np.full(ITEMS, value))


def regions() -> set[int]:
    return {info.region for info in clamor.variables()}


def stays(*wanted: int) -> bool:
    gc.collect()
    time.sleep(LOOKS_S)
    return set(wanted) <= regions()


def is_freed(ref: GlobalRef[Any]) -> bool:
    try:
        ref.get()
    except errors.FreedError:
        return True
    return False


def goes(*unwanted: int) -> None:
    gc.collect()
    until(lambda: not set(unwanted) & regions(), GONE_S)


@clamor.remote
def total(array: Any, pause_s: float = 0.0) -> float:
    time.sleep(pause_s)
    return float(array.sum())


@clamor.remote
def part(array: Any) -> Any:
    return array[1:-1]


@ray.remote
def same(value: Any) -> Any:
    return value


@ray.remote
def make(value: int) -> Any:
    ref = put(value)
    return {"made": ref, "region": ref._region}


@ray.remote(num_cpus=0)
class Holder:
    def __init__(self) -> None:
        self.refs: dict[int, Any] = {}

    def keep(self, key: int, value: Any) -> None:
        self.refs[key] = value

    def drop(self, key: int) -> None:
        self.refs.pop(key, None)

    def give(self, key: int) -> Any:
        return self.refs[key]

    def sums(self) -> dict[int, float]:
        return {key: float(value[0].get().sum()) for key, value in self.refs.items()}


def test_the_last_of_a_process_ends_it(clamor_cluster: ClamorCluster) -> None:
    first, other = put(1), put(2)
    region = first._region
    copies = [copy.copy(first), copy.deepcopy(first), first.snapshot(), first.at(0)]
    kept = other._region
    del first
    while copies:
        assert stays(region) or len(copies) < 4
        copies.pop()
    goes(region)
    assert kept in regions()
    assert float(other.get()[0]) == 2


def test_what_get_gave_holds_it(clamor_cluster: ClamorCluster) -> None:
    ref = put(3)
    region, row = ref._region, ref.get()[5:9]
    del ref
    assert stays(region)
    travelled = ray.get(same.remote([row, 1]))[0]  # by value: it is small
    assert int(travelled[0]) == int(row[0]) == 3
    del row
    goes(region)


def test_arguments_and_results_hold_it(clamor_cluster: ClamorCluster) -> None:
    ref = put(4)
    region, runs = ref._region, total.remote(ref, LOOKS_S + 1)
    del ref
    assert stays(region)
    assert ray.get(runs, timeout=ANSWER_S) == 4 * ITEMS
    goes(region)

    ref = put(5)
    region, result = ref._region, same.remote([{"deep": ref}])
    del ref
    ray.wait([result], timeout=ANSWER_S)
    assert stays(region)
    got = ray.get(result, timeout=ANSWER_S)
    del result
    assert stays(region)
    assert int(got[0]["deep"].get()[0]) == 5
    del got
    goes(region)


def test_views_that_travel_hold_it(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(np.arange(10**5))
    region, result = ref._region, part.remote(ref)
    del ref
    ray.wait([result], timeout=ANSWER_S)
    assert stays(region)
    view = ray.get(result, timeout=ANSWER_S)
    del result
    assert stays(region)
    assert [int(view[0]), int(view[-1])] == [1, 10**5 - 2]
    del view
    goes(region)


@clamor.remote
def keeps(array: Any) -> int:
    kept_here.append(array[5:])
    return os.getpid()


@clamor.remote
def halves(array: Any) -> Iterator[Any]:
    for half in np.array_split(array, 2):
        time.sleep(LOOKS_S)
        yield int(half[0]), half


@clamor.remote(max_retries=3)
def total_at_second_try(array: Any, marker: str) -> float:
    if not os.path.exists(marker):
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LOOKS_S)
    return float(array.sum())


@clamor.remote
def passes_on(array: Any) -> Any:
    return ray.get(part.remote(array)), [same.remote([array])]


kept_here: list[Any] = []


def test_what_outlives_a_call_holds_it(clamor_cluster: ClamorCluster, tmp_path: Path) -> None:
    ref = put(20)
    region, pid = ref._region, keeps.remote(ref)
    del ref
    kept_by = ray.get(pid, timeout=ANSWER_S)
    assert stays(region)
    os.kill(kept_by, signal.SIGKILL)  # it kept it in a global
    goes(region)

    ref = clamor.put(np.arange(10**5))
    region, items = ref._region, halves.options(num_returns="streaming").remote(ref)
    del ref
    first, second = (ray.get(item, timeout=ANSWER_S) for item in items)
    del items
    assert stays(region)
    assert [first[0], second[0], int(second[1][-1])] == [0, 50_000, 10**5 - 1]
    del first, second
    goes(region)

    ref = put(21)
    region, again = ref._region, total_at_second_try.remote(ref, str(tmp_path / "marker"))
    del ref
    assert ray.get(again, timeout=ANSWER_S) == 21 * ITEMS
    goes(region)

    ref = put(22)
    region = ref._region
    total.options(num_returns=0).remote(ref, LOOKS_S + 1)  # nobody has a reference to this task
    del ref
    assert stays(region)
    goes(region)

    ref = clamor.put(np.arange(10**5))
    region, passed = ref._region, passes_on.remote(ref)
    del ref
    view, (nested,) = ray.get(passed, timeout=ANSWER_S)
    assert int(ray.get(nested, timeout=ANSWER_S)[0][7]) == 7
    assert int(view[-1]) == 10**5 - 2
    del view, nested, passed
    goes(region)


def test_what_a_task_made_is_its_callers(clamor_cluster: ClamorCluster) -> None:
    got = ray.get(make.remote(6), timeout=ANSWER_S)
    region = got["region"]
    assert stays(region)
    assert int(got["made"].get()[0]) == 6
    del got
    goes(region)


def test_inside_ray_objects_and_variables(clamor_cluster: ClamorCluster) -> None:
    ref = put(7)
    region, in_store = ref._region, ray.put({"ref": [ref]})
    del ref
    assert stays(region)
    del in_store
    goes(region)

    inner = put(8)
    outer = clamor.put({"inner": inner, "rest": np.zeros(ITEMS)})
    in_outer, region = inner._region, outer._region
    del inner
    assert stays(in_outer, region)
    taken = outer.get()["inner"]
    del outer
    assert stays(in_outer)
    taken = ray.get(same.remote([taken]), timeout=ANSWER_S)[0]
    assert int(taken.get()[0]) == 8
    del taken
    goes(in_outer, region)

    small = clamor.put([put(9)])  # travels in its reference, and what is inside with it
    region = small.get()[0]._region
    small = ray.get(same.remote([small]), timeout=ANSWER_S)[0]
    assert stays(region)
    assert int(small.get()[0].get()[0]) == 9
    del small
    goes(region)


def test_what_was_taken_out_outlives_the_free_of_its_container(
    clamor_cluster: ClamorCluster,
) -> None:
    inner = put(30)
    outer = clamor.put({"inner": inner, "rest": np.zeros(ITEMS)})
    region, taken = inner._region, outer.get()["inner"]
    del inner
    clamor.free(outer)
    del outer
    assert stays(region)
    assert int(taken.get()[0]) == 30
    del taken
    goes(region)


def test_a_weak_one_counts_where_it_is_put_or_passed(clamor_cluster: ClamorCluster) -> None:
    ref = put(31)
    region = ref._region
    outer = clamor.put({"inner": pickle.loads(pickle.dumps(ref)), "rest": np.zeros(ITEMS)})
    del ref
    assert stays(region)
    taken = outer.get()["inner"]
    assert int(taken.get()[0]) == 31
    del outer, taken
    goes(region)

    ref = put(32)
    region = ref._region
    again = total.remote(pickle.loads(pickle.dumps(ref)), LOOKS_S + 1)
    del ref
    assert ray.get(again, timeout=ANSWER_S) == 32 * ITEMS
    goes(region)


class PutsAtItsEnd:
    made: ClassVar[list[GlobalRef[Any]]] = []

    def __init__(self, ref: GlobalRef[Any]) -> None:
        self.ref, self.cycle = ref, self

    def __del__(self) -> None:
        self.made.append(put(int(self.ref.get()[0]) + 1))


def test_a_del_may_use_variables(clamor_cluster: ClamorCluster) -> None:
    ref = put(40)
    region = ref._region
    PutsAtItsEnd(ref)
    del ref
    goes(region)  # collects garbage first
    (made,) = PutsAtItsEnd.made
    assert int(made.get()[0]) == 41
    region = made._region
    del made
    PutsAtItsEnd.made.clear()
    goes(region)


def test_a_fork_drops_nothing_of_its_parents(clamor_cluster: ClamorCluster) -> None:
    ref = put(50)
    region = ref._region
    child = os.fork()
    if child == 0:
        (anchor,) = map(weakref.ref, ref._anchors)
        del ref
        gc.collect()
        os._exit(anchor() is None)  # it would be given back to tables that are the parent's
    assert os.waitpid(child, 0)[1] == 0
    assert stays(region)
    assert int(ref.get()[0]) == 50
    del ref
    goes(region)


def test_what_makes_it_again_holds_it(clamor_cluster: ClamorCluster) -> None:
    raw = put(10)
    in_source = raw._region

    def again(raw: GlobalRef[Any] = raw) -> Any:
        return raw.get() + 1

    ref = clamor.put(raw.get() + 1, source=again)
    region = ref._region
    del raw, again
    assert stays(in_source, region)
    del ref
    goes(in_source, region)


def test_a_name_holds_it(clamor_cluster: ClamorCluster) -> None:
    name = uuid.uuid4().hex
    region = clamor.put(np.full(ITEMS, 11), name=name)._region
    assert stays(region)
    found = clamor.open(name)
    clamor.drop(name)
    assert stays(region)
    assert int(found.get()[0]) == 11
    del found
    goes(region)


def test_a_named_variable_holds_what_is_inside(clamor_cluster: ClamorCluster) -> None:
    name = uuid.uuid4().hex
    inner = put(23)
    inside = inner._region
    clamor.put({"inner": inner}, name=name)  # small, and yet in a region of its own
    del inner
    assert stays(inside)
    taken = clamor.open(name).get()["inner"]
    assert int(taken.get()[0]) == 23
    clamor.drop(name)
    assert stays(inside)
    del taken
    goes(inside)


def test_shared_objects_hold_what_is_inside(clamor_cluster: ClamorCluster) -> None:
    inner = put(24)
    inside = inner._region
    shared = clamor.share(ray.put({"inner": inner, "rest": np.zeros(10**5)}))
    del inner
    taken = shared.get()["inner"]
    del shared
    assert stays(inside)
    assert int(taken.get()[0]) == 24
    del taken
    goes(inside)


def test_what_is_copied_while_it_is_built(clamor_cluster: ClamorCluster) -> None:
    with build(1 << 20) as block:
        built = block.publish(block.zeros(ITEMS))
        copied = copy.copy(built)
    region = built._region
    del built
    assert stays(region)
    copied = ray.get(same.remote([copied]), timeout=ANSWER_S)[0]
    assert stays(region)
    del copied
    goes(region)  # `block` is still there


def test_prefetch_holds_no_longer_than_its_reference(clamor_cluster: ClamorCluster) -> None:
    ref = put(25).at()
    region = ref._region
    clamor.prefetch(ref, wait=False)
    del ref
    goes(region)


def test_a_chain_goes_at_once(clamor_cluster: ClamorCluster) -> None:
    chain, links = put(26), []
    for _ in range(30):
        links.append(chain._region)
        chain = clamor.put([chain, np.zeros(ITEMS)])
    assert stays(*links)
    del chain
    goes(*links)


def test_other_ways_to_make_one(clamor_cluster: ClamorCluster) -> None:
    zeros = clamor.zeros(ITEMS)
    with clamor.update(zeros) as array:
        array[0] = 1
    shared = clamor.share(ray.put(np.arange(10**5)))
    with build(1 << 20) as block:
        built = block.publish(block.zeros(ITEMS))
    hashmap = clamor.HashMap.build(np.arange(1000), np.arange(1000))
    made = [zeros._region, shared._region, built._region, hashmap.ref._region]
    del array
    assert stays(*made)
    assert ray.get(same.remote([hashmap]), timeout=ANSWER_S)[0][7] == 7
    assert [float(zeros.get()[0]), int(shared.get()[7]), float(built.get()[7])] == [1, 7, 0]
    del zeros, shared, built, block, hashmap
    goes(*made)


def test_a_pickle_in_a_file_is_weak(clamor_cluster: ClamorCluster, tmp_path: Path) -> None:
    ref = put(12)
    region, file = ref._region, tmp_path / "ref"
    file.write_bytes(pickle.dumps(ref))
    again = pickle.loads(file.read_bytes())
    assert int(again.get()[0]) == 12  # and from now on it counts
    del ref
    assert stays(region)
    again = ray.get(same.remote([again]), timeout=ANSWER_S)[0]
    assert stays(region)
    del again
    goes(region)
    until(lambda: is_freed(pickle.loads(file.read_bytes())), GONE_S)  # a server hears it later
    with pytest.raises(errors.FreedError, match="outside Ray's serializer, as to a file"):
        pickle.loads(file.read_bytes()).get()


def test_a_function_that_was_exported_keeps_it(clamor_cluster: ClamorCluster) -> None:
    def function_of(ref: GlobalRef[Any]) -> Any:
        @ray.remote
        def closes_over() -> int:
            return int(ref.get()[0])

        return closes_over

    ref = put(13)
    region, function = ref._region, function_of(ref)
    del ref
    assert ray.get(function.remote(), timeout=ANSWER_S) == 13
    del function
    gc.collect()
    assert stays(region)  # as an ObjectRef would be: until this process ends


def test_watching_holds_it(clamor_cluster: ClamorCluster) -> None:
    ref = put(14)
    region, watch = ref._region, ref.on_update(print)
    del ref
    assert stays(region)
    watch.cancel()
    goes(region)


def test_collections_hold_it(clamor_cluster: ClamorCluster) -> None:
    ref = put(15)
    region = ref._region
    added = clamor.from_items(range(8), partitions=2).map(lambda x, r: int(r[x]) + x, ref)
    del ref
    assert stays(region)
    assert added.collect() == [15 + x for x in range(8)]
    assert stays(region)
    del added
    goes(region)

    table = put(27)
    made = clamor.from_items(range(2), partitions=1).map(
        lambda x, t: {"view": t[x : x + 2], "made": clamor.put(np.full(ITEMS, x))}, table
    )
    results = made.collect()
    inside = [result["made"]._region for result in results]
    del made
    assert stays(*inside)
    assert [int(result["made"].get()[0]) for result in results] == [0, 1]
    del results, table
    goes(*inside)


def test_cycles_and_exceptions(clamor_cluster: ClamorCluster) -> None:
    ref = put(16)
    region, cycle = ref._region, [ref]
    cycle.append(cycle)  # type: ignore[arg-type]
    failure: list[BaseException] = []
    try:
        raise ValueError(ref)
    except ValueError as error:
        failure.append(error)
    del ref, cycle
    assert stays(region)
    failure.clear()
    goes(region)


@ray.remote(num_cpus=0, max_retries=0)
def fails(value: int) -> None:
    raise ValueError(put(value), os.getpid())


def test_an_exception_of_a_task_keeps_it(clamor_cluster: ClamorCluster) -> None:
    """Ray pickles it by itself, in the task's worker and to look at it here, and would pin an
    ObjectRef in it for as long."""
    failed = fails.remote(24)
    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        ray.get(failed, timeout=ANSWER_S)
    ref, pid = raised.value.cause.args
    region, again = ref._region, ref.snapshot()
    os.kill(pid, signal.SIGKILL)
    del failed, raised, ref
    assert stays(region)
    assert int(again.get()[0]) == 24
    clamor.free(again)
    assert region not in regions()


def test_free_does_not_wait_for_references(clamor_cluster: ClamorCluster) -> None:
    ref = put(17)
    region, other = ref._region, copy.copy(ref)
    clamor.free(ref)
    assert region not in regions()
    with pytest.raises(errors.FreedError):
        other.refresh()
    del ref, other
    assert stays()


def test_a_thousand_leave_nothing(clamor_cluster: ClamorCluster) -> None:
    gc.collect()
    before = clamor.stats()
    known = regions()
    holder = Holder.remote()
    refs = [put(number) for number in range(1000)]
    ray.get([holder.keep.remote(0, refs[:300]), same.remote(refs[300:600])], timeout=ANSWER_S)
    nested = ray.put([{"refs": refs[600:900]}])
    sums = ray.get([total.remote(ref) for ref in refs[900:]], timeout=ANSWER_S)
    assert sums == [number * ITEMS for number in range(900, 1000)]
    del refs
    assert len(regions() - known) >= 600
    ray.get(holder.drop.remote(0), timeout=ANSWER_S)
    del nested
    until(lambda: not regions() - known, GONE_S)
    # Some were read here: what their page servers held goes when the last mapping does.
    until(lambda: home_bytes() <= sum(node.engine.home_bytes for node in before.nodes), GONE_S)


def home_bytes() -> int:
    return sum(node.engine.home_bytes for node in clamor.stats().nodes)


class Program:
    """A random program, and by whom each variable is held. Variables are numbered."""

    def __init__(self, seed: int, markers: Path) -> None:
        self.random = random.Random(seed)
        self.markers = markers
        self.known = regions()
        self.region: dict[int, int] = {}
        self.here: dict[int, list[Any]] = {}
        self.stored: list[tuple[int, Any]] = []
        self.inside: list[tuple[int, GlobalRef[Any]]] = []  # of another variable
        self.named: dict[int, str] = {}
        self.running: list[tuple[int, Any]] = []
        self.actors: list[Any] = []
        self.kept: list[set[int]] = []
        self.gave: list[Any] = []  # actors that passed references on

    def step(self) -> None:
        steps: list[Callable[[], None]] = [self.make, self.task, self.store, self.give, self.take]
        steps += [self.put_inside, self.take_out, self.drop, self.drop, self.forget, self.kill]
        steps += [self.task_that_dies]
        self.random.choice(steps)()

    def some(self, of: Any) -> Any:
        return self.random.choice(sorted(of)) if of else None

    def make(self) -> None:
        number = len(self.region)
        way = self.random.random()
        if way < 0.2:
            self.named[number] = f"program {id(self)}, {number}"
            ref = clamor.put(np.full(ITEMS, number), name=self.named[number])
        elif way < 0.5:
            ref = put(number)
        else:
            ref = ray.get(make.remote(number), timeout=ANSWER_S)["made"]
        self.region[number] = ref._region
        self.here[number] = [ref]

    def task(self) -> None:
        if (number := self.some(self.here)) is not None:
            ref = self.here[number][0]
            pause_s = self.random.random()
            run = total.remote(ref, pause_s) if number % 2 else same.remote([ref])
            self.running.append((number, run))

    def task_that_dies(self) -> None:
        """Its worker is killed, and Ray runs it again in another."""
        if (number := self.some(self.here)) is not None:
            marker = str(self.markers / uuid.uuid4().hex)
            run = total_at_second_try.remote(self.here[number][0], marker)
            self.running.append((number, run))

    def store(self) -> None:
        if (number := self.some(self.here)) is not None:
            self.stored.append((number, ray.put({"ref": self.here[number][0]})))

    def put_inside(self) -> None:
        if (number := self.some(self.here)) is not None:
            outer = clamor.put({"inner": self.here[number][0], "rest": np.zeros(ITEMS)})
            self.inside.append((number, outer))

    def take_out(self) -> None:
        if self.inside:
            number, outer = self.inside.pop(self.random.randrange(len(self.inside)))
            self.here.setdefault(number, []).append(outer.get()["inner"])
            clamor.free(outer)

    def give(self) -> None:
        if len(self.actors) < 3:
            self.actors.append(Holder.remote())
            self.kept.append(set())
        if (number := self.some(self.here)) is not None:
            place = self.random.randrange(len(self.actors))
            ref = [self.here[number][0]]
            ray.get(self.actors[place].keep.remote(number, ref), timeout=ANSWER_S)
            self.kept[place].add(number)

    def take(self) -> None:
        place = self.some(range(len(self.actors)))
        number = None if place is None else self.some(self.kept[place])
        if number is not None:
            (ref,) = ray.get(self.actors[place].give.remote(number), timeout=ANSWER_S)
            self.gave.append(self.actors[place])
            self.here.setdefault(number, []).append(ref)

    def drop(self) -> None:
        if (number := self.some(self.here)) is not None:
            self.here[number].pop()
            if not self.here[number]:
                del self.here[number]

    def forget(self) -> None:
        if self.stored:
            self.stored.pop(self.random.randrange(len(self.stored)))
        if self.inside:
            self.inside.pop(self.random.randrange(len(self.inside)))
        if self.named:
            clamor.drop(self.named.pop(self.some(self.named)))
        place = self.some(range(len(self.actors)))
        number = None if place is None else self.some(self.kept[place])
        if number is not None:
            ray.get(self.actors[place].drop.remote(number), timeout=ANSWER_S)
            self.kept[place].discard(number)

    def kill(self) -> None:
        """Not one that passed a reference on: Ray loses what it gave, its own ObjectRefs too."""
        if self.actors and self.actors[0] not in self.gave and self.random.random() < 0.5:
            ray.kill(self.actors.pop(0))
            self.kept.pop(0)

    def check(self) -> None:
        """All that is held can be read, and the rest goes."""
        got = run = None
        for number, run in self.running:
            got = ray.get(run, timeout=ANSWER_S)
            value = got if isinstance(got, float) else float(got[0].get().sum())
            assert value == number * ITEMS
        del got, run
        self.running.clear()
        held = {*self.here, *self.named, *set().union(*self.kept)}
        held |= {number for number, _ in (*self.stored, *self.inside)}
        wanted = {self.region[number] for number in held}
        wanted |= {outer._region for _, outer in self.inside}
        gc.collect()
        until(lambda: not regions() - self.known - wanted, GONE_S)
        assert wanted <= regions()
        for number, refs in self.here.items():
            assert int(refs[0].get()[0]) == number
        for number, stored in self.stored:
            assert int(ray.get(stored, timeout=ANSWER_S)["ref"].get()[0]) == number
        for number, outer in self.inside:
            assert int(outer.get()["inner"].get()[0]) == number
        for number, name in self.named.items():
            assert int(clamor.open(name).get()[0]) == number
        for actor, kept in zip(self.actors, self.kept, strict=True):
            sums = ray.get(actor.sums.remote(), timeout=ANSWER_S)
            assert sums == {number: float(number * ITEMS) for number in kept}


def run_program(seed: int, markers: Path) -> None:
    program = Program(seed, markers)
    for _ in range(4):
        program.make()
        program.make()
        for _ in range(12):
            program.step()
        program.check()
    for name in program.named.values():
        clamor.drop(name)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
def test_random_programs(clamor_cluster: ClamorCluster, tmp_path: Path, seed: int) -> None:
    run_program(seed, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_random_programs(clamor_cluster: ClamorCluster, tmp_path: Path) -> None:
    for seed in range(3, 33):
        run_program(seed, tmp_path)


def test_variables_from_before_a_restart_stay(clamor_cluster: ClamorCluster) -> None:
    session = process_sessions.current()
    ref = put(18)
    region, made_before = ref._region, copy.copy(ref)
    pid = session.rpc.ping()
    os.kill(pid, signal.SIGKILL)
    until(lambda: session.rpc.ping() != pid, ANSWER_S)
    del ref
    assert int(ray.get(same.remote([made_before]), timeout=ANSWER_S)[0].get()[0]) == 18
    assert ray.get(total.remote(made_before), timeout=ANSWER_S) == 18 * ITEMS
    del made_before
    assert stays(region)
    ends = set()
    for number in range(MOST + 1):  # the anchors that were here are used up then
        ref = put(number)
        ends.add(ref._region)
        del ref
    until(lambda: len(ends & regions()) <= MOST, GONE_S)
    last = put(19)
    region = last._region
    del last
    goes(region)
