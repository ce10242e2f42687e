"""An arena as NumPy and unmodified C++ libraries see it, without a cluster."""

from __future__ import annotations

import contextvars
import ctypes
import gc
import importlib
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cffi import FFI

from clamor_ray import errors
from clamor_ray._build import (
    arena,
    libraries,
    numpy_allocator,
)
from clamor_ray._build.arena import Arena
from tests.support.native import compile_library

multiarray: Any = importlib.import_module(
    "numpy._core.multiarray"
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0"
    else "numpy.core.multiarray"
)

MIB = 1 << 20


class Ground:
    """Memory that an arena lies in, and its lease."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.memory = mmap.mmap(-1, n_bytes)
        image = np.frombuffer(self.memory, np.uint8)
        self.address = int(image.__array_interface__["data"][0])
        self.is_let_go = False
        ground = self

        class Lease:
            def __del__(self) -> None:
                ground.is_let_go = True

        self.arena: Any = Arena(self.address, n_bytes, Lease())

    def holds(self, what: Any) -> bool:
        address = what if isinstance(what, int) else what.__array_interface__["data"][0]
        return self.address <= address < self.address + self.n_bytes

    @contextmanager
    def numpy(self) -> Iterator[None]:
        with numpy_allocator.in_force(numpy_allocator.make_capsule(self.arena.numpy_handler())):
            yield

    def close(self) -> None:
        self.arena.close()
        libc = ctypes.CDLL(None, use_errno=True)
        at = ctypes.c_void_p(self.address)
        assert libc.mprotect(at, ctypes.c_size_t(self.n_bytes), 1) == 0  # PROT_READ


@pytest.fixture
def ground() -> Ground:
    return Ground(64 * MIB)


# ------------------------------------------------------------------ the binding


def test_unreferenced_blocks_go_back(ground: Ground) -> None:
    block = ground.arena.allocate(10 * MIB)
    array = block.bytes()
    first = block.address
    assert ground.holds(array)
    del block
    gc.collect()
    assert ground.arena.allocate(10 * MIB).address != first  # the array keeps it
    del array
    gc.collect()
    assert ground.arena.allocate(10 * MIB).address == first


def test_a_full_arena_says_so(ground: Ground) -> None:
    kept = ground.arena.allocate(40 * MIB)
    with pytest.raises(errors.NoSpaceError, match=r"64.0 MiB has no room for 40.0 MiB more"):
        ground.arena.allocate(40 * MIB)
    assert kept.n_bytes == 40 * MIB
    assert ground.arena.used_bytes == 40 * MIB


def test_the_lease_lasts_as_long_as_anything(ground: Ground) -> None:
    array = ground.arena.allocate(100).bytes()
    with ground.numpy():
        made = np.arange(100)
    ground.arena = None
    gc.collect()
    assert not ground.is_let_go
    del array
    gc.collect()
    assert not ground.is_let_go  # NumPy's array still needs it
    del made
    gc.collect()
    assert ground.is_let_go
    assert not numpy_allocator._kept


# ------------------------------------------------------------------ NumPy


def test_numpy_arrays_lie_in_the_arena(ground: Ground) -> None:
    before = np.arange(10)
    with ground.numpy():
        small, large = np.arange(10), np.ones(1_000_000)
        zeros, sorted_ = np.zeros((1000, 1000)), np.sort(large[::-1])
        copied = before.copy()
        text = np.array(["some", "words"])
    after = np.arange(10)
    for array in (small, large, zeros, sorted_, copied, text):
        assert ground.holds(array)
    assert not ground.holds(before)
    assert not ground.holds(after)
    assert large.sum() == 1_000_000
    assert not zeros.any()
    assert multiarray.get_handler_name(large) == "clamor_region"
    assert multiarray.get_handler_name() == "default_allocator"


def test_temporary_arrays_are_freed(ground: Ground) -> None:
    with ground.numpy():
        for _ in range(50):
            np.ones(MIB)  # 8 MiB each
    assert ground.arena.used_bytes <= 16 * MIB


def test_a_full_arena_is_a_memory_error(ground: Ground) -> None:
    with ground.numpy(), pytest.raises(MemoryError):
        np.ones(10 * MIB)
    assert np.ones(10 * MIB)[0] == 1


def test_nested_blocks(ground: Ground) -> None:
    inner = Ground(MIB)
    with ground.numpy():
        a = np.arange(5)
        with inner.numpy():
            b = np.arange(5)
        c = np.arange(5)
        with pytest.raises(ZeroDivisionError), inner.numpy():
            1 / 0  # noqa: B018
        d = np.arange(5)
    assert [ground.holds(x) for x in (a, b, c, d)] == [True, False, True, True]
    assert inner.holds(b)


def test_other_threads_and_contexts_are_not_concerned(ground: Ground) -> None:
    made: dict[str, Any] = {}
    outside = contextvars.copy_context()
    with ground.numpy():
        thread = threading.Thread(target=lambda: made.update(thread=np.arange(1000)))
        thread.start()
        thread.join()
        outside.run(lambda: made.update(context=np.arange(1000)))
        stale = contextvars.copy_context()
    assert not ground.holds(made["thread"])
    assert not ground.holds(made["context"])
    ground.close()
    # A context that was copied in the block outlives it, as a coroutine's may.
    assert not ground.holds(stale.run(lambda: np.arange(1000)))


def test_arrays_may_be_freed_and_resized_late(ground: Ground) -> None:
    with ground.numpy():
        arrays = [np.arange(n) for n in (1, 100, 10_000, 1_000_000)]
    ground.close()
    grown = arrays[2]
    assert not grown.flags.owndata or ground.holds(grown)
    grown.resize(20_000, refcheck=False)  # the arena is closed: it moves out
    assert not ground.holds(grown)
    np.testing.assert_array_equal(grown[:10_000], np.arange(10_000))
    assert arrays[3].sum() == 499_999_500_000  # still readable
    del grown
    arrays.clear()
    gc.collect()


def test_arrays_left_at_the_end_of_the_interpreter() -> None:
    program = """
import numpy as np
from tests.library.test_arena import Ground
ground = Ground(1 << 20)
with ground.numpy():
    kept = np.arange(1000)
ground.close()
import builtins
builtins.kept_for_ever = kept
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------ libraries


@pytest.fixture(scope="module")
def tree_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library("tree.cpp", tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def tree(tree_path: Path) -> Any:
    lib = ctypes.CDLL(str(tree_path))
    for name in ("build_tree", "build_dictionary", "allocate", "reallocate", "allocate_aligned",
                 "new_or_null", "allocate_on_a_thread"):  # fmt: skip
        getattr(lib, name).restype = ctypes.c_void_p
    lib.count_below.restype = ctypes.c_size_t
    lib.sum_of.restype = ctypes.c_long
    return lib


def pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def build_tree(tree: Any, keys: Any) -> int:
    return int(tree.build_tree(pointer(keys.ctypes.data), ctypes.c_size_t(len(keys))))


@contextmanager
def entered(ground: Ground, library: Any) -> Iterator[None]:
    arena.patch(libraries.name_of(library))
    with ground.arena.entered():
        yield


def test_a_tree_of_pointers(ground: Ground, tree: Any) -> None:
    keys = np.random.default_rng(1).random(20_000)
    outside = build_tree(tree, keys)
    with entered(ground, tree):
        root = build_tree(tree, keys)
    later = build_tree(tree, keys)
    assert ground.holds(root)
    assert not ground.holds(outside)
    assert not ground.holds(later)
    below = ctypes.c_double(0.25)
    assert tree.count_below(pointer(root), below) == (keys < 0.25).sum()
    # All of it is there: 20,000 nodes of 32 bytes and labels of 16, and nothing much besides.
    assert 20_000 * 48 <= ground.arena.used_bytes < 1.2 * 20_000 * 48
    ground.close()
    assert tree.count_below(pointer(root), below) == (keys < 0.25).sum()
    for made in (outside, root, later):
        tree.free_tree(pointer(made))


def test_memory_of_a_freed_tree_is_used_again(ground: Ground, tree: Any) -> None:
    keys = np.random.default_rng(1).random(20_000)
    with entered(ground, tree):
        for _ in range(5):
            root = build_tree(tree, keys)
            high = ground.arena.used_bytes
            tree.free_tree(pointer(root))
    assert high < 1.2 * 20_000 * 48


def test_containers_of_the_standard_library(ground: Ground, tree: Any) -> None:
    with entered(ground, tree):
        made = tree.build_dictionary(1000)
    assert ground.holds(made)
    expected = sum(999 * j for j in range(9))
    assert tree.sum_of(pointer(made), 999) == expected
    # Keys and values too: nothing of it lies elsewhere.
    assert ground.arena.used_bytes > 1000 * (48 + 80)
    ground.close()
    assert tree.sum_of(pointer(made), 999) == expected


def test_the_kin_of_malloc(ground: Ground, tree: Any) -> None:
    size = ctypes.c_size_t
    outside = tree.allocate(size(100))
    with entered(ground, tree):
        inside = tree.allocate(size(100))
        aligned = tree.allocate_aligned(size(1 << 16), size(10))
        other_thread = tree.allocate_on_a_thread(size(100))
        outside = tree.reallocate(pointer(outside), size(1000))
        full = tree.allocate(size(1 << 40)), tree.new_or_null(size(1 << 40))
    assert ground.holds(inside)
    assert ground.holds(aligned)
    assert aligned % (1 << 16) == 0
    assert not ground.holds(other_thread)
    assert not ground.holds(outside)  # a block keeps its kind
    assert full == (None, None)
    ctypes.memset(inside, 65, 100)
    ground.close()
    moved = tree.reallocate(pointer(inside), size(1000))
    assert not ground.holds(moved)
    assert ctypes.string_at(moved, 100) == b"A" * 100
    for made in (outside, inside, aligned, other_thread, moved):
        tree.release(pointer(made))


def test_python_does_not_land_there(ground: Ground, tree: Any) -> None:
    with entered(ground, tree):
        objects = [bytearray(n * 100) for n in range(1000)]
        arrays = [np.arange(n) for n in range(1000)]
    assert ground.arena.used_bytes == 0
    assert len(objects) == len(arrays)


def test_every_name_of_a_library(tree: Any, tree_path: Path) -> None:
    ffi = FFI()
    ffi.cdef("void *allocate(size_t n_bytes);")
    found = [
        arena.patch(libraries.name_of(library))
        for library in (tree, tree_path, str(tree_path), ffi.dlopen(str(tree_path)))
    ]
    assert found == [str(tree_path)] * 4
    from clamor_ray import _pagecache

    assert libraries.name_of(_pagecache.lib) == libraries.name_of(_pagecache)
    with pytest.raises(TypeError, match="is no shared library"):
        libraries.name_of(5)


def test_the_extension_modules_of_a_package() -> None:
    import faiss
    import hnswlib

    (found,) = libraries.names_of(faiss)
    assert Path(found).parent == Path(faiss.__file__).parent
    assert Path(found).name.startswith("_swigfaiss")
    assert libraries.names_of(sys.modules["faiss.swigfaiss"]) == [found]  # SWIG's own module
    assert libraries.names_of(hnswlib) == [hnswlib.__file__]
    assert arena.patch_any([found, libraries.name_of(hnswlib)]) == [found, hnswlib.__file__]
    with pytest.raises(errors.MallocShimError, match=r"No extension module of tests is loaded"):
        libraries.names_of(sys.modules["tests"])
    with pytest.raises(errors.MallocShimError, match="it is NumPy"):
        arena.patch_any(libraries.names_of(np))


def test_addresses(tree: Any) -> None:
    ffi = FFI()
    value = ctypes.c_int(5)
    at = ctypes.addressof(value)
    for given in (at, np.int64(at), ctypes.c_void_p(at), ctypes.pointer(value)):
        assert arena.address_of(given) == at
    assert arena.address_of(ffi.cast("char *", at)) == at
    assert arena.address_of(ctypes.c_char_p(None)) == 0
    with pytest.raises(TypeError, match="no address"):
        arena.address_of("text")


def _refused() -> list[tuple[Any, str]]:
    from clamor_ray import _pagecache

    return [
        (ctypes.CDLL(None), "the Python program itself"),
        (
            importlib.import_module(multiarray.__name__.replace("multiarray", "_multiarray_umath")),
            "it is NumPy",
        ),
        (_pagecache, "clamor's own"),
        ("libc.so.6", "the C library"),
        ("/no/such/library.so", "not loaded"),
    ]


@pytest.mark.parametrize(("library", "why"), _refused(), ids=lambda value: str(value)[:30])
def test_what_is_refused(library: Any, why: str) -> None:
    with pytest.raises(errors.MallocShimError, match=why):
        arena.patch(libraries.name_of(library))


def test_a_library_without_malloc() -> None:
    ctypes.CDLL("libm.so.6")
    with pytest.raises(errors.MallocShimError, match="imports no malloc"):
        arena.patch("libm.so.6")


def test_functions_for_libraries_that_take_an_allocator(ground: Ground) -> None:
    functions = arena.malloc_functions()
    malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(functions.malloc)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(functions.free)
    with ground.arena.entered():
        inside = malloc(100)
    outside = malloc(100)
    assert ground.holds(inside)
    assert not ground.holds(outside)
    ground.close()
    free(inside)
    free(outside)


ALONE = "CLAMOR_TEST_FORK_ALONE"


def test_a_fork_allocates_from_its_own_process(ground: Ground, tree: Any) -> None:
    """In a process of its own: a library's fork handlers (Arrow's, once it has been used) allocate
    by the C++ runtime's `new`, which is the block's while it is entered."""
    if ALONE not in os.environ:
        name = f"{__file__}::test_a_fork_allocates_from_its_own_process"
        alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
        done = subprocess.run(
            alone, env={**os.environ, ALONE: "1"}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout
        return
    with entered(ground, tree):
        block = tree.allocate(ctypes.c_size_t(10))
        child = os.fork()
        if child == 0:
            mine = tree.allocate(ctypes.c_size_t(10))
            tree.release(pointer(block))
            os._exit(1 if ground.holds(mine) else 0)
        assert os.waitpid(child, 0)[1] == 0
        assert ground.holds(tree.allocate(ctypes.c_size_t(10)))
