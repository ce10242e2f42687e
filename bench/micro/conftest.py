"""One node for all, and the last line of the output: each case against its control."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from bench.support import common

STORE_BYTES: Final = 256 << 20
CONTROL: Final = "control"
OURS: Final = "ours"
MEDIANS = pytest.StashKey[dict[str, dict[str, float]]]()

Measure = Callable[[str, str, Callable[[], Any]], None]


@pytest.fixture(scope="session", autouse=True)
def node() -> Iterator[None]:
    """A session in a cluster of one node: of its own, or the one that BENCH_ADDRESS names."""
    with common.several_nodes(1, STORE_BYTES):
        yield


@pytest.fixture
def measure(benchmark: Any, request: pytest.FixtureRequest) -> Measure:
    """Calls a function again and again: of a case, one of its two sides."""

    def run(case: str, side: str, function: Callable[[], Any]) -> None:
        benchmark.group = case
        benchmark(function)
        if benchmark.stats is not None:  # None with --benchmark-disable
            medians = request.config.stash.setdefault(MEDIANS, {})
            medians.setdefault(case, {})[side] = benchmark.stats.stats.median

    return run


def ratios(medians: dict[str, dict[str, float]]) -> dict[str, float]:
    """Of cases that have both sides. Pure.

    Args:
        medians: seconds a call, by case and side.
    """
    return {
        f"{case}_ratio": round(sides[OURS] / sides[CONTROL], 4)
        for case, sides in medians.items()
        if sides.keys() == {OURS, CONTROL}
    }


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Behind the tables of pytest-benchmark."""
    terminalreporter.write_line(json.dumps({"summary": ratios(config.stash.get(MEDIANS, {}))}))
