"""The files of homes and layers as Python sees them: what a later session is given. No Ray."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._native.base import c
from clamor_ray._store.bases import keep_base
from clamor_ray._store.layout import LAYERS, REGIONS
from tests.conftest import until

BASE, REGION, N_BLOCKS = 0x1300_0000_0000, 7, 64
LENGTH = N_BLOCKS * _native.BLOCK_BYTES
ONE_BLOCK = np.array([[3, 1]], np.uint64)


@pytest.fixture
def keepers() -> Iterator[Callable[[], _native.Keeper]]:
    """Starts one with each call."""
    started: list[tuple[int, _native.Keeper]] = []

    def start() -> _native.Keeper:
        name = f"clamor-test-{secrets.token_hex(6)}"
        pid = os.fork()
        if pid == 0:
            c.lib.pc_keeper_run(name.encode(), os.getppid(), int(60e9))
            os._exit(0)
        keeper = _native.Keeper(name)
        started.append((pid, keeper))
        return keeper

    yield start
    for pid, keeper in started:
        keeper.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory that is not in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


def engine_of(
    keeper: _native.Keeper,
    directory: Path,
    cold: bool = False,
    sums_directory: str | None = None,
) -> tuple[_native.Engine, _native.Client]:
    name = f"clamor-test-{secrets.token_hex(6)}"
    engine = _native.Engine(
        name,
        server_id=1,
        keeper=keeper,
        history_directory=str(directory),
        disk_directory=str(directory),
        durable=True,
        cold=cold,
        sums_directory=sums_directory,
    )
    return engine, _native.Client(name)


def written(client: _native.Client, mapping: _native.Mapping, word: bytes) -> None:
    """Into block 3."""
    ctypes.memmove(mapping.address + 3 * _native.BLOCK_BYTES, word, len(word))


def test_a_home_goes_on_in_another_session(
    keepers: Callable[[], _native.Keeper], disk: Path
) -> None:
    keeper = keepers()
    engine, client = engine_of(keeper, disk)
    with pytest.raises(errors.FreedError):
        engine.home_file(REGION)
    mapping = client.build(REGION, BASE, LENGTH)
    written(client, mapping, b"as it was put")
    client.build_seal(mapping.id)
    client.unmap(mapping.id)
    private = client.map(REGION, 0, BASE, LENGTH, flags=_native.MAP_PRIVATE)
    written(client, private, b"as it was committed")
    with pytest.raises(errors.NoVersionError):
        engine.layer_file(REGION, 5)
    client.stage(private.id, 5, ONE_BLOCK)
    fd, n_bytes = engine.layer_file(REGION, 5)
    assert os.fstat(fd).st_size == n_bytes
    assert os.pread(fd, 19, n_bytes - _native.BLOCK_BYTES) == b"as it was committed"
    os.close(fd)
    engine.publish(REGION, 1, 5)
    client.resolve(private.id, 5, REGION, 1)
    client.unmap(private.id)
    home = engine.home_file(REGION)
    assert (home.base_address, home.length_bytes, home.in_file) == (BASE, LENGTH, False)

    def version() -> int:
        again = engine.home_file(REGION)
        os.close(again.fd)
        return again.version

    until(lambda: version() == 1)
    client.close()
    engine.stop()

    keeper = keepers()
    keeper.put_home(REGION, 1, BASE, LENGTH, home.fd)
    os.close(home.fd)
    engine, client = engine_of(keeper, disk, cold=True)
    try:
        engine.define_region(REGION, 1, BASE, LENGTH, [1])
        mapping = client.map(REGION, 1, BASE, LENGTH)
        at = mapping.address + 3 * _native.BLOCK_BYTES
        assert ctypes.string_at(at, 19) == b"as it was committed"
        with pytest.raises(errors.SnapshotExpired):
            client.map(REGION, 0, BASE, LENGTH)
        client.unmap(mapping.id)
    finally:
        client.close()
        engine.stop()


def test_a_file_of_another_directory_makes_a_home_when_the_registry_says_so(
    keepers: Callable[[], _native.Keeper], disk: Path
) -> None:
    (disk / REGIONS).mkdir()
    (disk / LAYERS).mkdir()
    keeper = keepers()
    engine, client = engine_of(keeper, disk)
    mapping = client.build(REGION, BASE, LENGTH)
    written(client, mapping, b"as it was put")
    client.build_seal(mapping.id)
    client.unmap(mapping.id)
    home = engine.home_file(REGION)
    keep_base(disk, REGION, home.fd, 0, BASE, LENGTH)
    client.close()
    engine.stop()

    for is_rotten in (False, True):
        if is_rotten:
            os.pwrite(home.fd, b"?", 3 * _native.BLOCK_BYTES + 1)
        engine, client = engine_of(keepers(), disk, cold=True, sums_directory=str(disk / REGIONS))
        try:
            engine.rebuild_from_file(REGION, home, 2)
            engine.rebuild_from_file(REGION, home, 2)  # again: as the first time
            assert not [each for each in engine.region_stats() if each["is_home"]]
            engine.define_region(REGION, 0, BASE, LENGTH, [1], term=2)
            mapping = client.map(REGION, 0, BASE, LENGTH)
            if is_rotten:
                with pytest.raises(errors.HomeLostError):
                    client.prefetch(mapping.id, ONE_BLOCK)
            else:
                client.prefetch(mapping.id, ONE_BLOCK)
                at = mapping.address + 3 * _native.BLOCK_BYTES
                assert ctypes.string_at(at, 13) == b"as it was put"
            client.unmap(mapping.id)
        finally:
            client.close()
            engine.stop()
    os.close(home.fd)
