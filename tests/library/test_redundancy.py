"""Groups of pieces, and levels of redundancy. Pure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clamor_ray import errors
from clamor_ray._build.pieces import piece_bytes_of, xor_of
from clamor_ray._redundancy.groups import PieceGroups, homes_of, lengths_of
from clamor_ray._redundancy.levels import Level, level_of

groups_of = st.builds(
    PieceGroups,
    n_pieces=st.integers(1, 40),
    width=st.integers(1, 8),
    n_parity=st.integers(1, 3),
)


@given(groups_of)
def test_each_piece_is_in_one_group(groups: PieceGroups) -> None:
    seen: list[int] = []
    for group in range(groups.n_groups):
        members = groups.members(group)
        seen += members
        for index in members:
            assert groups.group_of(index) == group
            assert set(groups.others(index)) == set(members) - {index}
            assert groups.is_parity(index) == (index in groups.parity_of(group))
    assert sorted(seen) == list(range(groups.n_regions))


@given(groups_of, st.integers(1, 10**6), st.integers(1, 10**5))
def test_a_parity_is_as_long_as_its_longest_piece(groups: PieceGroups, n: int, piece: int) -> None:
    length_bytes = (groups.n_pieces - 1) * piece + min(n, piece)
    lengths = lengths_of(groups, length_bytes, piece)
    assert sum(lengths[: groups.n_pieces]) == length_bytes
    for group in range(groups.n_groups):
        longest = max(lengths[index] for index in groups.data_of(group))
        assert all(lengths[index] == longest for index in groups.parity_of(group))


@given(groups_of, st.integers(0, 50), st.booleans(), st.integers(0, 6))
def test_no_server_has_two_of_a_group(
    groups: PieceGroups, first: int, is_fixed: bool, more: int
) -> None:
    servers = list(range(100, 100 + groups.width + groups.n_parity + more))
    is_fixed &= groups.n_parity == 1
    homes = homes_of(groups, servers, first, is_fixed)
    assert len(homes) == groups.n_regions
    assert set(homes) <= set(servers)
    for group in range(groups.n_groups):
        members = groups.members(group)
        assert len({homes[index] for index in members}) == len(members)
    if is_fixed:
        parity = {homes[index] for g in range(groups.n_groups) for index in groups.parity_of(g)}
        assert len(parity) == 1


@pytest.mark.parametrize("n_nodes", [3, 4, 5, 9, 20])
def test_all_servers_have_equally_much_of_raid5(n_nodes: int) -> None:
    shape = Level("raid5").shape(n_nodes)
    groups = PieceGroups(shape.width * n_nodes, shape.width, shape.n_parity)
    homes = homes_of(groups, range(n_nodes), 0, shape.is_fixed)
    counts = np.bincount(homes, minlength=n_nodes)
    assert counts.max() - counts.min() <= 1
    parity = np.bincount(homes[groups.n_pieces :], minlength=n_nodes)
    assert parity.max() - parity.min() <= 1


def test_what_it_costs() -> None:
    """The bytes of pieces and parities over those of the pieces."""
    for level, n_nodes, ratio in (
        (Level("raid5"), 3, 1.5),
        (Level("raid5"), 5, 1.25),
        (Level("raid4"), 5, 1.25),
        (Level("raid1"), 3, 2.0),
        (Level("raid1", 3), 3, 3.0),
    ):
        shape = level.shape(n_nodes)
        length_bytes = 480 << 20
        piece_bytes = piece_bytes_of(length_bytes, n_nodes, shape.width)
        groups = PieceGroups(-(-length_bytes // piece_bytes), shape.width, shape.n_parity)
        lengths = lengths_of(groups, length_bytes, piece_bytes)
        assert sum(lengths) == pytest.approx(ratio * length_bytes, rel=0.02), level


contents = st.lists(
    st.lists(st.tuples(st.integers(0, 80), st.binary(min_size=1, max_size=20)), max_size=4),
    min_size=1,
    max_size=4,
)


@given(contents)
def test_the_xor_of_contents(given_contents: list[list[tuple[int, bytes]]]) -> None:
    wanted = np.zeros(100, np.uint8)
    taken = []
    for parts in given_contents:
        one = np.zeros(100, np.uint8)
        apart = [  # views of a piece do not overlap
            (at, view)
            for index, (at, view) in enumerate(parts)
            if not any(at < b + len(w) and b < at + len(view) for b, w in parts[:index])
        ]
        for at, view in apart:
            one[at : at + len(view)] = np.frombuffer(view, np.uint8)
        wanted ^= one
        taken.append([(at, memoryview(view)) for at, view in apart])
    found = np.zeros(100, np.uint8)
    for at, view in xor_of(taken, 100):
        assert not found[at : at + view.nbytes].any()
        found[at : at + view.nbytes] = np.frombuffer(view, np.uint8)
    assert np.array_equal(found, wanted)


def test_levels() -> None:
    assert level_of(None, None, 2) is None
    assert level_of(None, "raid0", 2) == level_of("spread", None, 2)
    with pytest.raises(ValueError, match="home is"):
        level_of("here", None, 2)
    with pytest.raises(ValueError, match="redundancy is one of raid0, raid1, raid4, raid5"):
        level_of(None, "raid2", 2)
    with pytest.raises(ValueError, match="copies is for"):
        level_of(None, None, 3)
    for copies in (1, 0, 2.0, True):
        with pytest.raises(ValueError, match="copies"):
            level_of(None, "raid1", copies)  # type: ignore[arg-type]
    for name in ("raid4", "raid5"):
        with pytest.raises(errors.TooFewNodesError, match=r"needs 3 nodes.*there are 2"):
            Level(name).shape(2)  # type: ignore[arg-type]
    with pytest.raises(errors.TooFewNodesError, match=r"copies=4 needs 4 nodes.*there are 3"):
        Level("raid1", 4).shape(3)
    for level, n_nodes, instead in (
        (Level("raid5"), 2, 'redundancy="raid1", which 2 nodes can have'),
        (Level("raid1", 5), 3, 'redundancy="raid1" with copies=3 or fewer'),
        (Level("raid1"), 1, "Add nodes. With one node"),
    ):
        with pytest.raises(errors.TooFewNodesError) as failure:
            level.shape(n_nodes)
        assert instead in failure.value.hint
    assert Level("raid5").shape(30).width == 8
