"""`clamor.remote`: tasks and actors get objects for references, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ANSWER_S, ClamorCluster, until
from tests.support.lab.cluster import node_resource

pytestmark = pytest.mark.lab

MIB = 1 << 20
OTHER_NODE: dict[str, Any] = {"num_cpus": 0, "resources": {node_resource(1): 0.001}}


def answer(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=ANSWER_S)


@pytest.fixture(scope="module")
def array() -> Any:
    return np.random.default_rng(0).integers(1, 1 << 60, MIB)


@pytest.fixture
def ref(clamor_cluster: ClamorCluster, array: Any) -> Iterator[Any]:
    ref = clamor.put(array)
    yield ref
    clamor.free(ref)


# ------------------------------------------------------------------ functions


@clamor.remote
def kinds(*args: Any, **kwargs: Any) -> Any:
    def name(value: Any) -> Any:
        if isinstance(value, list):
            return [name(item) for item in value]
        if isinstance(value, dict):
            return {key: name(item) for key, item in value.items()}
        return type(value).__name__

    return name(list(args)), name(kwargs)


def test_references_at_top_level_arrive_as_objects(ref: Any) -> None:
    small = clamor.put(np.arange(3))
    got = answer(
        kinds.options(**OTHER_NODE).remote(ref, 5, [ref, small], a=ref, b={"r": ref}, c=small)
    )
    assert got == (
        ["GlobalArray", "int", ["GlobalRef", "GlobalRef"]],
        {"a": "GlobalArray", "b": {"r": "GlobalRef"}, "c": "ndarray"},
    )


@clamor.remote(num_cpus=0, resources={node_resource(1): 0.001}, num_returns=3)
def three(array: Any, *, first: int = 0) -> tuple[int, Any, bool]:
    """Of the array."""
    return int(array[first]), array[:3].copy(), array is array


def test_decorated_with_options(ref: Any, array: Any) -> None:
    import ray

    assert three._function.__doc__ == "Of the array."
    one, two, _ = ray.get(three.remote(ref, first=9), timeout=ANSWER_S)
    assert one == array[9]
    np.testing.assert_array_equal(two, array[:3])
    assert answer(three.options(num_returns=1, name="other").remote(ref))[0] == array[0]


@clamor.remote
def are_one(one: Any, two: Any, three: Any) -> bool:
    return one is two and two is three


def test_one_reference_passed_twice_is_one_object(ref: Any) -> None:
    assert answer(are_one.options(**OTHER_NODE).remote(ref, ref, ref))


@clamor.remote
def fail(array: Any) -> None:
    raise KeyError(int(array[0]))


@clamor.remote
def fail_our_way(refs: list[Any]) -> None:
    raise errors.HomeLostError("made up", code=-7)


def test_exceptions_pass(clamor_cluster: ClamorCluster, ref: Any, array: Any) -> None:
    with pytest.raises(KeyError, match=str(array[0])):
        answer(fail.options(**OTHER_NODE).remote(ref))
    with pytest.raises(errors.HomeLostError, match="made up") as caught:
        answer(fail_our_way.options(**OTHER_NODE).remote([ref]))
    assert caught.value.cause.code == -7
    until(lambda: clamor_cluster.engine(1).mappings == 0)  # nor does the traceback hold the lease


@clamor.remote
def parts(array: Any, n: int) -> Iterator[int]:
    for part in np.array_split(array, n):
        yield int(part.sum())


def test_generators(ref: Any, array: Any) -> None:
    import ray

    expected = [int(part.sum()) for part in np.array_split(array, 5)]
    streamed = parts.options(num_returns="streaming", **OTHER_NODE).remote(ref, 5)
    assert [ray.get(item, timeout=ANSWER_S) for item in streamed] == expected
    fixed = parts.options(num_returns=5, **OTHER_NODE).remote(ref, 5)
    assert ray.get(fixed, timeout=ANSWER_S) == expected


@clamor.remote
def outer(refs: list[Any]) -> int:
    import ray

    first, second = (kinds.options(num_cpus=0).remote(refs[0]) for _ in range(2))
    assert ray.get([first, second]) == [(["GlobalArray"], {})] * 2
    return int(refs[0].get().sum())


def test_tasks_of_tasks(ref: Any, array: Any) -> None:
    assert answer(outer.options(**OTHER_NODE).remote([ref])) == array.sum()


@clamor.remote
def view_of(array: Any) -> Any:
    return array[1000:1010]


def test_a_view_that_a_task_returns_is_its_content(ref: Any, array: Any) -> None:
    got = answer(view_of.options(**OTHER_NODE).remote(ref))
    np.testing.assert_array_equal(got, array[1000:1010])


def test_only_functions_and_classes() -> None:
    with pytest.raises(TypeError, match="a function or a class, not 3"):
        clamor.remote(3)
    with pytest.raises(TypeError, match="name=value"):
        clamor.remote(answer, answer)
    with pytest.raises(ValueError, match="coarse, exact and off, not 'all'"):
        clamor.remote(read_set="all")


# ------------------------------------------------------------------ actors


@clamor.remote
class Callable:
    def __call__(self, array: Any) -> str:
        return type(array).__name__

    @staticmethod
    def of_nobody(array: Any, *, other: Any = None) -> list[str]:
        return [type(array).__name__, type(other).__name__]

    @classmethod
    def of_the_class(cls, array: Any) -> list[str]:
        return [cls.__name__, type(array).__name__]

    @staticmethod
    async def later(array: Any) -> str:
        return type(array).__name__

    async def here(self) -> bool:
        """What is called inside the actor."""
        return self.of_nobody(1) == ["int", "NoneType"] and type(self).of_nobody(2)[0] == "int"

    def parts(self, array: Any) -> Iterator[str]:
        yield type(array).__name__

    async def parts_later(self, array: Any) -> AsyncIterator[str]:
        yield type(array).__name__

    def _inside(self, given: Any) -> list[str]:
        plain = [self(given), self.of_nobody(given)[0], self.of_the_class(given)[1]]
        return [*plain, *self.parts(given)]

    async def inside(self, array: Any, given: list[Any]) -> list[Any]:
        """A reference that is passed on inside the actor, by each kind of function."""
        later = [item async for item in self.parts_later(given[0])]
        once = await asyncio.create_task(self.later(given[0]))
        return [type(array).__name__, *self._inside(given[0]), *later, once]

    async def inside_a_generator(self, array: Any, given: list[Any]) -> AsyncIterator[Any]:
        yield type(array).__name__
        yield self(given[0])


def test_call_static_and_class_methods(ref: Any) -> None:
    actor = Callable.options(**OTHER_NODE).remote()
    assert answer(actor.__call__.remote(ref)) == "GlobalArray"
    assert answer(actor.of_nobody.remote(ref, other=ref)) == ["GlobalArray", "GlobalArray"]
    assert answer(actor.of_the_class.remote(ref)) == ["Callable", "GlobalArray"]
    assert answer(actor.later.remote(ref)) == "GlobalArray"
    assert answer(actor.here.remote())


def test_what_an_actor_passes_on_to_itself_stays_a_reference(ref: Any) -> None:
    """As with Ray's own references: `clamor.free` in a helper of the actor needs it."""
    import ray

    actor = Callable.options(**OTHER_NODE).remote()
    assert answer(actor.inside.remote(ref, [ref])) == ["GlobalArray"] + 6 * ["GlobalRef"]
    stream = actor.inside_a_generator.remote(ref, [ref])
    assert [ray.get(item, timeout=ANSWER_S) for item in stream] == ["GlobalArray", "GlobalRef"]
    # Afterwards, on the threads that those calls used:
    assert answer(actor.__call__.remote(ref)) == "GlobalArray"
    assert answer(actor.later.remote(ref)) == "GlobalArray"


@clamor.remote
class Reader:
    """Keeps an array."""

    def __init__(self, array: Any, scale: int = 1) -> None:
        self.array, self.scale = array, scale

    def total(self) -> int:
        return int(self.array.sum()) * self.scale

    def dot(self, other: Any, /, *, rows: Any) -> int:
        return self._dot(other, rows)

    def _dot(self, other: Any, rows: Any) -> int:
        return int((self.array[rows] % 1000 * (other[rows] % 1000)).sum())

    def kind(self, items: list[Any]) -> str:
        return type(items[0]).__name__

    def parts(self, other: Any, n: int) -> Iterator[int]:
        yield from [int(part.sum()) for part in np.array_split(other, n)]

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    def forget(self) -> None:
        self.array = None


def test_an_actor(clamor_cluster: ClamorCluster, ref: Any, array: Any) -> None:
    import ray

    reader = Reader.options(**OTHER_NODE).remote(ref, scale=3)
    assert answer(reader.total.remote()) == int(array.sum()) * 3
    other = clamor.put(array[::-1])
    rows = np.arange(0, MIB, 999)
    expected = int((array[rows] % 1000 * (array[::-1][rows] % 1000)).sum())
    assert answer(reader.dot.remote(other, rows=rows)) == expected
    assert answer(reader.kind.remote([other])) == "GlobalRef"
    assert answer(reader.double.remote(4)) == 8
    got = [ray.get(item, timeout=ANSWER_S) for item in reader.parts.remote(other, 3)]
    assert got == [int(part.sum()) for part in np.array_split(array[::-1], 3)]
    # The array of the call is gone with the call, the one that the actor keeps is not.
    until(lambda: clamor_cluster.region(other).mappings == 0)
    assert clamor_cluster.region(ref).mappings == 1
    answer(reader.forget.remote())
    until(lambda: clamor_cluster.region(ref).mappings == 0)
    ray.kill(reader)
    clamor.free(other)


@clamor.remote(num_cpus=0, resources={node_resource(1): 0.001}, max_concurrency=4)
class AsyncReader:
    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def total(self, array: Any) -> int:
        await self.gate.wait()
        return int(array.sum())

    async def open_gate(self) -> None:
        self.gate.set()

    async def parts(self, array: Any, n: int) -> AsyncIterator[int]:
        for part in np.array_split(array, n):
            await asyncio.sleep(0)
            yield int(part.sum())


def test_an_async_actor(ref: Any, array: Any) -> None:
    import ray

    reader = AsyncReader.remote()
    waiting = [reader.total.remote(ref) for _ in range(2)]
    answer(reader.open_gate.remote())  # while the others wait with their leases
    assert ray.get(waiting, timeout=ANSWER_S) == [array.sum()] * 2
    got = [ray.get(item, timeout=ANSWER_S) for item in reader.parts.remote(ref, 4)]
    assert got == [int(part.sum()) for part in np.array_split(array, 4)]
    ray.kill(reader)


class Base:
    def total(self, array: Any) -> int:
        return int(array.sum())


def test_inherited_methods(ref: Any, array: Any) -> None:
    import ray

    class Derived(Base):
        pass

    actor = clamor.remote(Derived).options(**OTHER_NODE).remote()
    assert answer(actor.total.remote(ref)) == array.sum()
    ray.kill(actor)


def plain_get(refs: list[Any]) -> int:
    return int(refs[0].get().sum())


def test_plain_ray_tasks_and_actors(ref: Any, array: Any) -> None:
    import ray

    class Plain:
        def total(self, ref: Any) -> int:
            return int(ref.get().sum())

    assert answer(ray.remote(plain_get).options(**OTHER_NODE).remote([ref])) == array.sum()
    actor = ray.remote(Plain).options(**OTHER_NODE).remote()
    assert answer(actor.total.remote(ref)) == array.sum()
    ray.kill(actor)


# ------------------------------------------------------------------ read sets


def touch(array: Any, rows: Any) -> None:
    for row in rows:
        array[row]


@pytest.mark.parametrize("read_set", ["exact", "coarse", "off"])
def test_read_sets(clamor_cluster: ClamorCluster, ref: Any, read_set: str) -> None:
    blocks = np.arange(50, 2000, 61)
    clamor_cluster.run(prefetch_all, [ref])  # all there: coarse ones see the neighbours, too
    clamor_cluster.run(touch, ref, blocks * 512, read_set=read_set)
    touched = clamor_cluster.region(ref).touched_blocks
    if read_set == "off":
        assert touched == 0
        return
    if read_set == "exact":
        assert touched == len(blocks) + 1  # and the pickle stream
        counts = clamor.block_map(ref, "touched", ref._length_bytes // 4096)
        home, other = (counts[node_id] for node_id in clamor_cluster.lab.node_ids)
        np.testing.assert_array_equal(np.flatnonzero(other), [0, *(blocks + 1)])
        assert not home.any()
    else:
        assert len(blocks) + 1 <= touched <= 16 * (len(blocks) + 1)


def prefetch_all(refs: list[Any]) -> None:
    clamor.prefetch(refs[0])


def test_read_sets_of_tasks_add_up(clamor_cluster: ClamorCluster, ref: Any) -> None:
    for first in (0, 512 * 100, 512 * 100):
        clamor_cluster.run(touch, ref, [first, first + 512 * 50], read_set="exact")
    assert clamor_cluster.region(ref).touched_blocks == 1 + 4


# ------------------------------------------------------------------ what a worker runs of ours


def threads_of_get(handles: list[Any]) -> tuple[int, int, int]:
    import ray

    def threads() -> int:
        # Ray makes threads when it likes, and names them. One of ours has the name of the thread
        # that made it, or one that begins so.
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        return sum(name.startswith(("ray::threads", "clamor")) for name in names)

    ray.util.list_named_actors(all_namespaces=True)
    registry, *refs = handles
    ray.get(registry.stats.remote())  # Ray's own threads for calls are there now
    before = threads()
    arrays = [ref.get() for ref in refs]
    opened = threads()
    for array in arrays:
        array.sum()
    return before, opened, threads()


@pytest.mark.parametrize("trap", ["uffd", "sigsegv"])
def test_a_worker_has_one_thread_of_ours(clamor_cluster: ClamorCluster, trap: str) -> None:
    import ray

    from clamor_ray._session import process_sessions

    refs = [clamor.put(np.arange(MIB)) for _ in range(5)]
    # An environment that no other test has: a worker in which nothing of ours ever ran. One more
    # thread sends spans, where something took a millisecond.
    env = {"CLAMOR_TRAP": trap, "CLAMOR_TEST_FRESH": "1", "CLAMOR_SPANS": "off"}
    task = ray.remote(threads_of_get).options(**OTHER_NODE, runtime_env={"env_vars": env})
    before, opened, after = answer(task.remote([process_sessions.current().registry, *refs]))
    assert opened - before == 1
    assert after == opened
    for ref in refs:
        clamor.free(ref)
