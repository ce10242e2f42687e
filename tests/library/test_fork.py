"""Children of fork read global variables, or end with a message; they never read zeros."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import resource
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from tests.conftest import ClamorCluster

pytestmark = pytest.mark.lab

MIB = 1 << 20
CHILD_S = 60.0


@dataclass
class Ended:
    """How a child ended: its exit status, what it returned (None: nothing), what it printed."""

    status: int
    result: Any
    stderr: str


def drain(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    os.close(fd)
    return b"".join(parts)


def in_child(
    function: Callable[..., Any], *arguments: Any, fork: Callable[[], int] = os.fork
) -> Ended:
    """Calls a function in a child. Its result has to fit a pipe."""
    result_reader, result_writer = os.pipe()
    stderr_reader, stderr_writer = os.pipe()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    pid = fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
            os.dup2(stderr_writer, 2)
            os.write(result_writer, pickle.dumps(function(*arguments)))
            os._exit(0)
        except BaseException:
            os.write(stderr_writer, traceback.format_exc().encode())
            os._exit(99)
    os.close(result_writer)
    os.close(stderr_writer)
    deadline = time.monotonic() + CHILD_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)  # waitpid takes no deadline
    data = drain(result_reader)
    return Ended(
        os.waitstatus_to_exitcode(status),
        pickle.loads(data) if data else None,
        drain(stderr_reader).decode(),
    )


def content(n: int = MIB, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(1, 1 << 60, n)


# ------------------------------------------------------------------ children that read


def total(array: Any) -> int:
    return int(array.sum())


def fork_and_read(ref: Any, n: int) -> tuple[list[Ended], int]:
    array = ref.get()
    array[7]
    parts = np.array_split(np.arange(len(array)), n + 1)
    children = [in_child(total, array[part[0] : part[-1] + 1]) for part in parts[:n]]
    return children, int(array.sum())


def test_a_child_reads_untouched_blocks(clamor_cluster: ClamorCluster, trap: str) -> None:
    array = content()
    ref = clamor.put(array)
    children, own = clamor_cluster.run_in_trap(trap, fork_and_read, ref, 3)
    sums = [int(part.sum()) for part in np.array_split(array, 4)[:3]]
    assert [(child.status, child.result, child.stderr) for child in children] == [
        (0, part, "") for part in sums
    ]
    assert own == array.sum()
    clamor.free(ref)


def test_a_child_reads_an_array_in_pieces(clamor_cluster: ClamorCluster, trap: str) -> None:
    """Which is spread over both nodes; tests/cluster/test_raid_reads_lab.py has one with a
    parity."""
    array = content(seed=2)
    ref = clamor.put(array, home="spread")
    assert len(ref._piece_versions()) > 2
    children, own = clamor_cluster.run_in_trap(trap, fork_and_read, ref, 3)
    sums = [int(part.sum()) for part in np.array_split(array, 4)[:3]]
    assert [(child.status, child.result, child.stderr) for child in children] == [
        (0, part, "") for part in sums
    ]
    assert own == array.sum()
    clamor.free(ref)


def free_and_fork(ref: Any) -> tuple[list[Ended], int]:
    array = ref.get()
    array[7]
    clamor.free(ref)
    children = [in_child(total, array), in_child(refused, ref)]
    return children, int(array.sum())


def refused(ref: Any) -> str:
    with pytest.raises(clamor.errors.FreedError) as caught:
        ref.get()
    return str(caught.value)


def test_a_child_reads_what_was_freed(clamor_cluster: ClamorCluster, trap: str) -> None:
    """As its parent does, also blocks that nobody has touched here."""
    array = content(seed=3)
    ref = clamor.put(array)
    (reader, opener), own = clamor_cluster.run_in_trap(trap, free_and_fork, ref)
    assert (reader.status, reader.result, reader.stderr) == (0, array.sum(), "")
    assert opener.status == 0, opener
    assert own == array.sum()


def open_another(one: Any, ref: Any) -> tuple[int, int]:
    return total(one), total(ref.get())


def fork_and_open(ref: Any, other: Any) -> Ended:
    return in_child(open_another, ref.get(), other)


def test_a_child_opens_another_variable(clamor_cluster: ClamorCluster, trap: str) -> None:
    arrays = content(), content(seed=1)
    refs = [clamor.put(array) for array in arrays]
    child = clamor_cluster.run_in_trap(trap, fork_and_open, *refs)
    assert (child.status, child.result) == (0, tuple(int(array.sum()) for array in arrays)), child
    for ref in refs:
        clamor.free(ref)


def child_of_child(array: Any) -> tuple[Any, int]:
    half = len(array) // 2
    inner = in_child(total, array[:half])
    return (inner.status, inner.result), total(array[half:])


def fork_twice(ref: Any) -> Ended:
    return in_child(child_of_child, ref.get())


def test_a_child_of_a_child(clamor_cluster: ClamorCluster, trap: str) -> None:
    array = content()
    ref = clamor.put(array)
    child = clamor_cluster.run_in_trap(trap, fork_twice, ref)
    half = MIB // 2
    expected = ((0, int(array[:half].sum())), int(array[half:].sum()))
    assert (child.status, child.result) == (0, expected), child
    clamor.free(ref)


_dataset: Any = None


def item(index: int) -> int:
    return int(_dataset[index].sum())


def read_in_pool(ref: Any, n_workers: int) -> list[int]:
    """As a DataLoader does: the data set is a global that the workers inherit."""
    global _dataset
    _dataset = ref.get().reshape(-1, 1024)
    try:
        pool = multiprocessing.get_context("fork").Pool(n_workers)
        got = pool.map_async(item, range(len(_dataset)), chunksize=16).get(CHILD_S)
        # Not by terminate(), as `with` does: with or without us, a child of a worker of Ray may
        # forget the SIGTERM that it gets while it is forked, and the pool waits for it for ever.
        pool.close()
        pool.join()
        return got
    finally:
        _dataset = None


def test_workers_of_a_fork_pool(clamor_cluster: ClamorCluster, trap: str) -> None:
    array = content()
    ref = clamor.put(array)
    got = clamor_cluster.run_in_trap(trap, read_in_pool, ref, 3)
    assert got == array.reshape(-1, 1024).sum(axis=1).tolist()
    # The workers are other processes of the node: what one fetched the others had.
    assert clamor_cluster.region(ref).fetched_blocks == ref._length_bytes // 4096
    clamor.free(ref)


def fork_while_threads_read(ref: Any, n_forks: int) -> tuple[list[Ended], list[int]]:
    array = ref.get()
    sums: list[int] = []
    head = array[: MIB // 2].reshape(-1, 512)
    reader = threading.Thread(target=lambda: sums.extend(total(row) for row in head))
    reader.start()
    tail = array[MIB // 2 :].reshape(n_forks, -1)
    children = [in_child(total, row) for row in tail]
    reader.join(CHILD_S)
    return children, sums


def test_fork_while_another_thread_faults(clamor_cluster: ClamorCluster, trap: str) -> None:
    array = content()
    ref = clamor.put(array)
    children, sums = clamor_cluster.run_in_trap(trap, fork_while_threads_read, ref, 8)
    assert [child.result for child in children] == array[MIB // 2 :].reshape(8, -1).sum(1).tolist()
    assert sums == array[: MIB // 2].reshape(-1, 512).sum(1).tolist()
    clamor.free(ref)


def test_children_of_the_driver(clamor_cluster: ClamorCluster) -> None:
    ref = clamor_cluster.run(lambda: clamor.put(content()))
    child = in_child(total, ref.get())
    assert (child.status, child.result) == (0, content().sum()), child
    assert read_in_pool(ref, 2) == content().reshape(-1, 1024).sum(axis=1).tolist()
    # They are gone, and the session is not.
    assert clamor.put(content()).get().sum() == content().sum()
    clamor.free(ref)


def what_needs_the_registry(ref: Any) -> list[str]:
    calls = (lambda: clamor.put(content()), lambda: clamor.free(ref), clamor.stats)
    said = []
    for call in calls:
        try:
            call()
        except clamor.errors.ForkedError as error:
            said.append(str(error))
    return said


def test_a_child_reads_but_does_not_put(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(content())
    child = in_child(what_needs_the_registry, ref)
    assert child.status == 0, child
    assert len(child.result) == 3
    assert "spawn" in child.result[0]
    assert total(ref.get()) == content().sum()
    clamor.free(ref)


# ------------------------------------------------------------------ children that cannot


def fork_with_no_descriptor_left() -> int:
    """The hook in the child finds no descriptor to connect with."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        return os.fork()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def fork_behind_pythons_back() -> int:
    """As a C library does: none of Python's hooks runs in the child."""
    return int(ctypes.PyDLL(None).fork())


FORKS = {"no descriptors": fork_with_no_descriptor_left, "no hooks": fork_behind_pythons_back}


def fork_badly(ref: Any, how: str) -> tuple[Ended, Ended, int]:
    array = ref.get()
    array[: len(array) // 2].sum()
    absent = in_child(total, array[-5:], fork=FORKS[how])
    present = in_child(total, array[:5], fork=FORKS[how])
    return absent, present, total(array)


@pytest.mark.parametrize("how", FORKS)
def test_a_child_that_cannot_attach_ends(
    clamor_cluster: ClamorCluster, trap: str, how: str
) -> None:
    array = content()
    ref = clamor.put(array)
    absent, present, own = clamor_cluster.run_in_trap(trap, fork_badly, ref, how)
    for child in (absent, present):
        assert child.result is None
        assert child.status not in (0, 99), child
        assert f"clamor: variable {ref._region} version 0 block" in child.stderr
        assert "this process ends" in child.stderr
        assert "fork" in child.stderr
    assert own == array.sum()
    clamor.free(ref)


def fork_with_private(ref: Any) -> tuple[Ended, int]:
    mine = ref.get(mode="c")
    mine[:100] = 3
    return in_child(total, mine[:100]), total(mine[:100])


def test_a_private_copy_is_not_inherited(clamor_cluster: ClamorCluster, trap: str) -> None:
    ref = clamor.put(content())
    child, own = clamor_cluster.run_in_trap(trap, fork_with_private, ref)
    assert own == 300
    assert child.result is None
    assert child.status not in (0, 99), child
    assert f"clamor: variable {ref._region} version 0 block" in child.stderr
    clamor.free(ref)
