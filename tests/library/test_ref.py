"""References as values, the session's errors, and the decorator; no page server is needed here."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._labels import capital, label
from clamor_ray._objects import memory
from clamor_ray._objects.global_array import GlobalArray
from clamor_ray._objects.layout import Plan, take_apart
from clamor_ray._protocol import names as _names
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.rpc import await_rpc
from clamor_ray._read.ref import FACE, GlobalRef
from clamor_ray._tasks.remote import resolving
from tests.support.lab import local_cluster, require_lab

PLAN = Plan(1288490189, 120, ((4096, 1288486093),))
REF: GlobalRef[Any] = GlobalRef(7, 1, 0x1100_0000_0000, PLAN.region_bytes, PLAN, "abcdef123456")


def inline(obj: Any) -> GlobalRef[Any]:
    pickled = take_apart(obj)
    return GlobalRef(0, 0, 0, 0, pickled.plan, "abcdef123456", pickled.image())


# ------------------------------------------------------------------ values


def test_repr() -> None:
    assert repr(REF) == "GlobalRef(object, 1.2 GiB, variable 7 version 1)"
    assert repr(inline(17)) == "GlobalRef(int, 5 B, inline version 0)"
    named = REF._with(REF._state, frozen=False)
    named._name = "index"
    assert repr(named) == "GlobalRef('index', object, 1.2 GiB, variable 7 version 1)"


def test_label() -> None:
    named = inline(17)
    assert (REF._label, named._label) == ("variable 7", "inline variable")
    named._name = "it's"
    assert named._label == 'variable "it\'s"'
    assert (label(3), label(3, "index")) == ("variable 3", "variable 'index'")
    assert capital(label(3, "index")) == "Variable 'index'"


def test_a_reference_shows_a_small_face() -> None:
    assert dir(REF) == sorted(FACE)
    shown = {name for name in dir(GlobalRef) if not name.startswith("_")}
    assert shown == set(FACE)  # and nothing else is there, though dir would not say so
    assert all(inspect.getdoc(getattr(GlobalRef, name)) for name in FACE)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((1000, 256), np.float32),
        np.zeros((3, 0), ">i2"),
        np.zeros((), "M8[ns]"),
        np.zeros(4, [("a", "f4"), ("b", "S3")]),
        np.zeros((9, 9))[::2, ::3],
        np.array([{}, None], object),
        np.ma.masked_array([1, 2, 3], [0, 1, 0]),
        np.zeros(5).view(GlobalArray),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_a_reference_to_an_array_knows_what_it_looks_like(array: Any) -> None:
    ref = pickle.loads(pickle.dumps(inline(array)))
    assert (ref.shape, ref.dtype, ref.nbytes) == (array.shape, array.dtype, array.nbytes)
    name = "MaskedArray" if isinstance(array, np.ma.MaskedArray) else "ndarray"
    assert repr(ref).startswith(f"GlobalRef({name} {array.dtype} {array.shape}, ")
    assert ref  # also where there are no elements
    if array.ndim:
        assert len(ref) == len(array)
    else:
        with pytest.raises(TypeError, match=r"has no length.*len\(ref\.get\(\)\)"):
            len(ref)


def test_a_reference_to_another_object_says_what_it_is() -> None:
    ref = inline({"weights": np.zeros(10)})
    assert repr(ref).startswith("GlobalRef(dict, ")
    for name in ("shape", "dtype", "weights"):
        with pytest.raises(AttributeError, match=rf"\(dict\): use ref\.get\(\)\.{name}"):
            getattr(ref, name)
    with pytest.raises(TypeError, match=r"GlobalRef\(dict.* has no length"):
        len(ref)
    assert ref


def test_a_name_goes_with_its_reference() -> None:
    ref = inline(1)
    assert ref.name is None
    ref._name = "weights"
    for other in (pickle.loads(pickle.dumps(ref)), ref.snapshot(), copy.copy(ref)):
        assert other.name == "weights"


def test_references_are_small_equal_and_hashable() -> None:
    again = pickle.loads(pickle.dumps(REF))
    assert again == REF
    assert hash(again) == hash(REF)
    assert len(pickle.dumps(REF)) < 400
    assert again.nbytes == 120 + 1288486093
    assert not again._inline


def test_references_are_frozen() -> None:
    with pytest.raises(AttributeError):
        REF.version = 2  # type: ignore[misc]


def test_small_objects_travel_inside() -> None:
    array = np.arange(100.0)
    ref = pickle.loads(pickle.dumps(inline({"a": array, "b": "text"})))
    assert ref._inline
    again = ref.get()
    np.testing.assert_array_equal(again["a"], array)
    with pytest.raises(ValueError, match="read-only"):
        again["a"][0] = 1


def test_mode_c_is_private_and_writable() -> None:
    ref = inline(np.arange(100.0))
    mine = ref.get(mode="c")
    mine[0] = 99
    assert ref.get()[0] == 0
    assert ref.get("c")[0] == 0


def test_other_modes_are_refused() -> None:
    with pytest.raises(ValueError, match="mode is 'r' or 'c', not 'w'"):
        inline(1).get(mode="w")  # type: ignore[arg-type]


def test_a_freed_reference_stays_freed_when_it_travels() -> None:
    ref = inline(1)
    ref._mark_freed()
    for freed in (ref, pickle.loads(pickle.dumps(ref))):
        with pytest.raises(errors.FreedError, match=r"GlobalRef\(.*inline"):
            freed.get()
    with pytest.raises(errors.FreedError):
        clamor.prefetch.__globals__["GlobalRef"]._check_not_freed(ref)


# ------------------------------------------------------------------ before a session


@pytest.mark.parametrize(
    "call",
    [
        lambda: clamor.put(1),
        lambda: clamor.zeros(3),
        lambda: clamor.stats(),
        lambda: clamor.free(REF),
        lambda: clamor.prefetch(np.zeros(3)),
        lambda: REF.get(),
    ],
    ids=["put", "zeros", "stats", "free", "prefetch", "get"],
)
def test_before_init(call: Any) -> None:
    with pytest.raises(errors.NotInitializedError, match=r"clamor.init\(\)"):
        call()


def test_shutdown_without_a_session_is_nothing() -> None:
    clamor.shutdown()


def test_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(errors.UnsupportedPlatformError, match="darwin"):
        clamor.init()


def test_ray_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.RayClientError, match="ray job submit"):
        clamor.init("ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(errors.RayClientError):
        clamor.init()


@pytest.mark.parametrize("call", [clamor.free, clamor.share])
def test_wrong_arguments(call: Any) -> None:
    with pytest.raises(TypeError, match="takes a"):
        call([1, 2])


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("clamor_ray", ("ray", "numpy")),
        # pyarrow: 25 MB and a tenth of a second of each worker, page server and registry.
        ("clamor_ray._session.init", ("pyarrow", "obstore", "click", "rich")),
        ("clamor_ray.actors.create_registry", ("pyarrow", "obstore", "click", "rich")),
        ("clamor_ray.actors.page_server.page_server", ("pyarrow", "obstore", "click", "rich")),
    ],
)
def test_import_is_light(module: str, heavy: tuple[str, ...]) -> None:
    code = f"import {module}, sys; print([each for each in {heavy} if each in sys.modules])"
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert out.stdout.splitlines()[-1] == "[]"


def test_everything_promised_is_there() -> None:
    for name in clamor.__all__:
        assert getattr(clamor, name) is not None
    assert set(clamor.__all__) <= set(dir(clamor))
    with pytest.raises(AttributeError, match=r"attribute.*nonsense"):
        _ = clamor.nonsense


# ------------------------------------------------------------------ settings


def test_the_environment() -> None:
    assert Config.from_env({}) == Config()
    config = Config.from_env({"CLAMOR_TRAP": "sigsegv", "CLAMOR_REATTACH_S": "2.5"})
    assert (config.trap, config.reattach_s) == ("sigsegv", 2.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CLAMOR_TRAP", "magic"),
        ("CLAMOR_READ_SETS", "all"),
        ("CLAMOR_REATTACH_S", "soon"),
        ("CLAMOR_REATTACH_S", "-1"),
        ("CLAMOR_REATTACH_S", "inf"),
        ("CLAMOR_REATTACH_S", "nan"),
    ],
)
def test_the_environment_when_wrong(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        Config.from_env({name: value})


def test_every_setting_is_in_the_table() -> None:
    from dataclasses import fields

    from clamor_ray._protocol import config as _config

    for field in fields(Config):
        default = field.default
        text = f"{default:g}" if isinstance(default, float) else default
        row = f"| CLAMOR_{field.name.upper()} | {text} |".replace("|  |", "| |")
        assert row in (_config.__doc__ or "")


# ------------------------------------------------------------------ names


def test_sessions_of_a_job_are_told_apart() -> None:
    one, two = _names.new_scope("10.0.0.1:6379", "01"), _names.new_scope("10.0.0.1:6379", "01")
    assert one != two
    assert len(one) == len(two) == 12
    part = _names.job_part("10.0.0.1:6379", "01")
    names = [_names.registry_name(one), "page-server-x", _names.registry_name("f" * 12)]
    assert _names.scopes_of_job(names, part) == [one]


def test_names_agree_with_the_actors() -> None:
    from clamor_ray.actors import create_registry
    from clamor_ray.actors.page_server import page_server

    # A worker finds both by name alone, so nobody may spell the names a second time.
    assert create_registry.names is page_server.names is _names


# ------------------------------------------------------------------ memory


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_left_is_the_least_that_anyone_leaves(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8000 kB\n"}
    assert memory.available_bytes(tree(tmp_path, files)) == 8000 * 1024
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/memory.max": "5000000\n",
        "sys/fs/cgroup/pod/memory.current": "4000000\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 500000\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/box/memory.current": "4000000\n",
    }
    assert memory.available_bytes(tree(tmp_path, files)) == 1_500_000


def test_memory_left_under_the_first_cgroups(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu:/x\n2:memory:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1000",
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "2000",
    }
    assert memory.available_bytes(tree(tmp_path, files)) == 0


def test_memory_left_unknown(tmp_path: Path) -> None:
    assert memory.available_bytes(tmp_path) is None
    enough = None if memory.available_bytes() is None else 1 << 61
    memory.check_room(1 << 60, "put(x)", available=enough)


def test_no_room_is_an_error_with_both_numbers() -> None:
    with pytest.raises(errors.OutOfMemoryError, match=r"2\.0 KiB \(2048 bytes\).*1000 bytes"):
        memory.check_room(2048, "put(x)", available=1000)
    memory.check_room(2048, "put(x)", available=2048)


# ------------------------------------------------------------------ the decorator, without Ray


def test_references_arrive_as_objects() -> None:
    def work(a: Any, *rest: Any, b: Any = None, **more: Any) -> Any:
        """Works."""
        return a, rest, b, more

    wrapped = resolving(work)
    ref = inline([1, 2])
    assert wrapped(ref, ref, 3, b=ref, c=[ref]) == ([1, 2], ([1, 2], 3), [1, 2], {"c": [ref]})
    assert inspect.signature(wrapped) == inspect.signature(work)
    assert wrapped.__doc__ == "Works."
    a, (again, *_), *_ = wrapped(ref, ref)
    assert a is again


def test_generators_stay_generators() -> None:
    def count(items: Any) -> Iterator[Any]:
        yield from items

    assert inspect.isgeneratorfunction(resolving(count))
    assert list(resolving(count)(inline([1, 2]))) == [1, 2]


async def _drain(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def test_coroutines_stay_coroutines() -> None:
    import asyncio

    async def total(items: Any) -> int:
        return sum(items)

    async def each(items: Any) -> AsyncIterator[Any]:
        for item in items:
            yield item

    assert inspect.iscoroutinefunction(resolving(total))
    assert asyncio.run(resolving(total)(inline([1, 2]))) == 3
    assert inspect.isasyncgenfunction(resolving(each))
    assert asyncio.run(_drain(resolving(each)(inline([1, 2])))) == [1, 2]


def test_wrong_decorations() -> None:
    with pytest.raises(TypeError, match="function or a class"):
        clamor.remote(7)
    with pytest.raises(TypeError, match=r"@clamor.remote\("):
        clamor.remote(1, 2)
    with pytest.raises(ValueError, match="read_set"):
        clamor.remote(read_set="some")


# ------------------------------------------------------------------ the decorator, with Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    require_lab("local")
    with local_cluster(1, num_cpus=2):
        yield


def ray_get(reference: Any) -> Any:
    return ray.get(reference, timeout=60)


def test_tasks(cluster: None) -> None:
    @clamor.remote
    def double(values: Any, extra: int = 0) -> Any:
        return values * 2 + extra

    @clamor.remote(num_cpus=1, num_returns=2, read_set="off")
    def both(values: Any) -> Any:
        return values.sum(), type(values).__name__

    ref = inline(np.arange(10))
    assert (ray_get(double.remote(ref, extra=1)) == np.arange(10) * 2 + 1).all()
    assert (ray_get(double.options(num_cpus=0.5).remote(values=ref)) == np.arange(10) * 2).all()
    assert ray_get(list(both.remote(ref))) == [45, "ndarray"]


def test_tasks_take_ray_references_too(cluster: None) -> None:
    @clamor.remote
    def add(a: Any, b: Any) -> Any:
        return a + b

    assert ray_get(add.remote(inline(1), ray.put(2))) == 3
    # A reference that is itself behind an ObjectRef arrives as the object as well.
    assert ray_get(add.remote(ray.put(inline(1)), 2)) == 3


def test_generator_tasks(cluster: None) -> None:
    @clamor.remote
    def count(items: Any) -> Iterator[Any]:
        yield from items

    assert [ray_get(item) for item in count.remote(inline([1, 2, 3]))] == [1, 2, 3]


def test_actors(cluster: None) -> None:
    @clamor.remote(num_cpus=0)
    class Store:
        """Keeps."""

        def __init__(self, values: Any) -> None:
            self.values = values

        def total(self, more: Any = ()) -> int:
            return int(sum(self.values) + sum(more))

        @ray.method(num_returns=2)
        def pair(self, a: Any) -> Any:
            return a[0], a[1]

        def each(self) -> Iterator[Any]:
            yield from self.values

        @staticmethod
        def fixed() -> int:
            return 5

    store = Store.remote(inline([1, 2]))
    assert ray_get(store.total.remote()) == 3
    assert ray_get(store.total.remote(inline([10]))) == 13
    assert ray_get(store.total.remote(more=inline([10]))) == 13
    assert ray_get(list(store.pair.remote(inline([4, 5])))) == [4, 5]
    each = store.each.options(num_returns="streaming").remote()
    assert [ray_get(item) for item in each] == [1, 2]
    assert ray_get(store.fixed.remote()) == 5


def test_async_actors(cluster: None) -> None:
    @clamor.remote(num_cpus=0)
    class Store:
        async def total(self, values: Any) -> int:
            return int(sum(values))

    store = Store.remote()
    assert ray_get([store.total.remote(inline([i])) for i in range(5)]) == list(range(5))


def test_inheritance_and_calls_to_oneself(cluster: None) -> None:
    class Base:
        def __init__(self, values: Any) -> None:
            self.values = values

        def total(self, factor: Any) -> int:
            return int(sum(self.values)) * factor

    @clamor.remote(num_cpus=0)
    class Derived(Base):
        def total(self, factor: Any) -> int:
            return super().total(factor) + 1

    assert ray_get(Derived.remote(inline([1, 2])).total.remote(inline(10))) == 31


def test_errors_cross_the_wire_whole(cluster: None) -> None:
    @ray.remote(num_cpus=0, max_retries=0)
    def fail() -> None:
        raise errors.HomeLostError("Node 7 is gone.", code=-7)

    with pytest.raises(errors.HomeLostError) as caught:
        await_rpc(fail.remote(), 60)
    assert type(caught.value) is errors.HomeLostError
    assert caught.value.code == -7


def test_answers_that_do_not_come(cluster: None) -> None:
    @ray.remote(num_cpus=0, max_retries=0)
    def fail() -> None:
        raise KeyError("what")

    with pytest.raises(errors.InternalError, match="KeyError"):
        await_rpc(fail.remote(), 60)

    @ray.remote(num_cpus=0)
    class Registry:
        def ping(self) -> None: ...

    registry = Registry.remote()
    ray_get(registry.ping.remote())
    ray.kill(registry)  # returns before the actor is dead

    def ask_until(deadline: float) -> None:
        while time.monotonic() < deadline:
            await_rpc(registry.ping.remote(), 60)

    with pytest.raises(errors.ServerUnavailableError):
        ask_until(time.monotonic() + 60)


def test_a_worker_without_a_session_says_so(cluster: None) -> None:
    @ray.remote(num_cpus=0, max_retries=0)
    def put() -> None:
        clamor.put(np.zeros(10_000))

    @ray.remote(num_cpus=0, max_retries=0)
    def get() -> None:
        REF.get()

    with pytest.raises(errors.NotInitializedError, match="No driver of this job"):
        await_rpc(put.remote(), 60)
    with pytest.raises(errors.SessionMismatchError, match="abcdef123456"):
        await_rpc(get.remote(), 60)
