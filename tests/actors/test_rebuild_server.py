"""A page server that gets ready to be a home: an engine in this process, and no Ray."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyroaring import BitMap
from ray.exceptions import (
    GetTimeoutError,
    ObjectFetchTimedOutError,
    ObjectLostError,
    RayTaskError,
    WorkerCrashedError,
)

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._objects import memory
from clamor_ray._protocol.messages import Pinned, RebuildOrder, RegionRecord
from clamor_ray.actors.page_server import page_server, pinned_objects
from clamor_ray.actors.page_server.page_server import PageServer
from clamor_ray.actors.page_server.pinned_objects import PinnedObjects
from clamor_ray.actors.page_server.rebuilt_homes import RebuiltHomes

BLOCK = 4096
WRITERS = 0xDEAD_BEEF  # another page server
N_BLOCKS = 1 << 13  # 32 MiB
RECORD = RegionRecord(7, 1, 0x1300_0000_0000, N_BLOCKS * BLOCK, (1,))
ZEROS_OF = bytes(BitMap(range(N_BLOCKS)).serialize())
SPARSE = RebuildOrder(RECORD, (), (), ZEROS_OF, pieces=((64, b"the pickle stream"),))


def unused(*_: object) -> None:
    raise AssertionError("nothing is on another server here")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    server = PageServer.__new__(PageServer)
    server._engine = _native.Engine(
        f"clamor-test-{secrets.token_hex(6)}", server_id=1, history_directory="/tmp"
    )
    server._rebuilt_homes = RebuiltHomes(server._engine, unused, unused, unused, unused)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 << 20)
    try:
        yield server
    finally:
        server._engine.stop()


def prepared() -> int:
    """Files that are as long as the region and that this process has open."""
    n_files = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            n_files += os.stat(f"/proc/self/fd/{fd}").st_size == RECORD.length_bytes
        except FileNotFoundError:
            continue  # that of the listing itself
    return n_files


def test_zeros_that_are_larger_than_the_memory(server: PageServer) -> None:
    server.rebuild(SPARSE, [])
    assert prepared() == 1
    server._engine.define_region(7, 1, RECORD.base_address, RECORD.length_bytes, [1])
    (region,) = server.region_stats()
    assert region["is_home"]


def test_what_is_written_must_have_room(server: PageServer) -> None:
    with pytest.raises(errors.OutOfMemoryError, match="32"):
        server.rebuild(RebuildOrder(RECORD, ((1, ZEROS_OF),), ()), [])
    with pytest.raises(errors.OutOfMemoryError, match="32"):
        server.rebuild(RebuildOrder(RECORD, (), (), ZEROS_OF, digest=b"of a shared object"), [])
    assert prepared() == 0


def test_nothing_stays_of_an_attempt_that_fails(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(order: RebuildOrder, made: list[Any]) -> Any:
        assert prepared() == 2  # the engine's, and the attempt's own descriptor
        raise errors.SourceError("It raised.")

    monkeypatch.setattr(RebuiltHomes, "_pieces", staticmethod(fail))
    with pytest.raises(errors.SourceError):
        server.rebuild(SPARSE, [])
    assert prepared() == 0


def test_a_verdict_drops_what_is_ready(server: PageServer) -> None:
    server.rebuild_drop(7)
    server.rebuild(SPARSE, [])
    server.rebuild_drop(7)
    assert prepared() == 0
    with pytest.raises(errors.HomeLostError):
        server._engine.define_region(7, 1, RECORD.base_address, RECORD.length_bytes, [1])


def test_what_is_not_brought_has_not_failed(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(reference: Any, timeout: float) -> Any:
        raise GetTimeoutError(f"not within {timeout} s")

    monkeypatch.setattr(page_server.ray, "get", get)
    with pytest.raises(errors.WaitTimeoutError, match="was not brought within"):
        server.rebuild(SPARSE, [object()])
    assert prepared() == 0


@pytest.mark.parametrize(
    "failure",
    [
        RayTaskError("make", "a traceback", MemoryError("no more")),
        RayTaskError("make", "a traceback", OSError(24, "Too many open files")),
        WorkerCrashedError(),
        ObjectFetchTimedOutError("00", "", ""),
    ],
    ids=["memory", "descriptors", "crashed", "not fetched"],
)
def test_a_source_without_room_has_not_failed(
    failure: Exception, server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shortage is no verdict: what it would make is not written down as lost."""

    def get(reference: Any, timeout: float) -> Any:
        raise failure

    monkeypatch.setattr(page_server.ray, "get", get)
    with pytest.raises(errors.WaitTimeoutError, match="The source"):
        server.rebuild(SPARSE, [object()])
    assert prepared() == 0


@pytest.mark.parametrize("is_there", [False, True])
def test_a_layer_that_is_there_needs_no_room(is_there: bool) -> None:
    """As after a restart of a home: its keeper has given back what it had fetched."""

    async def pull(region: int, commit_id: int, from_server: int, layer_bytes: int) -> int:
        return 0

    server: Any = PageServer.__new__(PageServer)
    server._engine = SimpleNamespace(has_layer=lambda region, commit_id: is_there)
    server._core = SimpleNamespace(versions=SimpleNamespace(pull=pull))
    server._on_loop = lambda work, timeout_s: asyncio.run(work)
    if is_there:
        server.pull(9, 7, 2, 1 << 60)
    else:
        with pytest.raises(errors.OutOfMemoryError):
            server.pull(9, 7, 2, 1 << 60)


@pytest.mark.parametrize(
    ("failure", "passes"),
    [
        (GetTimeoutError("not within 120 s"), False),  # the other regions need this server
        (ObjectFetchTimedOutError("00", "", ""), True),
        (MemoryError(), True),
        (errors.DescriptorLimitError("none left"), True),
        (OSError(24, "Too many open files"), True),
        (ObjectLostError("00", "", ""), False),
        (FileNotFoundError(2, "what the object opens when it is unpickled"), False),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_shortage_is_no_reason_to_do_without_a_shared_object(
    failure: Exception, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may pass ends the process, and Ray starts it again; else the others go on."""

    def get(reference: Any, timeout: float) -> Any:
        raise failure

    monkeypatch.setattr(pinned_objects.ray, "get", get)
    pins: Any = PinnedObjects(None, None, "here")  # type: ignore[arg-type]
    if passes:
        with pytest.raises(type(failure)):
            pins._pin_again(Pinned(RECORD, None, b"digest"), [object()], 1.0)
    else:
        pins._pin_again(Pinned(RECORD, None, b"digest"), [object()], 1.0)


def test_shared_objects_that_do_not_come_delay_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have one deadline: who reads another region of this node waits for all of them."""
    began_s = time.monotonic()
    waits: list[float] = []

    def wait(references: list[Any], num_returns: int, timeout: float) -> Any:
        assert num_returns == len(references) == 4
        time.sleep(timeout)
        return [], references

    def get(reference: Any, timeout: float) -> Any:
        waits.append(timeout)
        raise GetTimeoutError("it is on its way")

    monkeypatch.setattr(pinned_objects.ray, "wait", wait)
    monkeypatch.setattr(pinned_objects.ray, "get", get)
    pins: Any = PinnedObjects(None, None, "here")  # type: ignore[arg-type]
    pins.pin_all_again([(Pinned(RECORD, None, b"digest"), [object()])] * 4, 0.2)
    assert waits == [pinned_objects.BROUGHT_OBJECT_S] * 4
    assert time.monotonic() - began_s < 4 * pinned_objects.FETCH_OBJECT_S
    assert pins.regions == {}


@pytest.mark.parametrize("code", [_native.PC_ERR_NO_MEMORY, _native.PC_ERR_DESCRIPTORS])
def test_a_home_that_is_short_of_something_names_itself(
    code: int, server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the server of the writer, who is short of nothing."""

    async def pull(*_: object) -> int:
        return code

    server._core = SimpleNamespace(versions=SimpleNamespace(pull=pull))  # type: ignore[assignment]
    monkeypatch.setattr(PageServer, "_on_loop", lambda _, work, __: asyncio.run(work))
    with pytest.raises((errors.OutOfMemoryError, errors.DescriptorLimitError)) as failure:
        server.pull(0x77, 7, WRITERS, 2 * BLOCK)
    assert "(variable 7, page server 0x1)" in str(failure.value)
    assert ("RLIMIT_NOFILE" in str(failure.value)) == (code == _native.PC_ERR_DESCRIPTORS)
    assert f"{WRITERS}" not in str(failure.value)


def test_a_home_that_may_open_nothing_names_itself(server: PageServer) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(most := os.open(os.devnull, os.O_RDONLY))  # the next one will be that
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, limits[1]))
    try:
        with pytest.raises(errors.DescriptorLimitError) as failure:
            server._engine.pull(7, 0x77, WRITERS, 2 * BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "(variable 7, page server 0x1): RLIMIT_NOFILE of the page server" in str(failure.value)
