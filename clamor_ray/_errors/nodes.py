"""What can go wrong with a node that is to go. `errors.py` has all errors."""

from __future__ import annotations

from clamor_ray._errors.base import ClamorError


class NodeLostError(ClamorError):
    """The node that `clamor.drain` moves everything off was lost meanwhile."""

    default_hint = (
        "Variables with redundancy stay whole. Of the others comes back what other nodes have read "
        "and what a source makes; HomeLostError names the rest: put that again."
    )


class NoOtherNodeError(ClamorError):
    """`clamor.drain` found no other node that could take what the node has."""

    default_hint = "Nothing was moved. Add a node to the cluster, or free variables, and try again."
