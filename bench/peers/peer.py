"""Peers that are programs of their own: started once, idle while the other side runs, then told.

Each process of a peer connects to a socket of the benchmark and waits there in the kernel. (A rank
that waits inside MPI spins, which would take a core from whoever is measured meanwhile.)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.support import common

START_S = 300.0
ANSWER_S = 1800.0


class PeerFailed(Exception):
    """A peer's process ended, or was silent for too long."""


class Peer:
    """The benchmark's end: tells all processes of a peer what to do."""

    def __init__(self, name: str, connections: list[Any], log: Path) -> None:
        self.name, self._connections, self._log = name, connections, log

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Each process's answer, by number.

        Raises:
            PeerFailed: with the end of what it printed.
        """
        line = json.dumps(command) + "\n"
        for connection in self._connections:
            connection.write(line)
            connection.flush()
        answers = []
        for connection in self._connections:
            try:
                answer = connection.readline()
            except OSError as error:
                answer, reason = "", str(error)
            else:
                reason = "its process ended"
            if not answer:
                raise PeerFailed(f"{self.name}: {reason}\n{tail(self._log)}")
            answers.append(json.loads(answer))
        return answers


def tail(log: Path, n_chars: int = 3000) -> str:
    """The end of what a peer printed."""
    return log.read_text(errors="replace")[-n_chars:]


@contextlib.contextmanager
def started(
    name: str, command: list[str], n_processes: int, environment: dict[str, str]
) -> Iterator[Peer]:
    """Starts a peer and ends it with all its processes.

    Args:
        name: for messages.
        command: the program; it gets the path of the socket as its last argument.
        n_processes: that will connect, each with a number below that.
        environment: of the program, beside this process's own.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path, log = Path(folder) / "socket", Path(folder) / "log"
        with socket.socket(socket.AF_UNIX) as server, log.open("w") as output:
            server.bind(str(path))
            server.listen(n_processes)
            process = subprocess.Popen(
                [*command, str(path)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(common.ROOT), **environment},
                start_new_session=True,
            )
            connections: dict[int, Any] = {}
            try:
                deadline = time.monotonic() + START_S
                server.settimeout(1.0)
                while len(connections) < n_processes:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise PeerFailed(f"{name} did not start\n{tail(log)}")
                    with contextlib.suppress(TimeoutError):
                        accepted, _ = server.accept()
                        accepted.settimeout(ANSWER_S)
                        stream = accepted.makefile("rw")
                        connections[int(json.loads(stream.readline()))] = stream
                        accepted.close()  # the stream keeps it open
                yield Peer(name, [connections[i] for i in range(n_processes)], log)
            finally:
                for stream in connections.values():
                    with contextlib.suppress(OSError):
                        stream.close()  # it reads the end and leaves
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):  # its whole session: it may have left some
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(20)


def serve(number: int, handlers: dict[str, Callable[[Any], Any]]) -> None:
    """The peer's end: does what it is told until the benchmark hangs up.

    A command is {name: argument}; the answer is what the handler of that name returns.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[-1])
        with connection.makefile("rw") as stream:
            stream.write(f"{number}\n")
            stream.flush()
            for line in stream:
                ((name, argument),) = json.loads(line).items()
                stream.write(json.dumps(handlers[name](argument)) + "\n")
                stream.flush()
