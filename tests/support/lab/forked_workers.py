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
_directories: list[Path] = []
# Read early: a test may give its own clusters another place, which goes with it.
TEMPORARY = os.environ.get("RAY_TMPDIR")
COMMANDS = ("--python_worker_command=", "--runtime_env_agent_command=")


def _launcher() -> Path | None:
    """The program, built where it was not yet; None where that cannot be: there is no compiler, or
    this user may not write there."""
    compiler = shutil.which("cc")
    program = BUILD / f"worker_launcher-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if program.exists():
        return program
    if compiler is None or not os.access(BUILD if BUILD.exists() else BUILD.parent, os.W_OK):
        return None
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as directory:  # others may build it, too
        built = Path(directory) / program.name
        subprocess.run([compiler, "-O2", "-Wall", "-o", built, SOURCE], check=True, timeout=60)
        built.replace(program)
    return program


def _rights() -> tuple[str, ...]:
    """What a process of this thread may do, as it would have it of this one."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    names = ("Uid", "Gid", "Groups", "CapEff", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters")
    return tuple(line for line in lines if line.partition(":")[0] in names)


def _directory() -> Path | None:
    return _started(_rights())


@functools.cache
def _started(rights: tuple[str, ...]) -> Path | None:
    """Starts the server. Where: the launcher's link, the socket and the parents; None: no forks.

    Args:
        rights: that its workers have: one that has others comes of another server.
    """
    if os.environ.get("LAB_FORKED_WORKERS") == "0" or (launcher := _launcher()) is None:
        return None
    directory = Path(tempfile.mkdtemp(prefix="lab", dir=TEMPORARY))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "parents").mkdir()
    _directories.append(directory)
    (directory / "python").symlink_to(launcher)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "workers"))
        listener.listen(BACKLOG)
        pipe, ours = os.pipe()
        home = BUILD if os.access(BUILD, os.W_OK) else directory
        names = home / f"imported-{ray.__version__}-{sys.version_info.minor}.txt"
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
    return {
        worker: launcher
        for directory in _directories
        for worker, launcher in worker_server.parents(directory / "parents").items()
    }
