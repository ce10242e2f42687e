"""A driver that goes on to another cluster."""

from __future__ import annotations

import pytest

from tests.conftest import ClamorCluster
from tests.support import driver_script

SCRIPT = """
import enum
import subprocess
import time
import numpy as np
import pyarrow as pa
import ray
import clamor_ray as clamor
from tests.support.lab.cluster import bare_cluster


class Key(str, enum.Enum):
    NAME = "name"  # the script's class goes to tasks


for number in range(2):
    with bare_cluster():  # it ends with ray.shutdown(), and not clamor.shutdown()
        assert ray.get_runtime_context().get_job_id() == "01000000"
        try:
            clamor.put(np.zeros(4096))
            raise AssertionError("there is no session in this cluster")
        except clamor.errors.NotInitializedError:
            pass
        clamor.init()
        if number == 1:
            ray.shutdown = ray._private.worker.shutdown  # without our hook, as where it dies
        ref = clamor.put(np.full(4096, float(number)))
        total = clamor.remote(lambda x: float(x.sum()))
        assert ray.get(total.remote(ref), timeout=60) == 4096.0 * number
        table = pa.table({"name": ["b", "a", "c"]})
        kept = clamor.from_arrow(table, partitions=2).sort(Key.NAME).execute()
        assert kept.to_arrow()["name"].to_pylist() == ["a", "b", "c"]
    began_s = time.monotonic()
    subprocess.run(["true"], check=True, preexec_fn=print)
    assert time.monotonic() - began_s < 30, "the child of a fork has waited for a server"
print("twice")
"""


@pytest.mark.lab
def test_without_an_end_of_the_first_session() -> None:
    """The first job of every cluster has the same id; the sessions are two all the same."""
    assert "twice" in driver_script.run(SCRIPT, timeout_s=280)


WORKER = """
import numpy as np
import ray
import clamor_ray as clamor

ray.init()


def built():
    with clamor.build(1 << 20) as region:
        return region.publish(region.zeros(100_000))


makers = {
    "put": lambda: clamor.put(np.ones(100_000)),
    "zeros": lambda: clamor.zeros(100_000),
    "share": lambda: clamor.share(ray.put(np.ones(100_000))),
    "HashMap": lambda: clamor.HashMap.build(np.arange(1000), np.arange(1000)).ref,
    "region": built,
}


@ray.remote(num_cpus=0, resources={"node0": 0.001})
class Worker:  # one process throughout
    def make(self, what):
        return makers[what]()


worker = Worker.remote()
scopes = set()
for what in makers:
    scopes.add(clamor.init().scope)
    ref = ray.get(worker.make.remote(what), timeout=60)
    assert len(ref.get()) > 0
    clamor.shutdown()
assert len(scopes) == len(makers)
print("made")
"""


@pytest.mark.lab
def test_a_worker_that_has_used_the_session_before(clamor_cluster: ClamorCluster) -> None:
    """Its next variable is of the session that there is, though no reference names that."""
    assert "made" in driver_script.run(WORKER, lab=clamor_cluster.lab)
