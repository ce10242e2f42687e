"""One raw TCP stream between two processes, into a memfd: what a link or the kernel gives.

    python -m bench.support.stream receive HOST MIB    prints its port, then the seconds, when all
    is in python -m bench.support.stream send HOST PORT MIB

The sender calls sendfile on a memfd; the receiver calls recv into a buffer and pwrite into a
memfd, as a page server has to. Timed: from the accepted connection to the last byte written.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.support import common

PIECE_BYTES = 1 << 20
WAIT_S = 600.0
SALT = 77
_DEADLINE = struct.pack("ll", int(WAIT_S), 0)

# Starts `python -m bench.support.stream ...` somewhere, e.g. in a namespace.
Start = Callable[[list[str]], "subprocess.Popen[str]"]


def start_here(arguments: list[str]) -> subprocess.Popen[str]:
    """As a child of this process."""
    command = [sys.executable, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=common.ROOT)


class Stream:
    """One stream that is set up; `finish` lets it run to its end.

    Args:
        receive: starts the receiver.
        send: starts the sender.
        host: the receiver's address.
        n_mib: what is sent.
    """

    def __init__(self, receive: Start, send: Start, host: str, n_mib: int) -> None:
        self.n_bytes = n_mib << 20
        self._receiver = receive(["-m", "bench.support.stream", "receive", host, str(n_mib)])
        self._sender: subprocess.Popen[str] | None = None
        try:
            port = self._line(self._receiver)
            self._sender = send(["-m", "bench.support.stream", "send", host, port, str(n_mib)])
            self._line(self._sender)  # it has its memory
        except BaseException:
            self.end()
            raise

    def go(self) -> None:
        """The clock runs from the moment that the sender connects."""
        assert self._sender is not None
        assert self._sender.stdin is not None
        self._sender.stdin.write("go\n")
        self._sender.stdin.flush()

    def finish(self) -> float:
        """Waits for the end; bytes per second."""
        try:
            return self.n_bytes / float(self._line(self._receiver))
        finally:
            self.end()

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"bench: {process.args} ended without an answer")
        return line.strip()

    def end(self) -> None:
        for process in (self._sender, self._receiver):
            if process is None:
                continue
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait(30)


def rate(receive: Start, send: Start, host: str, n_mib: int) -> float:
    """Bytes per second of one stream."""
    stream = Stream(receive, send, host, n_mib)
    stream.go()
    return stream.finish()


def _receive(host: str, n_mib: int) -> None:
    n_bytes = n_mib << 20
    common.warm_memory(n_bytes)
    buffer = memoryview(bytearray(PIECE_BYTES))
    fd = os.memfd_create("stream")
    os.ftruncate(fd, n_bytes)
    with socket.create_server((host, 0)) as listener:
        listener.settimeout(WAIT_S)
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        start = common.now()
        with connection:
            connection.setblocking(True)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _DEADLINE)
            at = 0
            while at < n_bytes:
                got = connection.recv_into(buffer)
                if got == 0:
                    raise SystemExit(f"bench: the stream ended at {at} of {n_bytes} bytes")
                at += os.pwrite(fd, buffer[:got], at)
        seconds = common.now() - start
    for first in range(0, n_bytes, PIECE_BYTES):
        words = np.frombuffer(os.pread(fd, PIECE_BYTES, first), np.uint64)
        want = common.expected_words(first // 8, len(words), SALT)
        common.verify("the raw stream", words, want)
    print(seconds, flush=True)


def _send(host: str, port: int, n_mib: int) -> None:
    n_bytes = n_mib << 20
    fd = os.memfd_create("source")
    for at in range(0, n_bytes, PIECE_BYTES):
        os.pwrite(fd, common.expected_words(at // 8, PIECE_BYTES // 8, SALT).data, at)
    print("ready", flush=True)
    sys.stdin.readline()
    with socket.create_connection((host, port), WAIT_S) as connection:
        connection.setblocking(True)  # the kernel's own deadline, as sendfile needs
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _DEADLINE)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _DEADLINE)
        at = 0
        while at < n_bytes:
            at += os.sendfile(connection.fileno(), fd, at, min(n_bytes - at, 1 << 30))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # until the receiver has closed


def main(arguments: list[str]) -> Any:
    what, host, *numbers = arguments
    if what == "receive":
        return _receive(host, int(numbers[0]))
    return _send(host, int(numbers[0]), int(numbers[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
