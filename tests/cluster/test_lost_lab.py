"""A node is lost with blocks that nobody else has: those are lost, and all others are not."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import session
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

LOST = 20  # the block of the array; one more in the region, behind the pickle stream
SAID = rf"1 of {N_BLOCKS + 1} blocks \({LOST + 1}\)"


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        clamor.init()
        try:
            yield lab
        finally:
            clamor.shutdown()


@pytest.fixture
def node(lab: LocalCluster) -> int:
    """A node that is there to be killed."""
    return lab.add_node(num_cpus=1, object_store_memory=150 << 20)


def put_and_lose_one(lab: LocalCluster, node: int, seed: int) -> tuple[Any, Any]:
    """(reference, content but for the lost block, which holds what it was put with)"""
    ref = on(node, put_content, seed)
    expected = content(seed)
    assert np.array_equal(on(1, read_all, ref), expected)
    assert on(node, add_to, ref, LOST * WORDS, 1) == 1  # which nobody has read yet
    lab.kill_node(node)
    return ref.refresh(), expected


def around(ref: Any) -> Any:
    """All of the array but the lost block."""
    array = ref.get()
    return np.concatenate([array[: LOST * WORDS], array[(LOST + 1) * WORDS :]])


def around_is(ref: Any, expected: Any) -> bool:
    parts = [expected[: LOST * WORDS], expected[(LOST + 1) * WORDS :]]
    return all(np.array_equal(on(index, around, ref), np.concatenate(parts)) for index in (0, 1))


def test_one_block_of_many(lab: LocalCluster, node: int) -> None:
    ref, expected = put_and_lose_one(lab, node, 1)
    for index in (0, 1):
        with pytest.raises(errors.HomeLostError, match=SAID) as caught:
            on(index, prefetch_all, ref)
        assert f"region {ref.region}" in str(caught.value)
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
    return int(session.current().call("ping"))


def write_lost(ref: Any, value: int) -> int:
    with clamor.update(ref, lost=value) as array:
        array[LOST * WORDS + 5] = 17
    return int(ref.refresh().version)


@pytest.mark.parametrize(("index", "value"), [(0, 0), (1, 3)])
def test_a_commit_makes_a_lost_block_whole(
    lab: LocalCluster, node: int, index: int, value: int
) -> None:
    ref, expected = put_and_lose_one(lab, node, 2)
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
    with pytest.raises(errors.HomeLostError, match=f"region {ref.region}"):
        clamor.prefetch(before)
    assert session.current().call("lost_blocks", ref.region) is None
    os.kill(lab.page_server_pid(1), 9)
    for reader in (0, 1):
        assert np.array_equal(on(reader, read_all, ref), expected)
    # Where nothing is lost it changes nothing.
    assert on(index, write_lost, ref, 9) == version + 1
    assert np.array_equal(read_all(ref.refresh()), expected)
    clamor.free(ref)


def test_a_source_makes_the_rest(lab: LocalCluster, node: int, tmp_path: Any) -> None:
    ref = on(node, put_with_source, 4, str(tmp_path / "ran"))
    assert on(node, add_to, ref, LOST * WORDS, 5) == 1
    lab.kill_node(node)
    with pytest.raises(errors.HomeLostError, match=rf"{SAID}.*commits have changed"):
        clamor.prefetch(ref.refresh())
    assert around_is(ref, content(4))
    assert (tmp_path / "ran").read_text() == "x"
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
    lease = session.current().open(ref.refresh(), stream=False, warns=False)
    return int(lease.mapping.loss)


def test_who_opens_it_is_warned(lab: LocalCluster, node: int) -> None:
    ref, expected = put_and_lose_one(lab, node, 3)
    with pytest.raises(errors.HomeLostError, match=SAID):
        clamor.prefetch(ref)
    assert on(1, add_to, ref, 3 * WORDS, 5) == 2
    ref.refresh()
    for index in (0, 1):
        until(lambda index=index: on(index, loss_of, ref) != 0)
    with pytest.warns(errors.LostBlocksWarning, match=SAID) as caught:
        ref.get()
    (warning,) = (found for found in caught if found.category is errors.LostBlocksWarning)
    assert warning.filename == __file__
    assert isinstance(warning.message, errors.LostBlocksWarning)
    assert (warning.message.region, warning.message.runs) == (ref.region, ((LOST + 1, 1),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(ref.get()[:WORDS], expected[:WORDS])  # once in a process
    *said, n_warnings = on(1, said_by_each_way, ref)
    assert len(said) == 5
    for text in said:
        assert f"region {ref.region}" in text
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


def test_what_is_run_again_says_why_it_ended(lab: LocalCluster, node: int, tmp_path: Any) -> None:
    ref, expected = put_and_lose_one(lab, node, 6)
    with pytest.raises(errors.HomeLostError, match=SAID):
        clamor.prefetch(ref)
    for index, function in ((0, touch_lost), (1, touch_lost), (1, get_and_touch_lost)):
        with pytest.raises(errors.HomeLostError, match=SAID) as caught:
            on_again(index, function, ref)
        said = str(caught.value)
        assert f"region {ref.region} version 1 block {LOST + 1}" in said
        assert "update(ref, lost=0)" in said
    # Who died of something else goes on.
    for index in (0, 1):
        mark = str(tmp_path / f"{index}")
        assert on_again(index, killed_once, ref, mark) == expected[5]
        assert os.path.exists(mark)
    clamor.free(ref)
