"""The examples of the README and of the guide run as they stand, one after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ClamorCluster

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[2]
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide.md"
# What is looked at behind the first example of a page.
CHECKS = {
    README: "",
    GUIDE: "assert len(answers) == 8 and all(a.shape == (125, 10) for a in answers)\n",
}
MARK = "<!-- executed by tests/project/test_readme.py -->"


def examples(page: Path) -> list[str]:
    text = page.read_text()
    found = re.findall(re.escape(MARK) + r"\n```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == text.count(MARK) == text.count("```python") > 0
    return [str(block) for block in found]


@pytest.mark.parametrize("page", CHECKS, ids=lambda page: page.name)
def test_the_examples_run(clamor_cluster: ClamorCluster, tmp_path: Path, page: Path) -> None:
    script = tmp_path / "example.py"
    first, *others = examples(page)
    script.write_text("\n".join([first, CHECKS[page], *others]))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **clamor_cluster.lab.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("node         home" in done.stdout) == (page == GUIDE)  # its stats are printed


@pytest.mark.parametrize("page", CHECKS, ids=lambda page: page.name)
def test_the_examples_are_short(page: Path) -> None:
    for example in examples(page):
        assert len([line for line in example.splitlines() if line.strip()]) <= 20


def test_the_readme_takes_two_minutes() -> None:
    assert len(README.read_text().splitlines()) < 150
