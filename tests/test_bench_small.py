"""Each benchmark runs on little data and ends with its figures; nothing judges them here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FIGURES = {
    "cold_read": {
        "sparse_fault_speedup",
        "sparse_prefetch_speedup",
        "sparse_bytes_ratio",
        "dense_speedup",
        "put_speedup",
    },
    "faults": {"node_hit_ratio", "remote_fault_ratio"},
    "update": {"round_speedup", "bytes_per_update", "lookup_rate_ratio"},
}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.lab
@pytest.mark.parametrize("name", sorted(FIGURES))
def test_small_run_ends_with_its_figures(name: str) -> None:
    done = bench(name, "--small")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"kernel", "cores", "page_size", "ray", "trap"} <= set(lines[0]["environment"])
    figures = lines[-1]["summary"]
    assert set(figures) == FIGURES[name]
    assert all(math.isfinite(value) and value > 0 for value in figures.values())


def test_unknown_name_lists_those_there_are() -> None:
    done = bench("nothing")
    assert done.returncode == 2
    for name in FIGURES:
        assert name in done.stderr
