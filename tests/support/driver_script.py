"""A driver of its own, for tests that end or change what a process has only once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.lab import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
_OF_RAY = re.compile(r"(\x1b\[\d+m)?\((raylet\)|.*pid=\d)")


def start(
    script: str, timeout_s: float = 120, lab: LocalCluster | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a script as a driver by itself, whatever becomes of it.

    Args:
        script: its text.
        timeout_s: how long it may take.
        lab: the cluster that its `ray.init()` finds, in which its session is one more; without it
            the script starts its own.
        environment: further variables.
    """
    variables = dict(os.environ)
    variables.pop("RAY_ADDRESS", None)
    if lab is not None:
        variables |= lab.environment
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def lines_of(printed: str) -> list[str]:
    """Without what Ray prints by itself, "(raylet) ...", and the indented lines behind that: it
    does where a machine is slow."""
    found: list[str] = []
    is_rays = False
    for line in printed.splitlines():
        is_rays = bool(_OF_RAY.match(line)) or (is_rays and line[:1].isspace())
        if not is_rays:
            found.append(line)
    return found


def run(
    script: str,
    timeout_s: float = 120,
    with_stderr: bool = False,
    lab: LocalCluster | None = None,
    **environment: str,
) -> str:
    """What a script prints that has to succeed; see `start`."""
    done = start(script, timeout_s, lab, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr if with_stderr else done.stdout
