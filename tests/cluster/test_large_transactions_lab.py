"""Transactions over spread variables that are larger than what this node keeps of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from clamor_ray._write import window
from tests.cluster.test_moves_lab import on
from tests.cluster.test_spread_build_lab import own_bytes, regions_there
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.pieces import homes_of_pieces
from tests.support.lab.troubles import server_pid

pytestmark = pytest.mark.lab

N = 3_000_000  # of 8 bytes: 12 pieces of 2 MiB
MIB = 1 << 20


@pytest.fixture(scope="module")
def three() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init(cache_bytes="32MiB")  # a quarter of it is for layers of commits that were made
        try:
            yield lab
        finally:
            clamor.shutdown()


@pytest.fixture(autouse=True)
def nothing_stays(three: LocalCluster) -> Iterator[None]:
    """No layer, and no scratch variable."""
    before = regions_there()
    yield
    until(lambda: not layers(), 60.0)
    until(lambda: not regions_there() - before, 60.0)


def layers() -> int:
    return sum(node.engine.layers for node in clamor.stats().nodes)


def budget(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(window, "write_budget_bytes", lambda config, has_bytes: n_bytes)


def write_some(rng: np.random.Generator, array: Any, expected: Any) -> None:
    value = int(rng.integers(1 << 30))
    if rng.random() < 0.5:
        first = int(rng.integers(0, N))
        n = int(rng.integers(1, N // 2))
        array[first : first + n] = expected[first : first + n] = value
    else:
        some = rng.integers(0, N, 30)
        array[some] += value
        expected[some] = array[some]


def set_one(ref: Any, index: int, value: int) -> None:
    with clamor.update(ref) as array:
        array[index] = value


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_random_writes_flushes_aborts_and_conflicts(three: LocalCluster, seed: int) -> None:
    """Against a plain array: each version is what the commits before it have written."""
    rng = np.random.default_rng(seed)
    ref = clamor.put(np.arange(N), home="spread")
    versions = [np.arange(N)]
    for step in range(6):
        mine = versions[-1].copy()
        change = clamor.update(ref)
        array = change.begin()
        for _ in range(int(rng.integers(1, 5))):
            write_some(rng, array, mine)
            if rng.random() < 0.6:
                change.flush()
            at = int(rng.integers(0, N))
            assert np.array_equal(array[at : at + 9000], mine[at : at + 9000])
        assert np.array_equal(array, mine)
        del array
        if step % 3 == 0:
            change.abort()
        elif step % 3 == 1:
            assert change.commit() == (len(versions),)
            versions.append(mine)
        else:
            changed = np.flatnonzero(mine != versions[-1])
            other = versions[-1].copy()
            other[changed[0]] = -7
            on(1, set_one, ref, int(changed[0]), -7)
            versions.append(other)
            with pytest.raises(errors.CommitConflict):
                change.commit()
            assert change.status == "aborted"
        del change
        assert ref.refresh().version == len(versions) - 1
        assert np.array_equal(ref.get(), versions[-1])
    for number, content in enumerate(versions):
        assert np.array_equal(ref.at(number).get(), content)
    assert np.array_equal(on(2, lambda ref: np.array(ref.get()), ref), versions[-1])


def test_it_is_four_times_as_large_as_what_may_be_here(
    three: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget_bytes = N * 8 // 4
    budget(monkeypatch, budget_bytes)
    ref = clamor.zeros((N // 8, 8), home="spread")
    least, most, parts = own_bytes(), 0, 0
    change = clamor.update(ref)
    with change as x:
        for rows in change.chunks():
            x[rows] = np.arange(rows.start, rows.stop)[:, None]
            most, parts = max(most, own_bytes() - least), parts + 1
        assert float(x[5, 0]) == 5.0
        assert change.flush() > 0
    assert parts >= 8 * 4
    assert most < budget_bytes + 3 * MIB
    assert ref.version == 1
    assert np.array_equal(ref.get()[:, 3], np.arange(N // 8))


GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 110 * MIB  # for layers of pieces that are homed here, too: a third of all
WRITTEN_BYTES = 160 * MIB  # ten times the budget


def write_in_a_group(ref: Any, sends: bool) -> int:
    """In a memory cgroup of this process alone: what was charged before is not counted."""
    group = GROUPS / f"clamor-test-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    with contextlib.suppress(OSError):  # no such file where nothing is swapped
        (group / "memory.memsw.limit_in_bytes").write_text(str(LIMIT_BYTES))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    window.write_budget_bytes = lambda config, has_bytes: 16 * MIB
    if not sends:
        window.Window.send = lambda window, before_bytes=None: 0  # type: ignore[method-assign]
    try:
        change = clamor.update(ref)
        with change as x:
            for rows in change.chunks():
                x[rows] = np.arange(rows.start, rows.stop)
        return int((group / "memory.max_usage_in_bytes").read_text())
    finally:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))


def groups_can_be_made() -> bool:
    folder = GROUPS / f"clamor-test-{os.getpid()}"
    try:
        folder.mkdir()
        folder.rmdir()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not groups_can_be_made(), reason="needs a memory cgroup (version 1), as root")
def test_where_the_kernel_ends_it_without_flushes(three: LocalCluster) -> None:
    import ray

    n = WRITTEN_BYTES // 8
    ref = clamor.put(np.ones(n, np.int64), home="spread")
    task = ray.remote(max_retries=0)(write_in_a_group)
    try:
        assert 0 < ray.get(task.remote(ref, True), timeout=120) <= LIMIT_BYTES
        assert ref.refresh().version == 1
        assert np.array_equal(ref.get(), np.arange(n))
        with pytest.raises((ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError)):
            ray.get(task.remote(ref, False), timeout=120)
        assert ref.refresh().version == 1
    finally:
        for group in GROUPS.glob("clamor-test-*"):
            until(lambda group=group: not (group / "cgroup.procs").read_text(), 60.0)
            group.rmdir()


def test_a_commit_beyond_the_budget_goes_in_turn(
    three: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a flush: layers go to their homes one by one, so no more than two are here."""
    budget(monkeypatch, MIB)
    ref = clamor.zeros(N, np.int64, home="spread")
    most = 0
    session = process_sessions.current()
    bring = session.rpc.bring

    def counted(request: Any, **options: Any) -> int:
        nonlocal most
        home = bring(request, **options)
        here = next(each for each in clamor.stats().nodes if each.node_id == session.node_id)
        most = max(most, here.engine.layer_bytes)
        return home

    monkeypatch.setattr(session.rpc, "bring", counted)
    with clamor.update(ref) as x:
        x[:] = 5
    assert 0 < most < N * 8 // 2
    assert ref.version == 1
    assert int(ref.get().min()) == 5


def test_several_variables_one_commit(three: LocalCluster) -> None:
    big, small = clamor.zeros(N, np.int64, home="spread"), clamor.put(np.zeros(1000))
    change = clamor.transaction(big, small)
    with change as (x, y):
        x[:] = 1
        y[:] = 1
        assert N * 8 <= change.flush() < N * 8 + 2 * 4096  # whole blocks of one of the two
        assert change.flush() == 0
        y[0] = 2
    assert (int(big.get().sum()), float(small.get().sum())) == (N, 1001.0)
    change = clamor.transaction(big, small)
    change.begin()
    with pytest.raises(TypeError, match="one variable"):
        change.chunks()
    change.abort()
    with pytest.raises(errors.ClosedError):
        change.flush()


def flush_and_die(ref: Any, moment: str) -> None:
    if moment == "commit":
        session = process_sessions.current(ref._scope)

        def die(request: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

        session.rpc.commit = die  # type: ignore[method-assign]
    change = clamor.update(ref)
    with change as x:
        x[:] = -1
        if moment == "commit":
            window.write_budget_bytes = lambda config, has_bytes: MIB
        else:
            change.flush()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", ["flush", "commit"])
def test_a_writer_that_is_killed_leaves_nothing(three: LocalCluster, moment: str) -> None:
    """After what it wrote was sent away; and when all layers are at their homes."""
    import ray

    ref = clamor.put(np.arange(N), home="spread")
    before = regions_there()
    env = {"env_vars": {"CLAMOR_CONTROL_TIMEOUT_S": "10"}}
    task = ray.remote(max_retries=0, runtime_env=env)(flush_and_die)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(task.remote(ref, moment), timeout=90)
    until(lambda: regions_there() <= before, 60.0)
    until(lambda: not layers(), 60.0)
    assert ref.refresh().version == 0
    assert np.array_equal(ref.get(), np.arange(N))
    with clamor.update(ref) as x:
        x[0] = 7
    assert int(ref.get()[0]) == 7


def kill_servers(three: LocalCluster) -> None:
    for node in range(3):
        os.kill(server_pid(three, node), signal.SIGKILL)


def kill_registry(three: LocalCluster) -> None:
    os.kill(process_sessions.current().rpc.ping(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("moment", "kill"),
    [
        ("flush", kill_servers),
        pytest.param("flush", kill_registry, marks=pytest.mark.soak),
        pytest.param("bring", kill_servers, marks=pytest.mark.soak),
        ("bring", kill_registry),
        ("commit", kill_servers),
        ("commit", kill_registry),
    ],
)
def test_servers_and_the_registry_are_killed_at_each_step(
    three: LocalCluster,
    monkeypatch: pytest.MonkeyPatch,
    kill: Callable[[LocalCluster], None],
    moment: str,
) -> None:
    """Between two flushes; when half of the layers are at their homes; when all are."""
    session = process_sessions.current()
    ref = clamor.put(np.arange(N), home="spread")
    expected = np.arange(N)
    calls = 0
    if moment != "flush":
        call = getattr(session.rpc, moment)

        def killed(request: Any, **options: Any) -> Any:
            nonlocal calls
            is_ours = ref._region + 1 in [write.region for write in request.writes] or calls
            calls += bool(is_ours)
            if calls == 1:
                kill(three)
            return call(request, **options)

        monkeypatch.setattr(session.rpc, moment, killed)
    change = clamor.update(ref)
    with change as x:
        x[: N // 2] = expected[: N // 2] = -1
        change.flush()
        if moment == "flush":
            kill(three)
        x[N // 3 :: 7] = expected[N // 3 :: 7] = -2
        change.flush()
        x[9] = expected[9] = -3
        assert np.array_equal(x, expected)
    assert calls or moment == "flush"
    assert ref.version == 1
    assert np.array_equal(ref.get(), expected)
    assert np.array_equal(ref.at(0).get(), np.arange(N))
    del x
    change = None  # type: ignore[assignment]
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline and any(
        info.region > ref._region for info in clamor.variables()
    ):
        time.sleep(0.2)
    with contextlib.suppress(errors.FreedError):
        ref.free()


def change_in_parts(ref: Any, expected: Any) -> None:
    """Parts are sent, written again after that, and written last, so that they are not sent."""
    change = clamor.update(ref)
    with change as x:
        x[: N // 2] = expected[: N // 2] = -1
        assert change.flush() > 0
        x[N // 3 :: 7] = expected[N // 3 :: 7] = -2
        assert change.flush() > 0
        x[9] = expected[9] = -3
        x[N // 2 : N // 2 + 90_000] = expected[N // 2 : N // 2 + 90_000] = -4


def change_by_chunks(ref: Any, expected: Any) -> None:
    change, n_parts = clamor.update(ref), 0
    with change as x:
        for rows in change.chunks():
            x[rows] += rows.start
            expected[rows] += rows.start
            n_parts += 1
    assert n_parts > 8


@pytest.mark.parametrize("level", ["raid1", "raid5"])
def test_what_it_changes_survives_the_loss_of_a_node(
    three: LocalCluster, monkeypatch: pytest.MonkeyPatch, level: Any
) -> None:
    """Parities and copies get what changes of pieces that were sent away, and may be sent again."""
    budget(monkeypatch, 4 * MIB)
    victim = three.add_node(num_cpus=1, object_store_memory=150 << 20)
    versions = [np.random.default_rng(4).integers(0, 1 << 60, N)]
    ref = clamor.put(versions[0], redundancy=level)
    assert victim in homes_of_pieces(three, ref)
    for change in (change_in_parts, change_by_chunks):
        versions.append(versions[-1].copy())
        change(ref, versions[-1])
    assert ref.version == 2
    three.kill_node(victim)
    assert np.array_equal(on(1, lambda ref: np.array(ref.get()), ref), versions[-1])
    until(lambda: victim not in homes_of_pieces(three, ref), 90.0)
    for number, content in enumerate(versions):
        assert np.array_equal(ref.at(number).get(), content), number
        assert np.array_equal(on(2, lambda ref: np.array(ref.get()), ref.at(number)), content)
    ref.free()
