"""What `print(clamor.stats())` shows."""

from __future__ import annotations

from clamor_ray._observe.stats import EngineStats, NodeStats, RegionStats, Stats
from clamor_ray._protocol.messages import ServerInfo


def node(name: str, **counters: int) -> NodeStats:
    info = ServerInfo.__new__(ServerInfo)
    object.__setattr__(info, "node_id", name * 28)
    return NodeStats(info, EngineStats(**counters), (RegionStats(),) * len(counters))


def test_a_line_for_each_node() -> None:
    silent = NodeStats(node("cd").info, error="it did not answer within 5 s")
    shown = Stats((node("ab", home_bytes=123456789, blocks_fetched=12345, faults=17), silent))
    assert str(shown) == (
        "node           home  cached        fetched  received  sent  faults  variables\n"
        "abababab  117.7 MiB     0 B  12,345 blocks       0 B   0 B      17          3\n"
        "cdcdcdcd  it did not answer within 5 s"
    )


def test_before_there_are_any() -> None:
    assert str(Stats()).startswith("node  home")
