"""An S3 on loopback: moto's server in a process of its own, and a proxy before it that fails.

The process ends when its standard input does, and so with the tests, however they end.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

START_S = 60.0
FOREVER = 10**9
_PART_BYTES = 256 << 10
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_DENIED = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
)


_EXPIRED = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
)
_REFUSALS = {"503": (503, _SLOW_DOWN), "403": (403, _DENIED), "expired": (400, _EXPIRED)}


def _keep_values() -> None:
    """moto reads an object whole, from a file, for each range of it: here it is bytes already."""
    from moto.s3.models import FakeKey

    before: Any = FakeKey.value

    def put(key: Any, value: Any) -> None:
        before.fset(key, value)
        key._whole = before.fget(key) if hasattr(key, "lock") else None

    def get(key: Any) -> Any:
        if key._whole is None:
            key._whole = before.fget(key)
        return key._whole

    FakeKey.value = property(get, put)  # type: ignore[assignment]


def main() -> None:
    """The server's process: prints its port, serves until its input ends."""
    import logging

    from moto.server import ThreadedMotoServer

    _keep_values()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(json.dumps(server.get_host_and_port()[1]), flush=True)
    sys.stdin.read()
    server.stop()


@contextlib.contextmanager
def moto_server() -> Iterator[int]:
    """The port of an S3 without buckets."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.s3_rig"],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        limit = threading.Timer(START_S, process.kill)
        limit.start()
        try:
            line = process.stdout.readline()
            assert line, "the S3 server did not start"
            limit.cancel()
            yield json.loads(line)
        finally:
            limit.cancel()
            process.stdin.close()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass
class Fault:
    """What goes wrong with some requests.

    Args:
        how: "503" (SlowDown), "403", "expired" (ExpiredToken), "close" (no answer at all), "cut"
            (half of the answer), "any" (If-Match is not looked at).
        path: of the requests, a regular expression.
        method: of the requests, a regular expression.
        times: how often.
        hits: how often so far.
    """

    how: str
    path: str = ""
    method: str = ""
    times: int = FOREVER
    hits: int = 0


@dataclass
class Asked:
    """A request that has come through.

    Args:
        method: of HTTP.
        path: with its query.
        n_bytes: of the answer's body.
    """

    method: str
    path: str
    n_bytes: int


@dataclass
class Proxy:
    """Counts what passes, and fails as it is told.

    Args:
        endpoint: its URL.
        faults: the first that fits and is not used up counts.
        asked: what has passed.
        latency_s: that each request takes longer.
        bytes_s: of all answers' bodies together, at most; 0: there is no limit.
        passed: called with the method and the path of each request before it is passed on.
    """

    endpoint: str = ""
    latency_s: float = 0.0
    bytes_s: float = 0.0
    passed: Callable[[str, str], object] = lambda method, path: None
    faults: list[Fault] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at_s: float = 0.0  # by when all bytes have gone that were let through

    def pace(self, n_bytes: int) -> None:
        """Waits as long as these bytes take on a link that others use too."""
        if not self.bytes_s:
            return
        with self.lock:
            begin_s = max(time.monotonic(), self.free_at_s)
            self.free_at_s = begin_s + n_bytes / self.bytes_s
            wait_s = self.free_at_s - time.monotonic()
        time.sleep(max(0.0, wait_s))

    def fail(self, how: str, **what: Any) -> Fault:
        """From now on; see `Fault`."""
        fault = Fault(how, **what)
        with self.lock:
            self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Nothing fails any more, and nothing is counted yet."""
        with self.lock:
            self.faults.clear()
            self.asked.clear()
        self.latency_s = self.bytes_s = 0.0
        self.passed = lambda method, path: None

    def fault_for(self, method: str, path: str) -> str | None:
        """What happens to this request."""
        with self.lock:
            for fault in self.faults:
                fits = re.search(fault.path, path) and re.search(fault.method, method)
                if fits and fault.hits < fault.times:
                    fault.hits += 1
                    return fault.how
        return None

    def body_bytes(self, path: str) -> int:
        """How much has been read of what fits."""
        return sum(
            asked.n_bytes for asked in self.asked if asked.method == "GET" and path in asked.path
        )


def _handler(proxy: Proxy, upstream: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = START_S

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet."""

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while n_bytes := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(n_bytes)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return body

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            for at in range(0, len(body), _PART_BYTES):
                part = body[at : at + _PART_BYTES]
                proxy.pace(len(part))
                self.wfile.write(part)

        def _forward(self) -> None:
            body = self._body()
            if proxy.latency_s:
                time.sleep(proxy.latency_s)
            fault = proxy.fault_for(self.command, self.path)
            if fault == "close":
                self.close_connection = True
                return
            if fault in _REFUSALS:
                status, content = _REFUSALS[fault]
                length = ("Content-Length", str(len(content)))
                self._answer(status, [length, ("Content-Type", "application/xml")], content)
                return
            proxy.passed(self.command, self.path)
            there = http.client.HTTPConnection("127.0.0.1", upstream, timeout=START_S)
            try:
                headers = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() not in ("transfer-encoding", "connection", "expect")
                    and not (fault == "any" and name.lower() == "if-match")
                }
                headers["Content-Length"] = str(len(body))
                there.request(self.command, self.path, body=body, headers=headers)
                answer = there.getresponse()
                content = answer.read()
                passed = [
                    (name, value)
                    for name, value in answer.getheaders()
                    if name.lower() not in ("transfer-encoding", "connection")
                ]
                if not any(name.lower() == "content-length" for name, _ in passed):
                    passed.append(("Content-Length", str(len(content))))
            finally:
                there.close()
            with proxy.lock:
                proxy.asked.append(Asked(self.command, self.path, len(content)))
            if fault == "cut":
                content = content[: len(content) // 2]
                self.close_connection = True
            self._answer(answer.status, passed, content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is none of our business."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def proxy_before(upstream: int) -> Iterator[Proxy]:
    """A proxy before a server of this machine.

    Args:
        upstream: the server's port.
    """
    proxy = Proxy()
    server = _Server(("127.0.0.1", 0), _handler(proxy, upstream))
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, name="s3-proxy")
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join(START_S)
        server.server_close()


def proxy_main(upstream: int, latency_s: float, bytes_s: float) -> None:
    """A proxy as a process of its own: prints its endpoint, serves until its input ends."""
    with proxy_before(upstream) as proxy:
        proxy.latency_s, proxy.bytes_s = latency_s, bytes_s
        print(json.dumps(proxy.endpoint), flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def far_server(latency_s: float, bytes_s: float) -> Iterator[tuple[str, str]]:
    """The endpoints of an S3 without buckets: near, and behind a link.

    Args:
        latency_s: that each request takes longer.
        bytes_s: of the link.
    """
    with moto_server() as port:
        command = [sys.executable, "-m", "tests.support.s3_rig"]
        command += ["proxy", str(port), str(latency_s), str(bytes_s)]
        with subprocess.Popen(
            command,
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                yield f"http://127.0.0.1:{port}", json.loads(process.stdout.readline())
            finally:
                process.stdin.close()
                try:
                    process.wait(START_S)
                except subprocess.TimeoutExpired:
                    process.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["proxy"]:
        proxy_main(int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
