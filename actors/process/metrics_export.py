"""In: a process's numbers, each second. Out: Ray's metrics, as `_protocol/metrics.py` names them.

It is off the way of faults: it reads what is counted anyway. A gauge is set each time: Ray's agent
forgets one that was not set for two of its intervals. A counter gets what it has grown by. Ray
refuses 0, and a counter that is not there has no rate: it begins with the least number there is.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.util import metrics as ray_metrics

from clamor_ray._protocol.metrics import Metric

logger = logging.getLogger("clamor_ray.metrics")

INTERVAL_S = 1.0
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
                continue
            grown = now - self._last.get(metric.name, 0.0)
            self._last[metric.name] = now
            if grown > 0:
                made.inc(grown)


def start(exporter: Exporter, numbers: Callable[[], Mapping[str, float]]) -> Callable[[], None]:
    """Exports each second, on a thread of its own, until what this returns is called.

    Args:
        exporter: which.
        numbers: what is now; where it raises, nothing more is exported.
    """
    over = threading.Event()

    def work() -> None:
        while not over.wait(INTERVAL_S):
            try:
                exporter.tick(numbers())
            except Exception as failure:  # any: nobody waits for metrics
                if not over.is_set():
                    logger.warning("metrics are exported no more: %r", failure)
                return

    threading.Thread(target=work, name="clamor-metrics", daemon=True).start()
    return over.set
