"""Small runs of benchmarks, over one cluster where they do not need their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.support import common
from tests.support.lab import local_cluster, require_lab

ROOT = Path(__file__).resolve().parents[2]
N_NODES = 3  # as many as a small run takes
NODE_STORE_BYTES = 512 << 20

Bench = Callable[..., subprocess.CompletedProcess[str]]


def run_bench(
    *arguments: str, timeout_s: float = 280, **more: str
) -> subprocess.CompletedProcess[str]:
    """A benchmark as its command line starts it, whatever becomes of it."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        env={**environment, **more},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def lines_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What a benchmark has emitted that must have ended well."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def running() -> Iterator[dict[str, str]]:
    """The environment in which benchmarks find nodes that run."""
    require_lab("local")
    with local_cluster(
        N_NODES, num_cpus=2, object_store_memory=NODE_STORE_BYTES, connect=False
    ) as lab:
        yield {**lab.environment, common.RUNNING: lab.address}


@pytest.fixture
def bench(running: dict[str, str]) -> Callable[..., list[dict[str, Any]]]:
    """What a benchmark emits on these nodes."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        return lines_of(run_bench(*arguments, **running))

    return run
