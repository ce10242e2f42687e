"""A node is lost with blocks that nobody else has: those are lost, and all others are not."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from tests.cluster.test_rebuild_lab import (
    N_BLOCKS,
    TASK_S,
    WORDS,
    add_to,
    content,
    on,
    prefetch_all,
    put_content,
    put_with_source,
    read_all,
)
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource

pytestmark = [
    pytest.mark.lab,
    pytest.mark.filterwarnings("default::clamor_ray.errors.LostBlocksWarning"),
]

LONG = (pytest.mark.soak, pytest.mark.timeout(1200))  # for `make soak`
LOST = 20  # the block of the array; one more in the region, behind the pickle stream
SAID = rf"1 of {N_BLOCKS + 1} blocks \({LOST + 1}\)"


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


SEEDS = (1, 2, 3, 5, 6)  # of the variables that a node takes with it, one for each test
WITH_SOURCE = 4  # likewise, of the one that has a source


@pytest.fixture(scope="module")
def lost(lab: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """References by seed: of each variable one block is lost, with its node. And what a source
    writes when it runs."""
    node = lab.add_node(num_cpus=1, object_store_memory=150 << 20)
    refs = {}
    for seed in SEEDS:
        refs[seed] = on(node, put_content, seed)
        assert np.array_equal(on(1, read_all, refs[seed]), content(seed))
    ran = tmp_path_factory.mktemp("lost") / "ran"
    refs[WITH_SOURCE] = on(node, put_with_source, WITH_SOURCE, str(ran))
    for ref in refs.values():
        assert on(node, add_to, ref, LOST * WORDS, 1) == 1  # which nobody has read yet
    lab.kill_node(node)
    return {"ran": ran, **{seed: ref.refresh() for seed, ref in refs.items()}}


def of(lost: dict[Any, Any], seed: int) -> tuple[Any, Any]:
    """(reference, content but for the lost block, which holds what it was put with)"""
    return lost[seed], content(seed)


def around(ref: Any) -> Any:
    """All of the array but the lost block."""
    array = ref.get()
    return np.concatenate([array[: LOST * WORDS], array[(LOST + 1) * WORDS :]])


def around_is(ref: Any, expected: Any) -> bool:
    parts = [expected[: LOST * WORDS], expected[(LOST + 1) * WORDS :]]
    return all(np.array_equal(on(index, around, ref), np.concatenate(parts)) for index in (0, 1))


def test_one_block_of_many(lab: LocalCluster, lost: dict[Any, Any]) -> None:
    ref, expected = of(lost, 1)
    for index in (0, 1):
        with pytest.raises(errors.HomeLostError, match=SAID) as caught:
            on(index, prefetch_all, ref)
        assert f"variable {ref._region}" in str(caught.value)
        assert "update(ref, lost=0)" in str(caught.value)
    assert around_is(ref, expected)
    # All others are changed as ever, from everywhere.
    for index, block in ((0, 3), (1, 4)):
        on(index, add_to, ref, block * WORDS, 5)
        expected[block * WORDS] += 5
        assert around_is(ref.refresh(), expected)
    # A gather says what it asked for.
    with pytest.raises(errors.HomeLostError, match=SAID):
        clamor.gather(ref, [LOST * WORDS + 7])
    assert clamor.gather(ref, [7])[0] == expected[7]
    # The registry knows it after a restart.
    os.kill(registry_pid(), 9)
    for index in (0, 1):
        with pytest.raises(errors.HomeLostError, match=SAID):
            on(index, prefetch_all, ref)
    # And so does the new home after one of its own.
    os.kill(lab.page_server_pid(1), 9)
    for index in (0, 1):
        with pytest.raises(errors.HomeLostError, match=SAID):
            on(index, prefetch_all, ref)
    assert around_is(ref, expected)
    clamor.free(ref)
    until(lambda: not clamor.stats().region(ref))


def registry_pid() -> int:
    return int(process_sessions.current().rpc.ping())


def write_lost(ref: Any, value: int) -> int:
    with clamor.update(ref, lost=value) as array:
        array[LOST * WORDS + 5] = 17
    return int(ref.refresh().version)


@pytest.mark.parametrize(("index", "value", "seed"), [(0, 0, 2), (1, 3, 5)])
def test_a_commit_makes_a_lost_block_whole(
    lab: LocalCluster, lost: dict[Any, Any], index: int, value: int, seed: int
) -> None:
    ref, expected = of(lost, seed)
    before = ref.snapshot()
    with pytest.raises(errors.HomeLostError, match=SAID):
        clamor.prefetch(ref)
    version = on(index, write_lost, ref, value)
    expected[LOST * WORDS : (LOST + 1) * WORDS] = int.from_bytes(bytes([value] * 8), "little")
    expected[LOST * WORDS + 5] = 17
    for reader in (0, 1):
        assert np.array_equal(on(reader, read_all, ref.refresh()), expected)
    assert ref.version == version == 2
    # From that version on; before it stays lost.
    with pytest.raises(errors.HomeLostError, match=f"variable {ref._region}"):
        clamor.prefetch(before)
    assert process_sessions.current().rpc.lost_blocks(ref._region) is None
    os.kill(lab.page_server_pid(1), 9)
    for reader in (0, 1):
        assert np.array_equal(on(reader, read_all, ref), expected)
    # Where nothing is lost it changes nothing.
    assert on(index, write_lost, ref, 9) == version + 1
    assert np.array_equal(read_all(ref.refresh()), expected)
    clamor.free(ref)


def test_a_source_makes_the_rest(lost: dict[Any, Any]) -> None:
    ref, expected = of(lost, WITH_SOURCE)
    with pytest.raises(errors.HomeLostError, match=rf"{SAID}.*commits have changed"):
        clamor.prefetch(ref)
    assert around_is(ref, expected)
    assert lost["ran"].read_text() == "x"
    clamor.free(ref)


def test_a_byte_is_a_byte(lab: LocalCluster) -> None:
    ref = clamor.put(np.arange(5000))
    for value in (-1, 256):
        with pytest.raises(ValueError, match="byte"):
            clamor.update(ref, lost=value)
    clamor.free(ref)


def said_by_each_way(ref: Any) -> list[str]:
    """What each way of opening it says where warnings are errors; and how often it warns else."""
    import asyncio
    import warnings

    from clamor_ray._read import losses

    losses._told.clear()  # this worker may have run another task
    ways = (
        ref.get,
        lambda: clamor.update(ref).begin(),
        lambda: ref.at(1),
        lambda: asyncio.run(clamor.aio.get(ref)),
        lambda: ref._open(again=True),  # as an argument of a task is opened
    )
    said = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.LostBlocksWarning)
        for way in ways:
            try:
                way()
                said.append("")
            except errors.LostBlocksWarning as warning:
                said.append(str(warning))
        saying = clamor.update(ref, lost=0)  # what is to become of them
        saying.begin()
        saying.abort()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ref.get()
    return [*said, str(len(caught))]


def loss_of(ref: Any) -> int:
    """What a new mapping says here."""
    lease = process_sessions.current().open(ref.refresh(), stream=False, warns=False)
    return int(lease.mapping.loss)


def test_opening_a_variable_with_lost_blocks_warns(lost: dict[Any, Any]) -> None:
    ref, expected = of(lost, 3)
    with pytest.raises(errors.HomeLostError, match=SAID):
        on(0, prefetch_all, ref)  # not here: who opens it where the loss is known is warned
    assert on(1, add_to, ref, 3 * WORDS, 5) == 2
    ref.refresh()
    for index in (0, 1):
        until(lambda index=index: on(index, loss_of, ref) != 0)
    with pytest.warns(errors.LostBlocksWarning, match=SAID) as caught:
        ref.get()
    (warning,) = (found for found in caught if found.category is errors.LostBlocksWarning)
    assert warning.filename == __file__
    assert isinstance(warning.message, errors.LostBlocksWarning)
    assert (warning.message.region, warning.message.runs) == (ref._region, ((LOST + 1, 1),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(ref.get()[:WORDS], expected[:WORDS])  # once in a process
    *said, n_warnings = on(1, said_by_each_way, ref)
    assert len(said) == 5
    for text in said:
        assert f"variable {ref._region}" in text
        assert re.search(SAID, text)
    assert n_warnings == "1"
    # Commits have written it: nobody is told any more.
    on(0, write_lost, ref, 0)
    for index in (0, 1):
        until(lambda index=index: on(index, loss_of, ref) == 0)
    clamor.free(ref)


def on_again(index: int, function: Any, *arguments: Any, retries: int = 1) -> Any:
    """As `on`, of a function that `clamor.remote` made; what dies is run again."""
    task = function.options(num_cpus=0, resources={node_resource(index): 0.01}, max_retries=retries)
    return ray.get(task.remote(*arguments), timeout=TASK_S)


@clamor.remote
def touch_lost(array: Any) -> int:
    return int(array[LOST * WORDS])


@ray.remote
def get_and_touch_lost(ref: Any) -> int:
    return int(ref.get()[LOST * WORDS])


@clamor.remote
def killed_once(array: Any, mark: str) -> int:
    if not os.path.exists(mark):
        with open(mark, "w"):
            os.kill(os.getpid(), 9)
    return int(array[5])


def test_what_is_run_again_says_why_it_ended(lost: dict[Any, Any], tmp_path: Any) -> None:
    ref, expected = of(lost, 6)
    with pytest.raises(errors.HomeLostError, match=SAID):
        clamor.prefetch(ref)
    for index, function in ((0, touch_lost), (1, touch_lost), (1, get_and_touch_lost)):
        with pytest.raises(errors.HomeLostError, match=SAID) as caught:
            on_again(index, function, ref)
        said = str(caught.value)
        assert f"variable {ref._region} version 1 block {LOST + 1}" in said
        assert "update(ref, lost=0)" in said
    # Who died of something else goes on.
    for index in (0, 1):
        mark = str(tmp_path / f"{index}")
        assert on_again(index, killed_once, ref, mark) == expected[5]
        assert os.path.exists(mark)
    clamor.free(ref)


N_WRITTEN = 3  # blocks of each commit
SEED = 15


def written_by(version: int) -> list[int]:
    """Blocks, all over the array; some of them were written a few versions before."""
    return [(version * 7 + i * 101) % N_BLOCKS for i in range(N_WRITTEN)]


def content_at(version: int) -> Any:
    words = content(SEED).reshape(N_BLOCKS, WORDS)
    for each in range(1, version + 1):
        words[written_by(each)] = each
    return words.reshape(-1)


def commit_until(ref: Any, stop: str, done: str) -> int:
    """Commits without a pause; says in a file which version was the last."""
    version = 0
    while not Path(stop).exists():
        with clamor.update(ref._latest()) as array:
            for block in written_by(version + 1):
                array[block * WORDS : (block + 1) * WORDS] = version + 1
        version += 1
        Path(done + ".new").write_text(str(version))
        Path(done + ".new").rename(done)
    return version


def follow_until(ref: Any, stop: str, done: str) -> list[str]:
    """Reads all of the newest version, again and again; returns what was wrong."""
    wrong = []
    while not Path(stop).exists():
        newest = ref._latest()
        try:
            # Mapped first: what is prefetched for nobody goes with the next version, and a touch
            # of what is on no node any more ends the process.
            array = newest.get()
            clamor.prefetch(newest)
            if not np.array_equal(array, content_at(newest.version)):
                wrong.append(f"version {newest.version} has wrong bytes")
        except errors.SnapshotExpired:
            continue  # a newer one was committed, and the home of this one is lost
        except errors.HomeLostError as lost:
            wrong.append(str(lost))
            break
        Path(done + ".new").write_text(str(newest.version))
        Path(done + ".new").rename(done)
    return wrong


@pytest.mark.parametrize("n_before", [60, pytest.param(5, marks=LONG)])
def test_a_writer_and_a_reader_that_never_pause_lose_nothing(
    lab: LocalCluster, node: int, tmp_path: Path, n_before: int
) -> None:
    """The reader's node has what it read, the writer's what it wrote, a source makes the rest."""
    ref = on(node, put_with_source, SEED, str(tmp_path / "ran"))
    stop, written, seen = (tmp_path / name for name in ("stop", "written", "seen"))

    def start(index: int, function: Any, done: Path) -> Any:
        task = ray.remote(function).options(
            num_cpus=0, resources={node_resource(index): 0.01}, max_retries=0
        )
        return task.remote(ref, str(stop), str(done))

    def at(file: Path) -> int:
        return int(file.read_text()) if file.exists() else 0

    def go_on(version: int) -> bool:
        ended, _ = ray.wait([writer, reader], timeout=0, fetch_local=False)
        return bool(ended) or min(at(written), at(seen)) > version

    writer, reader = start(1, commit_until, written), start(0, follow_until, seen)
    try:
        until(lambda: go_on(n_before), TASK_S)
        lab.kill_node(node)
        killed_at = at(written)
        until(lambda: go_on(killed_at + 10), TASK_S)
    finally:
        stop.touch()
    last, wrong = ray.get([writer, reader], timeout=TASK_S)
    assert wrong == []
    assert min(last, at(seen)) > killed_at + 10  # both went on, on a new home
    assert ref.refresh().version == last
    for index in (0, 1):
        assert np.array_equal(on(index, read_all, ref), content_at(last))
    clamor.free(ref)
