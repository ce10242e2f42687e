"""Starts a node's keeper: the process that holds memory across a page server's death.

Facts, and what follows:

* A page server dies by ``kill -9`` at any moment, and its keeper must not notice. So the keeper is
  in a session of its own, a grandchild (its parent has left: nobody's zombie), and shares no
  descriptor with the page server but the socket that it is given later.
* Ray may kill a dead worker's children and process group. A grandchild in its own session is
  neither.
* It lives as long as the node, times the number of jobs. So it is a bare interpreter (no site, no
  Ray, no NumPy) that loads the compiled module by its path and never runs Python again.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

# Run by `python -I -S -c`. Loads first and forks then, so that what goes wrong in loading is told.
_PROGRAM = """
import importlib.util, os, sys
path, cffi_folder, name, watched, orphan_ns = sys.argv[1:]
sys.path.insert(0, cffi_folder)
spec = importlib.util.spec_from_file_location("clamor_ray._pagecache", path)
lib = importlib.util.module_from_spec(spec).lib
if os.fork():
    os._exit(0)
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
if null > 2:
    os.close(null)
os._exit(1 if lib.pc_keeper_run(name.encode(), int(watched), int(orphan_ns)) else 0)
"""

START_S = 20.0


class KeeperError(RuntimeError):
    """The keeper could not be started; the text says what its interpreter said."""


def _file_of(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise KeeperError(f"{module} is not installed as a file")
    return Path(spec.origin)


def raylet_pid() -> int:
    """The raylet that this Ray worker belongs to; a keeper leaves when it ends.

    Raises:
        KeeperError: Neither Ray's own variable nor our parent names a raylet.
    """
    for candidate in (os.environ.get("RAY_RAYLET_PID", ""), str(os.getppid())):
        if not candidate.isdigit():
            continue
        try:
            comm = Path("/proc", candidate, "comm").read_text()
        except OSError:
            continue
        if comm.startswith("raylet"):
            return int(candidate)
    raise KeeperError(f"no raylet: neither RAY_RAYLET_PID nor process {os.getppid()} is one")


def spawn(listen_name: str, watched_pid: int, orphan_timeout_s: float) -> None:
    """Starts a keeper and returns when its process has loaded the library and stands alone.

    Args:
        listen_name: Abstract Unix socket, without the leading NUL.
        watched_pid: The keeper leaves when this process ends.
        orphan_timeout_s: It also leaves when no page server was connected for so long.

    Raises:
        KeeperError: It did not start within 20 s, or its interpreter failed.
    """
    arguments = [
        str(_file_of("clamor_ray._pagecache")),
        str(_file_of("_cffi_backend").parent),
        listen_name,
        str(watched_pid),
        str(int(orphan_timeout_s * 1e9)),
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            close_fds=True,
            start_new_session=True,
            cwd="/",
            timeout=START_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise KeeperError(f"cannot start the keeper: {failure}") from failure
    if done.returncode != 0:
        raise KeeperError(f"cannot start the keeper: {done.stderr.decode(errors='replace')}")
