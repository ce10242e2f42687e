"""The processes of one session and what they hold, read from /proc.

Memory is counted without a machine-wide counter (others run here too) and without RSS sums (a
page of shared memory is in the RSS of everyone who maps it, and in nobody's where it is held by a
descriptor alone): the private anonymous memory of each process, and the allocated pages of each
memfd that one of them has open, once.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.support import common

SAMPLE_S = 0.002


def session_pids() -> dict[str, int]:
    """Driver, registry, and each node's page server and keeper, by name."""
    from clamor_ray._session import process_sessions

    session = process_sessions.current()
    pids = {"driver": os.getpid(), "registry": int(session.rpc.ping())}
    report = session.rpc.stats()
    keepers = _keepers(session.scope)
    for number, server in enumerate(sorted(report.servers, key=lambda s: s.info.node_id)):
        suffix = "" if len(report.servers) == 1 else f"_{number}"
        pids[f"page_server{suffix}"] = server.info.pid
        for name, pid in keepers.items():
            if server.info.node_id[:16] in name:
                pids[f"keeper{suffix}"] = pid
    return pids


def _keepers(scope: str) -> dict[str, int]:
    """Pid of each keeper of a session, by its socket's name."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if any("pc_keeper_run" in word for word in words):
                for word in words:
                    if f"/{scope}-" in word and word.endswith("-keeper"):
                        found[word] = int(folder.name)
    return found


def resident_bytes(pid: int) -> int:
    """Its RSS, shared memory included."""
    return _status(pid, "VmRSS") or 0


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _status(pid: int, key: str) -> int | None:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == key:
                return int(value.split()[0]) << 10
    return None


def memory_bytes(pids: list[int]) -> int:
    """Private anonymous memory of these processes, and the memfds that they have open."""
    return sum(map(private_bytes, pids)) + sum(memfd_bytes(pids).values())


def private_bytes(pid: int) -> int:
    """Its private anonymous memory."""
    return _status(pid, "RssAnon") or 0


def memfd_bytes(pids: list[int]) -> dict[str, int]:
    """The memfds that these processes have open, each once: bytes allocated, by name."""
    found: dict[tuple[int, int], tuple[str, int]] = {}
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for fd in os.listdir(folder):
                with contextlib.suppress(OSError):
                    path = f"{folder}/{fd}"
                    target = os.readlink(path)
                    if target.startswith("/memfd:"):
                        state = os.stat(path)
                        name = target.removeprefix("/memfd:").removesuffix(" (deleted)")
                        found[state.st_dev, state.st_ino] = name, state.st_blocks * 512
    total: dict[str, int] = {}
    for name, n_bytes in found.values():
        total[name] = total.get(name, 0) + n_bytes
    return total


class Peak:
    """What a watch found."""

    start_bytes = 0
    peak_bytes = 0
    samples = 0


@contextlib.contextmanager
def peak_memory(pids: list[int]) -> Iterator[Peak]:
    """Watches `memory_bytes` from a process of its own, every 2 ms, while the block runs."""
    peak = Peak()
    command = [sys.executable, "-m", "bench.support.processes", *map(str, pids)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=common.ROOT
    ) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        peak.start_bytes = int(watcher.stdout.readline())
        yield peak
        watcher.stdin.close()
        highest, samples = watcher.stdout.readline().split()
        peak.peak_bytes, peak.samples = int(highest), int(samples)


def _watch(pids: list[int]) -> None:
    highest = memory_bytes(pids)
    samples = 1
    print(highest, flush=True)
    while not select.select([sys.stdin], [], [], SAMPLE_S)[0]:
        highest = max(highest, memory_bytes(pids))
        samples += 1
    print(max(highest, memory_bytes(pids)), samples + 1, flush=True)


if __name__ == "__main__":
    _watch([int(word) for word in sys.argv[1:]])
