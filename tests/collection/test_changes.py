"""Which partitions a change touches: exact to the block, and never too few."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from clamor_ray._tasks.task_context import Read
from clamor_ray.collection.plan.changes import Targets, is_touched


def read(version: int, *blocks: int, region: int = 1) -> Read:
    return Read(region, version, bytes(BitMap(blocks).serialize()))


def targets(newest: int, changed: BitMap | None, **more: object) -> Targets:
    return Targets({1: newest}, frozenset(), lambda *_: changed, **more)  # type: ignore[arg-type]


def test_a_block_that_was_read_and_changed() -> None:
    assert is_touched([read(0, 3, 4)], {}, targets(1, BitMap([4])))


def test_a_block_beside() -> None:
    assert not is_touched([read(0, 3, 4)], {}, targets(1, BitMap([2, 5])))


def test_without_newer_versions_nothing_is_asked() -> None:
    def never(*_: int) -> BitMap | None:
        raise AssertionError("asked")

    assert not is_touched([read(2, 3)], {}, Targets({1: 2}, frozenset(), never))


def test_what_is_not_known_counts() -> None:
    assert is_touched([read(0, 3)], {}, targets(9, None))


def test_a_variable_inside_its_reference_is_one_block() -> None:
    assert is_touched([Read(1, 0, None)], {}, targets(1, BitMap()))


def test_another_layout_counts() -> None:
    there = targets(1, BitMap(), other_layout=lambda region, version: version == 0)
    assert is_touched([read(0, 3)], {}, there)


def test_a_frozen_reference_stays() -> None:
    there = Targets({1: 5}, frozenset({(1, 2)}), lambda *_: None)
    assert not is_touched([read(2, 3)], {}, there)
    assert is_touched([read(3, 3)], {}, there)


def test_a_variable_that_is_none_of_the_collections() -> None:
    assert not is_touched([read(0, 3, region=7)], {}, targets(1, None))


def test_only_what_changed_after_the_last_look() -> None:
    asked: list[tuple[int, int, int]] = []

    def changed(*key: int) -> BitMap:
        asked.append(key)  # type: ignore[arg-type]
        return BitMap()

    there = Targets({1: 9}, frozenset(), changed)
    assert not is_touched([read(2, 3), read(2, 5)], {1: 7}, there)
    assert asked == [(1, 7, 9)]


@given(data=st.data())
def test_against_a_variable_that_is_read_again(data: st.DataObject) -> None:
    n_blocks = 12
    content = list(range(n_blocks))
    commits = data.draw(
        st.lists(st.sets(st.integers(0, n_blocks - 1)), min_size=1, max_size=5), label="commits"
    )
    blocks = data.draw(st.sets(st.integers(0, n_blocks - 1)), label="read")
    at = data.draw(st.integers(0, len(commits)), label="version")
    versions = [list(content)]
    for number, commit in enumerate(commits):
        content = [value + (1000 << number) * (i in commit) for i, value in enumerate(content)]
        versions.append(content)

    def changed(region: int, low: int, high: int) -> BitMap:
        return BitMap([b for commit in commits[low:high] for b in commit])

    there = Targets({1: len(commits)}, frozenset(), changed)
    same = all(versions[at][b] == versions[-1][b] for b in blocks)
    assert is_touched([read(at, *blocks)], {}, there) == (not same)
