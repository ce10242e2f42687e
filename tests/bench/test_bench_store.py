"""The benchmark of stores: its peers, its figures, and a small run of all of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench import store
from bench.peers import row_stores
from bench.support import common, disk, row_times
from tests.bench.conftest import lines_of, run_bench
from tests.support.lab import require_lab
from tests.support.lab.availability import missing

N_ROWS, ROW_BYTES = 2000, 64
PEER_FIGURES = {"put", "row", "rows", "update"}


class Broken(row_stores.Memmap):
    """Forgets what it was told last."""

    def update(self, numbers: Any, rows: Any) -> None:
        super().update(numbers[:-1], rows[:-1])


@pytest.mark.parametrize("name", row_stores.PEERS)
def test_a_peer_keeps_rows(name: str, tmp_path: Path) -> None:
    if name not in row_stores.installed():
        missing(f"the peer {name} is not installed")
    times = row_times.measure(row_stores.PEERS[name](tmp_path), N_ROWS, ROW_BYTES)
    assert set(times) == {f"{kind}_s" for kind in PEER_FIGURES}
    assert all(seconds > 0 for seconds in times.values())


def test_a_peer_that_is_wrong_has_no_figure(tmp_path: Path) -> None:
    with pytest.raises(common.WrongData, match="after updates"):
        row_times.measure(Broken(tmp_path), N_ROWS, ROW_BYTES)


def test_a_peer_is_compared_by_kind() -> None:
    ours = {"put_s": 2.0, "row_s": 1.0, "rows_s": 4.0, "update_s": 1.0}
    lmdb = {"put_s": 3.0, "row_s": 2.0, "rows_s": 2.0, "update_s": 1.0}
    assert store.speedups({"ours": ours, "lmdb": lmdb}) == {
        "lmdb": {"put": 1.5, "row": 2.0, "rows": 0.5, "update": 1.0}
    }


def test_shares_are_by_size() -> None:
    commits = [{"bytes": 64 << 20, "share": 0.9}, {"bytes": 256 << 20, "share": 0.8}]
    record = {"commits": commits, "put": {"bytes": 1 << 30, "share": 0.7}}
    assert store.shares(record) == {"64 MiB": 0.9, "256 MiB": 0.8, "put of 1024 MiB": 0.7}


def test_a_disk_has_rates(tmp_path: Path) -> None:
    disk.check_direct(tmp_path)
    assert disk.dd_rate(tmp_path, 1 << 20, ("64K", "1M")) > 0
    assert disk.sync_rate(tmp_path, 0.05) > 0
    assert list(tmp_path.iterdir()) == []


def test_blocks_are_counted_by_the_files_of_layers(tmp_path: Path) -> None:
    layers = tmp_path / "s" / "node-1" / "layers"
    layers.mkdir(parents=True)
    (layers / "1-0000000000000001-1.layer").write_bytes(bytes(100 * 4096 + 2048))
    (layers / "1-0000000000000002.layer").write_bytes(bytes(10 * 4096 + 1024))
    (layers.parent / "1.base").write_bytes(bytes(1 << 20))
    assert store.blocks_in_layers(tmp_path) == 110


@pytest.mark.lab
@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_it_ends_with_its_figures() -> None:
    require_lab("local")
    figures = lines_of(run_bench("store", "--small", timeout_s=900))[-1]["summary"]
    names = {"commit_share", "small_commit_rate", "open_ms", "recovery_rate"}
    assert set(figures) == names | set(row_stores.installed())
    assert set(figures["commit_share"]) == {"4 MiB", "16 MiB", "put of 32 MiB"}
    for name in row_stores.installed():
        assert set(figures[name]) == PEER_FIGURES
    single = [figures[name] for name in names - {"commit_share"}]
    several = [value for name in set(figures) - {*names} for value in figures[name].values()]
    assert all(math.isfinite(value) for value in single + several)
    assert all(share > 0 for share in figures["commit_share"].values())
