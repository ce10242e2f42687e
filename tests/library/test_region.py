"""`clamor.build`: arrays, NumPy's allocations and C++ structures built where tasks read them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from clamor_ray._session.session import Session
from tests.conftest import ANSWER_S, ClamorCluster, until
from tests.support.native import compile_library, require_nanoflann

pytestmark = pytest.mark.lab

MIB = 1 << 20
RNG = np.random.default_rng(3)


def n_mappings(cluster: ClamorCluster, node: int) -> int:
    return cluster.engine(node).mappings


@pytest.fixture(autouse=True)
def nothing_stays(clamor_cluster: ClamorCluster) -> Iterator[None]:
    """Leases end with what they were for."""
    yield
    gc.collect()
    until(lambda: n_mappings(clamor_cluster, 0) == 0)
    assert len(process_sessions.current().leases) == 0


def memory_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise LookupError(field)


def home_bytes(cluster: ClamorCluster, length_bytes: int) -> int:
    """Memory that node 0's page server has for its home of a region of this length."""
    folder = Path(f"/proc/{cluster.lab.page_server_pid(0)}/fd")
    found = []
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            found.append(entry.stat())
    return max(stat.st_blocks * 512 for stat in found if stat.st_size == length_bytes)


# ------------------------------------------------------------------ arrays


def test_an_array_built_in_place(clamor_cluster: ClamorCluster) -> None:
    expected = RNG.random((MIB // 8, 3))
    with clamor.build(64 * MIB) as r:
        a = r.empty(expected.shape)
        a[:] = expected
        ref = r.publish(a)
    assert ref.version == 0
    assert ref._plan.buffers[0][1] == expected.nbytes
    np.testing.assert_array_equal(ref.get(), expected)
    assert np.shares_memory(ref.get(), a)  # the same memory, at the same address
    total, head = clamor_cluster.run(lambda x: (float(x.sum()), x[:2].copy()), ref)
    assert total == pytest.approx(expected.sum())
    np.testing.assert_array_equal(head, expected[:2])
    clamor.free(ref)


def test_after_the_block_arrays_are_read_only(clamor_cluster: ClamorCluster) -> None:
    with clamor.build(MIB) as r:
        a, b = r.zeros(1000), r.empty(1000, np.int32)
        with r.numpy_allocator():
            c, d = np.arange(1000), np.asfortranarray(np.ones((30, 30)))
        b[:] = 7
        ref = r.publish({"b": b, "c": c, "d": d})
        a[0] = 1
        b[0] = 8
    for array in (a, b, c, d):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    assert (a[0], b[0], c[999], d.sum()) == (1, 8, 999, 900)
    got = clamor_cluster.run(lambda o: [int(o["b"][0]), int(o["c"].sum()), o["d"].sum()], ref)
    assert got == [8, 499_500, 900]
    clamor.free(ref)


def test_no_second_copy(clamor_cluster: ClamorCluster) -> None:
    n_bytes = 256 * MIB
    gc.collect()
    before = memory_kib("RssAnon")
    clamor_cluster.engine(0)
    with clamor.build(1 << 40) as r:
        a = r.empty(n_bytes // 8)
        assert memory_kib("RssAnon") - before < 2048  # nothing until it is written
        a[:] = 3.0
        ref = r.publish({"a": a})
        peak = memory_kib("RssAnon")
    private = max(peak, memory_kib("RssAnon")) - before
    assert private * 1024 < 0.05 * n_bytes
    assert n_bytes <= home_bytes(clamor_cluster, 1 << 40) <= 1.01 * n_bytes
    assert (
        clamor_cluster.run(lambda o: float(o["a"][::4096].sum()), ref) == 3.0 * n_bytes / 8 / 4096
    )
    clamor.free(ref)


def test_what_lies_outside_is_copied_in(clamor_cluster: ClamorCluster) -> None:
    outside = RNG.random(100_000)
    with clamor.build(4 * MIB) as r:
        inside = r.zeros(1000)
        ref = r.publish((inside, outside, "text", outside[:0], inside[10:20]))
        inside[10] = 5
    (at, _), (copied, n_bytes), *_ = ref._plan.buffers
    assert (at, n_bytes) == (inside.ctypes.data - ref._base_address, outside.nbytes)
    assert copied % 4096 == 0
    got = clamor_cluster.run(lambda o: (o[0][10], o[1].copy(), o[2], len(o[3]), o[4][0]), ref)
    assert (got[0], got[2:]) == (5, ("text", 0, 5))
    np.testing.assert_array_equal(got[1], outside)
    clamor.free(ref)


def test_what_was_published_stays_where_it_is(clamor_cluster: ClamorCluster) -> None:
    with clamor.build(MIB) as r, r.numpy_allocator():
        ref = r.publish(np.full(1000, 7))  # nobody else holds it
        for _ in range(50):
            np.zeros(1000, int)
    assert clamor_cluster.run(lambda x: int(x.sum()), ref) == 7000
    clamor.free(ref)


def test_too_full(clamor_cluster: ClamorCluster) -> None:
    with clamor.build(MIB) as r:
        with pytest.raises(errors.NoSpaceError, match="no room for"):
            r.empty(MIB)
        a = r.zeros(1000)
        with pytest.raises(errors.NoSpaceError):
            r.publish((a, np.ones(MIB)))
        ref = r.publish(a)  # the failure left nothing behind
        with pytest.raises(ValueError, match="one object"):
            r.publish(a)
    assert ref.get().sum() == 0
    clamor.free(ref)


# ------------------------------------------------------------------ ends


def test_an_exception_abandons(clamor_cluster: ClamorCluster) -> None:
    n_regions = clamor_cluster.engine(0).regions
    with pytest.raises(ZeroDivisionError), clamor.build(MIB) as r:  # noqa: PT012
        a = r.zeros(1000)
        ref = r.publish(a)
        a[0] = 1
        1 / 0  # noqa: B018
    assert a[0] == 1  # its memory is there as long as it is
    with pytest.raises(errors.FreedError):
        ref.get()
    with pytest.raises(errors.ClosedError, match="with block"):
        r.empty(5)
    del a, r
    gc.collect()
    until(lambda: clamor_cluster.engine(0).regions <= n_regions)


def seal_and_interrupt(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry carries out `seal`, and its answer never comes."""
    seal = session.rpc.seal

    def lost(*args: Any) -> Any:
        seal(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(session.rpc, "seal", lost)


@pytest.mark.parametrize("how", ["put", "zeros"])
def test_a_put_that_was_interrupted_after_its_seal_leaves_nothing(
    how: str, clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_regions = clamor_cluster.engine(0).regions
    with monkeypatch.context() as patch:
        seal_and_interrupt(process_sessions.current(), patch)
        with pytest.raises(KeyboardInterrupt):
            clamor.put(np.ones(1 << 16)) if how == "put" else clamor.zeros(1 << 20)
    until(lambda: clamor_cluster.engine(0).regions <= n_regions)


def test_a_region_whose_seal_was_not_answered_goes_with_its_last_array(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_regions = clamor_cluster.engine(0).regions
    with monkeypatch.context() as patch:
        seal_and_interrupt(process_sessions.current(), patch)
        with pytest.raises(KeyboardInterrupt), clamor.build(MIB) as r:  # noqa: PT012
            a = r.zeros(1000)
            a[0] = 1
            ref = r.publish(a)
    assert a[0] == 1  # its memory is there as long as it is
    with pytest.raises(errors.FreedError):
        ref.get()
    del a, r
    gc.collect()
    until(lambda: clamor_cluster.engine(0).regions <= n_regions)


def test_nothing_published(clamor_cluster: ClamorCluster) -> None:
    n_regions = clamor_cluster.engine(0).regions
    with pytest.warns(errors.ClamorWarning, match="nothing was published"):  # noqa: SIM117
        with clamor.build(MIB) as r:
            r.zeros(1000)
    until(lambda: clamor_cluster.engine(0).regions <= n_regions)


def test_before_the_end_of_the_block(clamor_cluster: ClamorCluster) -> None:
    with clamor.build(MIB) as r:
        ref = r.publish(r.zeros(1000))
        with pytest.raises(errors.ClamorError, match="not sealed yet"):
            ref.get()
    assert ref.get().sum() == 0
    clamor.free(ref)


def test_misuse() -> None:
    for nbytes in (0, -5):
        with pytest.raises(ValueError, match="at least one byte"):
            clamor.build(nbytes)
    r = clamor.build(100)
    with pytest.raises(errors.ClosedError, match="with block"):
        r.publish(1)
    with pytest.warns(errors.ClamorWarning), r:  # noqa: PT031
        with pytest.raises(ValueError, match="made of zero bytes"):
            r.empty(3, object)
        with pytest.raises(ValueError, match="negative"):
            r.zeros((3, -1))
        with pytest.raises(ValueError, match="not inside the region"):
            r.pointer(id(r))
    with pytest.raises(ValueError, match="once"), r:
        pass


def test_numpy_arrays_that_outlive_everything(clamor_cluster: ClamorCluster) -> None:
    with clamor.build(16 * MIB) as r, r.numpy_allocator():
        kept = np.arange(MIB)
        ref = r.publish({"kept": kept})
    del r
    clamor.free(ref)
    gc.collect()
    assert kept.sum() == MIB * (MIB - 1) // 2  # it keeps the lease
    assert n_mappings(clamor_cluster, 0) == 1
    del kept, ref
    gc.collect()
    until(lambda: n_mappings(clamor_cluster, 0) == 0)


def test_fork(clamor_cluster: ClamorCluster) -> None:
    with clamor.build(MIB) as r:
        a = r.zeros(1000)
        child = os.fork()
        if child == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    r.empty(5)
                except errors.NoSpaceError:
                    os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        ref = r.publish(a)
    assert ref.get().sum() == 0
    clamor.free(ref)


# ------------------------------------------------------------------ pointers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


def load_tree(path: str) -> Any:
    lib = ctypes.CDLL(path)
    lib.build_tree.restype = ctypes.c_void_p
    lib.build_dictionary.restype = ctypes.c_void_p
    lib.count_below.restype = ctypes.c_size_t
    lib.sum_of.restype = ctypes.c_long
    return lib


def test_an_unmodified_library(clamor_cluster: ClamorCluster, folder: Path) -> None:
    path = str(compile_library("tree.cpp", folder))
    lib = load_tree(path)
    keys = RNG.random(50_000)
    with clamor.build(64 * MIB) as r:
        with r.malloc(lib):
            tree = lib.build_tree(ctypes.c_void_p(keys.ctypes.data), ctypes.c_size_t(len(keys)))
            words = lib.build_dictionary(1000)
        ref = r.publish({"tree": r.pointer(tree), "words": r.pointer(words, 64), "n": len(keys)})
    assert ref._plan.fixed

    def query(found: Any) -> Any:
        lib = load_tree(path)
        limit = ctypes.c_double(0.5)
        return (
            int(found["tree"]),
            lib.count_below(found["tree"], limit),
            lib.sum_of(found["words"], 999),
            found["words"].nbytes,
        )

    query.__globals__["load_tree"] = load_tree
    expected = (tree, int((keys < 0.5).sum()), sum(999 * j for j in range(9)), 64)
    assert query(ref.get()) == expected
    assert clamor_cluster.run(query, ref) == expected
    # As long as the library may write here, it does so to a copy of its own.
    ctypes.memset(tree, 255, 8)
    with pytest.raises(errors.AddressClashError, match=r"written to its memory.*let_go"):
        ref.get()
    assert clamor_cluster.run(query, ref) == expected
    gc.collect()
    assert n_mappings(clamor_cluster, 0) == 1
    r.let_go()
    r.let_go()  # once is enough
    until(lambda: n_mappings(clamor_cluster, 0) == 0)
    assert query(ref.get()) == expected
    clamor.free(ref)


def test_a_library_may_write_to_what_was_abandoned(
    clamor_cluster: ClamorCluster, folder: Path
) -> None:
    n_regions = clamor_cluster.engine(0).regions
    lib = load_tree(str(compile_library("tree.cpp", folder)))
    with pytest.warns(errors.ClamorWarning), clamor.build(MIB) as r:  # noqa: PT031
        with r.malloc(lib):
            words = lib.build_dictionary(10)
        with pytest.raises(errors.ClosedError, match="end of its block"):
            r.let_go()
    until(lambda: clamor_cluster.engine(0).regions <= n_regions)
    gc.collect()
    assert lib.sum_of(ctypes.c_void_p(words), 9) == sum(9 * j for j in range(9))
    ctypes.memset(words, 255, 8)
    r.let_go()


def test_pointers_only_travel_in_their_region(clamor_cluster: ClamorCluster) -> None:
    import pickle

    with clamor.build(MIB) as r:
        pointer = r.pointer(r.zeros(1000).ctypes.data)
        ref = r.publish(pointer)
        with pytest.raises(errors.UnpicklableError, match="by itself"):
            pickle.dumps(pointer)
        with pytest.raises(errors.UnpicklableError, match="means nothing in a copy"):
            clamor.put([pointer])
    got = ref.get()
    assert got == pointer
    assert int(got) == pointer.address == got._as_parameter_.value
    assert clamor_cluster.run(lambda found: int(found), ref) == pointer.address
    clamor.free(ref)


def test_the_address_is_taken(clamor_cluster: ClamorCluster) -> None:
    with clamor.build(MIB) as r:
        a = r.zeros(1000)
        ref = r.publish((a, r.pointer(a.ctypes.data)))
    del a, r
    gc.collect()

    def clash(ref: Any) -> str:
        import mmap

        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (
            [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        )
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        assert libc.mmap(ref._base_address, 4096, 1, flags, -1, 0) == ref._base_address
        try:
            ref.get()
        except errors.AddressClashError as error:
            return str(error)
        finally:
            libc.munmap(ctypes.c_void_p(ref._base_address), ctypes.c_size_t(4096))
        return "no error"

    import ray

    task = ray.remote(clash).options(num_cpus=0, resources={"node1": 0.001})
    assert "must be mapped at" in ray.get(task.remote(ref), timeout=ANSWER_S)
    private = ref.get(mode="c")  # nobody else has it here: it is had at its own address
    assert int(private[1]) == private[0].ctypes.data
    with pytest.raises(errors.AddressClashError, match="let go of what came from that first"):
        ref.get()
    del private
    clamor.free(ref)


def load_kdtree(path: str) -> Any:
    lib = ctypes.CDLL(path)
    lib.build_index.restype = ctypes.c_void_p
    lib.nearest.restype = ctypes.c_size_t
    return lib


def neighbours(lib: Any, index: Any, queries: Any, k: int) -> Any:
    out = np.empty((len(queries), k), np.uint64)
    for query, row in zip(queries, out, strict=True):
        found = lib.nearest(
            index, query.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(k),
            row.ctypes.data_as(ctypes.c_void_p),
        )  # fmt: skip
        assert found == k
    return out


def test_nanoflann(clamor_cluster: ClamorCluster, folder: Path) -> None:
    """A third-party index of pointers, built here, asked on another node."""
    from scipy.spatial import cKDTree

    require_nanoflann()
    path = str(compile_library("kdtree.cpp", folder))
    lib = load_kdtree(path)
    coordinates = RNG.random((200_000, 3))
    queries = RNG.random((200, 3))
    with clamor.build(256 * MIB) as r:
        points = r.empty(coordinates.shape)
        points[:] = coordinates
        with r.malloc(lib):
            index = lib.build_index(
                ctypes.c_void_p(points.ctypes.data), ctypes.c_size_t(len(points))
            )
        ref = r.publish({"points": points, "index": r.pointer(index)})

    def ask(found: Any) -> Any:
        return neighbours(load_kdtree(path), ctypes.c_void_p(int(found["index"])), queries, 5)

    ask.__globals__.update(load_kdtree=load_kdtree, neighbours=neighbours)
    _, expected = cKDTree(coordinates).query(queries, 5)
    np.testing.assert_array_equal(ask(ref.get()), expected)
    assert clamor_cluster.run(lambda found: list(found), ref) == ["points", "index"]
    before = clamor_cluster.engine(1).bytes_received
    np.testing.assert_array_equal(clamor_cluster.run(ask, ref), expected)
    fetched = clamor_cluster.engine(1).bytes_received - before
    assert 0 < fetched < ref.nbytes  # a walk of the tree, not the tree
    clamor.free(ref)
    del points
    r.let_go()


# ------------------------------------------------------------------ room to grow


def test_zeros_with_a_capacity(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.zeros((10, 3), np.float32, capacity=10**9)
    assert ref._length_bytes >= 12 * 10**9
    assert not ref._inline
    assert ref.get().shape == (10, 3)
    assert clamor_cluster.run(lambda x: (x.shape, float(x.sum())), ref) == ((10, 3), 0.0)
    clamor.free(ref)
