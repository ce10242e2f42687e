"""What `clamor top` makes of two looks; tests/cluster/test_cli_lab.py asks a cluster."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from clamor_ray._observe.stats import EngineStats, NodeStats, RegionStats, Stats
from clamor_ray._protocol.messages import ServerInfo
from clamor_ray.cli.top import MOST_VARIABLES, Owner, VariableRates, rates, shown

A, B = "a" * 56, "b" * 56
SPREAD = Owner(7, "index")
MS = 10**6


def node(
    node_id: str, regions: tuple[RegionStats, ...] = (), error: str = "", **of: Any
) -> NodeStats:
    server = ServerInfo.__new__(ServerInfo)
    object.__setattr__(server, "node_id", node_id)
    return NodeStats(server, EngineStats(**of), regions, error=error)


def test_rates_of_nodes() -> None:
    before = Stats(nodes=(node(A, faults=100, bytes_received=10), node(B, faults=900)))
    after = Stats(
        nodes=(
            node(
                A,
                faults=300,
                fault_wait_ns=4000 * MS,
                faults_waiting=3,
                bytes_received=4010,
                disk_cache_reads=2,
                file_blocks=4,
                evicted_blocks=1,
                cached_bytes=4096,
            ),
            node(B, faults=50),  # it was started again meanwhile
        )
    )
    (first, second), variables = rates(before, after, 2.0, {})
    assert variables == []
    assert (first.faults, first.wait_ms, first.waiting) == (100.0, 2000.0, 3)
    assert (first.received_bytes, first.sent_bytes) == (2000.0, 0.0)
    assert (first.disk_bytes, first.evicted_bytes, first.cached_bytes) == (12288.0, 2048.0, 4096)
    assert second.faults == 0.0


def test_nodes_that_come_and_do_not_answer() -> None:
    before = Stats(nodes=(node(A, faults=7),))
    after = Stats(nodes=(node(A, error="it is gone"), node(B, faults=900)))
    gone, new = rates(before, after, 1.0, {})[0]
    assert (gone.error, gone.faults) == ("it is gone", 0.0)
    assert new.faults == 0.0  # since when is not known


def test_pieces_are_one_variable_and_the_slowest_goes_first() -> None:
    def looks(faults: int, wait_ms: int) -> RegionStats:
        return RegionStats(region=8, faults=faults, fault_wait_ns=wait_ms * MS)

    before = Stats(nodes=(node(A, (looks(1, 10), RegionStats(region=3, reads=5))), node(B)))
    after = Stats(
        nodes=(
            node(
                A,
                (
                    looks(2, 20),
                    RegionStats(region=9, faults=1, fault_wait_ns=5 * MS, fault_fetched_blocks=2),
                    RegionStats(region=3, reads=7),
                    RegionStats(region=4, reads=0),
                ),
            ),
            node(B, (looks(3, 40),)),
        )
    )
    _, (slow, quick) = rates(before, after, 1.0, {8: SPREAD, 9: SPREAD})
    assert (slow.name, slow.region, slow.hot_node) == ("index", 7, B)
    assert (slow.faults, slow.wait_ms, slow.fetched_bytes) == (5.0, 55.0, 8192.0)
    assert (quick.name, quick.reads, quick.hot_node) == ("(variable 3)", 2.0, "")


def test_a_node_that_did_not_answer_before_has_no_rates() -> None:
    def look(faults: int) -> RegionStats:
        return RegionStats(region=8, faults=faults, fault_wait_ns=faults)

    silent = Stats(nodes=(node(A, error="it is busy"),))
    _, variables = rates(silent, Stats(nodes=(node(A, (look(10**6),)),)), 1.0, {8: SPREAD})
    assert variables == []


def test_a_wait_that_goes_on_is_shown() -> None:
    before, after = (
        Stats(nodes=(node(A, (RegionStats(region=8, fault_wait_ns=ms * MS),)),)) for ms in (5, 905)
    )
    _, (waits,) = rates(before, after, 1.0, {8: SPREAD})
    assert (waits.wait_ms, waits.faults, waits.hot_node) == (900.0, 0.0, A)


def test_what_is_shown() -> None:
    nodes, _ = rates(Stats(), Stats(nodes=(node(A, error="it is gone"), node(B))), 1.0, {})
    out = Console(width=110, record=True, file=None)
    with out.capture() as captured:
        out.print(shown(nodes, [], 1.0))
    text = captured.get()
    assert f"{A[:12]}: it is gone" in text
    assert "no answer" in text
    assert "faults/s" in text
    assert B[:12] in text
    assert "No variable was read." in text
    many = [VariableRates(f"v{i}", i, faults=1.0) for i in range(MOST_VARIABLES + 2)]
    with out.capture() as captured:
        out.print(shown(nodes, many, 1.0))
    assert "and 2 more" in captured.get()
