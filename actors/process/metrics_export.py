"""In: a process's numbers. Out: Ray's metrics, as `_protocol/metrics.py` names them.

It is off the way of faults: it reads what is counted anyway. Reading computes, for longer where
there are many variables: the next look waits for `SHARE` times what the last one computed. What it
waited, for a lock or for a core, costs nobody anything. A
gauge is set each second all the same: Ray's agent forgets one that was not set for two of its
intervals. A counter gets what it has grown by. Ray refuses 0, and a counter that is not there has
no rate: it begins with the least number there is.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.util import metrics as ray_metrics

from clamor_ray._protocol.metrics import Metric

logger = logging.getLogger("clamor_ray.metrics")

INTERVAL_S = 1.0
SHARE = 1000  # a look takes one part in so many of a core's time
LEAST = sys.float_info.min


class Exporter:
    """Of one process.

    Args:
        metrics: what is exported.
        tags: their values, by name.
    """

    def __init__(self, metrics: Sequence[Metric], tags: Mapping[str, str]) -> None:
        self._last: dict[str, float] = {}
        self._made: list[tuple[Metric, Any]] = []
        for metric in metrics:
            make = ray_metrics.Counter if metric.kind == "counter" else ray_metrics.Gauge
            made = make(metric.name, description=metric.help, tag_keys=tuple(tags))
            made.set_default_tags(dict(tags))
            if metric.kind == "counter":
                made.inc(LEAST)
            self._made.append((metric, made))

    def tick(self, numbers: Mapping[str, float]) -> None:
        """Exports what is now.

        Args:
            numbers: by the names of `Metric.sources`.
        """
        for metric, made in self._made:
            now = sum(numbers[source] for source in metric.sources) * metric.scale
            if metric.kind == "gauge":
                made.set(now)
            elif (grown := now - self._last.get(metric.name, 0.0)) > 0:
                made.inc(grown)
                self._last[metric.name] = now


class Export:
    """Of numbers that take time to look at. It raises nothing: nobody waits for metrics.

    Args:
        metrics, tags: as `Exporter`'s.
        numbers: what is now; all of it on the thread that calls. Where it raises, or Ray does, that
            is logged once, and tried again.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        tags: Mapping[str, str],
        numbers: Callable[[], Mapping[str, float]],
    ) -> None:
        self._metrics, self._tags, self._numbers = metrics, tags, numbers
        self._exporter: Exporter | None = None
        self._found: Mapping[str, float] = {}
        self._look_s = 0.0
        self._has_failed = False

    def tick(self, quick: Mapping[str, float] | None = None) -> None:
        """Exports what is now.

        Args:
            quick: further numbers, which cost nothing.
        """
        try:
            self._exporter = self._exporter or Exporter(self._metrics, self._tags)
            now_s = time.monotonic()
            if now_s >= self._look_s:
                began_ns = time.thread_time_ns()
                self._found = self._numbers()
                self._look_s = now_s + SHARE * (time.thread_time_ns() - began_ns) / 1e9
            self._exporter.tick({**self._found, **(quick or {})})
        except Exception as failure:  # any
            if not self._has_failed:
                logger.warning("metrics are not exported now: %r", failure)
            self._has_failed = True


def start(export: Export) -> Callable[[], None]:
    """Exports each second, on a thread of its own, until what this returns is called."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(INTERVAL_S):
            export.tick()

    threading.Thread(target=work, name="clamor-metrics", daemon=True).start()
    return over.set
