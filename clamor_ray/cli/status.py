"""`clamor status`: sessions, their variables and page servers, and whether something is wrong."""

from __future__ import annotations

import time
from typing import Any

import click

from clamor_ray import errors
from clamor_ray._objects.layout import format_bytes
from clamor_ray._observe.stats import NodeStats, Stats, from_report
from clamor_ray._protocol.messages import INLINE_BASE
from clamor_ray._session.variables import VariableInfo, listed
from clamor_ray.cli.clusters import OpenSession, connected, open_sessions
from clamor_ray.cli.output import (
    ID_DIGITS,
    WELL,
    WRONG,
    cluster_options,
    console,
    exits,
    say_json,
    table,
)


def troubles(stats: Stats) -> list[str]:
    """What is not as it should be, a sentence each. Pure."""
    found = [why for _, why in sorted(stats.lost.items())]
    if stats.degraded:
        found.append(
            f"{stats.degraded} pieces would not survive the loss of one more node: they are being "
            "made again, or there are too few nodes."
        )
    for node in stats.nodes:
        label = f"Page server of node {node.node_id[:ID_DIGITS]}"
        if node.error:
            found.append(f"{label} did not answer: {node.error}")
        if node.engine.damaged_blocks:
            found.append(
                f"{label} has found {node.engine.damaged_blocks} damaged blocks: run clamor fsck "
                "when no session has the store open."
            )
    return found


def _node_of(node: NodeStats) -> dict[str, Any]:
    engine = node.engine
    return {
        "node_id": node.node_id,
        "server_id": f"{node.info.server_id:#x}",
        "pid": node.info.pid,
        "error": node.error,
        "leaving": node.leaving,
        "home_bytes": engine.home_bytes,
        "disk_bytes": engine.disk_bytes,
        "cached_bytes": engine.cached_bytes,
        "cache_budget_bytes": node.cache_bytes,
        "history_bytes": engine.history_bytes,
        "history_disk_bytes": engine.history_disk_bytes,
        "clients": engine.clients,
        "thrashing": node.thrashing,
    }


def _variable_of(info: VariableInfo, is_lost: bool) -> dict[str, Any]:
    return {
        "name": info.name,
        "id": info.region,
        "version": info.version,
        "kind": info.kind,
        "nbytes": info.nbytes,
        "homes": list(info.nodes),
        "is_lost": is_lost,
    }


def status_of(session: OpenSession) -> dict[str, Any]:
    """All that `clamor status` says of a session, for JSON."""
    info = session.info
    said: dict[str, Any] = {
        "name": info.name,
        "scope": info.scope,
        "began_at_s": info.began_at_s,
        "variables": [],
        "nodes": [],
        "troubles": [],
    }
    try:
        if info.error:
            said["troubles"] = [info.error]
            return said
        stats = from_report(session.rpc.stats())
        variables = listed(session.rpc.variables())
    except errors.ClamorError as error:
        said["troubles"] = [str(error)]
        return said
    said["variables"] = [_variable_of(each, each.region in stats.lost) for each in variables]
    said["nodes"] = [_node_of(each) for each in stats.nodes]
    said["troubles"] = troubles(stats)
    return said


def _age(began_at_s: float) -> str:
    seconds = max(0, round(time.time() - began_at_s))
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _of_budget(used: int, budget: int) -> str:
    return f"{format_bytes(used)} of {format_bytes(budget)}" if budget else format_bytes(used)


def _without_home(variable: dict[str, Any]) -> str:
    if variable["id"] >= INLINE_BASE:
        return "inline"
    return "lost" if variable["is_lost"] else "none answers"


def _print(said: dict[str, Any]) -> None:
    out = console()
    name = said["name"] or "of a driver, without a name"
    age = f", began {_age(said['began_at_s'])} ago" if said["began_at_s"] else ""
    out.print(f"Session {name} (scope {said['scope']}){age}", style="bold")
    variables = [
        (
            each["name"] or f"(variable {each['id']})",
            format_bytes(each["nbytes"]),
            str(each["version"]),
            ", ".join(node[:ID_DIGITS] for node in each["homes"]) or _without_home(each),
            each["kind"],
        )
        for each in said["variables"]
    ]
    if variables:
        heads = ["variable", "size", "version", "homes", "type"]
        out.print(table(heads, variables, heads[1:3]))
    nodes = [
        (
            each["node_id"][:ID_DIGITS],
            format_bytes(each["home_bytes"] + each["disk_bytes"]),
            _of_budget(each["cached_bytes"], each["cache_budget_bytes"]),
            format_bytes(each["history_bytes"] + each["history_disk_bytes"]),
            str(each["clients"]),
            "no answer" if each["error"] else "leaving" if each["leaving"] else "ready",
        )
        for each in said["nodes"]
    ]
    if nodes:
        heads = ["node", "homes", "cache", "history", "processes", "state"]
        out.print(table(heads, nodes, heads[1:5]))
    for trouble in said["troubles"]:
        out.print(f"Wrong: {trouble}", style="red")


@click.command("status")
@cluster_options
@exits
def command(address: str | None, session: str | None, timeout_s: float, form: str) -> int:
    """Shows sessions, their variables and page servers.

    Exit status: 0, all is well; 1, something is lost, degraded, or does not answer; 2, it could not
    be asked.
    """
    with connected(address, timeout_s):
        found = [status_of(each) for each in open_sessions(session, timeout_s)]
    if form == "json":
        say_json({"sessions": found})
    elif not found:
        console().print("No session. clamor.init() in a driver begins one.")
    for index, said in enumerate(found if form == "text" else ()):
        if index:
            console().print()
        _print(said)
    return WRONG if any(each["troubles"] for each in found) else WELL
