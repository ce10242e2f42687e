"""Variables on disk, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.troubles import small_disk

pytestmark = pytest.mark.lab

MIB = 1 << 20


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[LocalCluster]:
    """Its directory for variables on disk is none."""
    require_lab("local")
    directory = tmp_path / "disk"
    with pytest.MonkeyPatch.context() as patch, small_disk(directory, 100 * MIB):
        patch.setenv("CLAMOR_SPILL_DIR", str(directory))
        with local_cluster(1) as lab:
            clamor.init()
            yield lab


def test_what_the_disk_has_no_room_for(in_memory: LocalCluster) -> None:
    content, told = np.arange(100_000), r"no room for .* CLAMOR_SPILL_DIR .* \(tmpfs\) has none"
    with pytest.raises(errors.NoSpaceError, match=told):
        clamor.put(content, spill=True)
    with pytest.raises(errors.NoSpaceError, match=told):
        clamor.zeros(10**9, spill=True)
    with pytest.raises(errors.NoSpaceError, match=told), clamor.build(MIB, spill=True):
        pass
    assert not clamor.variables()
    assert np.array_equal(clamor.put(content).get(), content)
