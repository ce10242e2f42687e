"""`clamor top`: what page servers do now, by node and by variable, again and again."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._objects.layout import format_bytes
from clamor_ray._observe.stats import NodeStats, RegionStats, Stats, from_report
from clamor_ray._protocol.messages import VariableRecord
from clamor_ray._session.variables import ref_at
from clamor_ray.cli.clusters import OpenSession, connected, one_session
from clamor_ray.cli.output import (
    ID_DIGITS,
    WELL,
    cluster_options,
    console,
    exits,
    table,
)

MOST_VARIABLES: Final = 20  # that are shown: those that wait longest
LEAST_INTERVAL_S: Final = 0.2


@dataclass(frozen=True)
class NodeRates:
    """One page server, per second of the interval, and what it holds at its end.

    Args:
        node_id: Ray's.
        error: why it did not answer; "": it did.
        faults: touches of absent blocks.
        wait_ms: that faults have waited, together: 1000 is one thread that always waits.
        waiting: faults that wait now.
        received_bytes, sent_bytes: over the network.
        disk_bytes: of blocks that came from its disk or from files.
        evicted_bytes: of cached blocks.
        cached_bytes: now.
    """

    node_id: str
    error: str = ""
    faults: float = 0.0
    wait_ms: float = 0.0
    waiting: int = 0
    received_bytes: float = 0.0
    sent_bytes: float = 0.0
    disk_bytes: float = 0.0
    evicted_bytes: float = 0.0
    cached_bytes: int = 0


@dataclass(frozen=True)
class VariableRates:
    """One variable, per second of the interval, over all nodes.

    Args:
        name: or what it is called without one.
        reads: opens by processes, and requests of other nodes.
        faults, wait_ms: as of a node.
        fetched_bytes, touched_bytes: by faults: what they have asked for, and how much of it was
            touched, as estimated.
        hot_node: where most was waited; "" where nothing was.
    """

    name: str
    region: int
    reads: float = 0.0
    faults: float = 0.0
    wait_ms: float = 0.0
    fetched_bytes: float = 0.0
    touched_bytes: float = 0.0
    hot_node: str = ""


@dataclass(frozen=True)
class Owner:
    """A variable, for people."""

    region: int
    name: str


_OfNodes = dict[str, "Counter[str]"]  # counters by their names, by node


def _node_rates(old: NodeStats | None, new: NodeStats, seconds: float) -> NodeRates:
    if new.error or old is None or old.error:
        return NodeRates(new.node_id, new.error, cached_bytes=new.engine.cached_bytes)

    def rate(*names: str) -> float:
        # A page server that was started again counts from 0.
        grown = sum(getattr(new.engine, name) - getattr(old.engine, name) for name in names)
        return float(max(0, grown)) / seconds

    return NodeRates(
        node_id=new.node_id,
        faults=rate("faults"),
        wait_ms=rate("fault_wait_ns") / 1e6,
        waiting=new.engine.faults_waiting,
        received_bytes=rate("bytes_received"),
        sent_bytes=rate("bytes_sent"),
        disk_bytes=rate("disk_cache_reads", "file_blocks") * BLOCK_BYTES,
        evicted_bytes=rate("evicted_blocks") * BLOCK_BYTES,
        cached_bytes=new.engine.cached_bytes,
    )


_COUNTERS: Final = (
    "reads",
    "faults",
    "fault_wait_ns",
    "fault_fetched_blocks",
    "fault_touched_blocks",
)


def _grown(before: Stats, after: Stats, owners: Mapping[int, Owner]) -> dict[Owner, _OfNodes]:
    """By how much each variable's counters have grown, by node."""
    old = {(node.node_id, of.region): of for node in before.nodes for of in node.regions}
    known = {node.node_id for node in before.nodes if not node.error}
    grown: dict[Owner, _OfNodes] = {}
    for node in after.nodes:
        for new in node.regions if node.node_id in known else ():
            was = old.get((node.node_id, new.region), RegionStats())
            owner = owners.get(new.region) or Owner(new.region, f"(variable {new.region})")
            of_node = grown.setdefault(owner, {}).setdefault(node.node_id, Counter())
            for name in _COUNTERS:
                of_node[name] += max(0, getattr(new, name) - getattr(was, name))
    return grown


def _variable_rates(owner: Owner, of_nodes: _OfNodes, seconds: float) -> VariableRates:
    total: Counter[str] = sum(of_nodes.values(), Counter())
    hot = max(of_nodes, key=lambda node_id: of_nodes[node_id]["fault_wait_ns"])
    return VariableRates(
        name=owner.name,
        region=owner.region,
        reads=total["reads"] / seconds,
        faults=total["faults"] / seconds,
        wait_ms=total["fault_wait_ns"] / 1e6 / seconds,
        fetched_bytes=total["fault_fetched_blocks"] * BLOCK_BYTES / seconds,
        touched_bytes=total["fault_touched_blocks"] * BLOCK_BYTES / seconds,
        hot_node=hot if of_nodes[hot]["fault_wait_ns"] else "",
    )


def owners_of(records: Iterable[VariableRecord]) -> dict[int, Owner]:
    """Which variable a region is, or is a piece of, where the registry knows its reference.

    Args:
        records: what the registry says of variables.
    """
    owners = {}
    for record in records:
        owner = Owner(record.region, (record.names or (f"(variable {record.region})",))[0])
        owners[record.region] = owner
        if record.packed is not None:
            ref = ref_at(record.packed, record.latest)
            owners |= {piece.region: owner for piece in ref._piece_versions()}
    return owners


def rates(
    before: Stats, after: Stats, seconds: float, owners: Mapping[int, Owner]
) -> tuple[list[NodeRates], list[VariableRates]]:
    """What happened between two looks. Pure.

    Args:
        before: the first.
        after: the second.
        seconds: between them.
        owners: which variable each region is, or is a piece of.

    Returns:
        Nodes, in their order; variables of which something was read, those that wait longest first.
    """
    old_nodes = {node.node_id: node for node in before.nodes}
    nodes = [_node_rates(old_nodes.get(node.node_id), node, seconds) for node in after.nodes]
    grown = _grown(before, after, owners)
    found = [_variable_rates(owner, of_nodes, seconds) for owner, of_nodes in grown.items()]
    variables = [each for each in found if each.reads or each.faults or each.wait_ms]
    variables.sort(key=lambda each: (-each.wait_ms, -each.faults, -each.reads, each.region))
    return nodes, variables


def _per_s(n_bytes: float) -> str:
    return f"{format_bytes(round(n_bytes))}/s"


def shown(nodes: list[NodeRates], variables: list[VariableRates], seconds: float) -> Group:
    """Two tables."""
    heads = ["node", "faults/s", "wait ms/s", "waiting", "received", "sent", "disk", "evicted"]
    rows = [
        (each.node_id[:ID_DIGITS], "no answer")
        if each.error
        else (
            each.node_id[:ID_DIGITS],
            f"{each.faults:,.0f}",
            f"{each.wait_ms:,.0f}",
            str(each.waiting),
            _per_s(each.received_bytes),
            _per_s(each.sent_bytes),
            _per_s(each.disk_bytes),
            _per_s(each.evicted_bytes),
        )
        for each in nodes
    ]
    parts: list[Any] = [
        Text(f"{time.strftime('%H:%M:%S')}, the last {seconds:.1f} s", style="dim"),
        table(heads, rows, heads[1:]),
    ]
    parts += [
        Text(f"{each.node_id[:ID_DIGITS]}: {each.error}", style="red")
        for each in nodes
        if each.error
    ]
    if variables:
        heads = ["variable", "faults/s", "wait ms/s", "fetched", "touched", "reads/s", "hot node"]
        cells = [
            (
                each.name,
                f"{each.faults:,.0f}",
                f"{each.wait_ms:,.0f}",
                _per_s(each.fetched_bytes),
                _per_s(each.touched_bytes),
                f"{each.reads:,.0f}",
                each.hot_node[:ID_DIGITS],
            )
            for each in variables[:MOST_VARIABLES]
        ]
        parts.append(table(heads, cells, heads[1:6]))
        if len(variables) > MOST_VARIABLES:
            parts.append(Text(f"and {len(variables) - MOST_VARIABLES} more", style="dim"))
    else:
        parts.append(Text("No variable was read.", style="dim"))
    return Group(*parts)


def _samples(
    session: OpenSession, interval_s: float, count: int | None
) -> Iterator[tuple[list[NodeRates], list[VariableRates], float]]:
    def look() -> tuple[Stats, float]:
        return from_report(session.rpc.stats()), time.monotonic()

    before, began_s = look()
    n = 0
    while count is None or n < count:
        time.sleep(interval_s)
        after, now_s = look()
        owners = owners_of(session.rpc.variables())
        nodes, variables = rates(before, after, now_s - began_s, owners)
        yield nodes, variables, now_s - began_s
        before, began_s = after, now_s
        n += 1


@click.command("top")
@cluster_options
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(LEAST_INTERVAL_S, 3600.0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option(
    "--count",
    type=click.IntRange(1),
    help="So many times. Without it: until Ctrl-C in a terminal, else once.",
)
@exits
def command(
    address: str | None,
    session: str | None,
    timeout_s: float,
    form: str,
    interval_s: float,
    count: int | None,
) -> int:
    """Shows what page servers do: faults, how long they wait, bytes moved, and which variable.

    `wait ms/s` is what faults have waited in a second, together: 1000 is one thread that always
    waits. --timeout is for each answer by itself. JSON is a document a line. Exit status: 0; 2, it
    could not be asked.
    """
    is_live = form == "text" and sys.stdout.isatty()
    if count is None and not is_live:
        count = 1
    with contextlib.suppress(KeyboardInterrupt), connected(address, timeout_s):
        found = one_session(session, timeout_s, each_answer=True)
        if found.info.error:
            raise errors.NoSuchSessionError(found.info.error)
        samples = _samples(found, interval_s, count)
        if is_live:
            with Live(console=console(), auto_refresh=False, screen=count is None) as live:
                for nodes, variables, seconds in samples:
                    live.update(shown(nodes, variables, seconds), refresh=True)
        else:
            for nodes, variables, seconds in samples:
                if form == "json":
                    said = {
                        "seconds": seconds,
                        "nodes": [asdict(each) for each in nodes],
                        "variables": [asdict(each) for each in variables],
                    }
                    click.echo(json.dumps(said, sort_keys=True))
                else:
                    console().print(shown(nodes, variables, seconds))
    return WELL
