"""The examples of the README run as they stand, one after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ClamorCluster

pytestmark = pytest.mark.lab

README = Path(__file__).parents[2] / "README.md"
MARK = "<!-- executed by tests/project/test_readme.py -->"


def examples() -> list[str]:
    text = README.read_text()
    found = re.findall(re.escape(MARK) + r"\n```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == text.count(MARK) == text.count("```python") > 1
    return [str(block) for block in found]


def test_the_examples_run(clamor_cluster: ClamorCluster, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    check = "assert len(answers) == 8 and all(a.shape == (125, 10) for a in answers)\n"
    first, *others = examples()
    script.write_text("\n".join([first, check, *others]))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **clamor_cluster.lab.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node         home" in done.stdout


def test_the_examples_are_short() -> None:
    for example in examples():
        assert len([line for line in example.splitlines() if line.strip()]) <= 20
