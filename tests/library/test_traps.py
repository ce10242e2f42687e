"""One contract, every trap: what a process sees that touches blocks which are not there."""

from __future__ import annotations

import errno
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from tests.conftest import ClamorCluster

pytestmark = pytest.mark.lab

MIB = 1 << 20
BLOCK = 4096


def content(n: int = MIB, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(1, 1 << 60, n)


def sums(ref: Any, rows: Any) -> tuple[list[int], int, int]:
    array = ref.get()
    return [int(array[row]) for row in rows], int(array[::-1].sum()), int(array.sum())


def test_touches_see_the_content(clamor_cluster: ClamorCluster, trap: str) -> None:
    array = content()
    ref = clamor.put(array)
    rows = np.random.default_rng(1).choice(len(array), 200, replace=False)
    got = clamor_cluster.run_in_trap(trap, sums, ref, rows)
    assert got == (array[rows].tolist(), array.sum(), array.sum())
    assert clamor_cluster.region(ref).fetched_blocks == ref._length_bytes // BLOCK
    clamor.free(ref)


def prefetch_and_read(ref: Any) -> tuple[int, int, int]:
    array = ref.get()
    view = array[512 * 100 : 512 * 200 : 1024]
    before = clamor.stats()
    clamor.prefetch(view)
    between = clamor.stats()
    got = int(view.sum())
    after = clamor.stats()
    faults = [sum(node.engine.faults for node in stats.nodes) for stats in (before, between, after)]
    return got, faults[1] - faults[0], faults[2] - faults[1]


def test_what_was_prefetched_faults_no_more(clamor_cluster: ClamorCluster, trap: str) -> None:
    array = content()
    ref = clamor.put(array)
    expected = array[512 * 100 : 512 * 200 : 1024].sum()
    assert clamor_cluster.run_in_trap(trap, prefetch_and_read, ref) == (expected, 0, 0)
    assert clamor_cluster.region(ref).fetched_blocks == 1 + 50
    clamor.free(ref)


def write_through_a_pipe(view: Any) -> bytes | int:
    """What came out of the other end, or the error number."""
    reader, writer = os.pipe()
    try:
        n = os.write(writer, view)
        return os.read(reader, n)
    except OSError as error:
        return error.errno or -1
    finally:
        os.close(reader)
        os.close(writer)


def system_calls(ref: Any, path: str) -> tuple[Any, Any, bytes]:
    array = ref.get()
    absent = array[10 * 512 : 11 * 512]
    first = write_through_a_pipe(absent)
    clamor.prefetch(array)
    second = write_through_a_pipe(absent)
    array.tofile(path)
    return first, second, Path(path).read_bytes()


def test_a_system_call_on_an_absent_block(
    clamor_cluster: ClamorCluster, trap: str, tmp_path: Path
) -> None:
    """It works with full userfaultfd; elsewhere it is "Bad address", and prefetch is the cure."""
    array = content(64 * 512)
    ref = clamor.put(array)
    first, second, file = clamor_cluster.run_in_trap(
        trap, system_calls, ref, str(tmp_path / "file")
    )
    block = array[10 * 512 : 11 * 512].tobytes()
    assert first == (block if trap == "uffd" else errno.EFAULT)
    assert second == block
    assert file == array.tobytes()
    clamor.free(ref)


def touch_from_threads(ref: Any, n_threads: int) -> list[int]:
    array = ref.get()
    blocks = array.reshape(-1, 512)
    start = threading.Barrier(n_threads)

    def read(number: int) -> int:
        order = np.random.default_rng(number).permutation(len(blocks))
        start.wait(30)
        return sum(int(blocks[row].sum()) for row in order)  # all read all, each in its own order

    with ThreadPoolExecutor(n_threads) as pool:
        return list(pool.map(read, range(n_threads), timeout=60))


def test_threads_that_fault_at_once(clamor_cluster: ClamorCluster, trap: str) -> None:
    array = content(512 * 1500)
    ref = clamor.put(array)
    got = clamor_cluster.run_in_trap(trap, touch_from_threads, ref, 6)
    assert got == [sum(int(row.sum()) for row in array.reshape(-1, 512))] * 6
    assert clamor_cluster.region(ref).fetched_blocks == ref._length_bytes // BLOCK
    clamor.free(ref)


def change_privately(ref: Any) -> tuple[int, int]:
    mine, shared = ref.get(mode="c"), ref.get()
    mine[::700] = 5
    return int(mine.sum()), int(shared.sum())


def test_private_copies(clamor_cluster: ClamorCluster, trap: str) -> None:
    array = content()
    ref = clamor.put(array)
    changed = array.copy()
    changed[::700] = 5
    got = clamor_cluster.run_in_trap(trap, change_privately, ref)
    assert got == (changed.sum(), array.sum())
    clamor.free(ref)


def many_at_once(refs: list[Any]) -> list[int]:
    arrays = [ref.get() for ref in refs]
    first = [int(array[-1]) for array in arrays]
    del arrays[::2]
    rest = [int(array.sum()) for array in arrays]
    return [*first, *rest, *(int(ref.get().sum()) for ref in refs[::2])]


def test_many_variables_come_and_go(clamor_cluster: ClamorCluster, trap: str) -> None:
    arrays = [content(4096, seed) for seed in range(40)]
    refs = [clamor.put(array) for array in arrays]
    expected = [int(array[-1]) for array in arrays]
    expected += [int(array.sum()) for array in (*arrays[1::2], *arrays[::2])]
    assert clamor_cluster.run_in_trap(trap, many_at_once, refs) == expected
    for ref in refs:
        clamor.free(ref)


def query(ref: Any, points: Any) -> Any:
    return ref.get().query(points, k=4)


def test_compiled_code_reads_it_too(clamor_cluster: ClamorCluster, trap: str) -> None:
    """Pointers within native code fault as Python's own reads do."""
    from scipy.spatial import cKDTree

    points = np.random.default_rng(0).random((50_000, 3))
    tree = cKDTree(points)
    ref = clamor.put(tree)
    got = clamor_cluster.run_in_trap(trap, query, ref, points[::100] + 1e-3)
    np.testing.assert_array_equal(got, tree.query(points[::100] + 1e-3, k=4))
    clamor.free(ref)


def read_zeros(ref: Any) -> tuple[int, int]:
    array = ref.get()
    return int(array[:: len(array) // 50].sum()), int(array[:MIB].sum())


def test_zeros_are_read_as_zeros(clamor_cluster: ClamorCluster, trap: str) -> None:
    ref = clamor.zeros(1 << 30, np.uint8)
    assert clamor_cluster.run_in_trap(trap, read_zeros, ref) == (0, 0)
    clamor.free(ref)


def exact_touches(ref: Any, rows: Any) -> None:
    def touch(array: Any) -> None:
        for row in rows:
            array[row]

    from clamor_ray._tasks.remote import resolving

    resolving(touch, "exact")(ref)


def test_read_sets(clamor_cluster: ClamorCluster, trap: str) -> None:
    array = content()
    ref = clamor.put(array)
    rows = np.arange(100, 2000, 37) * 512
    clamor_cluster.run_in_trap(trap, exact_touches, ref, rows)
    touched = clamor_cluster.region(ref).touched_blocks
    if trap == "sigsegv":  # sees what it opened, which may be more
        assert len(rows) + 1 <= touched < ref._length_bytes // BLOCK
    else:
        assert touched == len(rows) + 1  # and the pickle stream
    clamor.free(ref)


def fails_on_an_absent_block(call: str, ref: Any, path: str) -> list[str]:
    """The notes of the OSError that leaves a task's function, or an update block; none: no error.

    As Ray calls the function, so that it is seen where it leaves us."""
    from clamor_ray._tasks.remote import resolving

    def work(array: Any) -> None:
        if call == "tofile":
            array.tofile(path)
        elif call == "save":
            np.save(path, array)
        elif call == "unbuffered write":
            with Path(path).open("wb", buffering=0) as file:
                file.write(array)
        else:
            Path(path).write_bytes(bytes(BLOCK * 8))
            with Path(path).open("rb", buffering=0) as file:
                file.readinto(array[: 512 * 8])

    def update(_: Any) -> None:
        with clamor.update(ref) as mine:
            work(mine)

    def another(_: Any) -> None:
        Path(path, "no such file").read_bytes()

    functions = {"readinto": update, "another error": another}
    try:
        resolving(functions.get(call, work), "off")(ref)
    except OSError as error:
        return list(getattr(error, "__notes__", ["no note"]))
    return ["no error"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
@pytest.mark.parametrize("call", ["tofile", "save", "unbuffered write", "readinto"])
def test_the_error_of_a_system_call_names_the_remedy(
    call: str, clamor_cluster: ClamorCluster, trap: str, tmp_path: Path
) -> None:
    ref = clamor.put(content(64 * 512))
    notes = clamor_cluster.run_in_trap(
        trap, fails_on_an_absent_block, call, ref, str(tmp_path / "file")
    )
    if trap == "uffd":
        assert notes == ["no error"]
    else:
        (note,) = notes
        assert f"the trap {trap!r}" in note
        assert "clamor.prefetch(array)" in note
        assert "readinto" in note
    clamor.free(ref)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_another_error_of_the_system_gets_no_note(
    clamor_cluster: ClamorCluster, tmp_path: Path
) -> None:
    ref = clamor.put(content(64 * 512))
    notes = clamor_cluster.run_in_trap(
        "sigsegv", fails_on_an_absent_block, "another error", ref, str(tmp_path)
    )
    assert notes == ["no note"]
    clamor.free(ref)
