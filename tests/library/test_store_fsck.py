"""clamor-fsck: what it finds in a store, what it mends, and what it leaves alone."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._protocol.messages import NamedVariable, RegionRecord
from clamor_ray._protocol.names import server_id_of
from clamor_ray._store.bases import keep_base
from clamor_ray._store.directories import open_node, open_registry
from clamor_ray._store.layer_files import DELTA, scan_layers
from clamor_ray._store.layout import LayerName, base_path, layer_path, sums_path
from clamor_ray.actors.commits.commit_log import Entry
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.cli import fsck
from tests.support.store_files import Block, base_file, block_of, put_layer

N_BLOCKS = 16
LENGTH = N_BLOCKS * BLOCK_BYTES
PLAIN, VARIABLE = 20, 10
PIECES = (11, 12, 13)  # two of data, one of parity


class Store:
    """Closed, with a plain variable and one in pieces with parity; one commit to each of them.

    Args:
        root: the session's part.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        registry = open_registry(root)
        nodes = [open_node(root, registry.description.store, "scope") for _ in range(2)]
        self.homes = {PLAIN: nodes[0], 11: nodes[0], 12: nodes[1], 13: nodes[0]}
        first: dict[int, dict[int, Block]] = {
            PLAIN: {1: block_of(1)},
            11: {2: block_of(2)},
            12: {2: block_of(3), 3: block_of(4)},
        }
        changed = {11: {5: block_of(5)}, 12: {2: block_of(6)}, PLAIN: {2: block_of(7)}}
        first[13] = {2: block_of(2) ^ block_of(3), 3: block_of(4)}
        changed[13] = {5: block_of(5), 2: block_of(3) ^ block_of(6)}
        journal = Journal(registry.path)
        variable = RegionRecord(
            *(VARIABLE, 0, 1 << 44, 2 * LENGTH, ()),
            n_pieces=2,
            piece_bytes=LENGTH,
            group_width=2,
            group_parity=1,
        )
        ids = {region: server_id_of(node.directory_id) for region, node in self.homes.items()}
        pieces = [variable.piece(i, 1 << 44, LENGTH, ids[each]) for i, each in enumerate(PIECES)]
        journal.create_region(variable, 1, 14, pieces)
        journal.create_region(RegionRecord(PLAIN, 0, 2 << 44, LENGTH, (ids[PLAIN],)), 2, 21)
        journal.create_region(RegionRecord(21, 0, 3 << 44, LENGTH, (ids[PLAIN],)), 3, 22)
        for region in (VARIABLE, *PIECES, PLAIN):
            journal.seal(region)
        for region, node in self.homes.items():
            with base_file(node.path, first[region], N_BLOCKS) as fd:
                keep_base(node.path, region, fd, 0, 1 << 44, LENGTH)
            flags = DELTA if region == 13 else 0
            put_layer(node.path, region, 99, changed[region], flags=flags)
        journal.commit(99, [Entry(region, 1, 99) for region in (*PIECES, PLAIN)], 0.0)
        journal.give_name(NamedVariable("index", PLAIN, b"x"))
        journal.close()
        for each in (registry, *nodes):
            each.close()
        self.now = {region: {**first[region], **changed[region]} for region in (*PIECES[:2], PLAIN)}

    def files(self) -> dict[str, bytes]:
        return {
            str(path): path.read_bytes()
            for path in self.root.rglob("*")
            if path.is_file() and path.name != "lock"
        }

    def flip(self, region: int, block: int) -> None:
        with base_path(self.homes[region].path, region).open("r+b") as file:
            file.seek(block * BLOCK_BYTES + 9)
            file.write(b"\x55\xaa\x55")

    def check_content(self) -> None:
        for region, blocks in self.now.items():
            content = base_path(self.homes[region].path, region).read_bytes()
            for block, data in blocks.items():
                found = np.frombuffer(content, np.uint8, BLOCK_BYTES, block * BLOCK_BYTES)
                assert np.array_equal(found, data), (region, block)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store" / "features")


def said(report: fsck.Report) -> str:
    return "\n".join(problem.text for problem in report.problems)


def test_a_store_that_is_well_is_left_alone(store: Store) -> None:
    before = store.files()
    report = fsck.check(store.root)
    assert (report.problems, report.notes, report.n_regions, report.n_layers) == ([], [], 4, 4)
    assert store.files() == before
    report = fsck.check(store.root, repairs=True)
    assert report.problems == []
    store.check_content()
    assert not any(scan_layers(node.path) for node in store.homes.values())


def test_blocks_are_made_again_of_their_group(store: Store) -> None:
    for region, block in ((11, 2), (12, 3), (13, 3), (PLAIN, 1)):
        store.flip(region, block)
    store.flip(12, 2)  # a layer has that one: a redo writes it
    report = fsck.check(store.root)
    assert not report.is_well
    assert "variable 20 ('index'): 1 block (1) is wrong, by the checksums" in said(report)
    assert len(report.problems) == 4
    report = fsck.check(store.root, repairs=True)
    mended = [problem.text for problem in report.problems if problem.is_mended]
    lost = [problem.text for problem in report.problems if not problem.is_mended]
    assert len(mended) == 1  # of block 3 two members are wrong
    assert "piece 0: 1 block (2)" in mended[0]
    assert len(lost) == 3
    for region, block in ((PLAIN, 1),):
        with base_path(store.homes[region].path, region).open("r+b") as file:
            file.seek(block * BLOCK_BYTES)
            file.write(store.now[region][block].tobytes())
    assert len(fsck.check(store.root).problems) == 2


def test_a_parity_is_made_again(store: Store) -> None:
    store.flip(13, 3)
    report = fsck.check(store.root, repairs=True)
    assert report.is_well, said(report)
    assert fsck.check(store.root).problems == []
    store.flip(12, 3)
    assert fsck.check(store.root, repairs=True).is_well
    store.check_content()


def test_what_is_missing_is_said(store: Store) -> None:
    node = store.homes[PLAIN].path
    layer_path(node, LayerName(PLAIN, 99)).unlink()
    sums_path(node, 11).unlink()
    base_path(store.homes[12].path, 12).unlink()
    text = said(fsck.check(store.root, repairs=True))
    assert "Version 1 of variable 20 is missing" in text
    assert "11.sums: opening it: it is missing" in text
    assert "variable 10, piece 1 has no base" in text


def test_a_directory_that_is_away_is_said(store: Store) -> None:
    node = store.homes[12]
    node.path.rename(store.root.parent / "away")
    report = fsck.check(store.root)
    assert f"node-{node.directory_id}" in said(report) or "piece 1 has no base" in said(report)
    (store.root.parent / "away").rename(node.path)
    assert fsck.check(store.root).is_well


def test_what_was_never_committed_goes(store: Store) -> None:
    node = store.homes[PLAIN].path
    put_layer(node, PLAIN, 98, {3: block_of(9)})
    torn = put_layer(node, PLAIN, 97, {4: block_of(9)})
    os.truncate(torn, 5000)
    report = fsck.check(store.root)
    assert report.is_well
    assert "2 layers of commits that were never made" in report.notes[0]
    assert fsck.check(store.root, repairs=True).is_well
    assert fsck.check(store.root).notes == []
    store.check_content()


def test_a_damaged_layer_is_said(store: Store) -> None:
    path = layer_path(store.homes[PLAIN].path, LayerName(PLAIN, 99))
    with path.open("r+b") as file:
        file.seek(BLOCK_BYTES + 5)
        file.write(b"\0\0\0\0")
    assert "Block 2 of variable 20" in said(fsck.check(store.root, repairs=True))
    assert path.exists()


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("damage", 1), ("open", 2), ("none", 2)])
def test_the_command(
    store: Store, capsys: pytest.CaptureFixture[str], problem: str, code: int
) -> None:
    opened = open_registry(store.root) if problem == "open" else None
    if problem == "damage":
        store.flip(PLAIN, 1)
    root = store.root if problem != "none" else store.root / "elsewhere"
    with pytest.raises(SystemExit) as caught:
        fsck.main([str(root)])
    assert caught.value.code == code
    out = "".join(capsys.readouterr())
    expected = {"": "all is well", "damage": "Wrong: ", "open": "is open in process"}
    assert expected.get(problem, "Not checked") in out
    if opened is not None:
        opened.close()


def test_the_command_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        fsck.main([])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        fsck.main(["--help"])
    assert caught.value.code == 0
    assert "--repair" in capsys.readouterr().out


def test_a_journal_that_is_missing_is_said(store: Store) -> None:
    (store.root / "registry" / "journal").unlink()
    with pytest.raises(errors.StoreDamagedError, match="journal"):
        fsck.check(store.root)
