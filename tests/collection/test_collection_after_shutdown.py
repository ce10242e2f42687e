"""A collection that outlives its session."""

from __future__ import annotations

import pytest

from tests.conftest import ClamorCluster
from tests.support import driver_script

SCRIPT = """
import gc
import numpy as np
import ray
import clamor_ray as clamor

ray.init()
clamor.init()
ref = clamor.put(np.arange(4096.0))
kept = clamor.from_numpy(np.arange(4), partitions=1).map_batches(lambda i, x: x[i], ref).execute()
assert kept.collect() == [0.0, 1.0, 2.0, 3.0]
clamor.shutdown()
ray.shutdown()
del kept
gc.collect()
assert not ray.is_initialized(), "letting go of it has started a cluster"
print("ended")
"""


@pytest.mark.lab
def test_letting_go_of_it_starts_nothing(clamor_cluster: ClamorCluster) -> None:
    assert "ended" in driver_script.run(SCRIPT, lab=clamor_cluster.lab)
