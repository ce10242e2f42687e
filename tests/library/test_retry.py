"""`clamor.retry`: bounded, with growing pauses, and only on conflicts."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from clamor_ray._write.retry import pause_s
from tests.support.fake_session import Cluster, FakeSession

DEADLINE_S = 30.0


def test_retry_runs_until_there_is_no_conflict() -> None:
    left = [3]

    def work(a: int, *, b: int) -> int:
        if left[0]:
            left[0] -= 1
            raise errors.CommitConflict("No.")
        return a + b

    assert clamor.retry(work, 1, b=2, base_s=0.0) == 3
    left[0] = 3
    assert clamor.retry(attempts=4, base_s=0.0)(work)(4, b=5) == 9


def test_retry_is_bounded_and_passes_the_last_conflict() -> None:
    raised = []

    def work() -> None:
        raised.append(errors.CommitConflict(f"No. {len(raised)}"))
        raise raised[-1]

    with pytest.raises(errors.CommitConflict) as caught:
        clamor.retry(work, attempts=3, base_s=0.0)
    assert len(raised) == 3
    assert caught.value is raised[-1]


def test_retry_passes_everything_else_at_once() -> None:
    calls = []

    def work() -> None:
        calls.append(1)
        raise errors.OutOfMemoryError("No.")

    with pytest.raises(errors.OutOfMemoryError):
        clamor.retry(work)
    assert len(calls) == 1


def test_retry_waits_longer_each_time() -> None:
    assert [pause_s(n, 0.01, 0.3, max) for n in (0, 1, 4, 5, 10_000)] == [
        0.01,
        0.02,
        0.16,
        0.3,
        0.3,
    ]
    assert pause_s(3, 0.01, 1, min) == 0
    for wrong in ({"attempts": 0}, {"base_s": -1}, {"most_s": -0.1}):
        with pytest.raises(ValueError):
            clamor.retry(print, **wrong)


def test_retry_makes_counters_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_sessions, "_current", FakeSession(Cluster()))
    ref = clamor.put(np.zeros(5000))

    def work() -> None:
        own = pickle.loads(pickle.dumps(ref))

        @clamor.retry(attempts=200, base_s=0.0005, most_s=0.01)
        def count() -> None:
            with clamor.update(own) as x:
                x[0] += 1

        for _ in range(20):
            count()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert ref.refresh().get()[0] == 60
    assert ref.version == 60
