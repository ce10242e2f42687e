"""Views of global variables in Ray's serialization: references there, bytes everywhere else."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import ray.cloudpickle

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._objects import ranges
from clamor_ray._protocol.config import Config
from clamor_ray._read import views
from clamor_ray._session import process_sessions
from tests.support.fake_session import Cluster, FakeSession

LIMIT = 65536
SMALL = 2000  # bytes that no pickled reference exceeds


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSession]:
    views.install()
    session = FakeSession(Cluster())
    monkeypatch.setattr(process_sessions, "_current", session)
    return session


@pytest.fixture
def array(session: FakeSession) -> Any:
    """Of a global variable: 800 by 1000."""
    return clamor.put(np.arange(800_000.0).reshape(800, 1000)).get()


def dumps(obj: Any) -> tuple[bytes, list[Any]]:
    """As Ray pickles it."""
    buffers: list[Any] = []
    stream = ray.cloudpickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return stream, buffers


def is_by_reference(obj: Any) -> bool:
    stream, buffers = dumps(obj)
    if b"array_at" in stream or b"_buffer_of" in stream:
        assert len(stream) + sum(b.raw().nbytes for b in buffers) < SMALL
        return True
    return False


# ------------------------------------------------------------------ arrays


@pytest.mark.parametrize(
    "cut",
    [
        lambda a: a,
        lambda a: a[100:300],
        lambda a: a[:, 5:500],
        lambda a: a[::-1],
        lambda a: a[::7, ::-3],
        lambda a: a.T,
        lambda a: a[3:, None, 17:],
        lambda a: a.view(np.uint8)[5:, 3:-2],
        lambda a: a.view("datetime64[s]")[9],
        lambda a: np.broadcast_to(a[5:6], (90, 1000)),
        lambda a: a.view([("x", "f4"), ("y", "i4")])[1:],
        lambda a: np.lib.stride_tricks.sliding_window_view(a[0], 900),
    ],
)
def test_views_come_back_as_they_were(session: FakeSession, array: Any, cut: Any) -> None:
    view = cut(array)
    session.config = Config(view_ref_bytes=1000)
    assert is_by_reference(view)
    again = pickle.loads(ray.cloudpickle.dumps(view))
    assert (again.dtype, again.shape, again.strides) == (view.dtype, view.shape, view.strides)
    assert not again.flags.writeable
    np.testing.assert_array_equal(again, view)


@pytest.mark.parametrize(
    "cut", [lambda a: a, lambda a: a[::-1, 3:], lambda a: a[2::3, ::-2], lambda a: a.T[4:9, ::-7]]
)
def test_where_elements_lie(cut: Any) -> None:
    array = np.zeros((50, 40), np.int32)
    view = cut(array)
    cells = np.arange(array.size, dtype=np.int64).reshape(array.shape) * 4
    begin = array.__array_interface__["data"][0]
    expected = begin + int(cut(cells).min()), begin + int(cut(cells).max()) + 4
    assert ranges.extent(view) == expected


def test_they_hold_a_lease_of_their_snapshot(session: FakeSession) -> None:
    ref = clamor.put(np.zeros(50_000))
    stream = ray.cloudpickle.dumps(ref.get()[100:])
    with clamor.update(ref) as x:
        x[:] = 1
    del x
    assert len(session.leases) == 0
    again = pickle.loads(stream)
    assert len(session.leases) == 1
    assert not again.any()
    newer = pickle.loads(ray.cloudpickle.dumps(ref.get()[100:]))
    assert newer.all()
    assert not again.any()
    del again, newer
    assert len(session.leases) == 0


def test_inside_other_objects_and_closures(session: FakeSession, array: Any) -> None:
    view = array[50:500]
    assert is_by_reference({"a": [view, 5], "b": (view,)})

    def total() -> float:
        return float(view.sum())

    assert len(dumps(total)[0]) < 2 * SMALL
    assert pickle.loads(ray.cloudpickle.dumps(total))() == view.sum()


def test_what_stays_by_value(session: FakeSession, array: Any) -> None:
    ref = clamor.put(np.zeros(50_000))
    private = ref.get("c")
    private[0] = 5
    for obj in (
        array[:8],  # small
        array.copy(),
        np.zeros(50_000),
        private,
        array.view(type("Mine", (np.ndarray,), {})),
    ):
        assert not is_by_reference(obj)
    np.testing.assert_array_equal(pickle.loads(ray.cloudpickle.dumps(private)), private)
    with clamor.update(ref) as x:
        x[3] = 1
        assert not is_by_reference(x)
        assert pickle.loads(ray.cloudpickle.dumps(x))[3] == 1


def test_the_size_from_which_on(session: FakeSession, array: Any) -> None:
    flat = array.reshape(-1)
    assert not is_by_reference(flat[: LIMIT // 8 - 1])
    assert is_by_reference(flat[: LIMIT // 8])
    session.config = Config(view_ref_bytes=0)
    assert not is_by_reference(flat)


def test_the_setting() -> None:
    assert Config.from_env({"CLAMOR_VIEW_REF_BYTES": "0"}).view_ref_bytes == 0
    for wrong in ("-1", "64k"):
        with pytest.raises(ValueError, match="CLAMOR_VIEW_REF_BYTES"):
            Config.from_env({"CLAMOR_VIEW_REF_BYTES": wrong})


def test_views_by_value(session: FakeSession, array: Any) -> None:
    seen = []
    with clamor.views_by_value():
        assert not is_by_reference(array)
        with clamor.views_by_value():
            pass
        assert not is_by_reference(array)
        thread = threading.Thread(target=lambda: seen.append(is_by_reference(array)))
        thread.start()
        thread.join(30)
    assert seen == [True]  # others go on as before
    assert is_by_reference(array)


def test_only_ray_is_taught(session: FakeSession, array: Any) -> None:
    for dump in (pickle.dumps, cloudpickle.dumps):
        assert len(dump(array)) > array.nbytes
    again = clamor.put(array)
    assert again.nbytes == array.nbytes
    np.testing.assert_array_equal(again.get(), array)


def test_ordinary_arrays_leave_out_of_band(session: FakeSession) -> None:
    array = np.arange(10**6)
    stream, buffers = dumps([array, array[5:], np.asfortranarray(array.reshape(1000, 1000))])
    assert len(stream) < SMALL
    assert buffers[0].raw().obj is not None
    begin = array.__array_interface__["data"][0]
    assert np.frombuffer(buffers[0].raw(), np.uint8).__array_interface__["data"][0] == begin
    assert len(buffers) == 3
    plain: list[Any] = []
    assert stream == cloudpickle_of_numpy_alone(
        [array, array[5:], np.asfortranarray(array.reshape(1000, 1000))], plain
    )


def cloudpickle_of_numpy_alone(obj: Any, buffers: list[Any]) -> bytes:
    return cloudpickle.dumps(obj, protocol=5, buffer_callback=buffers.append)


def test_without_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    views.install()
    monkeypatch.setattr(process_sessions, "_current", None)
    array = np.arange(100_000)
    np.testing.assert_array_equal(pickle.loads(ray.cloudpickle.dumps(array)), array)


def test_where_they_cannot_be_had(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = clamor.put(np.zeros(50_000))
    stream = ray.cloudpickle.dumps(ref.get())
    session._freed = {ref._region: ref._base_address}
    with pytest.raises(errors.FreedError):
        pickle.loads(stream)
    monkeypatch.setattr(process_sessions, "_current", None)
    with pytest.raises(errors.NotInitializedError):
        pickle.loads(stream)


def test_what_was_freed_here_travels_by_value(session: FakeSession) -> None:
    ref = clamor.put(np.arange(50_000))
    view = ref.get()
    assert is_by_reference(view)
    session._freed = {ref._region: ref._base_address}
    assert not is_by_reference(view)
    np.testing.assert_array_equal(pickle.loads(ray.cloudpickle.dumps(view)), view)


# ------------------------------------------------------------------ Arrow


def test_arrow_buffers(session: FakeSession) -> None:
    table = pa.table({"a": np.arange(100_000), "b": np.arange(100_000.0), "c": ["x"] * 100_000})
    mine = clamor.put(table).get()
    column = mine.column("a").chunk(0)
    buffer = column.buffers()[1]
    assert is_by_reference(buffer)
    assert is_by_reference(buffer.slice(8000))
    assert not is_by_reference(buffer.slice(0, 100))
    assert pickle.loads(ray.cloudpickle.dumps(buffer)).equals(buffer)
    assert is_by_reference(column)
    for obj in (column, mine, mine.slice(500, 60_000), column.slice(17)):
        again = pickle.loads(ray.cloudpickle.dumps(obj))
        assert again.equals(obj)
    assert not is_by_reference(table)
    assert pickle.loads(ray.cloudpickle.dumps(table)).equals(table)
    assert pickle.loads(pickle.dumps(mine)).equals(table)
