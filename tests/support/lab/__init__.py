"""A Ray cluster of several raylets on one machine, in two forms.

* ``local_cluster`` needs no root: raylets share the loopback device.
* ``netns_cluster`` needs root: every raylet has a network namespace, an address and a link of its
  own, whose rate is set by ``tc tbf``.

Used by tests, by bench, and by hand: ``python -m tests.support.lab --help``.
"""

from tests.support.lab.availability import lab_unavailable, require_lab
from tests.support.lab.cluster import LocalCluster, local_cluster
from tests.support.lab.netns import NetnsCluster, netns_cluster, remove_stale

__all__ = [
    "LocalCluster",
    "NetnsCluster",
    "lab_unavailable",
    "local_cluster",
    "netns_cluster",
    "remove_stale",
    "require_lab",
]
