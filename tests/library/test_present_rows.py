"""Where all of a version is here, `table[ids]` asks no function of Python."""

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
KEYS: list[Any] = [
    *(IDS, IDS.astype(np.int16)[::4], IDS.reshape(20, 15), IDS.tolist(), (IDS, 3)),
    *(IDS.astype(">i8"), np.abs(IDS).astype(np.uint64), np.arange(N) % 3 == 0),
]
BELIEVED_S = 0.01
WHOLE_S = global_array.WHOLE_NS / 1e9
LATER_S = 10 * BELIEVED_S


class Looks:
    """What stands for gathering: says that rows are here, or brings them."""

    def __init__(self) -> None:
        self.n = self.n_whole = 0
        self.are_here = True
        self.is_whole = True
        self.memory: tuple[int, int] | None = None  # as of a mapping; None: the array's own blocks

    def __call__(self, array: Any, key: Any) -> Any:
        self.n += 1
        if not self.are_here:
            return np.asarray(array)[key]
        begin = begin_of(array)
        data = int(array.__array_interface__["data"][0])
        end = -(-(data + array.nbytes) // BLOCK) * BLOCK  # not into the memory of the next array
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
        """Returns when it is not asked about these just after it was. A machine that is busy may
        take longer than the moment in which something is believed."""

        def not_again() -> bool:
            self.are_asked(array, IDS)
            return not self.are_asked(array, *keys)

        until(not_again)


@pytest.fixture
def looks() -> Iterator[Looks]:
    looks = Looks()
    global_array.set_gather(looks, lambda array: None)
    yield looks
    indexing.install()


def table(n: int = N) -> Any:
    """Memory of which nothing is believed so far: it may have been another test's."""
    made = global_array.as_global(np.random.default_rng(5).integers(0, 1 << 40, (n, 37)))
    global_array.forget(begin_of(made))
    return made


def begin_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0]) // BLOCK * BLOCK


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_it_is_believed_for_a_moment_whatever_the_key(looks: Looks, key: Any) -> None:
    view = table()
    assert looks.are_asked(view, key)
    looks.go_on(view, key)
    time.sleep(LATER_S)
    assert looks.are_asked(view, key)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_where_some_is_absent_each_key_is_asked_about(looks: Looks, key: Any) -> None:
    looks.is_whole = False
    view = table()
    for _ in range(3):
        assert looks.are_asked(view, key)


def test_what_went_is_no_longer_believed(looks: Looks) -> None:
    view = table()
    looks.go_on(view, IDS)
    looks.are_here = False
    time.sleep(LATER_S)
    for _ in range(3):
        assert looks.are_asked(view, IDS)
    looks.are_here = True  # of these rows; all of it was not looked at again
    n_whole = looks.n_whole
    assert looks.are_asked(view, IDS)
    if looks.n_whole == n_whole:
        assert looks.are_asked(view, IDS)


def test_it_is_not_believed_for_long_without_a_look_at_all(looks: Looks) -> None:
    view = table()
    looks.go_on(view, IDS)
    looks.is_whole = False
    end = time.monotonic() + 2 * WHOLE_S
    while time.monotonic() < end:  # each of these finds its rows
        looks.are_asked(view, IDS)
    for _ in range(3):
        assert looks.are_asked(view, IDS)


def test_all_is_looked_at_seldom(looks: Looks) -> None:
    for looks.is_whole in (True, False):
        looks.n_whole, view, began = 0, table(), time.monotonic()
        for _ in range(20):
            time.sleep(2 * BELIEVED_S)
            looks.are_asked(view, IDS)
        assert 1 <= looks.n_whole <= 2 + (time.monotonic() - began) / WHOLE_S


def test_what_is_large_and_opened_for_a_moment_is_not_looked_at(looks: Looks) -> None:
    view = table()
    looks.memory = (begin_of(view), begin_of(view) + (1 << 30))
    for _ in range(5):
        assert looks.are_asked(view, IDS, IDS)
        global_array.forget(begin_of(view))  # its last lease has ended
    assert looks.n_whole == 0
    until(lambda: looks.are_asked(view, IDS) and looks.n_whole == 1)  # where it stays
    looks.go_on(view, IDS)


def test_many_arrays_at_once(looks: Looks) -> None:
    views = [table(N + n) for n in range(40)]
    for _ in range(2):
        for view in views:
            looks.are_asked(view, IDS)
    looks.go_on(views[-1], IDS)
    assert looks.are_asked(views[0], IDS)  # that of the longest ago had to go


def test_memory_that_is_mapped_anew(looks: Looks) -> None:
    """Of another length, at the same place: what was known of the first one goes."""
    view = table()
    for n_blocks in (200, 1000, 300):
        looks.memory = (begin_of(view), begin_of(view) + n_blocks * BLOCK)
        time.sleep(LATER_S)
        n_whole = looks.n_whole
        assert looks.are_asked(view, IDS)
        assert looks.n_whole == n_whole + 1


def test_what_is_unmapped_is_forgotten(looks: Looks) -> None:
    view = table()
    looks.go_on(view, IDS)
    for _ in range(3):
        global_array.forget(begin_of(view))
        assert looks.are_asked(view, IDS)
    global_array.forget(begin_of(view) + (1 << 40))  # nothing


def test_ids_that_are_no_rows(looks: Looks) -> None:
    view = table()
    for bad in (N, -N - 1, 1 << 62, -(1 << 63)):
        looks.are_asked(view, IDS)
        with pytest.raises(IndexError, match="out of bounds"):
            view[np.array([0, bad, 1])]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_view_is_as_numpys(data: st.DataObject) -> None:
    """Random shapes, strides and memory."""
    looks = Looks()
    looks.is_whole = data.draw(st.booleans())
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
        looks.memory = (begin_of(whole), begin_of(whole) + data.draw(st.integers(1, 40)) * BLOCK)
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
