"""What a page server puts into its directory of a store, and when. Only the engine is a fake."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._native.client import HomeFile
from clamor_ray._protocol.messages import (
    Publication,
    RegionRecord,
    ServerConfig,
    StoredRegion,
    StoreState,
)
from clamor_ray._store import bases, layer_files
from clamor_ray._store.layout import base_path, layer_path
from clamor_ray.actors.node_store import store_part
from clamor_ray.actors.node_store.store_part import StorePart
from tests.support.store_files import block_of, engine_layer

REGION, N_BLOCKS = 7, 8
WAIT_S = 20.0


class Engine:
    """Has one base, and layers in memory."""

    def __init__(self, part: StorePart) -> None:
        self.version = 0
        self.layers: dict[tuple[int, int], bytes] = {}
        self.base = os.open(part.path, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.ftruncate(self.base, N_BLOCKS * BLOCK_BYTES)

    def home_file(self, region: int) -> HomeFile:
        if region != REGION:
            raise errors.FreedError("not here")
        return HomeFile(os.dup(self.base), self.version, 1 << 44, N_BLOCKS * BLOCK_BYTES, False)

    def layer_file(self, region: int, commit_id: int) -> tuple[int, int]:
        content = self.layers[region, commit_id]
        fd = os.memfd_create("layer")
        os.write(fd, content)
        return fd, len(content)

    def has_layer(self, region: int, commit_id: int) -> bool:
        return (region, commit_id) in self.layers

    def stage(self, commit_id: int, seed: int, block: int = 0) -> None:
        self.layers[REGION, commit_id] = engine_layer(REGION, commit_id, {block: block_of(seed)})

    def apply(self, seed: int, block: int = 0) -> None:
        os.pwrite(self.base, block_of(seed).tobytes(), block * BLOCK_BYTES)
        self.version += 1


class Keeper:
    def __init__(self) -> None:
        self.homes: dict[int, tuple[int, bytes]] = {}

    def put_home(
        self, region: int, version: int, base: int, n_bytes: int, fd: int, **_: Any
    ) -> None:
        self.homes[region] = version, os.pread(fd, n_bytes, 0)


class Rig:
    def __init__(self, directory: Path) -> None:
        self.root = directory / "store" / "kept"
        (directory / "store").mkdir(mode=0o700)
        self.noted = directory / "noted"
        self.config = ServerConfig(
            job_scope="aa" * 6,
            library_version="0",
            fetch_timeout_s=1.0,
            fault_timeout_s=1.0,
            reattach_s=1.0,
            orphan_timeout_s=1.0,
            page_bytes=0,
            control_timeout_s=1.0,
            store=str(self.root),
            store_id="ab" * 16,
        )
        self.outcomes: dict[int, dict[int, int]] = {}
        self.open()

    def open(self) -> None:
        self.part = StorePart(self.config, self.noted)
        self.engine = Engine(self.part)

    def serve(self) -> None:
        self.part.serve(self.engine, lambda commit_id: self.outcomes.get(commit_id, {}))  # type: ignore[arg-type]

    def crash(self) -> None:
        """The process and its keeper are gone: of the base only what has a name is there."""
        self.part._stopping.set()
        if self.part._thread is not None:
            self.part._thread.join()
        self.part._directory.close()
        os.close(self.engine.base)
        self.open()

    def bring_back(self, newest: int, *commits: tuple[int, int]) -> tuple[Keeper, dict[int, str]]:
        record = RegionRecord(REGION, newest, 1 << 44, N_BLOCKS * BLOCK_BYTES, (1,))
        keeper = Keeper()
        state = StoreState((StoredRegion(record, commits),))
        return keeper, self.part.open_again(state, keeper)  # type: ignore[arg-type]

    def layers(self) -> list[str]:
        return sorted(os.listdir(self.part.path / "layers"))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.part.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_part, "TICK_S", 0.01)
    monkeypatch.setattr(store_part, "CHECKPOINT_S", 3600.0)
    monkeypatch.setattr(store_part.directories, "DYING_S", 0.2)


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def commit(rig: Rig, commit_id: int, version: int, seed: int, block: int = 0) -> None:
    rig.engine.stage(commit_id, seed, block)
    rig.part.keep_layer(REGION, commit_id)
    rig.part.name([Publication(REGION, version, commit_id)])


def content(keeper: Keeper, block: int = 0) -> bytes:
    return keeper.homes[REGION][1][block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]


def test_what_was_kept_and_committed_is_there_after_a_crash(rig: Rig) -> None:
    rig.serve()
    rig.engine.apply(1, 3)
    rig.engine.version = 0
    rig.part.keep(REGION)
    commit(rig, 11, 1, seed=2)
    commit(rig, 12, 2, seed=3)  # neither is applied
    rig.crash()
    keeper, damaged = rig.bring_back(2)
    assert not damaged
    assert keeper.homes[REGION][0] == 2
    assert content(keeper) == block_of(3).tobytes()
    assert content(keeper, 3) == block_of(1).tobytes()
    assert rig.layers() == []


def test_a_commit_that_the_home_did_not_hear_of_is_there_too(rig: Rig) -> None:
    rig.serve()
    rig.part.keep(REGION)
    rig.engine.stage(11, seed=2)
    rig.part.keep_layer(REGION, 11)
    rig.engine.stage(12, seed=3)
    rig.part.keep_layer(REGION, 12)  # and this one was never decided
    rig.crash()
    keeper, _ = rig.bring_back(1, (1, 11))
    assert content(keeper) == block_of(2).tobytes()
    assert rig.layers() == []


def test_the_same_directory_is_taken_after_a_restart(rig: Rig) -> None:
    before = rig.part.directory_id
    rig.crash()
    assert rig.part.directory_id == before
    rig.part.close()
    assert not rig.noted.exists()
    other = StorePart(rig.config, rig.noted)
    rig.open()  # the first is taken
    assert {other.directory_id, rig.part.directory_id} > {before}
    other.close()


def test_a_checkpoint_lets_go_of_the_layers_that_the_base_has(rig: Rig) -> None:
    rig.serve()
    rig.part.keep(REGION)
    for version in (1, 2, 3):
        commit(rig, 10 + version, version, seed=version, block=version)
    rig.engine.apply(1, 1)
    rig.engine.apply(2, 2)
    rig.part.checkpoint(REGION)
    assert len(rig.layers()) == 1
    rig.crash()
    keeper, _ = rig.bring_back(3)
    assert [content(keeper, at) for at in (1, 2, 3)] == [block_of(at).tobytes() for at in (1, 2, 3)]


def test_it_comes_by_itself_when_layers_are_old_or_large(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.serve()
    rig.part.keep(REGION)
    commit(rig, 11, 1, seed=1)
    rig.engine.apply(1)
    time.sleep(0.1)
    assert len(rig.layers()) == 1
    monkeypatch.setattr(store_part, "CHECKPOINT_BYTES", 4096)
    until(lambda: not rig.layers())
    monkeypatch.setattr(store_part, "CHECKPOINT_BYTES", 1 << 30)
    commit(rig, 12, 2, seed=2)
    rig.engine.apply(2)
    monkeypatch.setattr(store_part, "CHECKPOINT_S", 0.0)
    until(lambda: not rig.layers())


def test_layers_of_a_base_that_stays_behind_are_merged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_part, "MERGE_BYTES", 0)
    monkeypatch.setattr(store_part, "AGAIN_S", 0.0)
    rig.serve()
    rig.part.keep(REGION)
    for version in range(1, 13):
        commit(rig, 10 + version, version, seed=version, block=version % 2)
    rig.part.checkpoint(REGION)
    assert len(rig.layers()) == 1
    rig.crash()
    keeper, _ = rig.bring_back(12)
    assert content(keeper, 0) == block_of(12).tobytes()
    assert content(keeper, 1) == block_of(11).tobytes()


def test_a_refused_commit_and_a_freed_region_leave_nothing(rig: Rig) -> None:
    rig.serve()
    rig.part.keep(REGION)
    rig.engine.stage(11, seed=1)
    rig.part.keep_layer(REGION, 11)
    rig.part.drop_layers(11, [REGION])
    assert rig.layers() == []
    commit(rig, 12, 1, seed=1)
    rig.part.drop_region(REGION)
    assert rig.layers() == []
    assert bases.bases_of(rig.part.path) == []
    rig.part.name([Publication(REGION, 2, 13)])  # late


def test_a_question_that_comes_late_writes_nothing(rig: Rig) -> None:
    """The commit is made, or refused, and what the writer asked for is done only now."""
    rig.serve()
    rig.part.keep(REGION)
    commit(rig, 11, 1, seed=1)
    rig.engine.stage(12, seed=2)
    assert rig.part.keep_own_layer(REGION, 12)
    assert len(rig.layers()) == 2
    rig.part.drop_layers(12, [REGION])
    before = rig.layers()
    assert len(before) == 1
    for commit_id in (11, 12):
        rig.part.keep_layer(REGION, commit_id)
    assert rig.layers() == before
    assert not rig.part.keep_own_layer(REGION + 1, 13)  # its home is not here


def test_a_layer_that_nobody_names_is_asked_about(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.serve()
    rig.part.keep(REGION)
    rig.outcomes[11] = {REGION: 1}
    for commit_id in (11, 12, 13):
        rig.engine.stage(commit_id, seed=commit_id)
        rig.part.keep_layer(REGION, commit_id)
    del rig.engine.layers[REGION, 11], rig.engine.layers[REGION, 12]
    monkeypatch.setattr(store_part, "UNDECIDED_S", 0.0)
    until(lambda: len(rig.layers()) == 2)
    assert sorted(name.version for name in layer_files.layers_of(rig.part.path, REGION)) == [0, 1]
    assert (
        layer_files.layers_of(rig.part.path, REGION)[1].commit_id == 13
    )  # the engine has it still


def test_a_delta_is_replaced_by_the_whole_layer(rig: Rig) -> None:
    rig.serve()
    rig.part.keep(REGION)
    rig.engine.layers[REGION, 11] = engine_layer(REGION, 11, {0: block_of(1)}, layer_files.DELTA)
    rig.part.keep_layer(REGION, 11)
    rig.engine.layers[REGION, 11] = engine_layer(
        REGION, 11, {0: block_of(2)}, layer_files.MADE_WHOLE
    )
    rig.part.keep_whole(REGION, 11, 1)
    rig.part.name([Publication(REGION, 1, 11)])
    assert len(rig.layers()) == 1
    rig.crash()
    keeper, _ = rig.bring_back(1)
    assert content(keeper) == block_of(2).tobytes()


def test_a_region_with_damaged_files_holds_up_no_other(rig: Rig) -> None:
    rig.serve()
    rig.part.keep(REGION)
    commit(rig, 11, 1, seed=1)
    (name,) = layer_files.layers_of(rig.part.path, REGION)
    path = layer_path(rig.part.path, name)
    path.write_bytes(path.read_bytes()[:-1])
    rig.crash()
    keeper, damaged = rig.bring_back(1)
    assert not keeper.homes
    assert "layer" in damaged[REGION]
    assert base_path(rig.part.path, REGION).exists()
    assert path.exists()


def test_a_region_that_should_be_there_and_is_not_is_said(rig: Rig) -> None:
    _, damaged = rig.bring_back(0)
    assert list(damaged) == [REGION]


def test_what_the_registry_does_not_name_goes(rig: Rig) -> None:
    rig.serve()
    rig.part.keep(REGION)
    commit(rig, 11, 1, seed=1)
    rig.crash()
    keeper = Keeper()
    assert rig.part.open_again(StoreState((), REGION), keeper) == {}  # type: ignore[arg-type]
    assert bases.bases_of(rig.part.path) == [REGION]  # the registry has not given it out yet
    assert rig.part.open_again(StoreState((), REGION + 1), keeper) == {}  # type: ignore[arg-type]
    assert bases.bases_of(rig.part.path) == []
    assert rig.layers() == []


def test_a_base_that_somebody_still_maps_does_not_change(rig: Rig) -> None:
    rig.serve()
    rig.engine.apply(1)
    rig.engine.version = 0
    rig.part.keep(REGION)
    commit(rig, 11, 1, seed=2)
    before = np.memmap(base_path(rig.part.path, REGION), np.uint8, "r")
    rig.crash()
    keeper, _ = rig.bring_back(1)
    assert content(keeper) == block_of(2).tobytes()
    assert before[:BLOCK_BYTES].tobytes() == block_of(1).tobytes()


def test_a_layer_that_comes_while_a_checkpoint_runs_is_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.serve()
    rig.part.keep(REGION)
    commit(rig, 11, 1, seed=1)
    rig.engine.apply(1)
    at_it, may = threading.Event(), threading.Event()
    real = store_part.checkpoint

    def slow(*arguments: Any) -> None:
        at_it.set()
        assert may.wait(WAIT_S)
        real(*arguments)

    monkeypatch.setattr(store_part, "checkpoint", slow)
    running = threading.Thread(target=rig.part.checkpoint, args=(REGION,))
    running.start()
    assert at_it.wait(WAIT_S)
    rig.engine.stage(12, seed=2)
    rig.part.keep_layer(REGION, 12)  # no commit waits for a checkpoint
    may.set()
    running.join()
    rig.part.name([Publication(REGION, 2, 12)])
    rig.crash()
    keeper, _ = rig.bring_back(2)
    assert content(keeper) == block_of(2).tobytes()


def test_a_disk_that_refuses_is_said_and_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_part, "AGAIN_S", 0.05)
    rig.serve()
    rig.part.keep(REGION)
    commit(rig, 11, 1, seed=1)
    rig.engine.apply(1)
    refusals = [errors.NoSpaceError("The disk is full."), errors.NoSpaceError("The disk is full.")]
    real = store_part.checkpoint

    def refuse(*arguments: Any) -> None:
        if refusals:
            raise refusals.pop()
        real(*arguments)

    monkeypatch.setattr(store_part, "checkpoint", refuse)
    monkeypatch.setattr(store_part, "CHECKPOINT_S", 0.0)
    until(lambda: not rig.layers())
    assert "The disk is full" in caplog.text


def test_two_servers_of_a_node_directory_are_refused(rig: Rig) -> None:
    with pytest.raises(errors.StoreInUseError):
        store_part.directories.open_node(
            rig.root, "ab" * 16, "aa" * 6, directory_id=rig.part.directory_id
        )


def test_a_layer_of_a_process_that_was_killed_is_written_again(rig: Rig) -> None:
    """It may be torn, and a torn one may have its name."""
    rig.serve()
    rig.part.keep(REGION)
    rig.engine.stage(11, seed=1)
    rig.part.keep_layer(REGION, 11)
    (path,) = (rig.part.path / "layers").iterdir()
    path.write_bytes(path.read_bytes()[:5000])
    engine = rig.engine
    rig.part._stopping.set()
    rig.part._directory.close()
    rig.part = StorePart(rig.config, rig.noted)  # its keeper lives: the engine has what it had
    rig.serve()
    assert rig.engine is engine
    rig.part.keep_layer(REGION, 11)
    rig.part.name([Publication(REGION, 1, 11)])
    rig.crash()
    keeper, damaged = rig.bring_back(1)
    assert not damaged
    assert content(keeper) == block_of(1).tobytes()


def test_a_late_word_drops_nothing_that_is_here(rig: Rig) -> None:
    rig.serve()
    rig.part.keep(REGION)
    rig.part.drop_unless_here(REGION)
    assert bases.bases_of(rig.part.path) == [REGION]
    rig.part.drop_unless_here(REGION + 1)
    rig.part.drop_region(REGION)
    assert bases.bases_of(rig.part.path) == []


def test_a_base_that_the_disk_has_refused_is_redone_by_an_opening(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync after the one that has failed says nothing, in whichever process."""
    rig.serve()
    rig.part.keep(REGION)
    commit(rig, 11, 1, seed=1)
    rig.engine.apply(1)
    real = os.fdatasync

    def refuse(fd: int) -> None:
        raise OSError(5, "as the disk says")

    monkeypatch.setattr(store_part.os, "fdatasync", refuse)
    with pytest.raises(OSError, match="as the disk says"):
        rig.part.checkpoint(REGION)
    monkeypatch.setattr(store_part.os, "fdatasync", real)
    rig.part._stopping.set()
    rig.part._directory.close()
    rig.part = StorePart(rig.config, rig.noted)  # its keeper lives
    rig.serve()
    with pytest.raises(errors.StoreError, match="refused"):
        rig.part.checkpoint(REGION)
    assert len(rig.layers()) == 1
    rig.crash()
    keeper, damaged = rig.bring_back(1)
    assert not damaged
    assert content(keeper) == block_of(1).tobytes()
    assert not list((rig.part.path / "regions").glob("*.refused"))
