"""`clamor drain NODE`: all variables of all sessions off a node that is to go."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import click
import ray

from clamor_ray import errors
from clamor_ray._objects.layout import format_bytes
from clamor_ray._protocol import ray_state
from clamor_ray._session.drain import ANSWER_S
from clamor_ray.cli.clusters import OpenSession, connected, node_of, open_sessions, watched
from clamor_ray.cli.output import (
    ID_DIGITS,
    NOT_CHECKED,
    WELL,
    WRONG,
    cluster_options,
    console,
    exits,
    say_json,
)

REACH_S: Final = ANSWER_S / 2  # of the time for an answer, what it may take to reach the cluster
PRINTS_S: Final = 1.0  # what is left to say why a registry has not answered

NOT_KNOWN: Final = "Not known: the raylet of the node that asked has ended."


def longest_s(timeout_s: float) -> float:
    """How long the command may take from its start to its end, whatever does not answer.

    A container's `preStop` is given up after some time: that must be longer.

    Args:
        timeout_s: its `--timeout`.
    """
    return timeout_s + ANSWER_S


def _asked(session: OpenSession, ask: Callable[[OpenSession], dict[str, Any]]) -> dict[str, Any]:
    """What one session says. What one cannot do is no reason to leave out another."""
    said: dict[str, Any] = {"name": session.info.name, "scope": session.info.scope, "error": ""}
    try:
        if session.info.error:
            ray_state.check_raylet()  # it may be why
            return {**said, "error": session.info.error}
        return {**said, **ask(session)}
    except ray_state.RayletEndedError:  # the session may be well, and have all on the node still
        return {**said, "error": NOT_KNOWN}
    except errors.SessionEndedError:
        return {**said, "ended": True}
    except errors.ClamorError as error:
        return {**said, "error": str(error)}


def _drained(session: OpenSession, node_id: str, timeout_s: float, over_s: float) -> dict[str, Any]:
    """With its answer before `over_s` of `time.monotonic()`. What reaching the cluster took beyond
    `REACH_S` is taken from the moves."""
    left_s = max(PRINTS_S, over_s - PRINTS_S - time.monotonic())
    moves_s = max(0.0, min(timeout_s, left_s + PRINTS_S - (ANSWER_S - REACH_S)))
    result = session.rpc.drain(node_id, moves_s, timeout_s=left_s)
    return {"moved": result.moved, "bytes": result.bytes, "seconds": result.seconds}


@click.command("drain", short_help="Moves all variables off a node that is to go.")
@click.argument("node", required=False)
@click.option("--this-node", is_flag=True, help="The node that this command runs on.")
@click.option("--cancel", is_flag=True, help="Undo it: variables may come to the node again.")
@cluster_options
@exits
def command(
    node: str | None,
    this_node: bool,
    cancel: bool,
    address: str | None,
    session: str | None,
    timeout_s: float,
    form: str,
) -> int:
    """Moves all variables off NODE, while they are used: an id or its beginning, a host name, an
    address.

    Exit status: 0, nothing is there any more, or nothing was; 1, some is there still; 2, it could
    not be asked, or its answer was not heard.
    """
    if (node is None) != this_node or node == "":
        raise click.UsageError("Give a NODE, or --this-node.")

    def ask(session: OpenSession) -> dict[str, Any]:
        if cancel:
            return {"undone": session.rpc.cancel_drain(node_id)}
        return _drained(session, node_id, timeout_s, over_s)

    over_s = time.monotonic() + longest_s(timeout_s)
    with watched(longest_s(timeout_s)), connected(address, timeout_s):
        node_id = node_of(node) if node else ray.get_runtime_context().get_node_id()
        sessions = open_sessions(session, timeout_s)
        with ThreadPoolExecutor(max(1, len(sessions))) as pool:  # one that hangs delays no other
            said = list(pool.map(lambda each: _asked(each, ask), sessions))
    if form == "json":
        say_json({"node_id": node_id, "sessions": said})
    else:
        _print(node_id, said)
    if any(each["error"] == NOT_KNOWN for each in said):
        click.echo(
            "clamor: It is not known what is on the node: Ray on the machine of this command has "
            "ended (its raylet). On another node, clamor status says what is lost, and clamor "
            f"drain {node_id[:ID_DIGITS]} asks again if the node lives.",
            err=True,
        )
        return NOT_CHECKED
    return WRONG if any(each["error"] for each in said) else WELL


def _counted(n: int) -> str:
    return "1 variable" if n == 1 else f"{n} variables"


def _print(node_id: str, said: list[dict[str, Any]]) -> None:
    out = console()
    if not said:
        out.print(f"Node {node_id[:ID_DIGITS]} has nothing: there is no session.")
    for each in said:
        label = f"Session {each['name'] or each['scope']}"
        if each["error"]:
            out.print(f"{label}: {each['error']}", style="red")
        elif "ended" in each:
            out.print(f"{label} has ended.")
        elif "undone" in each:
            out.print(
                f"{label}: {'the drain is undone' if each['undone'] else 'it was not drained'}."
            )
        elif not each["moved"]:
            out.print(f"{label} has nothing on node {node_id[:ID_DIGITS]}: nothing had to move.")
        else:
            out.print(
                f"{label}: {_counted(each['moved'])} ({format_bytes(each['bytes'])}) moved in "
                f"{each['seconds']:.1f} s."
            )
