"""Ray goes while anchors of tasks under way are looked after."""

from __future__ import annotations

import pytest

from tests.conftest import ClamorCluster
from tests.support import driver_script

pytestmark = pytest.mark.lab

SHUTDOWN = """
import threading
import time
import types
import numpy as np
import ray
import clamor_ray as clamor
from clamor_ray._counting import in_flight


def sleep(seconds):
    is_down.wait()
    time.sleep(0.01)


is_down = threading.Event()
in_flight.time = types.SimpleNamespace(sleep=sleep)


class SlowToGo:
    # Ray's core worker. It has ended a while before Ray drops it, and who calls it then, or drops
    # an object reference, ends the process.
    def __init__(self, of):
        self.of = of

    def __getattr__(self, name):
        return getattr(self.of, name)

    def shutdown_driver(self):
        self.of.shutdown_driver()
        is_down.set()
        time.sleep(1)


@clamor.remote(num_cpus=0)
def late(array):
    time.sleep(60)


for _ in range(2):
    is_down.clear()
    ray.init()
    clamor.init()
    late.remote(clamor.put(np.zeros(9999)))
    assert in_flight.in_flight._by_task
    worker = ray._private.worker.global_worker
    worker.core_worker = SlowToGo(worker.core_worker)
    ray.shutdown()
    until = time.monotonic() + 30
    while in_flight.in_flight._is_looking and time.monotonic() < until:
        time.sleep(0.1)
    assert not in_flight.in_flight._by_task
print("went on")
"""


def test_ray_shuts_down_under_a_look(clamor_cluster: ClamorCluster) -> None:
    assert "went on" in driver_script.run(SHUTDOWN, lab=clamor_cluster.lab)
