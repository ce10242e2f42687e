"""A fixed page: for the session, a process, or one `get`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray._native.client import MAP_PAGE_SHIFT, MAP_PRIVATE
from clamor_ray._protocol.config import Config
from clamor_ray._session import process_sessions
from tests.support.fake_session import Cluster, FakeSession


@pytest.mark.parametrize("configured", [0, 65536])
@pytest.mark.parametrize(
    ("page_bytes", "shift"), [(0, 0), (4096, 12), ("64KiB", 16), (8 << 20, 23)]
)
def test_what_is_asked_of_the_page_cache(
    monkeypatch: pytest.MonkeyPatch, configured: int, page_bytes: Any, shift: int
) -> None:
    session = FakeSession(Cluster(), Config(page_bytes=configured))
    monkeypatch.setattr(process_sessions, "_current", session)
    flags: list[int] = []
    real = session.fake.map

    def spy(*args: Any, **how: Any) -> Any:
        flags.append(how["flags"])
        return real(*args, **how)

    monkeypatch.setattr(session.fake, "map", spy)
    ref = clamor.put(np.zeros(10_000))
    ref.get(page_bytes=page_bytes)
    ref.get("c", page_bytes=page_bytes)
    wanted = shift or (16 if configured else 0)
    assert flags == [wanted << MAP_PAGE_SHIFT, wanted << MAP_PAGE_SHIFT | MAP_PRIVATE]


@pytest.mark.parametrize("page_bytes", [1, 4095, 16 << 20, "some", -4096, 4096.5])
def test_what_is_no_page(monkeypatch: pytest.MonkeyPatch, page_bytes: Any) -> None:
    monkeypatch.setattr(process_sessions, "_current", FakeSession(Cluster()))
    for ref in (clamor.put(np.zeros(10_000)), clamor.put(np.zeros(3))):
        with pytest.raises(ValueError, match="page_bytes is 0 or a power of two"):
            ref.get(page_bytes=page_bytes)
