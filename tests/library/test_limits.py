"""What is refused, and how: strangers on the sockets, other builds, too little of everything.

Where no Ray is needed there is none: an engine in this process is a page server.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._objects import memory
from clamor_ray._protocol.handshake import (
    ACCEPT_BYTES,
    CHALLENGE_BYTES,
    HELLO_BYTES,
    ClientHandshake,
    Hello,
)
from clamor_ray._session import process_sessions
from tests.conftest import ClamorCluster, until

BASE = 0x1200_0000_0000
LENGTH = 1 << 20
WAIT_S = 30.0


@dataclass
class Server:
    """An engine with one sealed region of 7s."""

    engine: _native.Engine
    name: str

    def client(self, **options: Any) -> _native.Client:
        return _native.Client(self.name, **options)


@pytest.fixture
def server() -> Iterator[Server]:
    name = f"clamor-test-{secrets.token_hex(6)}"
    engine = _native.Engine(name, server_id=1)
    maker = _native.Client(name)
    try:
        fd = maker.create(1, BASE, LENGTH)
        _native.copy_in(fd, 0, b"\7" * LENGTH)
        os.close(fd)
        maker.seal(1)
        yield Server(engine, name)
    finally:
        maker.close()
        engine.stop()


def run_python(program: str, *arguments: object, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


# ------------------------------------------------------------------- refusals


def test_another_build_is_told_both_versions(server: Server) -> None:
    with pytest.raises(errors.VersionMismatchError, match=r"this process 0\.0\.7") as caught:
        server.client(library_version="0.0.7")
    assert clamor.__version__ in str(caught.value)
    assert "same clamor-ray on every node" in caught.value.hint
    server.client().close()  # others are not affected


def test_nobody_listens() -> None:
    begin = time.monotonic()
    with pytest.raises(errors.ServerUnavailableError, match="clamor-test-nobody"):
        _native.Client("clamor-test-nobody", connect_timeout_s=0.3)
    assert time.monotonic() - begin < 5


_CLASH = """
import ctypes, sys
from clamor_ray._native import client as _native
from clamor_ray import errors

name, base, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
with open("/etc/passwd", "rb") as file:
    at = libc.mmap(base + 4096, 4096, 1, 0x100002, file.fileno(), 0)  # PRIVATE, FIXED_NOREPLACE
assert at == base + 4096
before = ctypes.string_at(at, 64)
client = _native.Client(name)
try:
    client.map(1, 0, base, length)
except errors.AddressClashError as error:
    print(error)
assert ctypes.string_at(at, 64) == before  # and it is left alone
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
assert libc.munmap(at, 4096) == 0
mapping = client.map(1, 0, base, length)
assert ctypes.string_at(mapping.address, length) == b"\\7" * length
client.close()
"""


def test_an_address_clash_names_both(server: Server) -> None:
    said = run_python(_CLASH, server.name, BASE, LENGTH)
    assert f"variable 1 must be mapped at {BASE:#x}-{BASE + LENGTH:#x}" in said
    assert "/etc/passwd" in said
    assert f"{BASE + 4096:x}" in said


def test_no_memory_is_told_with_both_numbers(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_500_000)  # no room for a piece either
    with pytest.raises(errors.OutOfMemoryError) as caught:
        clamor.put(np.zeros(2_000_000))
    numbers = [int(word) for word in str(caught.value).replace("(", " ").split() if word.isdigit()]
    assert 1_500_000 in numbers
    assert any(16_000_000 <= number < 16_100_000 for number in numbers)
    assert isinstance(caught.value, MemoryError)
    clamor.free(clamor.put(np.zeros(150_000)))  # what fits, fits


@pytest.mark.parametrize(
    ("name", "value", "told"), [("platform", "darwin", "darwin"), ("maxsize", 2**31 - 1, "32-bit")]
)
def test_other_platforms(
    name: str, value: object, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"platform": sys.platform, "maxsize": sys.maxsize, "modules": sys.modules, name: value}
    monkeypatch.setattr(process_sessions, "sys", SimpleNamespace(**seen))
    with pytest.raises(errors.UnsupportedPlatformError, match=told) as caught:
        clamor.init()
    assert "64-bit Linux" in caught.value.hint


# ---------------------------------------------------------------- descriptors

_FEW_DESCRIPTORS = """
import ctypes, json, os, resource, sys
from clamor_ray._native import client as _native
from clamor_ray import errors

name, base, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
_native.Client(name).close()  # everything is loaded
used = len(os.listdir("/proc/self/fd"))  # one of them is the listing's
outcomes = []
for spare in range(16):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1 + spare, hard))
    client = None
    try:
        client = _native.Client(name, trap=sys.argv[4])
        mapping = client.map(1, 0, base, length)
        assert ctypes.string_at(mapping.address, length) == b"\\7" * length
        outcomes.append("works")
    except errors.ClamorError as error:
        outcomes.append(type(error).__name__)
    if client is not None:
        client.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert len(os.listdir("/proc/self/fd")) == used, (spare, outcomes)
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize("trap", ["uffd", "sigsegv"])
def test_few_descriptors_are_an_error_or_enough(trap: str, server: Server) -> None:
    outcomes = json.loads(run_python(_FEW_DESCRIPTORS, server.name, BASE, LENGTH, trap))
    works = outcomes.index("works")
    assert set(outcomes[:works]) == {"DescriptorLimitError"}, outcomes
    assert set(outcomes[works:]) == {"works"}, outcomes


_FULL_SERVER = """
import json, os, resource, sys, time
from clamor_ray._native import client as _native
from clamor_ray import errors

name = sys.argv[1]
engine = _native.Engine(name, server_id=1)
clients = [_native.Client(name)]
limit = len(os.listdir("/proc/self/fd")) + 40
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
print("ready", flush=True)
sys.stdin.readline()
begin = time.process_time()
time.sleep(1)
print(time.process_time() - begin, flush=True)
sys.stdin.readline()
print(json.dumps(engine.stats()), flush=True)
"""


def test_a_server_without_descriptors_waits_and_does_not_spin() -> None:
    name = f"clamor-test-{secrets.token_hex(6)}"
    server = subprocess.Popen(
        [sys.executable, "-c", _FULL_SERVER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    strangers: list[socket.socket] = []
    try:
        assert server.stdout.readline() == "ready\n"
        for _ in range(60):
            strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            strangers[-1].connect(f"\0{name}")
        server.stdin.write("\n")
        assert float(server.stdout.readline()) < 0.3
        with pytest.raises(errors.ClamorError) as caught:
            _native.Client(name, connect_timeout_s=0.5)
        assert isinstance(caught.value, (errors.ServerUnavailableError, errors.WaitTimeoutError))
        for stranger in strangers:
            stranger.close()
        _native.Client(name).close()  # it accepts again
        server.stdin.write("\n")
        assert json.loads(server.stdout.readline())["clients"] <= 2
    finally:
        server.kill()
        server.wait(WAIT_S)
        server.stdin.close()
        server.stdout.close()
        for stranger in strangers:
            stranger.close()


# ------------------------------------------------------------------ strangers


def counters(cluster: ClamorCluster, node: int) -> tuple[dict[str, int], int]:
    """Refused connections by reason, and bad messages."""
    (found,) = (n for n in clamor.stats().nodes if n.node_id == cluster.lab.node_ids[node])
    return dict(found.refused_connections), found.engine.bad_messages


def info_of(cluster: ClamorCluster, node: int) -> Any:
    (found,) = (n for n in clamor.stats().nodes if n.node_id == cluster.lab.node_ids[node])
    return found.info


def receive(sock: socket.socket, n_bytes: int) -> bytes:
    parts = b""
    while len(parts) < n_bytes:
        part = sock.recv(n_bytes - len(parts))
        assert part, "closed too early"
        parts += part
    return parts


def is_closed(sock: socket.socket, seconds: float = 20.0) -> bool:
    """Whether the other side hangs up, whatever it says before."""
    sock.settimeout(seconds)
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def authenticated_peer(info: Any, secret: bytes) -> socket.socket:
    sock = socket.create_connection((info.host, info.port), 10)
    client = ClientHandshake(secret, Hello(client_id=0xBAD, server_id=info.server_id, lane=0))
    sock.sendall(client.hello)
    sock.sendall(client.prove(receive(sock, CHALLENGE_BYTES)))
    client.finish(receive(sock, ACCEPT_BYTES))
    return sock


def reading_goes_on(cluster: ClamorCluster) -> None:
    """Fresh blocks, from the node under attack to the other and back."""
    image = np.random.default_rng(time.monotonic_ns()).integers(0, 256, 1 << 20, dtype=np.uint8)
    ref = clamor.put(image)

    def digest(array: Any) -> bytes:
        return bytes(array[::4096]) + bytes(array[-4096:])

    assert cluster.run(digest, ref) == digest(image)
    clamor.free(ref)


GET = struct.Struct("<IHHIiQIHH")
MAGIC = 0x31524C43
ASKER_BYTES = 24  # pc__data_asker, behind the header of a GET
GET_ROWS = 4


def test_strangers_on_the_data_port(clamor_cluster: ClamorCluster) -> None:
    reading_goes_on(clamor_cluster)
    info = info_of(clamor_cluster, 0)
    refused, _ = counters(clamor_cluster, 0)

    def connect() -> socket.socket:
        return socket.create_connection((info.host, info.port), 10)

    stalled, truncated = connect(), connect()
    hello = ClientHandshake(bytes(32), Hello(client_id=9, server_id=info.server_id, lane=0)).hello
    assert len(hello) == HELLO_BYTES
    truncated.sendall(hello[:17])

    with connect() as garbage:
        garbage.sendall(secrets.token_bytes(HELLO_BYTES))
        assert is_closed(garbage)
    with connect() as oversized:
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                oversized.sendall(b"GET / HTTP/1.1\r\n" * 4096)
        assert is_closed(oversized)
    with connect() as hangs_up:
        hangs_up.sendall(hello[:40])
    with connect() as elsewhere:
        elsewhere.sendall(ClientHandshake(bytes(32), Hello(9, info.server_id + 1, 0)).hello)
        assert is_closed(elsewhere)
    with connect() as pretender:  # knows the protocol, not the secret
        pretender.sendall(hello)
        receive(pretender, CHALLENGE_BYTES)
        pretender.sendall(secrets.token_bytes(32))
        assert is_closed(pretender)
    reading_goes_on(clamor_cluster)  # while two still stall
    assert is_closed(stalled)
    assert is_closed(truncated)
    stalled.close()
    truncated.close()

    def refusals() -> dict[str, int]:
        now, _ = counters(clamor_cluster, 0)
        return {reason: n - refused.get(reason, 0) for reason, n in now.items()}

    expected = {"garbage": 2, "closed": 1, "wrong_server": 1, "denied": 1, "timeout": 2}
    until(lambda: {k: v for k, v in refusals().items() if v} == expected)


def test_peers_that_know_the_secret_and_lie(clamor_cluster: ClamorCluster) -> None:
    import ray

    secret = ray.get(process_sessions.current().registry.secret.remote(), timeout=30)
    info = info_of(clamor_cluster, 0)
    ref = clamor.put(np.full(1 << 20, 3, np.uint8))
    _, before = counters(clamor_cluster, 0)
    run = struct.pack("<Q", 0 << 24 | 1)
    beyond = struct.pack("<Q", (1 << 30) << 24 | 1)

    def get(n_runs: int, n_blocks: int, magic: int = MAGIC, kind: int = 1) -> bytes:
        return GET.pack(magic, kind, 0, 1, 0, ref._region, 0, n_runs, n_blocks) + bytes(ASKER_BYTES)

    def rows(row_bytes: int, n_rows: int) -> bytes:
        head = GET.pack(MAGIC, GET_ROWS, 0, 1, 0, ref._region, 0, 0, 0)
        return head + struct.pack("<QII", row_bytes, n_rows, 0)

    lies = {
        "garbage": secrets.token_bytes(4096),
        "another magic": get(1, 1, magic=1) + run,
        "an answer nobody asked for": get(1, 1, kind=2) + run,
        "too many runs": get(65535, 1) + run * 8000,
        "too many blocks": get(1, 65535) + run,
        "no runs": get(0, 0),
        "beyond the end": get(1, 1) + beyond,
        "rows of no bytes": rows(0, 1) + struct.pack("<Q", 0),
        "no rows": rows(8, 0),
        "too many rows": rows(8, 1 << 20),
        "rows beyond the end": rows(8, 1) + struct.pack("<Q", 1 << 40),
        "a sum that is not": get(2, 3) + run + struct.pack("<Q", 5 << 24 | 1),
    }
    for name, lie in lies.items():
        with authenticated_peer(info, secret) as peer:
            peer.sendall(get(1, 1) + run)  # an honest question first
            head = receive(peer, GET.size)
            assert GET.unpack(head)[4] == 0
            assert receive(peer, 4096) != bytes(4096)
            with contextlib.suppress(ConnectionError):
                peer.sendall(lie)
            assert is_closed(peer), name
    with authenticated_peer(info, secret) as silent:
        silent.sendall(get(1, 1)[:20])  # the rest never comes
        reading_goes_on(clamor_cluster)
        assert is_closed(silent)
    until(lambda: counters(clamor_cluster, 0)[1] - before == len(lies) + 1)
    reading_goes_on(clamor_cluster)
    clamor.free(ref)


HELLO = struct.Struct("<IHHIi")  # pc__ctl_header


def test_strangers_on_the_unix_socket(clamor_cluster: ClamorCluster) -> None:
    info = info_of(clamor_cluster, 0)
    _, before = counters(clamor_cluster, 0)

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(info.socket_name)
        return sock

    silent = connect()
    body = bytes(64)
    packets = {
        "garbage": secrets.token_bytes(200),
        "one byte": b"x",
        "shorter than it says": HELLO.pack(64, 1, 0, 1, 0) + body[:10],
        "longer than it says": HELLO.pack(10, 1, 0, 1, 0) + body,
        "too large": HELLO.pack(0xFFFFFFFF, 1, 0, 1, 0) + body,
        "oversized": HELLO.pack(70000, 8, 0, 1, 0) + bytes(70000),
        "before hello": HELLO.pack(48, 5, 0, 1, 0) + bytes(56),
        "no such type": HELLO.pack(0, 99, 0, 1, 0),
        "hello without descriptors": HELLO.pack(64, 1, 0, 1, 0)
        + struct.pack("<IIQ48s", 1, 2, 0, clamor.__version__.encode()),
    }
    for name, packet in packets.items():
        with connect() as stranger:
            stranger.send(packet)
            assert is_closed(stranger), name
    with connect() as wrong_descriptors:
        hello = HELLO.pack(64, 1, 0, 1, 0) + struct.pack(
            "<IIQ48s", 1, 4, 0, clamor.__version__.encode()
        )
        with open("/dev/null", "rb") as one, open("/dev/zero", "rb") as two:
            socket.send_fds(wrong_descriptors, [hello], [one.fileno(), two.fileno()])
        assert is_closed(wrong_descriptors)
    reading_goes_on(clamor_cluster)
    assert is_closed(silent)
    silent.close()
    until(lambda: counters(clamor_cluster, 0)[1] - before == len(packets) + 2)
    n_open = len(os.listdir(f"/proc/{info.pid}/fd"))
    for _ in range(50):  # descriptors that came with nonsense are closed
        with connect() as stranger, open("/dev/null", "rb") as null:
            socket.send_fds(stranger, [b"nonsense"], [null.fileno()] * 5)
            assert is_closed(stranger)
    until(lambda: len(os.listdir(f"/proc/{info.pid}/fd")) <= n_open + 5)


# ----------------------------------------------------------------------- idle

TICKS = os.sysconf("SC_CLK_TCK")


def ticks(stat: Path) -> int:
    fields = stat.read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def engine_ticks(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().startswith("clamor-engine"):
            found.append(ticks(task / "stat"))
    return found


def test_an_idle_cluster_uses_no_processor(clamor_cluster: ClamorCluster) -> None:
    import ray

    class Plain:
        def pid(self) -> int:
            return os.getpid()

    array = clamor.put(np.ones(1 << 20, np.uint8))
    clamor_cluster.run(lambda image: int(image.sum()), array)  # servers, peers, mappings
    plain = ray.remote(Plain).options(num_cpus=0, max_concurrency=16).remote()
    plain_pid = ray.get(plain.pid.remote(), timeout=60)
    servers = [info_of(clamor_cluster, node).pid for node in (0, 1)]
    time.sleep(3)  # what was asked above has an end
    pids = [plain_pid, *servers]
    engines = [engine_ticks(pid) for pid in servers]
    assert all(engines), "no engine thread found"
    before = [ticks(Path(f"/proc/{pid}/stat")) for pid in pids]
    time.sleep(6)
    plain_used, *used = (
        ticks(Path(f"/proc/{pid}/stat")) - was for pid, was in zip(pids, before, strict=True)
    )
    assert [engine_ticks(pid) for pid in servers] == engines
    slack = max(3, TICKS // 20)  # of Ray's own threads, which are no quieter there
    assert all(n <= plain_used + slack for n in used), (plain_used, used)
    ray.kill(plain)
    clamor.free(array)
