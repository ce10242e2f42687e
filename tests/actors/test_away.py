"""A page server that was away asks whether it was declared lost. No Ray."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from clamor_ray._protocol.messages import LocateAnswer, ServerInfo, ServerLost
from clamor_ray.actors.page_server import away
from clamor_ray.actors.page_server.away import AwayWatch, old_homes

INFO = ServerInfo(7, "node 1", "127.0.0.1", 1, "name", "0")
LOST = ServerLost(7, "its node is dead")


class Rig:
    """A server whose clock goes on by so many seconds a look; it is closed after the last."""

    def __init__(self, *steps_s: float) -> None:
        self.steps_s = list(steps_s)
        self.clock_s = 100.0
        self.answers: list[LocateAnswer | Exception] = []
        self.asked_s: list[float] = []
        self.lost: list[str] = []
        self.watch = AwayWatch(self._locate, self.lost.append, self._now_s)

    def _now_s(self) -> float:
        return self.clock_s

    def _locate(self) -> LocateAnswer:
        self.asked_s.append(self.clock_s - 100.0)
        answer = self.answers.pop(0) if self.answers else INFO
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wait(timeout: float | None = None) -> bool:
            assert timeout == away.LOOK_S
            if not self.steps_s:
                return True
            self.clock_s += self.steps_s.pop(0)
            return False

        monkeypatch.setattr(self.watch._closed, "wait", wait)
        self.watch.run()


def test_one_that_was_stopped_asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(1, 1, away.AWAY_S, 1, 1)
    rig.run(monkeypatch)
    assert rig.asked_s == [2 + away.AWAY_S]
    assert rig.lost == []


def test_one_that_was_not_stopped_asks_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been cut off."""
    rig = Rig(*[1.0] * 100)
    rig.run(monkeypatch)
    assert rig.asked_s == [away.ASK_S * n for n in (1, 2, 3)]


def test_one_that_was_declared_lost_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(1, 10, 10, 10)
    rig.answers = [LOST]
    rig.run(monkeypatch)
    assert rig.lost == ["its node is dead"]
    assert len(rig.asked_s) == 1


def test_a_registry_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(10, 1, 1, 1)
    rig.answers = [RuntimeError("it is restarting"), RuntimeError("still"), LOST]
    rig.run(monkeypatch)
    assert rig.asked_s == [10, 11, 12]
    assert rig.lost == ["its node is dead"]


def test_a_server_that_ends_meanwhile_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(10, 1)

    def locate() -> LocateAnswer:
        rig.watch.close()
        return LOST

    rig.watch._locate = locate
    rig.run(monkeypatch)
    assert rig.lost == []


def test_it_watches_on_a_thread_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "LOOK_S", 0.001)
    monkeypatch.setattr(away, "ASK_S", 0.0)
    asked = threading.Event()

    def locate() -> LocateAnswer:
        asked.set()
        return INFO

    watch = AwayWatch(locate, lambda reason: None)
    watch.start()
    assert asked.wait(10)
    (thread,) = [each for each in threading.enumerate() if each.name == "clamor-away"]
    watch.close()
    thread.join(10)
    assert not thread.is_alive()


def test_it_says_what_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    class Engine:
        server_id = 0xAB

        def region_stats(self) -> list[dict[str, int]]:
            return [
                {"is_home": 1, "home_bytes": 1 << 20, "disk_bytes": 2 << 20},
                {"is_home": 0, "home_bytes": 0, "disk_bytes": 0},
                {"is_home": 1, "home_bytes": 1 << 20, "disk_bytes": 0},
            ]

    engine: Any = Engine()
    with caplog.at_level(logging.ERROR):
        assert old_homes(engine, "its node is dead") == 2
    assert "page server 0xab was declared lost" in caplog.text
    assert "(its node is dead): the 2 homes that it has (4.0 MiB) are old" in caplog.text
