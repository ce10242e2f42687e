"""What a session shows to those who look, and what one process holds of the kernel."""

from __future__ import annotations

import contextlib
import os
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from clamor_ray._protocol import names

LOOK_S = 30.0


def processes() -> Iterator[tuple[str, bytes]]:
    """(where, what it says): command line, environment and names of all that may be looked at."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            for kind in ("cmdline", "environ", "comm"):
                with contextlib.suppress(OSError):
                    yield f"{kind} of {entry.name}", (entry / kind).read_bytes()


def files(kind: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """(where, what is in it) of all regular files below a folder, and of the names of all."""
    for path in folder.rglob("*"):
        yield f"{kind} {path}", os.fsencode(path)
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # a log that was rolled
                yield f"{kind} {path}", path.read_bytes()


def state(dashboard_url: str) -> Iterator[tuple[str, bytes]]:
    """(where, what it says): what Ray's state API lists."""
    from ray.util import state

    lists = {
        "actors": state.list_actors,
        "tasks": state.list_tasks,
        "jobs": state.list_jobs,
        "workers": state.list_workers,
        "runtime environments": state.list_runtime_envs,
        "objects": state.list_objects,
    }
    for name, listed in lists.items():
        found = listed(address=dashboard_url, detail=True, limit=10_000, timeout=LOOK_S)
        yield f"state of {name}", repr(found).encode()


def pages(dashboard_url: str) -> Iterator[tuple[str, bytes]]:
    """(where, what it says): what the dashboard shows of actors, jobs and nodes. It hears of an
    actor by and by."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    for page in ("logical/actors", "api/jobs/", "nodes?view=summary"):
        asked = urllib.request.Request(
            f"{dashboard_url}/{page}", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(asked, timeout=LOOK_S) as answer:
            yield f"page {page}", answer.read()


def internal_keys() -> Iterator[tuple[str, bytes]]:
    """(key, value) of what Ray's head keeps of jobs, runtime environments and functions."""
    from ray.experimental import internal_kv

    for namespace in (None, "clamor", "job", "fun", "session", "cluster", "dashboard", "workflow"):
        space = None if namespace is None else namespace.encode()
        for key in internal_kv._internal_kv_list(b"", namespace=space):
            value = internal_kv._internal_kv_get(key, namespace=space)
            yield f"key {key!r} of {namespace}", key + b"\0" + (value or b"")


def everywhere(session_directory: Path, dashboard_url: str) -> Iterator[tuple[str, bytes]]:
    """All of the above: a session's processes, Ray's files and ours, and what Ray says."""
    yield from processes()
    yield from files("file", session_directory)
    yield from files("our file", Path(names.socket_directory(names.SOCKETS_BELOW)))
    yield from state(dashboard_url)
    yield from pages(dashboard_url)
    yield from internal_keys()


def holdings(pid: int) -> Counter[str]:
    """What a process has open or mapped, by kind: descriptors, and maps of memfds."""
    found: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(descriptor)
            if link.startswith("/memfd:"):
                found["memfd"] += 1
            elif link.startswith("anon_inode:"):
                found[link] += 1
            else:
                found[re.sub(r":\[\d+\]$", "", link)] += 1
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found["map of a memfd"] = sum("/memfd:" in line for line in maps)
    return found
