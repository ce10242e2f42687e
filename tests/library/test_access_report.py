"""Who read which blocks: added up from records, as numbers, as a table and as a picture."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from pyroaring import BitMap

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._observe import access_report
from clamor_ray._observe.access_report import AccessReport, from_records
from clamor_ray._protocol.attempt_record import AttemptRecord
from clamor_ray._protocol.rpc import pack
from tests.conftest import ClamorCluster

N_BLOCKS = 1024


def record(
    partition: int, blocks: Any, *, stage: str = "0 map", run: int = 7, version: int = 3, **how: Any
) -> AttemptRecord:
    packed = None if blocks is None else bytes(BitMap(blocks).serialize())
    fields: dict[str, Any] = {"function": "mod.lookup", "node_id": "3f2a91c0aa", "attempt": 0}
    return AttemptRecord(
        token=b"t" * 16,
        run_id=run,
        stage=stage,
        partition=partition,
        reads=((5, version, packed),),
        **{**fields, **how},
    )


def known(*records: AttemptRecord, n_blocks: int = N_BLOCKS) -> AccessReport:
    return from_records("variable 5", 4, n_blocks, records)


def test_one_entry_for_each_attempt() -> None:
    found = known(record(0, [1, 2]), record(1, None, attempt=2, outcome="cancelled", version=4))
    first, second = found.by
    assert (first.function, first.stage, first.partition) == ("mod.lookup", "0 map", 0)
    assert (first.node, first.version, first.n_blocks) == ("3f2a91c0aa", 3, 2)
    assert list(first.blocks) == [1, 2]
    assert (second.n_blocks, second.attempt, second.outcome) == (N_BLOCKS, 2, "cancelled")


def test_a_block_counts_once_for_each_partition_that_read_it() -> None:
    found = known(
        record(0, [0, 1, 512]), record(0, [1, 2], attempt=1), record(1, [1, 1023]), record(0, [0])
    )
    counts = found.counts()
    assert counts.dtype == np.uint32
    assert np.flatnonzero(counts).tolist() == [0, 1, 2, 512, 1023]
    assert counts[[0, 1, 2, 512, 1023]].tolist() == [1, 2, 1, 1, 1]
    assert found.counts(2).tolist() == [4, 2]
    assert found.counts(4096).sum() == 6
    assert list(found.blocks) == [0, 1, 2, 512, 1023]
    with pytest.raises(ValueError, match="at least 1"):
        found.counts(0)


@pytest.mark.parametrize("n_buckets", [1, 3, 7, 1000, 1024, 3000])
def test_every_block_is_in_the_part_that_holds_it(n_buckets: int) -> None:
    rng = np.random.default_rng(n_buckets)
    blocks = rng.choice(N_BLOCKS, 300, replace=False)
    expected = np.zeros(n_buckets, int)
    for block in blocks:
        expected[int(block) * n_buckets // N_BLOCKS] += 1
    assert known(record(0, blocks.tolist())).counts(n_buckets).tolist() == expected.tolist()


def test_nobody() -> None:
    found = known()
    assert found.by == []
    assert found.counts(4).tolist() == [0, 0, 0, 0]
    assert str(found) == (
        "variable 5, version 4, 4.0 MiB: 0 of 1,024 blocks were read (0%)\n"
        "nobody is known to have read it"
    )


def test_a_variable_that_has_shrunk_since() -> None:
    found = known(record(0, [5, 2000]), n_blocks=10)
    assert found.n_blocks == 2001
    assert found.counts().sum() == 2


def test_the_table() -> None:
    found = known(
        record(1, range(512, 1024), stage="0 map_batches+a_rather_long_name"),
        record(0, range(256)),
        record(0, range(128), attempt=1, node_id="77ab01fe", version=4),
        record(-1, [9], run=0, stage="", function="workloads.knn.nearest"),
    )
    assert str(found).split("\n") == [
        "variable 5, version 4, 4.0 MiB: 768 of 1,024 blocks were read (75%)",
        "reader                function      node     version  blocks  where (of 4.0 MiB)",
        "0 map_batches+a_r…[1] lookup        3f2a91c0       3     512  ·········█████████",
        "0 map[0]              lookup        2 nodes     3..4     256  ████▄·············",
        "(task)                nearest       3f2a91c0       3       1  █·················",
    ]
    assert repr(found) == "Reads(variable 5, version 4: 3 readers, 768 of 1024 blocks)"


def test_a_long_table_says_that_there_is_more() -> None:
    found = known(*(record(n, [n]) for n in range(100)))
    lines = str(found).split("\n")
    assert lines[-1] == "... and 60 more readers (all are in .by)"
    assert len(lines) == 43
    assert max(map(len, lines)) <= 80


def pixels(path: Path) -> Any:
    return matplotlib.image.imread(path)[..., :3]


def test_the_picture_shows_where(tmp_path: Path) -> None:
    """The half that nobody read is paper; the other one is dark in the rows of its readers."""
    path = tmp_path / "reads.png"
    n_rows = 8
    known(*(record(n, range(512)) for n in range(n_rows))).save(path)
    red = (pixels(path)[..., 0] > 0.3) & (pixels(path)[..., 2] < 0.25)
    columns = np.flatnonzero(red.sum(axis=0) > 50)
    width = pixels(path).shape[1]
    heat = columns[columns < 0.93 * width]  # the colour bar is beside it
    assert heat.min() < 0.25 * width
    assert 0.45 * width < heat.max() < 0.6 * width
    known().save(path)
    assert not ((pixels(path)[..., 0] > 0.3) & (pixels(path)[..., 2] < 0.25)).any()


@pytest.mark.parametrize("n_partitions", [1, 60, 700])
def test_pictures_of_any_size(tmp_path: Path, n_partitions: int) -> None:
    path = tmp_path / "reads.svg"
    stages = [
        record(n, [n % 12], stage=stage)
        for stage in ("0 map", "1 zip")
        for n in range(n_partitions)
    ]
    known(*stages, n_blocks=12).save(path)
    text = path.read_text()
    assert "0 map[0] lookup" in text
    assert "1 zip[0] lookup" in text
    assert "offset in the variable (KiB)" in text
    assert "variable 5, version 4, 48.0 KiB" in text


@pytest.mark.parametrize(
    ("n_blocks", "unit", "end"),
    [(12, "KiB", 48), (1024, "MiB", 4), (1 << 19, "GiB", 2), (1 << 18, "MiB", 1024)],
)
def test_the_axis_has_a_unit_that_suits(n_blocks: int, unit: str, end: float) -> None:
    edges, name = known(n_blocks=n_blocks)._edges(min(512, n_blocks))
    assert (name, edges[0], edges[-1]) == (unit, 0, end)


def test_without_matplotlib_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install matplotlib") as caught:
        known().save(tmp_path / "reads.png")
    assert "clamor.read_report(picture=...)" in str(caught.value)
    assert not (tmp_path / "reads.png").exists()


@pytest.mark.lab
def test_of_a_variable(clamor_cluster: ClamorCluster, tmp_path: Path) -> None:
    session = clamor._session.process_sessions.current()  # type: ignore[attr-defined]
    ref = clamor.put(np.zeros(64 * 512))
    blocks = bytes(BitMap([1, 2, 40]).serialize())
    said = AttemptRecord(
        b"t" * 16, 7, "0 map", 3, 0, "mod.f", reads=((ref._region, 0, blocks),), node_id="ab" * 28
    )
    session.rpc.note_attempt(said.packed())
    found = clamor.read_report(ref, picture=tmp_path / "reads.png")
    assert [(entry.stage, entry.partition, list(entry.blocks)) for entry in found.by] == [
        ("0 map", 3, [1, 2, 40])
    ]
    assert found.n_blocks == ref._length_bytes // 4096
    assert f"variable {ref._region}, version 0" in str(found)
    assert pixels(tmp_path / "reads.png").std() > 0
    small = clamor.put(5)
    said = said._replace(partition=4, reads=((small._region, 0, None),))
    session.rpc.note_attempt(said.packed())
    assert [entry.n_blocks for entry in clamor.read_report(small).by] == [1]
    session.rpc.note_reads(pack(b"n" * 16, {ref._region: blocks}, ("g", "cd", {ref._region: 0})))
    assert [entry.function for entry in clamor.read_report(ref).by] == ["mod.f", "g"]
    clamor.free(ref)
    with pytest.raises(errors.FreedError):
        clamor.read_report(ref)


def test_it_is_loaded_when_it_is_used() -> None:
    assert clamor.read_report is access_report.read_report
    assert "reads" in clamor.__all__
