"""`clamor inspect VARIABLE`: its type, versions and homes, and which blocks each node has."""

from __future__ import annotations

from typing import Any, Final

import click

from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._objects.layout import format_bytes
from clamor_ray._observe.stats import from_report
from clamor_ray._session.variables import VariableInfo, listed
from clamor_ray.cli.clusters import OpenSession, connected, one_session
from clamor_ray.cli.output import (
    WELL,
    NotAskedError,
    cluster_options,
    console,
    exits,
    say_json,
    table,
)

BUCKETS: Final = 64
SHADES: Final = " ░▒▓█"
ID_DIGITS: Final = 12
PRESENT: Final = 0  # enum pc_block_set


def variable_of(known: list[VariableInfo], wanted: str) -> VariableInfo:
    """The one that is meant. Pure.

    Args:
        known: of the session.
        wanted: a name, or an id.

    Raises:
        NotAskedError: None is.
    """
    for info in known:
        if info.name == wanted:
            return info
    for info in known:
        if str(info.region) == wanted:
            return info
    named = ", ".join(sorted({info.name for info in known if info.name})) or "none"
    raise NotAskedError(f"No variable has the name or id {wanted!r}. Names: {named}.")


def shade(counts: list[int], blocks_of_bucket: float) -> str:
    """A character for each bucket: how much of it is there. Pure.

    Example:
        >>> shade([0, 1, 5, 10], 10.0)
        ' ░▒█'
    """
    most = len(SHADES) - 1
    return "".join(
        SHADES[min(most, max(int(n > 0), int(n / blocks_of_bucket * most)))] for n in counts
    )


def inspection(session: OpenSession, wanted: str) -> dict[str, Any]:
    """All that `clamor inspect` says, for JSON."""
    info = variable_of(listed(session.rpc.variables()), wanted)
    stats = from_report(session.rpc.stats())
    maps = session.rpc.histogram(info.region, PRESENT, BUCKETS) if info.nodes else {}
    nodes = []
    for node in stats.nodes:
        of_region = node.region(info.region)
        if of_region is None:
            continue
        nodes.append(
            {
                "node_id": node.node_id,
                "is_home": bool(of_region.is_home),
                "version": of_region.version,
                "oldest_version": of_region.oldest_version,
                "mappings": of_region.mappings,
                "generations": of_region.generations,
                "present_blocks": of_region.present_blocks,
                "fetched_blocks": of_region.fetched_blocks,
                "touched_blocks": of_region.touched_blocks,
                "home_bytes": of_region.home_bytes,
                "disk_bytes": of_region.disk_bytes,
                "block_map": list(maps.get(node.node_id, [])),
            }
        )
    return {
        "session": session.info.name,
        "scope": session.info.scope,
        "name": info.name,
        "id": info.region,
        "kind": info.kind,
        "nbytes": info.nbytes,
        "version": info.version,
        "homes": list(info.nodes),
        "nodes": nodes,
    }


def _print(said: dict[str, Any]) -> None:
    out = console()
    name = said["name"] or f"variable {said['id']}"
    out.print(
        f"{name}: {said['kind'] or 'no type is known'}, {format_bytes(said['nbytes'])}",
        style="bold",
    )
    homes = (
        ", ".join(node[:ID_DIGITS] for node in said["homes"])
        or "none: it travels in its references"
    )
    out.print(f"id {said['id']}, version {said['version']}, homes: {homes}")
    if not said["nodes"]:
        return
    bucket = max(1.0, said["nbytes"] / BLOCK_BYTES / BUCKETS)
    rows = [
        (
            each["node_id"][:ID_DIGITS],
            "home" if each["is_home"] else "cache",
            f"{each['oldest_version']}..{each['version']}"
            if each["is_home"]
            else str(each["version"]),
            str(each["mappings"]),
            f"{each['touched_blocks']:,}",
            "all of it" if each["is_home"] else shade(each["block_map"], bucket),
        )
        for each in said["nodes"]
    ]
    heads = ("node", "as", "versions", "mappings", "blocks touched", "blocks that it has")
    out.print(table(heads, rows, heads[2:5]))


@click.command("inspect", short_help="Shows a variable: type, versions, homes, blocks.")
@click.argument("variable")
@cluster_options
@exits
def command(
    variable: str, address: str | None, session: str | None, timeout_s: float, form: str
) -> int:
    """Shows VARIABLE, a name or an id: its type, versions, homes, and which node has which blocks.

    Exit status: 0; 2, there is no such variable, or it could not be asked.
    """
    with connected(address, timeout_s):
        said = inspection(one_session(session, timeout_s), variable)
    if form == "json":
        say_json(said)
    else:
        _print(said)
    return WELL
