"""A node is lost with the home of variables: what comes back, from where, and what is said else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.cluster.test_timeline_lab import named, trace_of
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.processes import stop

pytestmark = [
    pytest.mark.lab,
    pytest.mark.filterwarnings("default::clamor_ray.errors.LostBlocksWarning"),
]

BLOCK = 4096
RESTED_S = 2.0  # more than a task's mapping rests
TASK_S = 90.0
LOST_S = 60.0
WORDS = BLOCK // 8
N_BLOCKS = 300
LARGE_WORDS = 4 << 20  # what takes milliseconds to be made again


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        clamor.init()
        yield lab


@pytest.fixture
def node(lab: LocalCluster) -> int:
    """A node that is there to be killed."""
    return lab.add_node(num_cpus=1, object_store_memory=150 << 20)


def on(index: int, function: Any, *arguments: Any) -> Any:
    import ray

    task = ray.remote(function).options(num_cpus=0, resources={node_resource(index): 0.01})
    return ray.get(task.remote(*arguments), timeout=TASK_S)


def content(seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(1, 1 << 62, N_BLOCKS * WORDS)


def put_content(seed: int = 1) -> Any:
    return clamor.put(content(seed))


def put_with_source(seed: int, ran: str) -> Any:
    def again() -> Any:
        with Path(ran).open("a") as file:
            file.write("x")
        return content(seed)

    return clamor.put(content(seed), source=again)


def read_all(ref: Any) -> Any:
    return np.array(ref.get())


def read_half(ref: Any) -> int:
    array = ref.get()
    clamor.prefetch(array[: len(array) // 2])
    return int(array[0])


def add_to(ref: Any, index: int, value: int) -> int:
    with clamor.update(ref) as array:
        array[index] += value
    return int(ref.refresh().version)


def home_of(ref: Any) -> str:
    (home,) = (node_id for node_id, entry in clamor.stats().region(ref).items() if entry.is_home)
    return str(home)


def test_what_others_have_read_comes_back_from_them(lab: LocalCluster, node: int) -> None:
    ref = on(node, put_content)
    expected = content()
    assert np.array_equal(on(1, read_all, ref), expected)
    assert add_to(ref, 5, 7) == 1  # by the driver's node
    expected[5] += 7
    assert np.array_equal(on(1, read_all, ref.refresh()), expected)
    lab.kill_node(node)
    assert np.array_equal(read_all(ref), expected)  # here, where little of it was
    assert home_of(ref) == lab.node_ids[1]
    # It goes on as any variable: on its home, and elsewhere.
    assert on(1, add_to, ref, 4 * WORDS, 3) == 2
    assert add_to(ref, 9 * WORDS, 1) == 3
    expected[4 * WORDS] += 3
    expected[9 * WORDS] += 1
    for index in (0, 1):
        assert np.array_equal(on(index, read_all, ref.refresh()), expected)
    # What was before the loss is gone with the home; what came after it is kept.
    with pytest.raises(errors.SnapshotExpired):
        clamor.prefetch(ref.at(0))
    assert int(on(0, read_all, ref.at(1))[9 * WORDS]) == expected[9 * WORDS] - 1
    # The new home's process may die as any.
    os.kill(lab.page_server_pid(1), 9)
    assert np.array_equal(on(1, read_all, ref), expected)
    assert add_to(ref, 0, 1) == 4
    clamor.free(ref)
    until(lambda: not clamor.stats().region(ref))


# ------------------------------------------- one node that takes variables of many tests with it


def read_in_part(lab: LocalCluster, node: int, folder: Path) -> Any:
    ref = on(node, put_content)
    on(1, read_half, ref)
    return ref


def read_at_its_beginning(lab: LocalCluster, node: int, folder: Path) -> Any:
    ref = on(node, put_content)
    assert on(1, first_word, ref) == first_word(ref)  # here, too, its first blocks are cached now
    return ref


def large_and_named(lab: LocalCluster, node: int, folder: Path) -> Any:
    ref = on(node, put_large)
    assert len(on(1, read_all, ref)) == LARGE_WORDS
    return ref


def put_large() -> Any:
    return clamor.put(np.arange(LARGE_WORDS), name="large")


def read_by_nobody(lab: LocalCluster, node: int, folder: Path) -> Any:
    return on(node, put_content)


def with_a_source(lab: LocalCluster, node: int, folder: Path) -> Any:
    """Block 20 is changed, and read: no source makes it, but somebody has it."""
    ref = on(node, put_with_source, 3, str(folder / "ran"))
    assert add_to(ref, 20 * WORDS, 5) == 1
    changed = content(3)[20 * WORDS] + 5
    assert on(1, lambda ref: int(ref.refresh().get()[20 * WORDS]), ref) == changed
    assert not (folder / "ran").exists()
    return ref


def changed_with_a_source(lab: LocalCluster, node: int, folder: Path) -> Any:
    ref = on(node, put_with_source, 4, str(folder / "not this one"))
    assert on(node, add_to, ref, 20 * WORDS, 5) == 1
    return ref


def with_another_source(kind: str) -> Any:
    def prepare(lab: LocalCluster, node: int, folder: Path) -> Any:
        ref = on(node, put_with_another, 5, kind)
        on(1, read_half, ref)
        return ref

    return prepare


def zeros(lab: LocalCluster, node: int, folder: Path) -> Any:
    ref = on(node, make_zeros)
    assert add_to(ref, 7 * WORDS, 9) == 1
    assert int(ref.refresh().get()[7 * WORDS]) == 9
    return ref


def shared(lab: LocalCluster, node: int, folder: Path) -> Any:
    import ray

    # Ray can make it again where the node is gone, so its task must be able to run elsewhere.
    make = ray.remote(content).options(
        num_cpus=0,
        max_retries=3,
        scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            lab.node_ids[node], soft=True
        ),
    )
    assert len(on(node, content)) == N_BLOCKS * WORDS  # until Ray knows the node it goes elsewhere
    ref = clamor.share(make.remote(6))
    assert home_of(ref) == lab.node_ids[node]
    assert int(ref.get()[0]) == int(content(6)[0])
    return ref


PREPARED = {
    "read in part": read_in_part,
    "read at its beginning": read_at_its_beginning,
    "large and named": large_and_named,
    "read by nobody": read_by_nobody,
    "with a source": with_a_source,
    "changed, with a source": changed_with_a_source,
    **{kind: with_another_source(kind) for kind in ("content", "shape", "raises")},
    "zeros": zeros,
    "shared": shared,
}


@dataclass(frozen=True)
class Fallen:
    """What a node took with it.

    Args:
        refs: of variables, by what had become of each before.
        folder: with a file "ran" once a source has run.
        began_s: when it ended, since the epoch of Unix.
        told_s: how long after that who asked was told what is lost.
    """

    refs: dict[str, Any]
    folder: Path
    began_s: float
    told_s: float


@pytest.fixture(scope="module")
def fallen(lab: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Fallen:
    """Each test has a variable of its own of it."""
    folder = tmp_path_factory.mktemp("fallen")
    node = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    refs = {name: prepare(lab, node, folder) for name, prepare in PREPARED.items()}
    began_s = time.time()
    lab.kill_node(node)
    begin = time.monotonic()
    with pytest.raises(errors.HomeLostError):
        clamor.prefetch(refs["read in part"])
    return Fallen(refs, folder, began_s, time.monotonic() - begin)


def test_blocks_on_no_node_are_named(fallen: Fallen) -> None:
    ref = fallen.refs["read in part"]
    with pytest.raises(errors.HomeLostError, match=rf"\d+ of {N_BLOCKS + 1} blocks") as caught:
        clamor.prefetch(ref)
    assert "source=" in caught.value.hint
    assert f"-{N_BLOCKS}" in caught.value.message  # up to the last
    assert "without a source" in caught.value.message
    assert fallen.told_s < LOST_S
    assert add_to(ref, 0, 1) == 1  # what others have is changed as ever
    clamor.free(ref)


def test_the_timeline_has_it(lab: LocalCluster, fallen: Fallen) -> None:
    ref = fallen.refs["large and named"]
    assert np.array_equal(read_all(ref), np.arange(LARGE_WORDS))
    trace = trace_of(lab, clamor.init().scope)
    (rebuild,) = named(trace, "rebuild large", f"clamor page server {lab.node_ids[1][:12]}")
    assert rebuild["cat"] == "clamor"
    assert rebuild["args"]["node_id"] == lab.node_ids[1]
    assert rebuild["dur"] > 0
    assert rebuild["ts"] >= fallen.began_s * 1e6
    assert rebuild["ts"] + rebuild["dur"] <= time.time() * 1e6
    clamor.free(ref)


def first_word(ref: Any) -> int:
    return int(ref.get()[0])


def prefetch_all(ref: Any) -> None:
    clamor.prefetch(ref)


def test_what_others_have_is_read_though_blocks_are_lost(fallen: Fallen) -> None:
    ref, word = fallen.refs["read at its beginning"], int(content()[0])
    for index in (0, 1):
        with pytest.raises(errors.HomeLostError, match=rf"\d+ of {N_BLOCKS + 1} blocks"):
            on(index, prefetch_all, ref)
        assert on(index, first_word, ref) == word
    assert add_to(ref, 0, 3) == 1
    for index in (0, 1):
        assert on(index, first_word, ref.refresh()) == word + 3
    clamor.free(ref)


def test_what_is_wholly_lost_is_not_opened(fallen: Fallen) -> None:
    """Else the next touch ends the process, and four workers with Ray's retries."""
    ref = fallen.refs["read by nobody"]
    with pytest.raises(errors.HomeLostError, match="blocks"):
        clamor.prefetch(ref)
    for attempt in (first_word, read_all):
        for index in (0, 1):
            until(lambda index=index, attempt=attempt: refused(index, attempt, ref))
    with pytest.raises(errors.HomeLostError, match=rf"{N_BLOCKS + 1} of {N_BLOCKS + 1} blocks"):
        ref.get()
    with pytest.raises(errors.HomeLostError, match="blocks"), clamor.update(ref) as array:
        array[0] = 1
    clamor.free(ref)


def refused(index: int, attempt: Any, ref: Any) -> bool:
    """Whether a process that opens it is told what is lost. It was told soon, not at once."""
    try:
        on(index, attempt, ref)
    except errors.HomeLostError as error:
        return f"of {N_BLOCKS + 1} blocks" in str(error)
    return False


def test_a_source_makes_blocks_that_are_on_no_node(fallen: Fallen) -> None:
    ref, expected = fallen.refs["with a source"], content(3)
    expected[20 * WORDS] += 5
    assert np.array_equal(read_all(ref.refresh()), expected)
    assert (fallen.folder / "ran").read_text() == "x"
    assert add_to(ref, 21 * WORDS, 5) == 2
    clamor.free(ref)


def test_what_a_commit_changed_no_source_makes(fallen: Fallen) -> None:
    ref = fallen.refs["changed, with a source"]
    with pytest.raises(errors.HomeLostError, match=r"1 of .* blocks \(21\).*commits have changed"):
        clamor.prefetch(ref.refresh())
    clamor.free(ref)


def retained_layers(lab: LocalCluster, *indices: int) -> int:
    """On these nodes."""
    ids = [lab.node_ids[index] for index in indices]
    return sum(node.engine.retained_layers for node in clamor.stats().nodes if node.node_id in ids)


def test_what_was_committed_just_now_is_at_its_writers(
    lab: LocalCluster, node: int, tmp_path: Path
) -> None:
    """Nobody has read it, and no source makes it."""
    before = retained_layers(lab, 0, 1)
    written = []
    for index in (0, 1):
        ref, expected = (
            on(node, put_with_source, 12 + index, str(tmp_path / "ran")),
            content(12 + index),
        )
        for version, block in enumerate((20, 21, 20), 1):
            assert on(index, add_to, ref, block * WORDS, 5) == version
            expected[block * WORDS] += 5
        written.append((ref, expected))
    lab.kill_node(node)
    for ref, expected in written:
        assert np.array_equal(read_all(ref.refresh()), expected)
        assert add_to(ref, 0, 1) == 4
        clamor.free(ref)
    until(lambda: retained_layers(lab, 0, 1) <= before)


def put_with_another(seed: int, kind: str) -> Any:
    def again() -> Any:
        if kind == "raises":
            raise KeyError("the file is gone")
        return content(seed + 1) if kind == "content" else content(seed)[:-1]

    return clamor.put(content(seed), source=again)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("content", "differs from what another node has"),
        ("shape", "differs from what was put"),
        ("raises", "the file is gone"),
    ],
)
def test_a_source_that_does_not_make_it_again(fallen: Fallen, kind: str, text: str) -> None:
    ref = fallen.refs[kind]
    with pytest.raises(errors.HomeLostError, match=text):
        clamor.prefetch(ref)
    clamor.free(ref)


def make_zeros() -> Any:
    return clamor.zeros(N_BLOCKS * WORDS, np.int64)


def test_zeros_are_made_again(fallen: Fallen) -> None:
    ref, expected = fallen.refs["zeros"], np.zeros(N_BLOCKS * WORDS, np.int64)
    expected[7 * WORDS] = 9
    for index in (0, 1):
        assert np.array_equal(on(index, read_all, ref.refresh()), expected)
    clamor.free(ref)


def test_a_shared_object_is_brought_again(fallen: Fallen) -> None:
    ref = fallen.refs["shared"]
    assert np.array_equal(on(1, read_all, ref), content(6))
    assert add_to(ref, 1, 1) == 1
    clamor.free(ref)


# ------------------------------------------------------------------- a node for one test


def stopped_reader(ref: Any, mapped: str, go: str) -> Any:
    array = ref.get()
    Path(mapped).touch()
    deadline = time.monotonic() + TASK_S
    while not Path(go).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return np.array(array)


def test_threads_that_wait_for_a_block_go_on(lab: LocalCluster, node: int, tmp_path: Path) -> None:
    import ray

    ref = on(node, put_content, 8)
    assert np.array_equal(on(1, read_all, ref), content(8))
    go = tmp_path / "go"
    answers = {}
    for trap in ("uffd", "sigsegv"):
        task = ray.remote(stopped_reader).options(
            num_cpus=0,
            max_retries=0,
            resources={node_resource(0): 0.01},
            runtime_env={"env_vars": {"CLAMOR_TRAP": trap}},
        )
        answers[trap] = task.remote(ref, str(tmp_path / trap), str(go))
    for trap in answers:
        until((tmp_path / trap).exists, TASK_S)
    lab.kill_node(node)
    go.touch()
    for answer in answers.values():
        assert np.array_equal(ray.get(answer, timeout=TASK_S), content(8))
    clamor.free(ref)


def test_both_homes_are_lost(lab: LocalCluster, node: int) -> None:
    second = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    ref = on(node, put_content, 9)
    assert np.array_equal(on(second, read_all, ref), content(9))
    on(1, read_half, ref)
    lab.kill_node(node)
    assert np.array_equal(read_all(ref), content(9))
    assert home_of(ref) == lab.node_ids[second]
    lab.kill_node(second)
    assert np.array_equal(on(1, read_all, ref), content(9))
    assert add_to(ref, 3, 3) == 1
    clamor.free(ref)


def test_what_was_committed_just_now_outlives_a_restart_of_its_writers_server(
    lab: LocalCluster, node: int, tmp_path: Path
) -> None:
    """Nobody there uses the variable any more, so nobody has said to the new process what it is."""
    before = retained_layers(lab, 1)
    ref = on(node, put_with_source, 14, str(tmp_path / "ran"))
    expected = content(14)
    assert on(1, add_to, ref, 20 * WORDS, 5) == 1
    expected[20 * WORDS] += 5
    until(lambda: retained_layers(lab, 1) > before)
    time.sleep(RESTED_S)
    server = lab.page_server_pid(1)
    os.kill(server, signal.SIGKILL)
    until(lambda: lab.page_server_pid(1, TASK_S) != server)
    lab.kill_node(node)
    assert np.array_equal(read_all(ref.refresh()), expected)
    clamor.free(ref)
    until(lambda: retained_layers(lab, 1) <= before)


def registry_pid() -> int:
    import ray

    from clamor_ray._session import process_sessions

    return int(ray.get(process_sessions.current().registry.ping.remote(), timeout=TASK_S))


def test_a_commit_waits_for_the_new_home(lab: LocalCluster, node: int) -> None:
    """Once before any home has fetched, once where the lost home had, and another one had not."""
    ref = on(node, put_content)
    other = on(1, put_content, 2)
    expected, others = content(), content(2)
    assert np.array_equal(read_all(ref), expected)
    assert np.array_equal(read_all(other), others)
    transaction = clamor.transaction(ref, other)
    first, second = transaction.begin()
    first[7] = expected[7] = 70
    second[8] = others[8] = 80
    stopped = lab.page_server_pid(1)
    stop(stopped)
    try:
        with futures.ThreadPoolExecutor(1) as pool:
            committing = pool.submit(transaction.commit)
            time.sleep(1.0)  # the home that is not stopped fetches its layer within milliseconds
            lab.kill_node(node)
            time.sleep(1.0)
            assert not committing.done()
            os.kill(stopped, signal.SIGCONT)
            assert committing.result(timeout=TASK_S) == (1, 1)
    finally:
        os.kill(stopped, signal.SIGCONT)
    for index in (0, 1):
        assert np.array_equal(on(index, read_all, ref.refresh()), expected)
        assert np.array_equal(on(index, read_all, other.refresh()), others)
    clamor.free(other)
    # The new home is lost, too: nothing of the next commit was fetched.
    last = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    clamor.free(ref)
    ref = on(last, put_content)
    assert np.array_equal(read_all(ref), content())
    transaction = clamor.update(ref)
    array = transaction.begin()
    array[9] = 90
    lab.kill_node(last)
    assert transaction.commit() == (1,)
    assert int(on(1, read_all, ref.refresh())[9]) == 90
    clamor.free(ref)


def test_the_registry_dies_after_a_rebuild_and_before_one(
    lab: LocalCluster, node: int, tmp_path: Path
) -> None:
    second = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    ran = tmp_path / "ran"
    ref = on(node, put_with_source, 10, str(ran))
    assert np.array_equal(on(second, read_all, ref), content(10))
    lab.kill_node(node)
    assert np.array_equal(read_all(ref), content(10))
    os.kill(registry_pid(), 9)
    # The journal has the new home,
    assert np.array_equal(on(1, read_all, ref), content(10))
    assert add_to(ref, 3, 3) == 1
    assert int(ref.refresh().get()[3]) == content(10)[3] + 3
    assert not ran.exists()
    clamor.free(ref)
    # and the sources.
    ref = on(second, put_with_source, 11, str(ran))
    os.kill(registry_pid(), 9)
    lab.kill_node(second)
    assert np.array_equal(read_all(ref), content(11))
    assert ran.read_text() == "x"
    clamor.free(ref)
