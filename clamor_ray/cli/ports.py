"""In: the port of Ray's metrics; what /proc and Ray's log say. Out: whether a node can have it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clamor_ray.cli.machine import Finding

CHECK: Final = "metrics port"
OPTION: Final = "--metrics-export-port"  # of `ray start`, and of `clamor doctor`
AGENT: Final = ("dashboard/agent.py", "DashboardAgent")  # what Ray's agent is called
LISTENS: Final = "0A"  # as /proc/net/tcp says it
SHOWN: Final = 60  # characters of a command
LOGS: Final = "ray/session_latest/logs"  # below RAY_TMPDIR
TAIL_BYTES: Final = 16 << 10
FREE_ONE: Final = f"Give ray start another {OPTION}, or none: it takes a free one then."


@dataclass(frozen=True)
class Holder:
    """The process that listens on a port.

    Args:
        pid: of it.
        command: its arguments.
    """

    pid: int
    command: str

    @property
    def is_ray(self) -> bool:
        return any(name in self.command for name in AGENT)


def refusal(port: int) -> int:
    """The errno of a bind as Ray's agent does it; 0: the port is free."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
            sock.listen()
        except OSError as refused:
            return refused.errno or errno.EINVAL
    return 0


def _sockets(port: int, root: Path) -> set[str]:
    """As the links of /proc/PID/fd name those that listen there."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (root / "proc/net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found


def holder(port: int, root: Path = Path("/")) -> Holder | None:
    """Who listens on a port; None: a process of another user or container, or nobody."""
    sockets = _sockets(port, root)
    for process in (root / "proc").iterdir() if sockets else ():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # another user's, or it ended just now
            if any(os.readlink(each) in sockets for each in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().decode(errors="replace")
                words = command.replace("\0", " ").split()
                return Holder(int(process.name), " ".join(words))
    return None


def of_port(port: int) -> Finding:
    """What a node meets that is started with `--metrics-export-port=PORT`."""
    refused = refusal(port)
    if not refused:
        return Finding(CHECK, "ok", f"{port} is free")
    has = holder(port) if refused == errno.EADDRINUSE else None
    if has is not None and has.is_ray:
        says = f"on {port} Ray's agent of a node serves metrics (process {has.pid})"
        return Finding(CHECK, "ok", f"{says}; another node here needs another port")
    if has is not None:
        who = f"is taken by process {has.pid} ({has.command[:SHOWN]})"
    elif refused == errno.EADDRINUSE:
        who = "is taken by a process of another user or container"
    else:
        who = f"is refused: {os.strerror(refused)}"
    says = f"{port} {who}: a node of Ray does not start with it"
    return Finding(CHECK, "wrong", says, FREE_ONE)


def _agent_log(logs: Path) -> Path | None:
    """Of the node that was started last: Ray counts those of a machine, from none and 1 on."""
    found = {}
    for path in logs.glob("dashboard_agent*.log"):
        number = path.name.removeprefix("dashboard_agent").removesuffix("log").strip(".")
        if number.isdigit() or not number:
            found[int(number or 0)] = path
    return found[max(found)] if found else None


def of_last_start(logs: Path | None = None) -> Iterator[Finding]:
    """Whether the node that was started last here had to end for its port of metrics. Ray's log has
    no number of it. Never "wrong": who looks before `ray start` could never start Ray again."""
    log = _agent_log(logs or Path(os.environ.get("RAY_TMPDIR", "/tmp")) / LOGS)
    if log is None:
        return
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            tail = file.read().decode(errors="replace").rstrip()
            ended_at_s = log.stat().st_mtime
    except OSError:
        return
    last = tail.rpartition("Traceback (most recent call last)")[2]
    ended = f"[Errno {errno.EADDRINUSE}]" in last.rpartition("\n")[2]
    if ended and "prometheus_exporter" in last:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended_at_s))
        yield Finding(
            CHECK,
            "note",
            f"a node of Ray did not start here at {when}: its port of metrics was taken ({log})",
            f"{FREE_ONE} Who has it: clamor doctor {OPTION} PORT.",
        )
