"""The example of the README runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ClamorCluster

pytestmark = pytest.mark.lab

README = Path(__file__).parent.parent / "README.md"
MARK = "<!-- executed by tests/test_readme.py -->"


def example() -> str:
    found = re.findall(re.escape(MARK) + r"\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_the_example_runs(clamor_cluster: ClamorCluster, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    check = "\nassert len(answers) == 8 and all(a.shape == (125, 10) for a in answers)\n"
    script.write_text(example() + check)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **clamor_cluster.lab.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EngineStats" in done.stdout


def test_the_example_is_short() -> None:
    assert len([line for line in example().splitlines() if line.strip()]) <= 20
