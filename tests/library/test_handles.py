"""Handles of C objects and leases, over stand-ins for what is in C."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native import base
from clamor_ray._native import client as _native
from clamor_ray._read.lease import Lease, LeaseTable

DEADLINE_S = 10.0


class Blocking:
    """A C function that stays inside until it is let go."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()
        self.pointers: list[Any] = []

    def __call__(self, pointer: Any) -> int:
        self.pointers.append(pointer)
        self.inside.set()
        assert self.go.wait(DEADLINE_S)
        return 0


def test_a_handle_is_not_freed_under_a_call() -> None:
    handle, function, pointer = base._Handle(), Blocking(), object()
    handle._opened(pointer)
    caller = threading.Thread(target=handle._call, args=(function,))
    caller.start()
    assert function.inside.wait(DEADLINE_S)
    assert handle._take() is pointer
    drained = threading.Event()

    def drain() -> None:
        handle._drain()
        drained.set()

    closer = threading.Thread(target=drain)
    closer.start()
    with pytest.raises(errors.ClosedError):
        handle._call(function)
    assert not drained.wait(0.05)  # long enough for one that does not wait
    function.go.set()
    assert drained.wait(DEADLINE_S)
    caller.join(DEADLINE_S)
    closer.join(DEADLINE_S)
    assert function.pointers == [pointer]
    assert handle._take() is None


def test_a_call_that_never_ends_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "_DRAIN_S", 0.02)
    handle, function = base._Handle(), Blocking()
    handle._opened(object())
    caller = threading.Thread(target=handle._call, args=(function,))
    caller.start()
    assert function.inside.wait(DEADLINE_S)
    handle._take()
    with pytest.raises(errors.WaitTimeoutError, match="other threads"):
        handle._drain()
    function.go.set()
    caller.join(DEADLINE_S)
    handle._drain()


def test_a_call_that_fails_is_over() -> None:
    handle = base._Handle()
    handle._opened(object())
    with pytest.raises(ZeroDivisionError):
        handle._call(lambda _pointer: 1 // 0)
    handle._take()
    handle._drain()


class Reads:
    """A client that counts read sets."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def access_report_begin(self, _id: int) -> None:
        self.log.append("begin")

    def access_report_end(self, _id: int) -> Any:
        self.log.append("end")
        return np.empty((0, 2), np.uint64)

    def access_report_drop(self, _id: int) -> None:
        self.log.append("drop")

    def report_reads(self, _id: int, _runs: Any) -> None:
        self.log.append("report")
        raise errors.ServerUnavailableError("No.")

    def unmap(self, _id: int) -> None:
        self.log.append("unmap")


def lease_over(client: Any) -> Lease:
    return Lease(client, LeaseTable(), _native.Mapping(1, 0x1000, 4096), 7, writable=False)


def test_a_read_set_that_began_ends_once() -> None:
    client = Reads()
    lease = lease_over(client)
    lease.access_report_begin()
    with pytest.raises(errors.ServerUnavailableError):
        lease.report_reads()
    lease.report_reads()  # nothing left to report
    lease.close()
    assert client.log == ["begin", "end", "report", "unmap"]


def test_an_unreported_read_set_ends_with_the_lease() -> None:
    client = Reads()
    lease = lease_over(client)
    lease.access_report_begin()
    del lease
    gc.collect()
    assert client.log == ["begin", "drop", "unmap"]
