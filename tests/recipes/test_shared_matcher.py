"""What a matcher in C has beyond the model: many callers at once, kernels, the outbox, its ends."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native.base import PC_ERR_MEMBER, c
from clamor_ray._native.matcher import KERNEL_MESSAGE, KERNEL_TASK, checked, kernel_calls
from clamor_ray._recipes.matching.matcher import ReadyTask
from clamor_ray._recipes.matching.packing import pack_state, unpack_state
from clamor_ray._recipes.matching.shared import Answer, Closing, KernelFailed, SharedMatcher
from clamor_ray._recipes.matching.state import Inbox, PartitionState, SliceState
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.plain import run_plainly
from tests.recipes.executors import ANSWER_S, Job, processes, threads
from tests.recipes.programs import random_program

Make = Callable[..., SharedMatcher]
Kernel = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
)


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(SharedMatcher.create(*args, **options))


def a_sum() -> Builder:
    """x of two partitions sends to v, which decides; three rounds."""
    p = Builder()
    x, v = p.dataset([1, 2]), p.value(0)
    with p.loop(max=3) as loop:
        p.stage(lambda t, x: t.send(0, x), reads=[x], sends=True)
        p.stage(lambda t, v: sum(t.recv()), writes=[v], receives=True)
        loop.until(lambda t, v: v > 100, reads=[v])
    return p


def fresh(*datasets: int) -> SliceState:
    return SliceState({dataset: PartitionState() for dataset in datasets})


@pytest.mark.parametrize("by", [threads, processes])
def test_executors_at_once_give_the_plain_answer(by: Callable[[Any, int], None]) -> None:
    jobs, expected = [], []
    for seed in range(25):
        builder = random_program(random.Random(5000 + seed), n_most=6)
        sources = [list(dataset.source) for dataset in builder.datasets]
        expected.append(run_plainly(builder.tables(), builder.functions, sources))
        jobs.append(Job(builder))
    try:
        by(jobs, 3)
        assert [job.result() for job in jobs] == expected
        assert [job.left_bytes() for job in jobs] == [0] * len(jobs)
    finally:
        for job in jobs:
            job.close()


def test_what_is_for_others_waits_in_the_outbox(make: Make) -> None:
    matcher = make(a_sum().tables())
    matcher.add(0, 0, fresh(0))
    (task,) = matcher.take(8)
    assert not matcher.wait_outgoing(0)
    waiter = threading.Thread(target=matcher.wait_outgoing, args=(ANSWER_S,), daemon=True)
    waiter.start()
    big = bytes(range(256)) * 1000
    matcher.send_all(task, {0: [b"a", b"", big]})
    waiter.join(ANSWER_S / 2)
    assert not waiter.is_alive()
    matcher.answer(3, True)
    assert matcher.wait_outgoing(0)
    assert matcher.take_outgoing() == [
        Closing(number=2, group=1, index=0, sender=0, messages=[b"a", b"", big]),
        Answer(3, True),
    ]
    assert matcher.take_outgoing() == []
    assert matcher.decisions == {3: True}
    assert not matcher.wait_outgoing(0)
    assert matcher.heap_used_bytes == 0


def test_the_outbox_is_emptied_in_parts(make: Make) -> None:
    p = Builder()
    x, y = p.dataset(range(40)), p.dataset(range(300))
    p.stage(lambda t, x: t.broadcast(x), reads=[x], sends=True)
    p.stage(lambda t, y: t.recv() and None, reads=[y], receives=True)
    matcher = make(p.tables(), heap_bytes=8 << 20)
    for index in range(40):
        matcher.add(0, index, fresh(0))
    message = b"m" * 10_000
    for task in matcher.take(100):
        matcher.send_all(task, {to: [message] for to in range(300)})
    # A message to all is stored once for each sender, and not 300 times.
    assert matcher.heap_used_bytes < 3 << 20
    found: list[Any] = []
    while part := matcher.take_outgoing():
        found += part
    assert sorted((each.sender, each.index) for each in found) == [
        (sender, index) for sender in range(40) for index in range(300)
    ]
    assert all(each.messages == [message] for each in found)


def test_many_tasks_end_in_one_call(make: Make) -> None:
    """What finds no room has not ended, and ends when it is told again; what is wrong is named."""
    p = Builder()
    x, v = p.dataset(range(4)), p.value(0)
    p.stage(lambda t, x: t.send(0, x), reads=[x], sends=True)
    p.stage(lambda t, v: sum(t.recv()), writes=[v], receives=True)
    matcher = make(p.tables(), heap_bytes=64 << 10)
    for index in range(4):
        matcher.add(0, index, fresh(0))
    matcher.add(1, 0, fresh(1))
    tasks = matcher.take(8)
    sent = [{0: [b"a", b"b"]}, {}, {0: [b"x" * 100_000]}, {0: [b"d"]}]
    assert matcher.end(tasks, [10, 20, 30, 40], sent) == 2
    assert matcher.tallies() == {(0, 0): (1, 10), (0, 1): (1, 20)}
    with pytest.raises(errors.RangeError):
        matcher.end(tasks[:1], [1], [{}])  # it has ended
    with pytest.raises(errors.RangeError):
        matcher.end(tasks[2:], [1, 1], [{1: [b"nobody"]}, {}])
    assert matcher.end(tasks[2:], [30, 40], [{0: [b"c"]}, {0: [b"d"]}]) == 2
    (last,) = matcher.take(8)
    assert matcher.messages(last) == [b"a", b"b", b"c", b"d"]
    with pytest.raises(errors.RangeError, match="sends, and its stage does not"):
        matcher.end([last], [1], [{0: [b"to nobody"]}])
    assert matcher.end([last], [1], [{}]) == 1
    assert matcher.is_complete


def test_a_full_heap_says_so_and_goes_on(make: Make) -> None:
    matcher = make(a_sum().tables(), heap_bytes=64 << 10)
    with pytest.raises(errors.NoSpaceError, match=r"is full: .* of 65536"):
        matcher.close(2, 1, 0, 0, [b"x" * 100_000])
    matcher.close(2, 1, 0, 0, [b"x" * 10_000])
    matcher.add(1, 0, fresh(1))
    assert matcher.take(1) == []
    matcher.close(2, 1, 0, 1, [])
    (task,) = matcher.take(1)
    assert matcher.messages(task) == [b"x" * 10_000]
    state = SliceState({0: PartitionState()}, {1: Inbox({0}, {})})
    with pytest.raises(errors.RangeError):
        matcher.add(0, 0, SliceState({1: PartitionState()}))
    with pytest.raises(errors.RangeError):  # the first stage has no sender
        matcher.add(0, 0, state)
    matcher.add(0, 0, fresh(0))
    with pytest.raises(errors.ExistsError):
        matcher.add(0, 0, fresh(0))


def test_calls_that_cannot_be_are_refused(make: Make) -> None:
    matcher = make(a_sum().tables())
    matcher.add(0, 0, fresh(0))
    (task,) = matcher.take(1)
    for call in (
        lambda: matcher.remove(0, 0),
        lambda: matcher.hold(0, 1),
        lambda: matcher.release(7, 0),
        lambda: matcher.finish([ReadyTask(9, 0, 0)]),
        lambda: matcher.messages(ReadyTask(1, 0, 1)),
        lambda: matcher.close_all(task, {5: [b""]}),
        lambda: matcher.close(2, 1, 0, 2, []),
    ):
        with pytest.raises(errors.RangeError):
            call()
    with pytest.raises(errors.RangeError, match="window"):
        SharedMatcher.create(a_sum().tables(), window=1)
    with open(os.devnull) as other, pytest.raises(errors.ProtocolError):
        SharedMatcher.attach(a_sum().tables(), other.fileno())
    matcher.close_all(task, {0: [b"a"]})
    matcher.finish([task])


def test_waits_end_with_their_deadline_with_stop_and_with_the_handle(make: Make) -> None:
    tables = a_sum().tables()
    matcher = make(tables)
    other = SharedMatcher.attach(tables, matcher.fd)
    began = time.monotonic()
    assert matcher.take(1, 0.05) == []
    assert time.monotonic() - began >= 0.05
    ended: list[BaseException] = []

    def wait(call: Callable[[float], Any]) -> None:
        try:
            call(ANSWER_S)
        except errors.ClosedError as error:
            ended.append(error)

    def ends(calls: list[Callable[[float], Any]], end: Callable[[], None]) -> None:
        ended.clear()
        waiters = [threading.Thread(target=wait, args=(call,), daemon=True) for call in calls]
        for waiter in waiters:
            waiter.start()
        time.sleep(0.05)
        end()
        for waiter in waiters:
            waiter.join(ANSWER_S / 2)
        assert len(ended) == len(calls)

    calls = [lambda s: other.take(1, s), lambda s: other.run_kernels(1, s), other.wait_outgoing]
    ends(calls, other.close_handle)
    other = SharedMatcher.attach(tables, matcher.fd)
    ends(calls, matcher.stop)
    with pytest.raises(errors.ClosedError, match="was stopped"):
        other.take(1)
    assert matcher.floor == 4  # what it knows can still be read
    other.close_handle()


def test_a_death_in_a_call_has_its_own_error() -> None:
    with pytest.raises(errors.MemberLostError, match="process died while it changed the matcher"):
        checked(PC_ERR_MEMBER)


def test_kernels_change_partitions_and_python_has_the_rest(make: Make) -> None:
    tables = a_sum().tables()
    values = (ctypes.c_int64 * 3)(1, 2, 0)

    @Kernel
    def double(task: int, partitions: Any, n_bytes: Any) -> int:
        at = ctypes.cast(partitions[0], ctypes.POINTER(ctypes.c_int64))
        at[0] *= 2 * (n_bytes[0] == 8)
        return 0

    @Kernel
    def is_large(task: int, partitions: Any, n_bytes: Any) -> int:
        return ctypes.cast(partitions[0], ctypes.POINTER(ctypes.c_int64))[0] > 100

    matcher = make(tables)
    for place, (dataset, index) in enumerate([(0, 0), (0, 1), (1, 0)]):
        address = ctypes.addressof(values) + 8 * place
        matcher.set_partition(dataset, index, address, 8)
    matcher.set_kernel(0, ctypes.cast(double, ctypes.c_void_p).value or 0)
    matcher.set_kernel(2, ctypes.cast(is_large, ctypes.c_void_p).value or 0)
    matcher.add(0, 0, fresh(0))
    matcher.add(0, 1, fresh(0))
    matcher.add(1, 0, fresh(1))
    n_ran = 0
    while not matcher.is_complete:
        n, tasks = matcher.run_kernels(8, 0.0)
        n_ran += n
        for task in tasks:
            assert task.stage == 1
            values[2] = 50 * task.number
        matcher.finish(tasks)
    # Two rounds: 50 * 2 is not more than 100, 50 * 5 is. Nobody else heard of the answers.
    assert list(values) == [4, 8, 250]
    assert n_ran == 2 * 2 + 2
    assert matcher.take_outgoing() == [Answer(3, False), Answer(6, True)]


def test_kernels_read_their_task_by_its_dtype_and_send_by_address(make: Make) -> None:
    for name, dtype in (("task", KERNEL_TASK), ("message", KERNEL_MESSAGE)):
        struct_name = f"struct pc_match_{name}"
        assert c.ffi.sizeof(struct_name) == dtype.itemsize
        for field in dtype.names or ():
            assert c.ffi.offsetof(struct_name, field) == dtype.fields[field][1]
    send = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64
    )(kernel_calls()["send"])
    received = []

    def record(address: int, dtype: Any, n: int = 1) -> Any:
        raw = (ctypes.c_char * (n * dtype.itemsize)).from_address(address)
        return np.frombuffer(raw, dtype)

    @Kernel
    def tell(task: int, partitions: Any, n_bytes: Any) -> int:
        (at,) = record(task, KERNEL_TASK)
        assert (at["number"], at["n_tasks"], at["n_next"]) == (1, 2, 1)
        text = b"from %d" % at["index"]
        return int(send(task, 0, text, len(text)))

    @Kernel
    def hear(task: int, partitions: Any, n_bytes: Any) -> int:
        (at,) = record(task, KERNEL_TASK)
        for each in record(int(at["messages"]), KERNEL_MESSAGE, int(at["n_messages"])):
            text = ctypes.string_at(int(each["data"]), int(each["n_bytes"]))
            received.append((int(each["sender"]), text))
        return 0

    matcher = make(a_sum().tables())
    matcher.set_kernel(0, ctypes.cast(tell, ctypes.c_void_p).value or 0)
    matcher.set_kernel(1, ctypes.cast(hear, ctypes.c_void_p).value or 0)
    matcher.add(1, 0, fresh(1))
    for index in (1, 0):
        matcher.add(0, index, fresh(0))
    n_ran, tasks = matcher.run_kernels(1, 0.0)
    assert (n_ran, [each.stage for each in tasks]) == (3, [2])
    assert received == [(0, b"from 0"), (1, b"from 1")]


def test_a_kernel_that_fails_is_named(make: Make) -> None:
    @Kernel
    def fails(task: int, partitions: Any, n_bytes: Any) -> int:
        return -5

    matcher = make(a_sum().tables())
    matcher.set_kernel(0, ctypes.cast(fails, ctypes.c_void_p).value or 0)
    matcher.add(0, 1, fresh(0))
    with pytest.raises(KernelFailed, match=r"index 1, in stage number 1.*-5"):
        matcher.run_kernels(8, 0.0)


def test_a_state_is_the_same_after_it_was_bytes() -> None:
    inboxes = {
        7: Inbox({0, 3, 70}, {3: [b"a", b"", b"bcd" * 50], 70: [b"z"]}),
        9: Inbox({1}, {}),
    }
    partitions = {2: PartitionState(5, 3, 3, 0), 4: PartitionState()}
    state = SliceState(partitions, inboxes)
    assert unpack_state(pack_state(state)) == state
