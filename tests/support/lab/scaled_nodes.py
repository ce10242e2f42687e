"""Ray's fake provider of nodes, whose nodes have ids as real ones: they differ at their beginning.

The autoscaler's process imports it.
"""

from __future__ import annotations

import secrets
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class ScaledNodes(FakeMultiNodeProvider):  # type: ignore[misc]
    """See the file's head."""

    def _next_hex_node_id(self) -> Any:
        return secrets.token_hex(28)
