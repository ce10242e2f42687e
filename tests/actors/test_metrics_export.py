"""What is exported of numbers that grow, and of such as are now."""

from __future__ import annotations

import time
from typing import Any

import pytest

from clamor_ray._protocol.metrics import Metric
from clamor_ray.actors.process import metrics_export
from clamor_ray.actors.process.metrics_export import LEAST, Exporter
from tests.conftest import until

METRICS = (
    Metric("clamor_reads", "counter", "Reads.", ("disk", "files"), scale=4096.0),
    Metric("clamor_homes", "gauge", "Homes.", ("homes",)),
)


class Fake:
    made: dict[str, Fake]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.said: list[float] = []
        self.keys = tag_keys
        self.made[name] = self

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.keys

    def inc(self, value: float) -> None:
        assert value > 0  # Ray refuses others
        self.said.append(value)

    def set(self, value: float) -> None:
        self.said.append(value)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    Fake.made = {}
    monkeypatch.setattr(metrics_export.ray_metrics, "Counter", Fake)
    monkeypatch.setattr(metrics_export.ray_metrics, "Gauge", Fake)
    return Fake.made


def test_counters_grow_and_gauges_are_set(made: dict[str, Fake]) -> None:
    exporter = Exporter(METRICS, {"node": "a", "session": "s"})
    for disk, homes in ((1, 5), (1, 5), (4, 0)):
        exporter.tick({"disk": disk, "files": 1, "homes": homes, "another": 7})
    assert made["clamor_reads"].said == [LEAST, 8192.0, 12288.0]
    assert made["clamor_homes"].said == [5.0, 5.0, 0.0]


def test_numbers_that_begin_again(made: dict[str, Fake]) -> None:
    exporter = Exporter(METRICS, {})
    for disk in (9, 2, 3):
        exporter.tick({"disk": disk, "files": 0, "homes": 0})
    assert made["clamor_reads"].said == [LEAST, 9 * 4096.0, 4096.0]


def test_what_cannot_be_counted_ends_it(
    made: dict[str, Fake], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_export, "INTERVAL_S", 0.01)
    calls: list[float] = []

    def numbers() -> dict[str, Any]:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise OSError("gone")
        return {"disk": 1, "files": 0, "homes": 0}

    metrics_export.start(Exporter(METRICS, {}), numbers)
    until(lambda: "no more" in caplog.text, 10)
    time.sleep(0.05)
    assert len(calls) == 3


def test_it_ends(made: dict[str, Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_export, "INTERVAL_S", 0.01)
    calls: list[int] = []

    def numbers() -> dict[str, int]:
        calls.append(1)
        return {"disk": 1, "files": 0, "homes": 0}

    end = metrics_export.start(Exporter(METRICS, {}), numbers)
    until(lambda: len(calls) > 2, 10)
    end()
    time.sleep(0.1)
    n = len(calls)
    time.sleep(0.1)
    assert len(calls) == n
