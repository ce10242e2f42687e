"""Runs the models in ``docs/model`` with spin, for the tests of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.lab.availability import REQUIRE_VARIABLE

MODEL = Path(__file__).resolve().parents[2] / "docs" / "model"
EXACT = "-O2 -DCOLLAPSE"  # states are stored compressed, and none is hashed away
QUICK = "-O0 -DCOLLAPSE"  # to compile takes longer than to search


def check(
    model: str, *switches: str, timeout_s: float = 280, cflags: str = EXACT, arguments: str = ""
) -> subprocess.CompletedProcess[str]:
    """What the checker says of a model; its return code is 1 where it has found an error.

    Args:
        model: The file's name.
        switches: Of the model: ``-DNAME``.
        timeout_s: For all of it.
        cflags: How the search is compiled.
        arguments: Of the search.
    """
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        text = f"{' and '.join(missing)} not installed: {model} cannot be checked"
        if os.environ.get(REQUIRE_VARIABLE) == "1":
            pytest.fail(f"{text} ({REQUIRE_VARIABLE}=1)", pytrace=False)
        pytest.skip(text)
    done = subprocess.run(
        [str(MODEL / "run.sh"), model, *switches],
        env={**os.environ, "PAN_CFLAGS": cflags, "PAN_ARGS": arguments},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done


def holds(model: str, done: subprocess.CompletedProcess[str]) -> None:
    """Asserts that no error was found, and that each step of the model was reached."""
    assert done.returncode == 0, done.stdout
    # A step that is never reached would prove nothing about itself.
    unreached = re.findall(rf'{re.escape(model)}:\d+, state \d+, "(.*)"', done.stdout)
    assert set(unreached) == {"-end-"}, done.stdout


def switches_of(model: str) -> tuple[set[str], set[str]]:
    """The names behind ``BREAK_``: in the model's head comment, and in what follows it."""
    head, _, body = (MODEL / model).read_text().partition("*/")
    return set(re.findall(r"BREAK_([A-Z_]+) ", head)), set(re.findall(r"BREAK_([A-Z_]+)", body))
