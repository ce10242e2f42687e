"""The peer that holds rows by key: a Redis server of this machine's, and its client in Python."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

START_S = 30.0
KEYS_PER_PIPELINE = 100_000

Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint64]


def unavailable() -> str | None:
    """Why there is no Redis here, or None."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (Debian: redis-server)"
    try:
        import hiredis  # noqa: F401
        import redis  # noqa: F401
    except ImportError as missing:
        return f"{missing} (pip install redis hiredis)"
    return None


@contextlib.contextmanager
def server() -> Iterator[Any]:
    """A server on the loopback device that keeps nothing on disk; yields a client."""
    import redis

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = {"bind": "127.0.0.1", "port": str(port), "save": "", "appendonly": "no"}
        command = ["redis-server", "--dir", folder]
        for name, value in options.items():
            command += [f"--{name}", value]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(host="127.0.0.1", port=port, socket_read_size=1 << 20)
            deadline = time.monotonic() + START_S
            while True:
                try:
                    client.ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise
                time.sleep(0.05)  # it has no other way to say that it listens
            yield client
            client.close()
        finally:
            process.kill()
            process.wait(30)


def keys_of(ids: Int64) -> list[bytes]:
    """A key of eight bytes per id."""
    keys: list[bytes] = ids.astype("<u8").view("V8").tolist()
    return keys


def load(client: Any, ids: Int64, rows: Rows) -> None:
    """Sets the rows with these ids."""
    for first in range(0, len(ids), 10_000):
        part = slice(first, first + 10_000)
        values = (row.tobytes() for row in rows[part])
        client.mset(dict(zip(keys_of(ids[part]), values, strict=True)))


def gather(client: Any, ids: Int64, keys_per_mget: int, row_words: int) -> Rows:
    """Rows by id, in pipelines of MGETs of so many keys each, as one array."""
    keys = keys_of(ids)
    parts: list[bytes] = []
    for first in range(0, len(keys), KEYS_PER_PIPELINE):
        pipeline = client.pipeline(transaction=False)
        end = min(first + KEYS_PER_PIPELINE, len(keys))
        for at in range(first, end, keys_per_mget):
            pipeline.mget(keys[at : min(at + keys_per_mget, end)])
        parts += [b"".join(values) for values in pipeline.execute()]
    return np.frombuffer(b"".join(parts), np.uint64).reshape(-1, row_words)
