"""`clamor inspect VARIABLE`: its type, versions and homes, and which blocks each node has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._objects.layout import format_bytes
from clamor_ray._observe.stats import from_report, map_of_pieces
from clamor_ray._protocol.messages import INLINE_BASE
from clamor_ray._session.variables import VariableInfo, listed, ref_at
from clamor_ray.cli.clusters import OpenSession, connected, one_session
from clamor_ray.cli.output import (
    ID_DIGITS,
    WELL,
    WRONG,
    NotAskedError,
    cluster_options,
    console,
    exits,
    say_json,
    table,
)

BUCKETS: Final = 64
SHADES: Final = " ░▒▓█"
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
    records = session.rpc.variables()
    info = variable_of(listed(records), wanted)
    stats = from_report(session.rpc.stats())
    # Page servers know the pieces of one that is spread: its reference says which those are.
    named = [each for each in records if each.region == info.region]
    refs = [ref_at(each.packed, each.latest) for each in named if each.packed is not None]
    pieces = refs[0]._piece_versions() if refs else ()
    maps: Mapping[str, Any] = {}
    if info.nodes and pieces:
        maps = map_of_pieces(session.rpc, pieces, PRESENT, BUCKETS)
    elif info.nodes:
        maps = session.rpc.histogram(info.region, PRESENT, BUCKETS)
    nodes = []
    for node in stats.nodes:
        of_region = node.region(refs[0] if refs else info.region)
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
                "block_map": [int(n) for n in maps.get(node.node_id, ())],
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
        "is_spread": bool(pieces),
        "lost": stats.lost.get(info.region, ""),
    }


def _print(said: dict[str, Any]) -> None:
    out = console()
    name = said["name"] or f"variable {said['id']}"
    out.print(
        f"{name}: {said['kind'] or 'no type is known'}, {format_bytes(said['nbytes'])}",
        style="bold",
    )
    none = "it travels in its references" if said["id"] >= INLINE_BASE else "none answers"
    homes = ", ".join(node[:ID_DIGITS] for node in said["homes"]) or none
    out.print(f"id {said['id']}, version {said['version']}, homes: {homes}")
    if said["lost"]:
        out.print(f"Wrong: {said['lost']}", style="red")
    if not said["nodes"]:
        return
    whole = not said["is_spread"]
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
            "all of it" if each["is_home"] and whole else shade(each["block_map"], bucket),
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

    Exit status: 0; 1, it is lost, or lacks blocks; 2, it is not there, or could not be asked.
    """
    with connected(address, timeout_s):
        said = inspection(one_session(session, timeout_s), variable)
    if form == "json":
        say_json(said)
    else:
        _print(said)
    return WRONG if said["lost"] else WELL
