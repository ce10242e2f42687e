"""The blocks of docs/recipes.md: what the page shows of them is what they print, and they give the
plain answer. `test_readme.py` runs them on a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._recipes.program.builder import Builder, Dataset
from clamor_ray._recipes.program.explaining import explain_text
from clamor_ray._recipes.program.plain import run_plainly
from tests.support import fences

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


class PlainProgram(Builder):
    """Runs in this process."""

    def run(self) -> Any:
        sources = [list(each.source) for each in self.datasets]
        found = run_plainly(self.tables(), self.functions, sources)

        def result(dataset: Dataset) -> Any:
            (value,) = found[dataset.number]
            return value

        return SimpleNamespace(result=result)

    def explain(self) -> str:
        return explain_text(self.tables())


def test_the_page_runs_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = fences.fences(PAGE.read_text())
    names: dict[str, Any] = {
        "np": np,
        "clamor": SimpleNamespace(Program=PlainProgram, errors=errors),
    }
    for block in blocks:
        # Those with a job that more is asked of than its result run on a cluster alone.
        if block.language == "python" and not re.search(
            r"tempfile|iterate|progress|publish|Kernel", block.code
        ):
            exec(compile(block.code, f"{PAGE}:{block.line}", "exec"), names)
    texts = [block.code for block in blocks if block.language == "text"]
    (shown,) = [text for text in texts if text.startswith("program: ")]  # others are of a cluster

    def without_lines(text: str) -> str:
        return re.sub(r"  \([^()]*:\d+\)$", "", text.strip(), flags=re.M)

    assert without_lines(capsys.readouterr().out) == without_lines(shown)
