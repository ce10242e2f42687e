"""What is exported of numbers that grow, and of such as are now."""

from __future__ import annotations

import time
from typing import Any

import pytest

from clamor_ray._protocol.metrics import Metric
from clamor_ray.actors.process import metrics_export
from clamor_ray.actors.process.metrics_export import LEAST, Export, Exporter
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


def test_numbers_that_shrink_for_a_moment(made: dict[str, Fake]) -> None:
    exporter = Exporter(METRICS, {})
    for disk in (9, 8, 9, 10):  # a sum of several counters may be read while they change
        exporter.tick({"disk": disk, "files": 0, "homes": 0})
    assert made["clamor_reads"].said == [LEAST, 9 * 4096.0, 4096.0]


def test_what_cannot_be_counted_is_tried_again(
    made: dict[str, Fake], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_export, "INTERVAL_S", 0.01)
    calls: list[float] = []

    def numbers() -> dict[str, Any]:
        calls.append(time.monotonic())
        if len(calls) == 3:
            raise OSError("gone")
        return {"disk": 1, "files": 0, "homes": 0}

    monkeypatch.setattr(metrics_export, "SHARE", 0)
    end = metrics_export.start(Export(METRICS, {}, numbers))
    until(lambda: len(calls) > 5, 10)
    end()
    assert caplog.text.count("metrics are not exported now: OSError('gone')") == 1


def test_a_look_that_computes_long_is_seldom(
    made: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_export, "INTERVAL_S", 0.01)
    looks: list[int] = []

    def numbers() -> dict[str, float]:
        looks.append(1)
        over_ns = time.thread_time_ns() + 30_000_000
        while time.thread_time_ns() < over_ns:
            pass
        return {"disk": 1, "files": 0, "homes": 3}

    end = metrics_export.start(Export(METRICS, {}, numbers))
    until(lambda: len(made["clamor_homes"].said) > 5 if "clamor_homes" in made else False, 10)
    end()
    assert len(looks) == 1  # the next one in 30 s


def test_a_look_that_only_waits_is_as_often_as_any(
    made: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a lock; or for a core, on a busy machine."""
    monkeypatch.setattr(metrics_export, "INTERVAL_S", 0.01)
    looks: list[int] = []

    def numbers() -> dict[str, float]:
        looks.append(1)
        time.sleep(0.2)  # a thousand times that is more than the test has
        return {"disk": 1, "files": 0, "homes": 3}

    end = metrics_export.start(Export(METRICS, {}, numbers))
    until(lambda: len(looks) > 1, 60)
    end()


def test_it_ends(made: dict[str, Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_export, "INTERVAL_S", 0.01)
    calls: list[int] = []

    def numbers() -> dict[str, int]:
        calls.append(1)
        return {"disk": 1, "files": 0, "homes": 0}

    monkeypatch.setattr(metrics_export, "SHARE", 0)
    end = metrics_export.start(Export(METRICS, {}, numbers))
    until(lambda: len(calls) > 2, 10)
    end()
    time.sleep(0.1)
    n = len(calls)
    time.sleep(0.1)
    assert len(calls) == n
