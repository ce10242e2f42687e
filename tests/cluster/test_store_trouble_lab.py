"""What a session with a store says, and keeps, when a part of its disk is away, damaged or full."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.cluster.test_moves_lab import on
from tests.conftest import ANSWER_S, until
from tests.support import store_openings
from tests.support.lab import local_cluster, require_lab, troubles
from tests.support.power_cut import power_cut_disk
from tests.support.store_openings import SESSION, opening

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

N = 1_000_000  # of 8 bytes
MIB = 1 << 20
BLOCK_BYTES = 4096
ROWS = BLOCK_BYTES // 8
AWAY = r"(?s)node-[0-9a-f]{32}.*[Ss]tart a node"


@pytest.fixture(autouse=True)
def needs() -> None:
    require_lab("local")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "s"


def put_named(name: str, seed: int) -> str:
    clamor.put(content(seed), name=name)
    return name


def content(seed: int) -> Any:
    return np.random.default_rng(seed).integers(1, 1 << 62, N // 10)


def read(name: str) -> Any:
    """A touch of what is away ends a process; a prefetch raises what there is to say."""
    ref = clamor.open(name)
    clamor.prefetch(ref)
    return np.array(ref.get())


def add(name: str) -> None:
    with clamor.update(clamor.open(name)) as array:
        array[::ROWS] += 1


def added(array: Any, times: int) -> Any:
    array = array.copy()
    array[::ROWS] += times
    return array


def is_back(name: str, expected: Any) -> bool:
    try:
        return bool(np.array_equal(read(name), expected))
    except errors.HomeLostError:
        return False


def put_on_each(n_nodes: int) -> None:
    """A variable on each node, one in pieces with parity, and one without."""
    for node in range(n_nodes):
        assert on(node, put_named, f"on {node}", node)
    clamor.put(np.arange(N), name="raid5", redundancy="raid5")
    clamor.put(np.arange(N), name="spread", home="spread")


def directory_of(store: Path, region: int) -> Path:
    """Of the page server that is a variable's home."""
    (base,) = store.rglob(f"{region}.base")
    return base.parent.parent


def test_a_node_dies_and_its_directory_comes_back(store: Path) -> None:
    with opening(store, 3) as lab:
        put_on_each(3)
        for name in ("on 2", "raid5", "spread"):
            add(name)
        lab.kill_node(2)
        with pytest.raises(errors.HomeLostError, match=AWAY):
            read("on 2")
        assert np.array_equal(read("raid5"), added(np.arange(N), 1))
        add("raid5")
        assert np.array_equal(read("raid5"), added(np.arange(N), 2))
        assert np.array_equal(read("on 1"), content(1))
        add("on 1")
        lab.add_node(num_cpus=1, object_store_memory=150 * MIB)
        until(lambda: is_back("on 2", added(content(2), 1)), ANSWER_S)
        add("on 2")
        until(lambda: is_back("spread", added(np.arange(N), 1)), ANSWER_S)
        add("spread")
    with opening(store, 3):
        assert np.array_equal(read("on 1"), added(content(1), 1))
        assert np.array_equal(read("on 2"), added(content(2), 2))
        assert np.array_equal(read("raid5"), added(np.arange(N), 2))
        assert np.array_equal(read("spread"), added(np.arange(N), 2))


def test_a_directory_is_away_and_is_brought_back(store: Path, tmp_path: Path) -> None:
    with opening(store, 3):
        put_on_each(3)
        region = clamor.open("on 2")._region
    moved = directory_of(store, region)
    away = tmp_path / moved.name
    moved.rename(away)
    with opening(store, 3):
        with pytest.raises(errors.HomeLostError, match=moved.name):
            read("on 2")
        assert np.array_equal(read("on 0"), content(0))
        assert np.array_equal(read("raid5"), np.arange(N))
        add("raid5")
        add("on 1")
    away.rename(moved)
    with opening(store, 3):
        assert np.array_equal(read("on 2"), content(2))
        assert np.array_equal(read("on 1"), added(content(1), 1))
        assert np.array_equal(read("raid5"), added(np.arange(N), 1))
        assert np.array_equal(read("spread"), np.arange(N))


def test_the_registrys_part_is_away(store: Path, tmp_path: Path) -> None:
    with opening(store, 1):
        put_named("index", 1)
    registry = store / SESSION / "registry"
    registry.rename(tmp_path / "registry")
    with (
        local_cluster(1),
        pytest.raises(errors.StoreIncompleteError, match="registry"),
    ):
        store_openings.in_time(store)
    (tmp_path / "registry").rename(registry)
    with opening(store, 1):
        assert np.array_equal(read("index"), content(1))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_byte_of_a_layer_is_not_what_was_written(store: Path) -> None:
    with local_cluster(1, connect=False) as lab:
        script = """
ref = clamor.put(np.arange(100_000), name="index")
with clamor.update(ref) as array:
    array[5000] = -1
print(json.dumps([found.scope, ref._region]))
"""
        scope, region = store_openings.run(lab, store, script)
        store_openings.crash(lab, scope)
    (layer,) = store.rglob(f"{region}-*.layer")
    blocks = layer.read_bytes()
    flip(layer, blocks.index((-1).to_bytes(8, "little", signed=True)))
    with opening(store, orderly=False), pytest.raises(errors.ClamorError) as failed:
        read("index")
    said = str(failed.value)
    assert layer.name in said
    assert str(region) in said
    layer.write_bytes(blocks)
    with opening(store):
        assert int(read("index")[5000]) == -1


@pytest.mark.parametrize("level", [{}, {"redundancy": "raid5"}])
def test_a_byte_of_a_base_is_not_what_was_written(store: Path, level: dict[str, Any]) -> None:
    """It is an error, or the block comes from where it is whole. The log says which block."""
    with opening(store, 3):
        ref = clamor.put(np.arange(N), name="index", **level)
        regions = range(ref._region, ref._region + 100)
    bases = [path for path in store.rglob("*.base") if int(path.stem) in regions]
    largest = max(bases, key=lambda path: path.stat().st_size)
    flip(largest, 17 * BLOCK_BYTES + 100)
    with opening(store, 3, orderly=False):
        if level:
            assert np.array_equal(read("index"), np.arange(N))
        else:
            with pytest.raises(errors.HomeLostError, match=largest.stem):
                read("index")
            until(lambda: sum(node.engine.damaged_blocks for node in clamor.stats().nodes) == 1)


@pytest.mark.parametrize("kind", ["registry", "node"])
def test_a_newer_format_is_refused(store: Path, kind: str) -> None:
    with opening(store):
        put_named("index", 1)
    (path,) = (store / SESSION).glob(f"{kind}*/description.json")
    text = path.read_text()
    path.write_text(json.dumps({**json.loads(text), "format": 99}))
    with local_cluster(1), pytest.raises(errors.StoreFormatError, match="99"):
        store_openings.in_time(store)
    path.write_text(text)
    with opening(store):
        assert np.array_equal(read("index"), content(1))


@pytest.mark.parametrize("part", ["", "registry", "node"])
@pytest.mark.parametrize("how", ["mode", "owner"])
def test_a_directory_of_others_is_refused(store: Path, part: str, how: str) -> None:
    if how == "owner" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    with opening(store):
        put_named("index", 1)
    (path,) = (store / SESSION).glob(f"{part}*") if part else [store / SESSION]
    if how == "mode":
        path.chmod(0o755)
    else:
        os.chown(path, 12345, 12345)
    with local_cluster(1), pytest.raises(errors.StoreAccessError, match=str(path)):
        store_openings.in_time(store)
    path.chmod(0o700)
    os.chown(path, os.geteuid(), os.getegid())
    with opening(store):
        assert np.array_equal(read("index"), content(1))


def test_the_disk_is_full_and_has_room_again(tmp_path: Path) -> None:
    with power_cut_disk(tmp_path / "disk", 160 * MIB):  # of tmpfs nothing is on a disk
        store = tmp_path / "disk" / "s"
        filler = tmp_path / "disk" / "filler"
        with opening(store):
            clamor.put(np.arange(N), name="index")
            add("index")
            troubles.fill(filler)
            with pytest.raises((errors.NoSpaceError, errors.JournalFullError)):
                clamor.put(np.arange(N))
            n_commits = commit_until_refused()
            assert np.array_equal(read("index"), added(np.arange(N), 1 + n_commits))
            filler.unlink()
            add("index")
            assert np.array_equal(read("index"), added(np.arange(N), 2 + n_commits))
            clamor.free(clamor.put(np.arange(N)))
        with opening(store):
            assert np.array_equal(read("index"), added(np.arange(N), 2 + n_commits))


def commit_until_refused() -> int:
    for n in range(100):
        try:
            add("index")
        except (errors.NoSpaceError, errors.JournalFullError):
            return n
    raise AssertionError("the disk is never full")
