"""Which home moves where, when a node is full. Pure."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from clamor_ray._protocol.messages import HomeUse, NodeRoom
from clamor_ray.actors.moves.choices import RECENT_S, RESERVE_SHARE, by_use, to_make_room

MEMORY = 1600


def home(
    region: int, n_bytes: int, reads: int = 0, idle_s: float = 0.0, keeps_memory: bool = False
) -> HomeUse:
    return HomeUse(region, n_bytes, reads, idle_s, keeps_memory)


def empty(n: int = 1) -> dict[int, NodeRoom]:
    return {9 + index: NodeRoom(MEMORY, MEMORY) for index in range(n)}


def test_the_fewest_reads_go_first() -> None:
    homes = [home(1, 100, 5), home(2, 100, 3), home(3, 100, 4)]
    assert to_make_room(150, homes, empty(), {}) == [(2, 9), (3, 9)]


def test_reads_of_long_ago_do_not_count() -> None:
    homes = [home(1, 100, 5), home(2, 100, 1000, RECENT_S + 1)]
    assert to_make_room(10, homes, empty(), {}) == [(2, 9)]


@pytest.mark.parametrize(
    ("short_bytes", "expected"),
    [(90, [2]), (130, [3]), (300, [1]), (350, [1, 2]), (420, [1, 3]), (600, [1, 3, 2])],
)
def test_of_equally_read_ones_the_smallest_that_is_enough_goes(
    short_bytes: int, expected: list[int]
) -> None:
    """Where none is enough, the largest."""
    homes = [home(1, 300), home(2, 100), home(3, 200)]
    assert to_make_room(short_bytes, homes, empty(), {}) == [(each, 9) for each in expected]


def test_what_processes_map_stays_as_its_memory_would() -> None:
    assert to_make_room(10, [home(1, 100, keeps_memory=True)], empty(), {}) is None
    assert to_make_room(10, [home(1, 0)], empty(), {}) is None  # it holds nothing


def test_it_goes_to_the_server_that_has_the_least_and_can_take_it() -> None:
    homes = [home(1, 400), home(2, 300)]
    assert to_make_room(600, homes, empty(2), {9: 100}) == [(1, 10), (2, 9)]
    takers = {9: NodeRoom(MEMORY, MEMORY), 10: NodeRoom(500, MEMORY)}
    assert to_make_room(350, homes, takers, {9: 100}) == [(1, 9)]  # the other has no room for it


def test_a_taker_keeps_a_part_of_its_memory_free() -> None:
    reserve = MEMORY // RESERVE_SHARE
    assert to_make_room(10, [home(1, 100)], {9: NodeRoom(reserve + 99, MEMORY)}, {}) is None
    assert to_make_room(10, [home(1, 100)], {9: NodeRoom(reserve + 100, MEMORY)}, {}) == [(1, 9)]


@pytest.mark.parametrize("room", [NodeRoom(None, MEMORY), NodeRoom(MEMORY, None)])
def test_who_does_not_know_its_memory_takes_nothing(room: NodeRoom) -> None:
    assert to_make_room(10, [home(1, 100)], {9: room}, {}) is None


def test_nothing_moves_where_it_is_not_enough() -> None:
    assert to_make_room(1000, [home(1, 100), home(2, 200)], empty(), {}) is None
    assert to_make_room(50, [home(1, 100)], {}, {}) is None
    assert to_make_room(50, [home(1, 100)], empty(), {}, stay={1}) is None


def test_what_fits_nowhere_is_passed_over() -> None:
    homes = [home(1, 5 * MEMORY), home(2, 100, 7)]
    assert to_make_room(80, homes, empty(), {}) == [(2, 9)]


def test_any_choice_is_enough_and_fills_nobody() -> None:
    rng = random.Random(5)
    n_found = 0
    for _ in range(500):
        homes = [
            home(number, rng.randrange(400), rng.randrange(3), 0.0, rng.random() < 0.2)
            for number in range(8)
        ]
        takers = {9 + n: NodeRoom(rng.randrange(MEMORY), MEMORY) for n in range(3)}
        short_bytes = rng.randrange(1, 900)
        stay = {rng.randrange(8)}
        found = to_make_room(short_bytes, homes, takers, {}, stay)
        if found is None:
            continue
        n_found += 1
        by_region = {each.region: each for each in homes}
        sizes = [by_region[region].n_bytes for region, _ in found]
        assert sum(sizes) >= short_bytes > sum(sizes[:-1])
        assert len({region for region, _ in found}) == len(found)
        assert not any(by_region[region].keeps_memory or region in stay for region, _ in found)
        taken: Counter[int] = Counter()
        for region, taker in found:
            taken[taker] += by_region[region].n_bytes
        for taker, n_bytes in taken.items():
            assert (takers[taker].available_bytes or 0) - n_bytes >= MEMORY // RESERVE_SHARE
    assert n_found > 50


def test_the_most_read_are_safe_first() -> None:
    homes = [home(1, 9, 3, 5.0), home(2, 9, 8, 5.0), home(3, 9, 5, 5.0, keeps_memory=True)]
    assert by_use(homes) == [2, 3, 1]


def test_then_those_that_were_read_later_and_then_the_small_ones() -> None:
    old = RECENT_S + 1
    homes = [home(1, 9), home(2, 5), home(3, 9, 1000, old + 5), home(4, 9, 1, old)]
    assert by_use(homes) == [4, 3, 2, 1]
    assert by_use([*homes, home(5, 9, 1, RECENT_S)]) == [5, 4, 3, 2, 1]


def test_of_equally_read_ones_the_newest_use_is_first() -> None:
    assert by_use([home(1, 9, 4, 3.0), home(2, 9, 4, 2.0), home(3, 9, 4, 4.0)]) == [2, 1, 3]


def test_it_goes_to_no_server_that_has_another_of_its_group() -> None:
    def apart(region: int, servers: list[int]) -> list[int]:
        return [each for each in servers if each != 9 or region == 2]

    homes = [home(1, 400)]
    assert to_make_room(100, homes, empty(2), {10: 100}, apart=apart) == [(1, 10)]
    assert to_make_room(100, homes, empty(), {}, apart=apart) is None  # there is no other
    assert to_make_room(100, [*homes, home(2, 300)], empty(), {}, apart=apart) == [(2, 9)]
