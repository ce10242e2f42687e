"""`clamor`, the command, beside sessions that it is no part of."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from tests.cluster.test_timeline_lab import named, trace_of
from tests.conftest import until
from tests.library.test_spans import rows_of, within
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.availability import missing
from tests.support.lab.cluster import node_resource
from tests.support.processes import stop

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

SESSION = "shown"
RUN_S = 100.0
N = 300_000
MANY = 4 << 20


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        yield lab


@pytest.fixture
def session(lab: LocalCluster) -> Iterator[clamor.GlobalRef[Any]]:
    """A variable of two versions, which node 1 has read a part of."""
    clamor.init(session=SESSION, lifetime="detached")
    ref = clamor.put(np.arange(N), name="index")
    with clamor.update(ref) as array:
        array[7] = 0
    there(lab, first_block).remote(ref)
    yield ref
    del ref
    clamor.shutdown(session=SESSION)


def first_block(array: Any) -> int:
    return int(array[3])


def sum_of(array: Any) -> int:
    return int(array.sum())


def put_there() -> Any:
    return clamor.put(np.ones(N), name="elsewhere")


def put_much_there() -> Any:
    """What takes a page server milliseconds to carry."""
    return clamor.put(np.ones(MANY), name="elsewhere")


def there(lab: LocalCluster, function: Any) -> Any:
    return clamor.remote(function).options(num_cpus=0, resources={node_resource(1): 0.001})


def run(
    lab: LocalCluster, *arguments: str, status: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`clamor` with these arguments, which ends with that status."""
    done = subprocess.run(
        [sys.executable, "-m", "clamor_ray.cli.main", *arguments],
        env={**os.environ, **lab.environment, **environment},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_status_and_inspect(lab: LocalCluster, session: clamor.GlobalRef[Any]) -> None:
    import ray

    assert ray.get(there(lab, first_block).remote(session), timeout=RUN_S) == 3
    said = run(lab, "status").stdout
    for text in (SESSION, "index", "2.3 MiB", f"ndarray int64 ({N},)", lab.node_ids[0][:12]):
        assert text in said
    found = json.loads(run(lab, "status", "--format", "json").stdout)
    (shown,) = found["sessions"]
    assert (shown["name"], shown["troubles"]) == (SESSION, [])
    assert {node["node_id"] for node in shown["nodes"]} == set(lab.node_ids)
    (variable,) = shown["variables"]
    assert variable["version"] == session.refresh().version == 1
    assert variable["homes"] == [lab.node_ids[0]]

    one = json.loads(run(lab, "inspect", "index", "--format", "json").stdout)
    assert one["nbytes"] == 8 * N
    parts = {node["node_id"]: node for node in one["nodes"]}
    assert parts[lab.node_ids[0]]["is_home"]
    other = parts[lab.node_ids[1]]
    assert not other["is_home"]
    assert other["present_blocks"] == sum(other["block_map"]) > 0
    by_id = json.loads(run(lab, "inspect", str(one["id"]), "--format", "json").stdout)
    assert by_id["name"] == "index"
    assert "all of it" in run(lab, "inspect", "index").stdout


@pytest.fixture
def reading(lab: LocalCluster, session: clamor.GlobalRef[Any]) -> Iterator[None]:
    """All of the variable changes, and node 1 reads it, again and again."""
    import ray

    over, begun = threading.Event(), threading.Event()
    # What it read the time before is fetched before it begins: then there are no faults.
    on_node = {"num_cpus": 0, "resources": {node_resource(1): 0.001}}
    read = clamor.remote(replay=False)(sum_of).options(**on_node)

    def work() -> None:
        while not over.is_set():
            with clamor.update(session) as array:
                array += 1
            ray.get(read.remote(session), timeout=60)
            begun.set()

    with futures.ThreadPoolExecutor(1) as pool:
        worked = pool.submit(work)
        assert begun.wait(60)
        yield
        over.set()
        worked.result(60)


def test_top_says_who_waits_for_what(lab: LocalCluster, reading: None) -> None:
    said = json.loads(run(lab, "top", "--interval", "3", "--format", "json").stdout)
    assert 3.0 <= said["seconds"] < 30.0
    assert len(said["variables"]) == 1, said
    (variable,) = said["variables"]
    assert variable["name"] == "index"
    assert variable["faults"] > 0
    assert variable["wait_ms"] > 0
    assert variable["hot_node"] == lab.node_ids[1]
    (reads,) = (node for node in said["nodes"] if node["node_id"] == lab.node_ids[1])
    assert reads["received_bytes"] > 0
    assert reads["faults"] == pytest.approx(variable["faults"], rel=0.5)
    text = run(lab, "top", "--interval", "0.5", "--count", "2").stdout
    assert text.count("wait ms/s") >= 3  # of nodes twice, and of what was read
    assert "index" in text


class Terminal:
    """A real one: `tmux`, of 40 lines of 110 characters."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._tmux = ("tmux", "-S", str(directory / "tmux"), "-f", "/dev/null")
        self._environment = {**os.environ, **environment, "TERM": "screen-256color"}
        self.run("new-session", "-d", "-x", "110", "-y", "40", "sh")

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._tmux, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return done.stdout

    def type(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def screen(self) -> str:
        return self.run("capture-pane", "-p")

    def shows(self, *words: str) -> str:
        until(lambda: all(word in self.screen() for word in words), RUN_S)
        return self.screen()


@pytest.fixture
def terminal(lab: LocalCluster, tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        missing("tmux is not installed (Debian: tmux)")
    with tempfile.TemporaryDirectory() as short:  # a socket's path has 107 characters at most
        terminal = Terminal(Path(short), lab.environment)
        yield terminal
        terminal.run("kill-server")


def test_in_a_terminal(lab: LocalCluster, terminal: Terminal, reading: None) -> None:
    clamor_command = f"{sys.executable} -m clamor_ray.cli.main"
    terminal.type(f"clear; {clamor_command} top --interval 0.5", "Enter")
    first = terminal.shows("faults/s", "index", lab.node_ids[0][:12], lab.node_ids[1][:12])
    until(lambda: terminal.screen().split("\n")[0] != first.split("\n")[0], 30)  # the time
    assert all(len(line) <= 110 for line in terminal.screen().splitlines())
    terminal.type("C-c")
    terminal.type("echo ended $?", "Enter")
    assert "Traceback" not in terminal.shows("ended 0")
    terminal.type(f"clear; {clamor_command} status; echo status $?", "Enter")
    terminal.shows("Session shown", "index", "ready", "status 0")
    terminal.type(f"clear; {clamor_command} doctor; echo status $?", "Enter")
    terminal.shows("trap", "versions", "status 0")
    terminal.type(f"clear; {clamor_command} inspect nothing; echo status $?", "Enter")
    terminal.shows("has the name or id 'nothing'. Names: index.", "status 2")


def test_a_session_without_a_name_is_shown_by_its_scope(lab: LocalCluster) -> None:
    scope = clamor.init().scope
    ref = clamor.put(np.arange(N))
    said = run(lab, "status", "--session", scope[:6]).stdout
    assert f"scope {scope}" in said
    assert "without a name" in said
    assert f"(variable {ref._region})" in said
    clamor.shutdown()
    assert "No session." in run(lab, "status").stdout


def test_a_node_is_drained_and_the_drain_undone(
    lab: LocalCluster, session: clamor.GlobalRef[Any]
) -> None:
    import ray

    ray.get(there(lab, put_much_there).remote(), timeout=RUN_S)
    here, node = lab.node_ids[:2]
    with clamor.update(clamor.open("elsewhere")) as array:
        array[:] = 2
    (drained,) = json.loads(run(lab, "drain", node[:10], "--format", "json").stdout)["sessions"]
    assert drained["moved"] == 1
    homes = {info.name: info.nodes for info in clamor.variables()}
    assert homes["elsewhere"] == (here,)
    check_spans_of_a_drain(lab, node)
    assert "the drain is undone" in run(lab, "drain", "--cancel", node).stdout
    assert "it was not drained" in run(lab, "drain", "--cancel", node).stdout
    assert clamor.open("elsewhere").get().sum() == 2 * MANY


def check_spans_of_a_drain(lab: LocalCluster, node: str) -> None:
    """What `clamor timeline` has of it, of the move that it made, and of a commit before."""
    import ray

    registry, server = f"clamor registry {SESSION}", f"clamor page server {lab.node_ids[0][:12]}"
    driver = f"driver:{ray.get_runtime_context().get_worker_id()}"
    trace: list[dict[str, Any]] = []

    def is_sent() -> bool:  # by this process, in a second
        trace[:] = trace_of(lab, SESSION)
        return bool(named(trace, "commit elsewhere", driver))

    until(is_sent, RUN_S)
    (drain,) = named(trace, "drain", registry)
    (move,) = named(trace, "move home of elsewhere", registry)
    takes = named(trace, "take home of elsewhere", server)
    (commit,) = named(trace, "commit elsewhere", driver)
    (decided,) = named(trace, "commit at registry elsewhere", registry)
    (transaction,) = named(trace, "transaction elsewhere", driver)
    pairs = [(move, drain), (commit, transaction), (decided, commit)]
    for part, whole in [*pairs, *((take, move) for take in takes)]:
        assert within(part, whole), (part, whole)
        assert min(part["dur"], whole["dur"]) > 0
    assert takes  # of what it took in more than one turn, each
    assert transaction["ts"] + transaction["dur"] <= drain["ts"]
    events = [drain, move, *takes, commit, decided, transaction]
    assert {event["cat"] for event in events} == {"clamor"}
    assert {event["args"]["node_id"] for event in events} == {lab.node_ids[0]}
    assert drain["args"]["node"] == node
    rows = rows_of(trace)
    of_registry = {rows[e["pid"], e["tid"]][1] for e in (drain, move, decided)}
    assert of_registry == {registry}


def test_a_node_that_has_nothing_is_drained_though_it_is_the_last(lab: LocalCluster) -> None:
    """What has nowhere to go is said, and what to do."""
    scope = clamor.init().scope
    ref = clamor.put(np.arange(N))
    here, there = lab.node_ids[:2]
    assert clamor.drain(here).moved == 1
    said = run(lab, "drain", there, status=1).stdout
    assert "no other node of the session can take what it has" in said
    assert "Add a node to the cluster, or free variables" in " ".join(said.split())
    clamor.free(ref)
    until(lambda: not clamor.stats().region(ref), RUN_S)
    said = " ".join(run(lab, "drain", there).stdout.split())
    assert f"Session {scope} has nothing on node {there[:12]}: nothing had to move." in said
    late = clamor.put(np.arange(N))  # of a node's own processes
    assert late.get()[7] == 7
    assert clamor.cancel_drain(there)
    assert clamor.drain(here).moved == 1
    clamor.shutdown()


def test_what_is_not_there_is_said(lab: LocalCluster, session: clamor.GlobalRef[Any]) -> None:
    said = run(lab, "inspect", "nothing", status=2).stderr
    assert "No variable has the name or id 'nothing'. Names: index." in said
    said = run(lab, "status", "--session", "other", status=2).stderr
    assert f"named 'other', or has a scope that begins so. There are: {SESSION}." in said
    said = run(lab, "drain", "nowhere", status=2).stderr
    assert "No living node is meant by 'nowhere'. The nodes: " in said
    assert all(node_id[:12] in said for node_id in lab.node_ids)
    assert "Give a NODE, or --this-node" in run(lab, "drain", status=2).stderr
    began = time.monotonic()
    said = run(lab, "status", "--address", "127.0.0.1:1", status=2).stderr
    assert "No Ray cluster answers at 127.0.0.1:1" in said
    assert time.monotonic() - began < 30.0


def test_one_of_three_sessions_has_to_be_named(
    lab: LocalCluster, session: clamor.GlobalRef[Any]
) -> None:
    clamor.shutdown()  # this driver leaves it
    clamor.init(session="other", lifetime="detached")
    clamor.put(np.arange(10), name="index")
    clamor.shutdown()
    scope = clamor.init().scope
    try:
        for command in (("inspect", "index"), ("top", "--count", "1")):
            said = run(lab, *command, status=2)
            assert said.stdout == ""
            assert said.stderr == (
                f"clamor: 3 sessions could be meant: other, {SESSION}, {scope}. Name one: "
                "--session NAME, or the beginning of its scope.\n"
            )
        said = run(lab, "inspect", "index", "--session", "other").stdout
        assert said.startswith("index: ndarray int64 (10,)")
    finally:
        clamor.shutdown()
        clamor.shutdown(session="other")


# As a process has that was given none, an old one, or one of another cluster.
NO_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ""}
OLD_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
NO_MODE = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""}
NO_FILE = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": "/nowhere"}
GIVE = "Set RAY_AUTH_MODE=token, and give the cluster's token: RAY_AUTH_TOKEN, or a file that"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (NO_TOKEN, "This process has no token for Ray: "),
        (OLD_TOKEN, "The Ray cluster at {} refuses the token of this process: "),
        (NO_MODE, "The Ray cluster at {} asks for a token, and this process sends none ("),
        (NO_FILE, "This process has no token for Ray: RAY_AUTH_TOKEN_PATH is set but"),
    ],
    ids=["none", "old", "mode", "file"],
)
def test_a_token_that_is_refused_is_one_line(
    lab: LocalCluster, tmp_path: Path, environment: dict[str, str], says: str
) -> None:
    said = run(lab, "status", status=2, HOME=str(tmp_path), **environment)
    (line,) = said.stderr.splitlines()  # `ray.init` tries for 20 s, and writes a line each second
    assert line.startswith("clamor: " + says.format(lab.address))
    assert GIVE in line
    assert said.stdout == ""


def test_a_token_that_is_refused_is_an_error_of_init(lab: LocalCluster, tmp_path: Path) -> None:
    script = """
import clamor_ray as clamor
try:
    clamor.init()
except clamor.errors.DeniedError as error:
    print(error)
"""
    environment = {**os.environ, **lab.environment, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, **OLD_TOKEN},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.stdout.startswith(f"The Ray cluster at {lab.address} refuses"), done.stderr
    assert GIVE in done.stdout


def test_a_token_in_the_home_is_used_for_a_cluster_that_was_found(
    lab: LocalCluster, tmp_path: Path
) -> None:
    """As `ray.init` does where nobody has named a cluster, nor a mode: a first `ray.init()` of a
    machine leaves the token there, and `ray start --head` takes it."""
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text(lab.environment["RAY_AUTH_TOKEN"])
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(lab.address)
    named = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in named},
        "HOME": str(tmp_path),
        "RAY_TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "clamor_ray.cli.main", "status", "--format", "json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("address", "variable", "found"),
    [
        (None, None, ("noted:1", True)),
        ("auto", None, ("noted:1", True)),
        (None, "named:2", ("named:2", False)),
        ("auto", "named:2", ("named:2", False)),
        ("given:3", "named:2", ("given:3", False)),
    ],
)
def test_the_cluster_that_is_meant_is_rays(
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    variable: str | None,
    found: tuple[str, bool],
) -> None:
    from clamor_ray._protocol import ray_state
    from clamor_ray._session.begin.tokens import meant

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    monkeypatch.setattr(ray_state, "noted_address", lambda: "noted:1")
    assert meant(address) == found


def test_a_registry_that_hangs_is_said_and_ends_the_wait(
    lab: LocalCluster, session: clamor.GlobalRef[Any]
) -> None:
    from clamor_ray._session import process_sessions

    pid = process_sessions.current().rpc.ping()
    stop(pid)
    try:
        said = run(lab, "status", "--timeout", "5", status=1).stdout
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "did not answer within" in said


def test_what_is_lost_is_said(lab: LocalCluster, session: clamor.GlobalRef[Any]) -> None:
    import ray

    index = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    resources = {node_resource(index): 0.001}
    ray.get(
        clamor.remote(put_there).options(num_cpus=0, resources=resources).remote(), timeout=RUN_S
    )
    lab.kill_node(index)
    deadline = time.monotonic() + RUN_S
    while True:  # until Ray has found out
        done = subprocess.run(
            [sys.executable, "-m", "clamor_ray.cli.main", "status"],
            env={**os.environ, **lab.environment},
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        if done.returncode == 1 and "lost" in done.stdout:
            break
        assert time.monotonic() < deadline, done.stdout + done.stderr
        time.sleep(0.5)
    assert "Wrong: " in done.stdout
    said = run(lab, "inspect", "elsewhere", status=1).stdout
    assert "homes: none answers" in said
    assert "Wrong: " in said


def test_one_that_is_spread(lab: LocalCluster, session: clamor.GlobalRef[Any]) -> None:
    import ray

    ref = clamor.put(np.arange(4 * N), name="spread", home="spread")
    assert ray.get(there(lab, sum_of).remote(ref), timeout=RUN_S) == sum_of(ref.get())
    said = json.loads(run(lab, "inspect", "spread", "--format", "json").stdout)
    assert said["is_spread"]
    homes = {node["node_id"] for node in said["nodes"] if node["is_home"]}
    assert homes == set(said["homes"])
    assert homes <= set(lab.node_ids)
    assert sum(sum(node["block_map"]) for node in said["nodes"]) > 0  # one of both had it fetched
