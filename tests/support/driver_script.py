"""A driver of its own, for tests that end or change what a process has only once."""

from __future__ import annotations

import os
import subprocess
import sys


def run(script: str, timeout_s: float = 120, with_stderr: bool = False) -> str:
    """What a script prints that runs as a driver by itself and has to succeed."""
    environment = dict(os.environ)
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr if with_stderr else done.stdout
