"""Starts what outlives our actors: a node's keeper, and the watcher of the registry's journal.

The keeper is the process that holds memory across a page server's death; the watcher removes the
journal's directory when nobody needs it any more.

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

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from clamor_ray._cause import cause_of

# Run by `python -I -S -c`. Loads first and forks then, so that what goes wrong in loading is told.
_PROGRAM = """
import importlib.util, os, sys
path, cffi_folder, name, watched, orphan_ns, is_part = sys.argv[1:]
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
run = lib.pc_keeper_run_part if is_part == "1" else lib.pc_keeper_run
os._exit(1 if run(name.encode(), int(watched), int(orphan_ns)) else 0)
"""

# Also run by `python -I -S -c`. The directory goes when the raylet ends, or when its registry has
# been gone for so long that Ray cannot mean to restart it: then the driver died without a word.
_WATCHER = """
import fcntl, os, select, shutil, sys, time
directory, watched, orphan_s, poll_s = sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:])
raylet = os.pidfd_open(watched)
mine = os.open(os.path.join(directory, "watcher.lock"), os.O_RDWR | os.O_CREAT, 0o600)
if os.fork():
    os._exit(0)
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
try:
    fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    os._exit(0)  # there is one
theirs = os.open(os.path.join(directory, "registry.lock"), os.O_RDWR)
poll = select.poll()
poll.register(raylet, select.POLLIN)
seen = time.monotonic()
while not poll.poll(int(poll_s * 1000)):
    if os.fstat(theirs).st_nlink == 0:
        os._exit(0)
    try:
        fcntl.flock(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        seen = time.monotonic()
    else:
        if time.monotonic() - seen > orphan_s:
            break
        fcntl.flock(theirs, fcntl.LOCK_UN)
# Somebody may still be writing, for a moment.
for _ in range(100):
    shutil.rmtree(directory, ignore_errors=True)
    if not os.path.exists(directory):
        break
    time.sleep(0.05)
"""

START_S = 60.0
LOCK_S = 30.0
JOURNAL_ORPHAN_S = 600.0
WATCHER_POLL_S = 5.0


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


def spawn(
    listen_name: str, watched_pid: int, orphan_timeout_s: float, *, is_part: bool = False
) -> None:
    """Starts a keeper and returns when its process has loaded the library and stands alone.

    Args:
        listen_name: Abstract Unix socket, without the leading NUL.
        watched_pid: The keeper leaves when this process ends.
        orphan_timeout_s: It also leaves when no page server was connected for so long.
        is_part: It takes the place of one that died: a page server that comes before it was given
            everything is told so.

    Raises:
        KeeperError: It did not start within 60 s, or its interpreter failed.
    """
    _run(
        _PROGRAM,
        str(_file_of("clamor_ray._pagecache")),
        str(_file_of("_cffi_backend").parent),
        listen_name,
        str(watched_pid),
        str(int(orphan_timeout_s * 1e9)),
        "1" if is_part else "0",
    )


def hold_and_watch(
    directory: Path,
    watched_pid: int,
    orphan_s: float = JOURNAL_ORPHAN_S,
    poll_s: float = WATCHER_POLL_S,
) -> int:
    """Marks a journal's directory as in use by this process, and sees to its end.

    A process is started, unless there is one, that removes the directory when ``watched_pid``
    ends, or when nobody has had it in use for ``orphan_s`` seconds. It leaves then, and within
    ``poll_s`` seconds when somebody else has removed the directory.

    Returns:
        A descriptor; the directory is in use until it is closed, or this process ends.

    Raises:
        KeeperError: The watcher did not start.
        OSError: The directory is not there, or cannot be written.
    """
    fd = os.open(directory / "registry.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() >= deadline:  # a watcher only looks, an old registry dies soon
                raise KeeperError(f"{directory} is in use by another process")
            time.sleep(0.01)
        _run(_WATCHER, str(directory), str(watched_pid), str(orphan_s), str(poll_s))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _run(program: str, *arguments: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program, *arguments],
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
        raise KeeperError(f"cannot start a keeper: {cause_of(failure)}") from failure
    if done.returncode != 0:
        raise KeeperError(f"cannot start a keeper: {done.stderr.decode(errors='replace')}")
