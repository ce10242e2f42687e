"""Sessions that outlive their drivers: attached to by name from anywhere, through deaths."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol import names
from clamor_ray._protocol.rpc import unpack
from clamor_ray._session import process_sessions
from clamor_ray._spans import record
from clamor_ray._spans.record import Span
from clamor_ray.actors.process.journals import has_ended
from tests.conftest import ANSWER_S, until
from tests.support import driver_script
from tests.support.driver_script import ROOT
from tests.support.lab import LocalCluster, local_cluster
from tests.support.lab.cluster import node_resource
from tests.support.processes import stop

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

NAME = "kept"
BEGIN = """
import os, signal, sys, time
import numpy as np, ray
import clamor_ray as clamor
ray.init(log_to_driver=False)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(2) as lab:
        yield lab


@pytest.fixture
def kept(cluster: LocalCluster) -> Iterator[str]:
    """The scope of a session that nobody is attached to."""
    scope = clamor.init(session=NAME, lifetime="detached").scope
    clamor.put(np.arange(10**6), name="index")
    clamor.put(np.arange(3), name="small")
    clamor.shutdown()
    yield scope
    clamor.shutdown()
    if NAME in [info.name for info in clamor.sessions()]:
        clamor.shutdown(session=NAME)


def other_driver(cluster: LocalCluster, script: str) -> str:
    return driver_script.run(BEGIN + script, lab=cluster)


def of_scope(scope: str) -> list[str]:
    """Processes and sockets that are named after a session."""
    found = [str(path) for path in Path("/tmp").glob(f"clamor-*/{scope}*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if scope in command:
                found.append(command)
    return found


def test_it_outlives_its_driver_and_ends_by_name(cluster: LocalCluster) -> None:
    scope = other_driver(
        cluster,
        """
found = clamor.init(session="kept", lifetime="detached")
ref = clamor.put(np.arange(10**6), name="index")
clamor.put(np.arange(3), name="small")
with clamor.update(ref) as x:
    x[7] = 70
print(found.scope)
""",
    ).strip()
    found = clamor.init(session=NAME)
    assert (found.scope, found.session) == (scope, NAME)
    assert int(clamor.open("index").get()[7]) == 70
    assert clamor.open("small").get().tolist() == [0, 1, 2]
    (info,) = [info for info in clamor.sessions() if info.name == NAME]
    assert (info.scope, info.n_variables, info.error) == (scope, 1, "")
    assert info.nbytes >= 8 * 10**6
    assert 0 <= time.time() - info.began_at_s < 600
    assert of_scope(scope)
    clamor.shutdown(session=NAME)
    assert NAME not in [info.name for info in clamor.sessions()]
    with pytest.raises(errors.NotInitializedError):
        clamor.open("index")
    until(lambda: not of_scope(scope))


def test_a_driver_that_is_killed_leaves_it(cluster: LocalCluster, kept: str) -> None:
    killed = driver_script.start(
        BEGIN
        + """
clamor.init(session="kept")
clamor.add_at(clamor.open("index"), [0], 5)
clamor.put(np.ones(10**5), name="by the dead")
os.kill(os.getpid(), signal.SIGKILL)
""",
        lab=cluster,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    clamor.init(session=NAME)
    assert int(clamor.open("index").get()[0]) == 5
    assert clamor.open("by the dead").get().sum() == 100000


def test_registry_and_page_server_are_killed_while_no_driver_is_there(
    cluster: LocalCluster, kept: str
) -> None:
    registry = ray.get_actor("session-kept", namespace="clamor")
    pid = ray.get(registry.ping.remote(), timeout=ANSWER_S)
    (server,) = ray.get(registry.servers.remote(), timeout=ANSWER_S)
    os.kill(server.pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    clamor.init(session=NAME)
    assert clamor.open("index").get().sum() == sum(range(10**6))


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)
class Replica:
    """As one of Serve: of a job whose driver knows nothing of the session."""

    def __init__(self) -> None:
        clamor.init(session=NAME)
        self.ref = clamor.open("index")

    def look(self, i: int) -> tuple[int, int]:
        return int(self.ref.refresh().get()[i]), os.getpid()

    def make(self) -> None:
        clamor.put(np.ones(10**5), name="by a replica")


def test_an_actor_attaches_and_does_so_again_when_it_is_restarted(
    cluster: LocalCluster, kept: str
) -> None:
    replica = Replica.options(resources={node_resource(1): 0.001}).remote()
    value, pid = ray.get(replica.look.remote(9), timeout=ANSWER_S)
    assert value == 9
    os.kill(pid, signal.SIGKILL)
    value, again = ray.get(replica.look.remote(9), timeout=ANSWER_S)
    assert value == 9
    assert again != pid
    ray.get(replica.make.remote(), timeout=ANSWER_S)
    ray.kill(replica)
    clamor.init(session=NAME)
    assert clamor.open("by a replica").get().sum() == 100000


def test_what_tasks_of_an_attached_driver_make_is_in_it(cluster: LocalCluster, kept: str) -> None:
    @ray.remote(num_cpus=0, resources={node_resource(1): 0.001})
    def make() -> tuple[int, str]:
        clamor.put(np.ones(10**5), name="by a task")
        return int(clamor.open("index").get()[5]), clamor.init().scope

    clamor.init(session=NAME)
    assert ray.get(make.remote(), timeout=ANSWER_S) == (5, kept)
    assert clamor.open("by a task").get().sum() == 100000


def test_two_drivers_that_make_it_at_once_share_it(cluster: LocalCluster, tmp_path: Path) -> None:
    script = (
        BEGIN
        + """
open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.005)
found = clamor.init(session="kept", lifetime="detached")
ref = clamor.get_or_create("one", lambda: np.zeros(10**5))
clamor.add_at(ref, [0], 1)
print(found.scope)
"""
    )
    go = tmp_path / "go"
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / f"ready{i}"), str(go)],
            cwd=ROOT,
            env=os.environ | cluster.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        until(lambda: all((tmp_path / f"ready{i}").exists() for i in range(2)), 60)
        go.touch()
        scopes = {driver.communicate(timeout=ANSWER_S)[0].strip() for driver in drivers}
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()
    assert scopes == {clamor.init(session=NAME).scope}
    assert clamor.open("one").get()[0] == 2
    clamor.shutdown(session=NAME)


def test_what_cannot_be_attached_to_says_why(cluster: LocalCluster, kept: str) -> None:
    with pytest.raises(errors.NoSuchSessionError, match=r"'misspelt'.*lifetime='detached'"):
        clamor.init(session="misspelt")
    with pytest.raises(ValueError, match="'sieve'"):
        clamor.init(session=NAME, cache_policy="lru")
    with pytest.raises(ValueError, match="a detached session has a name"):
        clamor.init(lifetime="detached")
    with pytest.raises(ValueError, match="'forever'"):
        clamor.init(session=NAME, lifetime="forever")
    with pytest.raises(ValueError, match="1 to 200 characters"):
        clamor.init(session="")
    with pytest.raises(errors.NoSuchSessionError, match="'misspelt'"):
        clamor.shutdown(session="misspelt")
    with pytest.raises(errors.NotInitializedError):
        clamor.variables()
    clamor.init()
    with pytest.raises(ValueError, match=r"clamor.shutdown\(\) before"):
        clamor.init(session=NAME)
    assert [info.name for info in clamor.sessions()] == [NAME, None]


def test_arrays_of_a_driver_that_detaches_are_still_read(cluster: LocalCluster, kept: str) -> None:
    @ray.remote(num_cpus=0, resources={node_resource(1): 0.001})
    def make() -> list[Any]:
        return [clamor.put(np.arange(10**6))]

    clamor.init(session=NAME)
    ref = clamor.put(np.arange(10**6))
    (far,) = ray.get(make.remote(), timeout=ANSWER_S)
    x, y = ref.get(), far.get()
    clamor.shutdown()
    assert int(x[7]) == 7
    assert int(y[10**5]) == 10**5
    assert y.sum() == x.sum()
    with pytest.raises(errors.NotInitializedError):
        ref.get()
    clamor.init(session=NAME)
    assert int(ref.get()[9]) == 9
    assert int(x[10]) == 10
    assert int(far.get()[11]) == 11
    assert int(y[12]) == 12


def test_a_reference_in_a_file_outlives_its_process_and_not_the_session(
    cluster: LocalCluster, kept: str, tmp_path: Path
) -> None:
    path = tmp_path / "ref"
    other_driver(
        cluster,
        f"""
import pickle
clamor.init(session="kept")
with open({str(path)!r}, "wb") as file:
    pickle.dump(clamor.open("index"), file)
""",
    )
    clamor.init(session=NAME)
    assert pickle.loads(path.read_bytes()).get()[3] == 3
    clamor.shutdown(session=NAME)
    clamor.init(session=NAME, lifetime="detached")
    with pytest.raises(errors.SessionEndedError, match=kept):
        pickle.loads(path.read_bytes()).get()


def test_another_driver_ends_it(cluster: LocalCluster, kept: str) -> None:
    clamor.init(session=NAME)
    x = clamor.open("index").get()
    assert int(x[3]) == 3
    other_driver(cluster, "clamor.shutdown(session='kept')\n")
    assert int(x[3]) == 3

    def put() -> bool:
        clamor.put(np.zeros(10**5))
        return False

    with pytest.raises(errors.SessionEndedError, match="kept has ended"):
        until(put, ANSWER_S)
    assert clamor.init(session=NAME, lifetime="detached").scope != kept
    assert int(clamor.put(np.arange(10**6)).get()[5]) == int(x[5]) == 5


def test_its_addresses_are_its_own_while_it_lives(cluster: LocalCluster, kept: str) -> None:
    assert not has_ended(kept)
    clamor.shutdown(session=NAME)
    assert has_ended(kept)


def test_it_ends_with_the_node_of_its_registry(cluster: LocalCluster) -> None:
    """And the name can be used again."""

    @ray.remote(num_cpus=0)
    def make() -> str:
        scope = clamor.init(session=NAME, lifetime="detached").scope
        clamor.put(np.zeros(10**5), name="lost")
        return scope

    index = cluster.add_node()
    made = make.options(resources={node_resource(index): 0.001}).remote()
    scope = ray.get(made, timeout=ANSWER_S)
    clamor.init(session=NAME)
    ref = clamor.open("lost")
    cluster.kill_node(index)

    def put() -> bool:
        try:
            clamor.put(np.zeros(10**5))
        except errors.SessionEndedError:
            return True
        except errors.ClamorError:  # Ray does not know yet
            pass
        return False

    until(put, ANSWER_S)
    assert clamor.init(session=NAME, lifetime="detached").scope != scope
    with pytest.raises(errors.SessionEndedError):
        ref.get()
    until(lambda: not of_scope(scope), ANSWER_S)  # page servers of other nodes hear of it, too
    clamor.shutdown(session=NAME)


@ray.remote(num_cpus=0)
class Member:
    """An actor of a driver that is attached by name; it does not attach itself."""

    def work(self) -> tuple[int, int, int]:
        far = clamor.open("index").get()
        held = [clamor.put(np.arange(10**5)).get() for _ in range(20)]
        clamor.prefetch(far[:10])
        clamor.prefetch(held[0][:10])
        assert int(held[0][7]) == int(far[7]) == 7
        n_sessions = len(process_sessions.sessions())
        return n_sessions, threading.active_count(), len(os.listdir("/proc/self/fd"))


def test_a_worker_of_an_attached_driver_has_one_part(cluster: LocalCluster, kept: str) -> None:
    clamor.init(session=NAME)
    member = Member.options(resources={node_resource(1): 0.001}).remote()
    n_sessions, n_threads, n_fds = ray.get(member.work.remote(), timeout=ANSWER_S)
    assert n_sessions == 1
    again = ray.get(member.work.remote(), timeout=ANSWER_S)
    assert again[0] == 1
    assert again[1] <= n_threads + 5
    assert again[2] <= n_fds + 30  # a descriptor for each variable of the second time
    ray.kill(member)


def test_a_task_that_attaches_does_so_for_itself(cluster: LocalCluster, kept: str) -> None:
    @ray.remote(num_cpus=0, resources={node_resource(1): 0.001}, max_calls=0)
    def attach() -> tuple[int, int]:
        clamor.init(session=NAME)
        clamor.put(np.ones(10**5), name="of the task")
        return os.getpid(), int(clamor.open("index").get()[4])

    @ray.remote(num_cpus=0, resources={node_resource(1): 0.001}, max_calls=0)
    def plain() -> tuple[int, str]:
        clamor.put(np.ones(10**5), name=f"of {os.getpid()}")
        return os.getpid(), clamor.init().scope

    own = clamor.init().scope
    pid, value = ray.get(attach.remote(), timeout=ANSWER_S)
    assert value == 4

    def same_worker() -> bool:
        other, scope = ray.get(plain.remote(), timeout=ANSWER_S)
        assert scope == own
        clamor.free(clamor.open(f"of {other}"))
        return other == pid

    until(same_worker, ANSWER_S)
    clamor.shutdown()
    clamor.init(session=NAME)
    assert {"index", "of the task"} <= {info.name for info in clamor.variables()}


def test_the_end_of_one_leaves_the_other(cluster: LocalCluster, kept: str) -> None:
    @ray.remote(num_cpus=0, resources={node_resource(1): 0.001})
    def scope() -> str:
        return clamor.init().scope

    other = clamor.init(session="other", lifetime="detached").scope
    clamor.init(session=NAME)
    x = clamor.open("index").get()
    assert ray.get(scope.remote(), timeout=ANSWER_S) == kept
    clamor.shutdown(session="other")
    assert ray.get(scope.remote(), timeout=ANSWER_S) == kept
    second = clamor.init(session="other", lifetime="detached").scope
    assert second != other
    assert ray.get(scope.remote(), timeout=ANSWER_S) == second
    clamor.shutdown(session="other")
    assert clamor.put(np.zeros(10**5))._scope == kept
    assert ray.get(scope.remote(), timeout=ANSWER_S) == kept
    assert int(x[8]) == 8


def test_init_begins_anew_where_another_has_ended_it(cluster: LocalCluster, kept: str) -> None:
    clamor.init(session=NAME)
    other_driver(cluster, "clamor.shutdown(session='kept')\n")
    assert clamor.init().session is None
    assert int(clamor.put(np.arange(10**5)).get()[5]) == 5


def test_who_dies_while_it_ends_a_session_leaves_the_name(cluster: LocalCluster, kept: str) -> None:
    registry = ray.get_actor("session-kept", namespace="clamor")
    ray.get(registry.shutdown.remote(), timeout=ANSWER_S)  # and is killed before it kills that
    assert NAME not in [info.name for info in clamor.sessions()]
    assert clamor.init(session=NAME, lifetime="detached").scope != kept


def test_a_session_that_hangs_can_be_ended(
    cluster: LocalCluster, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = ray.get_actor("session-kept", namespace="clamor")
    pid = ray.get(registry.ping.remote(), timeout=ANSWER_S)
    monkeypatch.setenv("CLAMOR_CONTROL_TIMEOUT_S", "2")
    stop(pid)
    try:
        clamor.shutdown(session=NAME)
        until(lambda: not of_scope(kept), ANSWER_S)
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGCONT)
    assert NAME not in [info.name for info in clamor.sessions()]


def test_other_threads_read_while_one_attaches_again(cluster: LocalCluster, kept: str) -> None:
    clamor.init(session=NAME)
    x = clamor.open("index").get()
    failed: list[BaseException] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            try:
                clamor.prefetch(x[:10])
            except BaseException as failure:
                failed.append(failure)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        clamor.init(session=NAME)
    is_over.set()
    reader.join(ANSWER_S)
    assert failed == []


def spans_of(cluster: LocalCluster, scope: str, process: str) -> list[str]:
    """The names of what a process has sent to the page server of node 0."""
    server = ray.get_actor(
        names.page_server_name(scope, cluster.node_ids[0]), namespace=names.NAMESPACE
    )
    (said,) = unpack(ray.get(server.spans.remote(), timeout=ANSWER_S))
    return [Span._make(each).name for who, _, spans in said if who == process for each in spans]


@pytest.mark.parametrize("end", ["", "ray.shutdown()"], ids=["exit", "ray.shutdown"])
def test_the_last_spans_of_a_driver_are_sent(cluster: LocalCluster, kept: str, end: str) -> None:
    """It ends a moment after them, and before the first look in a second."""
    said = other_driver(
        cluster,
        f"""
from clamor_ray._session import span_sender
span_sender.LAST_S = span_sender.INTERVAL_S = 100.0  # a machine may be busy
clamor.init(session="kept")
with clamor.update(clamor.open("index")) as x:
    x[3] = 0
    time.sleep(0.01)
print(ray.get_runtime_context().get_worker_id())
{end}
""",
    )
    (worker,) = driver_script.lines_of(said)
    assert "transaction" in spans_of(cluster, kept, f"driver:{worker}")


def test_a_page_server_that_hangs_is_not_waited_for_at_the_end(
    cluster: LocalCluster, kept: str
) -> None:
    clamor.init(session=NAME)
    ref = clamor.put(np.arange(10**6))
    pid = cluster.page_server_pid(0, scope=kept)
    stop(pid)
    try:
        record.here.note(kept, "the last", time.time_ns() - 10**9)
        clamor.shutdown()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not record.here.keeps(kept)
    clamor.init(session=NAME)
    assert int(ref.get()[5]) == 5


def test_without_its_cluster_it_says_so(cluster: LocalCluster, kept: str) -> None:
    said = other_driver(
        cluster,
        """
clamor.init(session="kept")
ray.shutdown()
try:
    clamor.open("index")
except clamor.NotInitializedError as error:
    print(error, ray.is_initialized())
""",
    )
    assert said.startswith("ray.shutdown() took the cluster"), said
    assert said.split()[-1] == "False"
