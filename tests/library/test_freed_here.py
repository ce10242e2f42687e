"""What this process has freed it opens no more, whatever its page server has heard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.messages import FreeAnswer
from clamor_ray._session import process_sessions, session
from tests.support.fake_session import Cluster, FakeSession


class DeafServer(FakeSession):
    """Its page server takes no word of a free; nor has the registry reached it in time."""

    def __init__(self) -> None:
        super().__init__(Cluster())
        self.asked: list[tuple[Any, ...]] = []
        self.fake.retire = self._refuse  # type: ignore[attr-defined]
        self.rpc.free = self._free  # type: ignore[method-assign]

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise errors.WaitTimeoutError("It is stopped.", hint="")

    def _free(self, *args: Any) -> FreeAnswer:
        self.asked.append(args)
        return FreeAnswer()


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> DeafServer:
    session = DeafServer()
    monkeypatch.setattr(process_sessions, "_current", session)
    return session


def test_it_is_known_at_once_though_nothing_of_it_is_held(deaf: DeafServer) -> None:
    ref = clamor.put(np.arange(5000))
    again = ref.snapshot()  # does not learn of a free by itself
    assert int(again.get()[-1]) == 4999
    clamor.free(ref.snapshot())
    assert len(deaf.asked) == 2  # the registry tells the server
    with pytest.raises(errors.FreedError):
        again.get()


def test_what_is_remembered_of_freed_variables_is_bounded(
    deaf: DeafServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FREED_KEPT", 8)
    monkeypatch.setattr(session, "SWEEP_LEAST", 4)
    held = clamor.put(np.arange(5000))
    here = {held._base_address}  # in these sessions memory lies elsewhere
    monkeypatch.setattr(type(deaf.leases), "find", lambda _, at: at if at in here else None)
    clamor.free(held)
    for i in range(100):
        clamor.free(clamor.put(np.full(5000, i)))
    assert len(deaf._freed) < 64
    assert held._region in deaf._freed
    here.clear()
    for i in range(40):
        clamor.free(clamor.put(np.full(5000, i)))
    assert held._region not in deaf._freed
