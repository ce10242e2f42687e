"""Libraries with Python objects of their own, built in a region: what they left there is written
for as long as the process lives, and the process lives on (docs/building.md)."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ANSWER_S, ClamorCluster
from tests.support import driver_script
from tests.support.lab.cluster import node_resource
from tests.support.native import compile_library

pytestmark = pytest.mark.lab

MIB = 1 << 20
N, DIMENSIONS, K = 3000, 32, 5
DRIVER_S = 240.0

SCRIPT = """
import gc, os, sys
import hnswlib
import numpy as np
import clamor_ray as clamor

def used(index):
    hnswlib.Index("l2", 8).init_index(10)  # an unrelated one
    assert (index.knn_query(vectors[:10], k=1)[0][:, 0] == range(10)).all()

def in_a_child(index):
    child = os.fork()
    if child == 0:
        used(index)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child"

vectors = np.random.default_rng(0).random((2000, 64), np.float32)
clamor.init(*sys.argv[2:])
hnswlib.Index("l2", 64)  # loads what pybind11 keeps for all
kept = []
for ends in ("sealed", "abandoned"):
    try:
        with clamor.build(1 << 28) as r:
            with r.malloc(hnswlib):
                index = hnswlib.Index("l2", 64)
                index.init_index(4000, M=12, ef_construction=60)
                index.add_items(vectors[:1000], num_threads=1)
            ref = r.publish(index)
            if ends == "abandoned":
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    index.add_items(vectors[1000:], num_threads=1)
    index.set_ef(500)  # else the search misses some
    used(index)
    gone = hnswlib.Index("l2", 4)
    del gone
    kept.append(index)
    in_a_child(index)
    if ends == "sealed":
        clamor.free(ref)  # what this process keeps of it stays, also for its children
        in_a_child(index)
    print(ends, flush=True)
del kept[0]
gc.collect()
if "shutdown" in sys.argv:
    clamor.shutdown()
    used(index)
    del index
    gc.collect()
used(kept[-1])
print("the end", flush=True)
"""


@pytest.mark.parametrize("how", ["exit", "shutdown"])
def test_a_driver_that_builds_lives_on(
    how: str, tmp_path: Path, clamor_cluster: ClamorCluster
) -> None:
    """Once in a cluster that it starts itself, once in one that it finds."""
    path = tmp_path / "driver.py"
    path.write_text(SCRIPT)
    own = how == "exit"
    done = subprocess.run(
        [sys.executable, str(path), how, *(["local"] if own else [])],
        capture_output=True,
        text=True,
        timeout=DRIVER_S,
        env={
            **os.environ,
            **({} if own else clamor_cluster.lab.environment),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert driver_script.lines_of(done.stdout)[-3:] == ["sealed", "abandoned", "the end"]


# ------------------------------------------------------------------ what others see of it


def some_vectors() -> Any:
    return np.random.default_rng(7).random((N, DIMENSIONS), np.float32)


class Builder:
    """A process that builds, and goes on."""

    def hnswlib(self) -> Any:
        import hnswlib

        with clamor.build(256 * MIB) as r:
            with r.malloc(hnswlib):
                self.index = hnswlib.Index("l2", DIMENSIONS)
                self.index.init_index(2 * N, M=12, ef_construction=60)
                self.index.add_items(some_vectors(), num_threads=1)
                self.index.set_ef(500)  # else the search misses some
            assert r.used_bytes > some_vectors().nbytes
            return r.publish(self.index)  # as the arrays that its pickle is made of

    def hnswlib_again(self) -> Any:
        import hnswlib

        found = self.index.knn_query(some_vectors()[:100], k=K, num_threads=1)[0]
        other = hnswlib.Index("l2", 8)
        other.init_index(10)
        self.index.add_items(some_vectors(), np.arange(N, 2 * N), num_threads=1)
        assert self.index.get_current_count() == 2 * N
        del self.index, other
        gc.collect()
        hnswlib.Index("cosine", 8)
        return found

    def faiss(self) -> Any:
        import faiss

        with clamor.build(256 * MIB) as r:
            with r.malloc(faiss):
                self.index = faiss.IndexHNSWFlat(DIMENSIONS, 16)
                self.index.add(some_vectors())
            assert r.used_bytes > some_vectors().nbytes
            with r.numpy_allocator():
                stored = faiss.serialize_index(self.index)
            return r.publish(stored)

    def faiss_again(self) -> Any:
        import faiss

        _, found = self.index.search(some_vectors()[:100], K)
        faiss.IndexFlatL2(4).add(np.ones((3, 4), np.float32))
        self.index.add(some_vectors())
        assert self.index.ntotal == 2 * N
        del self.index
        gc.collect()
        return found

    def words(self, path: str) -> Any:
        self.module = load_words(path)
        with clamor.build(64 * MIB) as r:
            numbers = r.zeros(5000, np.int64)
            with r.malloc(self.module):
                self.made = self.module.Words(1000)
            return r.publish({"numbers": numbers, "words": r.pointer(self.made.address)})

    def words_again(self, refs: list[Any]) -> Any:
        (ref,) = refs
        first = self.module.Words.at(int(ref.get()["words"])).sum()  # nobody has written to it
        self.made.set("one more", 10**6)
        assert self.made.sum() == first + 10**6
        try:
            ref.get()
        except errors.AddressClashError as error:
            return first, error.message, error.hint
        return first, "", ""

    def words_after_a_commit(self) -> Any:
        return self.made.sum()


def load_words(path: str) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("words", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def builder() -> Any:
    import ray

    made = ray.remote(Builder).options(num_cpus=0, resources={node_resource(0): 0.001}).remote()
    yield lambda name, *given: ray.get(getattr(made, name).remote(*given), timeout=ANSWER_S)
    ray.kill(made)


def test_hnswlib(clamor_cluster: ClamorCluster, builder: Any) -> None:
    ref = builder("hnswlib")

    def ask(index: Any) -> Any:
        index.set_ef(500)
        return index.knn_query(some_vectors()[:100], k=K, num_threads=1)[0]

    ask.__globals__["some_vectors"] = some_vectors
    expected = builder("hnswlib_again")
    np.testing.assert_array_equal(expected[:, 0], np.arange(100))
    np.testing.assert_array_equal(clamor_cluster.run(ask, ref), expected)
    clamor.free(ref)


def test_faiss(clamor_cluster: ClamorCluster, builder: Any) -> None:
    ref = builder("faiss")

    def ask(stored: Any) -> Any:
        import faiss

        reader = faiss.ZeroCopyIOReader(faiss.swig_ptr(stored), stored.nbytes)
        return faiss.read_index(reader).search(some_vectors()[:100], K)[1]

    ask.__globals__["some_vectors"] = some_vectors
    expected = builder("faiss_again")
    np.testing.assert_array_equal(expected[:, 0], np.arange(100))
    np.testing.assert_array_equal(clamor_cluster.run(ask, ref), expected)
    clamor.free(ref)


@pytest.fixture(scope="module")
def words_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    import pybind11

    includes = [pybind11.get_include(), sysconfig.get_path("include")]
    folder = tmp_path_factory.mktemp("native")
    return str(compile_library("words.cpp", folder, *(f"-I{path}" for path in includes)))


def test_a_wrapper_of_ones_own(
    clamor_cluster: ClamorCluster, builder: Any, words_path: str
) -> None:
    ref = builder("words", words_path)
    expected = sum(range(1000))

    def ask(found: Any) -> Any:
        return load_words(words_path).Words.at(int(found["words"])).sum()

    ask.__globals__["load_words"] = load_words
    assert clamor_cluster.run(ask, ref) == expected
    first, message, hint = builder("words_again", [ref])
    assert first == expected
    assert "written to its memory" in message
    assert "let_go()" in hint
    assert clamor_cluster.run(ask, ref) == expected  # what it wrote is its own
    for _ in range(3):  # the newest version moves on, and what it built does not
        with clamor.update(ref) as found:
            found["numbers"] += 1
    assert builder("words_after_a_commit") == expected + 10**6
    assert clamor_cluster.run(ask, ref) == expected
    clamor.free(ref)
