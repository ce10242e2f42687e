"""The commit benchmark on little data: every figure is there; nothing judges them here."""

from __future__ import annotations

import math
import os
import time

import pytest

from bench.support import processes
from tests.bench.conftest import lines_of, run_bench

MIB = 1 << 20

PERCENTILES = {
    "small_commit_ms",
    "small_commit_ratio",
    "small_commit_ms_other_home",
    "small_commit_ratio_other_home",
}
FIGURES = {
    "bulk_commit_ratio",
    "bulk_commit_ratio_fresh",
    "cow_write_ratio",
    "cow_write_ratio_cached",
    "build_in_place_ratio",
}


def is_figure(value: float) -> bool:
    return math.isfinite(value) and value > 0


@pytest.mark.lab
def test_small_run_ends_with_its_figures(running: dict[str, str]) -> None:
    lines = lines_of(run_bench("commit", "--small", **running))
    assert {"kernel", "cores", "page_size", "ray", "trap"} <= set(lines[0]["environment"])
    figures = lines[-1]["summary"]
    assert set(figures) == FIGURES | PERCENTILES
    assert all(is_figure(figures[name]) for name in FIGURES)
    for name in PERCENTILES:
        assert set(figures[name]) == {"p50", "p99"}
        assert all(is_figure(value) for value in figures[name].values())
    # What was built is in memory once at the least: a smaller peak was not measured.
    assert figures["build_in_place_ratio"] > 0.95


@pytest.mark.lab
@pytest.mark.soak
def test_long_run_says_what_is_left() -> None:
    lines = lines_of(run_bench("commit", "--long", "--commits", "60"))
    names = {"driver", "registry", "page_server", "keeper"}
    for line in lines[1:-1]:
        assert set(line["rss_bytes"]) == set(line["descriptors"]) == names
        assert all(is_figure(value) for value in line["rss_bytes"].values())
        assert is_figure(line["journal_bytes"])
    summary = lines[-1]["summary"]
    assert summary["commits"] == 60
    assert all(math.isfinite(value) for value in summary.values())


def test_memory_counts_a_memfd_once_and_mapped_or_not() -> None:
    before = processes.memory_bytes([os.getpid()])
    fd = os.memfd_create("clamor-test")
    try:
        os.posix_fallocate(fd, 0, 8 * MIB)  # without a copy of it in this process
        copy = os.dup(fd)
        try:
            grown = processes.memory_bytes([os.getpid(), os.getpid()]) - 2 * before
        finally:
            os.close(copy)
        once = processes.memory_bytes([os.getpid()]) - before
    finally:
        os.close(fd)
    assert 8 * MIB <= once < 9 * MIB
    assert grown < 9 * MIB  # two names of one process, and two descriptors, of one memfd


def test_peak_is_seen_though_it_is_over_at_the_end() -> None:
    with processes.peak_memory([os.getpid()]) as peak:
        fd = os.memfd_create("clamor-test")
        os.write(fd, b"x" * (64 * MIB))
        time.sleep(0.5)  # for as many as 250 samples
        os.close(fd)
    assert peak.peak_bytes - peak.start_bytes >= 64 * MIB
