"""Rows that were all here a moment ago: C knows it, and asks no function of Python."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clamor_ray._objects import global_array
from clamor_ray._read import indexing
from tests.conftest import until

BLOCK = 4096
N = 2000
IDS = np.random.default_rng(3).integers(-N, N, 300)
BELIEVED_S = 0.01
LATER_S = 10 * BELIEVED_S


class Looks:
    """What stands for gathering: says that rows are here, or brings them."""

    def __init__(self, *, is_whole: bool = False) -> None:
        self.n = self.n_whole = 0
        self.are_here = True
        self.is_whole = is_whole
        self.memory: tuple[int, int] | None = None  # as of a mapping; None: the array's own blocks

    def __call__(self, array: Any, key: Any) -> Any:
        self.n += 1
        if not self.are_here:
            return np.asarray(array)[key]
        begin = begin_of(array)
        end = -(-(begin + BLOCK + array.nbytes) // BLOCK) * BLOCK
        global_array.believe(*(self.memory or (begin, end)), self._look_at_all)
        return NotImplemented

    def _look_at_all(self) -> bool:
        self.n_whole += 1
        return self.is_whole

    def are_asked(self, array: Any, *keys: Any) -> bool:
        before = self.n
        for key in keys:
            np.testing.assert_array_equal(array[key], np.asarray(array)[key])
        return self.n > before

    def go_on(self, array: Any, *keys: Any) -> None:
        """Returns when it is not asked about these again just afterwards. A machine that is busy
        may take longer than the moment in which something is believed."""

        def not_again() -> bool:
            self.are_asked(array, *keys)
            return not self.are_asked(array, *keys)

        until(not_again)


@pytest.fixture
def looks() -> Iterator[Looks]:
    looks = Looks()
    global_array.set_gather(looks, lambda array: None)
    yield looks
    indexing.install()


def table(n: int) -> Any:
    """Memory of which nothing is believed so far: it may have been another test's."""
    made = global_array.as_global(np.random.default_rng(5).integers(0, 1 << 40, (n, 37)))
    global_array.forget(begin_of(made))
    return made


def begin_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0]) // BLOCK * BLOCK


def test_what_was_looked_at_is_believed_for_a_moment(looks: Looks) -> None:
    view = table(N)
    assert looks.are_asked(view, IDS)
    looks.go_on(view, IDS, IDS[::-1].copy(), IDS[:7])
    time.sleep(LATER_S)
    assert looks.are_asked(view, IDS)


def test_rows_that_were_not_looked_at_are_asked_about(looks: Looks) -> None:
    view = table(N)
    few, others = np.arange(50), np.arange(1000, 1050)
    for _ in range(5):
        looks.are_asked(view, few)
    assert looks.are_asked(view, others)
    looks.go_on(view, few, others, np.arange(1040, 1050))


@pytest.mark.parametrize(
    "key",
    [
        *(IDS.astype(np.int32), IDS[::2], IDS.reshape(20, 15), IDS.tolist(), (IDS, 3)),
        *(IDS.astype(">i8"), np.abs(IDS).astype(np.uint64), np.arange(N) % 3 == 0),
    ],
)
def test_other_keys_are_pythons(looks: Looks, key: Any) -> None:
    view = table(N)
    for _ in range(3):
        looks.are_asked(view, IDS)
        assert looks.are_asked(view, key)


def test_what_went_is_forgotten(looks: Looks) -> None:
    view = table(N)
    looks.go_on(view, IDS)
    looks.are_here = False
    time.sleep(LATER_S)
    for _ in range(3):  # each one, now
        assert looks.are_asked(view, IDS)
    looks.are_here = True
    assert looks.are_asked(view, np.arange(3))  # of the others nothing is believed
    assert looks.are_asked(view, IDS)
    looks.go_on(view, IDS)


def test_where_all_is_here_every_key_is_numpys(looks: Looks) -> None:
    looks.is_whole = True
    view = table(N)
    assert looks.are_asked(view, [3])
    looks.go_on(view, IDS, IDS.tolist(), (IDS, 3), np.arange(N) % 3 == 0)
    assert looks.n_whole == 1
    looks.are_here = False
    time.sleep(LATER_S)
    assert looks.are_asked(view, IDS)
    assert looks.are_asked(view, IDS)


def test_all_is_asked_about_seldom(looks: Looks) -> None:
    view = table(N)
    began = time.monotonic()
    for _ in range(10):
        time.sleep(2 * BELIEVED_S)
        looks.are_asked(view, IDS)
    assert 1 <= looks.n_whole <= 2 + time.monotonic() - began  # once a second


def test_many_arrays_at_once(looks: Looks) -> None:
    views = [table(100 + n) for n in range(40)]
    ids = np.arange(100)
    for _ in range(2):
        for view in views:
            looks.are_asked(view, ids)
    looks.go_on(views[-1], ids)
    assert looks.are_asked(views[0], ids)  # that of the longest ago had to go


def test_memory_that_is_mapped_anew(looks: Looks) -> None:
    """Of another length, at the same place: what was known of the first one goes."""
    view = table(N)
    begin = begin_of(view)
    for n_blocks in (10, 1000, 200):
        looks.memory = (begin, begin + n_blocks * BLOCK)
        looks.are_asked(view, np.arange(5))
        time.sleep(LATER_S)
        assert looks.are_asked(view, np.arange(5))


def test_what_is_unmapped_is_forgotten(looks: Looks) -> None:
    looks.is_whole = True
    view = table(N)
    begin = begin_of(view)
    looks.go_on(view, IDS)
    for _ in range(3):
        global_array.forget(begin)
        assert looks.are_asked(view, IDS)
    global_array.forget(begin + (1 << 40))  # nothing


def test_ids_that_are_no_rows(looks: Looks) -> None:
    view = table(N)
    for is_whole in (False, True):
        looks.is_whole = is_whole
        for bad in (len(view), -len(view) - 1, 1 << 62, -(1 << 63)):
            looks.are_asked(view, IDS)
            with pytest.raises(IndexError, match="out of bounds"):
                view[np.array([0, bad, 1])]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_view_is_as_numpys(data: st.DataObject) -> None:
    """Random shapes, strides and memory; what is believed here is never read beyond its bits."""
    looks = Looks(is_whole=data.draw(st.booleans()))
    global_array.set_gather(looks, lambda array: None)
    try:
        shape = data.draw(st.sampled_from([(6000,), (700, 30), (90, 5, 40), (40, 7, 5, 6), (3, 0)]))
        whole = np.arange(int(np.prod(shape)), dtype=data.draw(st.sampled_from(["u1", "f8"])))
        whole = whole.reshape(shape)
        steps = data.draw(st.tuples(*(st.sampled_from([1, 2, 3, -1]) for _ in shape)))
        start = data.draw(st.integers(0, shape[0] // 2))
        cut = (slice(start, None), *(slice(None, None, step) for step in steps[1:]))
        view = whole.view(global_array.GlobalArray)[cut]
        if data.draw(st.booleans()):
            view = view.swapaxes(0, -1)
        begin = begin_of(whole)
        n_blocks = data.draw(st.integers(1, 40))
        looks.memory = (begin, begin + n_blocks * BLOCK)
        for _ in range(4):
            n = len(view)
            ids = data.draw(st.lists(st.integers(-n, max(n - 1, 0)), max_size=20))
            key = np.array(ids, np.int64)
            try:
                expected = np.asarray(view)[key]
            except IndexError:
                with pytest.raises(IndexError):
                    view[key]
            else:
                got = view[key]
                assert type(got) is np.ndarray
                np.testing.assert_array_equal(got, expected)
    finally:
        indexing.install()
