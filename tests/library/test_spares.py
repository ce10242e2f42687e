"""Regions in advance: who gets one, and how many calls a row of puts makes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray._build import spares as _spares
from clamor_ray._build.spares import Spares
from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._session import process_sessions
from tests.conftest import ClamorCluster
from tests.support.fake_session import Cluster, FakeSession


class Clock:
    now_s = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_spares, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_only_a_row_of_one_size_wants_one(clock: Clock) -> None:
    spares = Spares()
    assert not spares.wanted(4096)
    assert spares.wanted(4096)
    assert not spares.wanted(8192)
    assert not spares.wanted(4096)
    clock.now_s += _spares.KEEP_S
    assert not spares.wanted(4096)  # that was long ago
    assert spares.wanted(4096)
    spares.keep(4096, "region")
    assert not spares.wanted(4096)  # one is enough
    assert not spares.wanted(8192)
    assert spares.wanted(8192)  # what is here is of another size


def test_a_spare_is_given_once_and_not_late(clock: Clock) -> None:
    spares = Spares()
    assert spares.take(4096) is None
    spares.keep(4096, "first")
    assert spares.take(8192) is None
    assert spares.take(4096) == "first"
    assert spares.take(4096) is None
    spares.keep(4096, "second")
    clock.now_s += _spares.KEEP_S
    assert spares.take(4096) is None


def test_a_put_and_a_free_make_one_call_at_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the registry writes of each: test_registry_facade.py."""
    fake = FakeSession(Cluster())
    monkeypatch.setattr(process_sessions, "_current", fake)
    calls = fake.cluster.calls
    refs = [clamor.put(np.full(1024, i)) for i in range(2)]  # the first of a row, and the second
    for n in (100, 2000):
        refs += [clamor.put(np.full(1024, i)) for i in range(n - len(refs))]
        calls.clear()
        refs += [clamor.put(np.full(1024, i)) for i in range(10)]
        assert calls == ["seal_and_create"] * 10, n
        calls.clear()
        for _ in range(10):
            clamor.free(refs.pop())
        assert calls == ["free"] * 10, n


def test_a_row_of_puts_makes_one_call_each(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    ask = RegistryClient._ask

    def counted(self: Any, method: str, *arguments: Any, **how: Any) -> Any:
        calls[method] += 1
        return ask(self, method, *arguments, **how)

    monkeypatch.setattr(RegistryClient, "_ask", counted)
    n = 20
    # Of a size that no other test puts: a row of these may have begun just before.
    refs = [clamor.put(np.full(1033, i)) for i in range(n)]
    # The first asks for its region, and the second still; the second's answer brings a third.
    # Anchors come with a region, or many at once.
    calls["create_region"] += calls.pop("create_counted", 0)
    assert calls.pop("anchors", 0) <= 1
    assert calls == {"create_region": 2, "seal": 1, "seal_and_create": n - 1}
    assert [int(ref.get()[-1]) for ref in refs] == list(range(n))
    assert len({ref._region for ref in refs}) == n
    calls.clear()
    for ref in refs:
        clamor.free(ref)
    assert calls == {"free": n}
