"""Programs without a cluster of their own: each is called as its command line calls it."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

import clamor_ray as clamor
from clamor_ray.workloads.cli import program
from clamor_ray.workloads.cli.stages import Stages
from tests.conftest import ClamorCluster


@pytest.fixture
def stages() -> Stages:
    """Progress that nobody sees."""
    return Stages(Console(file=io.StringIO(), width=120))


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that attaches to a cluster fails."""

    def attached(*_: Any, **__: Any) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(program, "attached", attached)


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes what is there for its cluster."""
    monkeypatch.setattr(program, "attached", lambda *_, **__: contextlib.nullcontext())


def run_as_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, *arguments: str
) -> str:
    """Runs a program in this process as `python -m` does; returns what it prints."""
    module = f"clamor_ray.workloads.{name}"
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    # It is imported anew: its functions are then those of `__main__`, and travel by value.
    monkeypatch.delitem(sys.modules, module, raising=False)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    said = capsys.readouterr().out
    assert end.value.code == 0, said
    return said


@pytest.fixture
def run_program(
    clamor_cluster: ClamorCluster,
    attached: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """`run_as_main` over the cluster of two nodes. What it made there is gone afterwards."""

    def run(name: str, *arguments: str) -> str:
        before = {info.region for info in clamor.variables()}
        said = run_as_main(monkeypatch, capsys, name, *arguments)
        assert {info.region for info in clamor.variables()} <= before
        return said

    return run
