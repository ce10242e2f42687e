"""Each benchmark once, small, with all that it starts by itself: `make soak-bench`.

The gate's small runs share a cluster (`conftest.py`); a figure that counts is of one of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import __main__ as bench
from bench.peers import redis
from bench.support import cgroup, common
from tests.bench.conftest import lines_of, run_bench
from tests.support.lab import require_lab
from tests.support.lab.availability import missing

BENCH_S = 900.0
IN_NAMESPACES = {
    *(
        "allreduce",
        "disk_cache",
        "drain",
        "hot_pages",
        "program_moves",
        "raid",
        "sparse_lr",
        "spread",
    ),
}
NEEDS = {"gather": redis.unavailable, "straggler": cgroup.unavailable}


def test_every_benchmark_has_its_name() -> None:
    files = {path.stem for path in Path(bench.__file__).parent.glob("[!_]*.py")}
    assert files == set(bench.NAMES)


@pytest.mark.lab
@pytest.mark.soak
@pytest.mark.timeout(BENCH_S + 100)
@pytest.mark.parametrize("name", sorted(bench.NAMES))
def test_it_ends_with_a_summary(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_lab("netns" if name in IN_NAMESPACES else "local")
    if reason := NEEDS.get(name, lambda: None)():
        missing(f"{name}: {reason}")
    monkeypatch.delenv(common.RUNNING, raising=False)
    lines = lines_of(run_bench(name, "--small", timeout_s=BENCH_S))
    assert lines[-1]["summary"]
