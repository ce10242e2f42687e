"""A process of somebody who reaches data ports and opens connections that never pass.

    python -m tests.support.strangers HOST PORT AT_ONCE TOTAL [HELLO_HEX]

Opens TOTAL connections as fast as it can, holds the last AT_ONCE of them, prints "open", and from
then on renews each that is closed, until its input ends. With HELLO_HEX it says that on each.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

RENEW_S = 0.02


def _open(address: tuple[str, int], hello: bytes) -> socket.socket | None:
    sock = socket.socket()
    sock.settimeout(1.0)  # a full backlog makes it wait
    try:
        sock.connect(address)
        if hello:
            sock.sendall(hello)
    except OSError:
        sock.close()
        return None
    sock.setblocking(False)
    return sock


def _ended(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def main(host: str, port: str, at_once: str, total: str, hello: str = "") -> None:
    address, said, most = (host, int(port)), bytes.fromhex(hello), int(at_once)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held: deque[socket.socket] = deque()
    opened = 0
    while opened < int(total):
        if (sock := _open(address, said)) is not None:
            held.append(sock)
            opened += 1
        if len(held) > most:
            held.popleft().close()
    print("open", flush=True)
    while not select.select([sys.stdin], [], [], RENEW_S)[0]:
        for _ in range(len(held)):
            sock = held.popleft()
            if not _ended(sock):
                held.append(sock)
                continue
            sock.close()
            if (sock := _open(address, said)) is not None:
                held.append(sock)
            elif not held:  # the server is away: come back when it is there
                break
        if not held and (sock := _open(address, said)) is not None:
            held.append(sock)
        while held and len(held) < most and (sock := _open(address, said)) is not None:
            held.append(sock)


@contextlib.contextmanager
def strangers(
    host: str, port: int, at_once: int, total: int, hello: bytes = b""
) -> Iterator[subprocess.Popen[str]]:
    """That process; ends it."""
    command = [
        sys.executable,
        "-m",
        "tests.support.strangers",
        host,
        port,
        at_once,
        total,
        hello.hex(),
    ]
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main(*sys.argv[1:])
