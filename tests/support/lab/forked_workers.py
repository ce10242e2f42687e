"""The workers of a lab as forks: see `worker_server.py`, which runs beside this process.

LAB_FORKED_WORKERS=0 leaves them to Ray, as the soak does.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import ray

from tests.support.lab import worker_server

SOURCE = Path(__file__).with_name("worker_launcher.c")
BUILD = Path(__file__).resolve().parents[3] / "build"
BACKLOG = 256
COMMANDS = ("--python_worker_command=", "--runtime_env_agent_command=")


def _launcher() -> Path | None:
    """The program, built where it was not yet; None where there is no compiler."""
    compiler = shutil.which("cc")
    program = BUILD / f"worker_launcher-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if program.exists() or compiler is None:
        return program if program.exists() else None
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as directory:  # others may build it, too
        built = Path(directory) / program.name
        subprocess.run([compiler, "-O2", "-Wall", "-o", built, SOURCE], check=True, timeout=60)
        built.replace(program)
    return program


@functools.cache
def _directory() -> Path | None:
    """Starts the server. Where: the launcher's link, the socket and the parents; None: no forks."""
    if os.environ.get("LAB_FORKED_WORKERS") == "0" or (launcher := _launcher()) is None:
        return None
    directory = Path(tempfile.mkdtemp(prefix="lab", dir=os.environ.get("RAY_TMPDIR")))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "parents").mkdir()
    (directory / "python").symlink_to(launcher)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "workers"))
        listener.listen(BACKLOG)
        pipe, ours = os.pipe()
        names = BUILD / f"imported-{ray.__version__}-{sys.version_info.minor}.txt"
        arguments = [str(listener.fileno()), str(pipe), str(directory / "parents"), str(names)]
        # Whose end it waits for: the write end stays open as long as this process lives.
        subprocess.Popen(
            [sys.executable, str(worker_server.__file__), *arguments],
            env={**os.environ, **worker_server.OF_ALL},
            pass_fds=(listener.fileno(), pipe),
            stdin=subprocess.DEVNULL,
        )
        os.close(pipe)
        os.set_inheritable(ours, False)
    return directory


def environment() -> dict[str, str]:
    """What a raylet needs for it."""
    directory = _directory()
    if directory is None:
        return {}
    return {
        "LAB_PYTHON": sys.executable,
        "LAB_LAUNCHER": str(directory / "python"),
        "LAB_WORKERS": str(directory / "workers"),
    }


def raylet_command(command: list[str]) -> list[str]:
    """A raylet's command, with workers and an agent that are forks."""
    directory = _directory()
    if directory is None:
        return command
    forked = list(command)
    for option in COMMANDS:
        plain = f"{option}{sys.executable} "
        for at, each in enumerate(forked):
            if each.startswith(plain):
                forked[at] = f"{option}{directory / 'python'} {each[len(plain) :]}"
    return forked


def parents() -> dict[int, int]:
    """Who has asked for each of the workers that live, by the worker's process."""
    if not _directory.cache_info().currsize or (directory := _directory()) is None:
        return {}
    return worker_server.parents(directory / "parents")
