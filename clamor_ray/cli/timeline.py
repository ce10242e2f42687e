"""`clamor timeline`: what took long, as a Chrome trace, beside what Ray says of its tasks."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import ray

from clamor_ray import errors
from clamor_ray._protocol import names
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.rpc import unpack
from clamor_ray._spans.chrome_trace import Event, Row, events_of, merged
from clamor_ray._spans.record import Span
from clamor_ray.actors.page_server.node_spans import PROCESS_WAIT
from clamor_ray.cli.clusters import OpenSession, connected, open_sessions
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
from clamor_ray.cli.top import owners_of

MOST_LINES: Final = 15  # of the table


@dataclass
class Found:
    """What sessions have said.

    Args:
        events: ours, whose rows are texts.
        troubles: who did not answer, a sentence each.
    """

    events: list[Event] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


def _spans(said: Sequence[tuple[Any, ...]], since_ns: float) -> list[Span]:
    found = map(Span._make, said)
    return [span for span in found if span.start_ns + span.duration_ns >= since_ns]


def _ask(session: OpenSession, since_ns: float, left_s: float) -> Found:
    """All page servers and the registry of one session."""
    deadline = time.monotonic() + left_s
    found = Found()
    scope = session.info.scope
    try:
        servers = session.rpc.servers()
        owners = owners_of(session.rpc.variables())
        host, node_id, pid, said = unpack(session.rpc.spans())
    except errors.ClamorError as error:
        found.troubles.append(f"Session {session.info.name or scope}: {error}")
        return found
    title = f"clamor registry {session.info.name or scope}"
    rows = [(Row(host, title, node_id, pid), _spans(said, since_ns))]
    asked: dict[Any, Any] = {}
    for info in servers:
        try:
            name = names.page_server_name(scope, info.node_id)
            asked[ray.get_actor(name, namespace=names.NAMESPACE).spans.remote()] = info
        except ValueError as failure:
            found.troubles.append(_silent(info.node_id, cause_of(failure)))
    ready: list[Any] = []
    if asked:
        wait_s = max(0.1, deadline - time.monotonic())
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=wait_s)
    for answer, info in asked.items():
        if answer not in ready:
            found.troubles.append(_silent(info.node_id, "no answer in time"))
            continue
        try:
            (processes,) = unpack(ray.get(answer))
        except ray.exceptions.RayError as failure:
            found.troubles.append(_silent(info.node_id, cause_of(failure)))
            continue
        for process, pid, said in processes:
            title = process or f"clamor page server {info.node_id[:ID_DIGITS]}"
            rows.append((Row(info.host, title, info.node_id, pid), _spans(said, since_ns)))
    found.events = events_of(rows, {region: owner.name for region, owner in owners.items()})
    return found


def _silent(node_id: str, why: str) -> str:
    return f"Page server of node {node_id[:ID_DIGITS]} did not answer: {why}."


def _is_event(found: Any) -> bool:
    """Whether that is one of a Chrome trace, as far as it is looked at here."""
    return (
        isinstance(found, dict)
        and isinstance(found.get("ph"), str)
        and isinstance(found.get("args", {}), dict)
        and all(isinstance(found.get(name, 0), (int, float)) for name in ("ts", "dur"))
    )


def read_trace(path: Path) -> list[Event]:
    """A trace of `ray timeline`, of Ray's dashboard, or of this command.

    Raises:
        NotAskedError: It is none.
    """
    try:
        found = json.loads(path.read_text())
        events = found["traceEvents"] if isinstance(found, dict) else found
        if not (isinstance(events, list) and all(map(_is_event, events))):
            raise ValueError("it is no list of events")
    except (ValueError, KeyError) as failure:
        raise NotAskedError(
            f"{path} is no Chrome trace: {cause_of(failure)}. Give a file of `ray timeline`."
        ) from failure
    return events


def _of_ray(left_s: float) -> list[Event]:
    """What `ray timeline` says.

    Raises:
        NotAskedError: Not in time: the call has no deadline of its own.
    """
    with_ray = Future[list[Event]]()

    def ask() -> None:
        try:
            with_ray.set_result(ray.timeline())
        except BaseException as failure:
            with_ray.set_exception(failure)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return with_ray.result(left_s)
    except FutureTimeoutError:
        raise NotAskedError(
            "Ray did not say its timeline in time. Raise --timeout, or leave --with-ray out."
        ) from None


def _since(events: Sequence[Event], since_ns: float) -> list[Event]:
    """Without what was over before."""
    return [
        each
        for each in events
        if each["ph"] == "M" or (each.get("ts", 0) + each.get("dur", 0)) * 1000 >= since_ns
    ]


@dataclass(frozen=True)
class Sum:
    """All events of one name on one node.

    Args:
        name: what they are called.
        node_id: Ray's.
        n: how many.
        total_ms, longest_ms: how long they took.
    """

    name: str
    node_id: str
    n: int
    total_ms: float
    longest_ms: float


def sums(events: Sequence[Mapping[str, Any]]) -> list[Sum]:
    """What took longest, first. Of waits of faults it is what was waited: of variables, not once
    more of processes. Pure.

    Args:
        events: of `events_of`.
    """
    counts: Counter[tuple[str, str]] = Counter()
    totals: dict[tuple[str, str], float] = {}
    longest: dict[tuple[str, str], float] = {}
    for event in events:
        if event["name"] == PROCESS_WAIT:
            continue
        details = event["args"]
        key = (event["name"], details.get("node_id", ""))
        took_ms = details.get("wait_ms", event["dur"] / 1000.0)
        counts[key] += details.get("faults", 1)
        totals[key] = totals.get(key, 0.0) + took_ms
        longest[key] = max(longest.get(key, 0.0), took_ms)
    found = [
        Sum(
            name=key[0],
            node_id=key[1],
            n=n,
            total_ms=totals[key],
            longest_ms=longest[key],
        )
        for key, n in counts.items()
    ]
    return sorted(found, key=lambda each: (-each.total_ms, each.name, each.node_id))


def _print(found: Found, path: Path, n_events: int) -> None:
    out = console()
    rows = [
        (
            each.name,
            each.node_id[:ID_DIGITS],
            f"{each.n:,}",
            f"{each.total_ms / 1000:,.3f}",
            f"{each.longest_ms / 1000:,.3f}",
        )
        for each in sums(found.events)
    ]
    if rows:
        heads = ["what", "node", "times", "seconds", "longest"]
        out.print(table(heads, rows[:MOST_LINES], heads[2:]))
    if len(rows) > MOST_LINES:
        out.print(f"and {len(rows) - MOST_LINES} more")
    out.print(f"{n_events:,} events are in {path}: open it in https://ui.perfetto.dev, or in")
    out.print("chrome://tracing. One within another is a part of it.")
    for trouble in found.troubles:
        out.print(f"Wrong: {trouble}", style="red")


@click.command("timeline")
@cluster_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="The file. Else clamor-timeline.json here; with --format json, none.",
)
@click.option(
    "--last",
    "last_s",
    type=click.FloatRange(min=0.0, min_open=True, max=1e9),
    metavar="SECONDS",
    help="Only what was not over before that.",
)
@click.option(
    "--merge",
    "others",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file of `ray timeline` that is to be in it, too.",
)
@click.option("--with-ray", is_flag=True, help="What `ray timeline` says now is in it, too.")
@exits
def command(
    address: str | None,
    session: str | None,
    timeout_s: float,
    form: str,
    out: Path | None,
    last_s: float | None,
    others: tuple[Path, ...],
    with_ray: bool,
) -> int:
    """Says what took long, and writes a Chrome trace of it.

    Waits for blocks, transactions, commits, opens, gathers, puts, stages, moved homes: of each
    session's processes, what took a millisecond or more. Its rows are those of `ray timeline`.

    Exit status: 0; 1, a page server or a registry did not answer, and its spans are missing; 2, it
    could not be asked.
    """
    theirs = [read_trace(path) for path in others]
    since_ns = 0.0 if last_s is None else (time.time() - last_s) * 1e9
    all_found = Found()
    deadline = time.monotonic() + timeout_s
    with connected(address, timeout_s):
        for each in open_sessions(session, timeout_s):
            found = _ask(each, since_ns, deadline - time.monotonic())
            all_found.events += found.events
            all_found.troubles += found.troubles
        if with_ray:
            theirs.append(_of_ray(max(0.1, deadline - time.monotonic())))
    trace = merged(all_found.events, *(_since(each, since_ns) for each in theirs))
    path = out or (Path("clamor-timeline.json") if form == "text" else None)
    if path is not None:
        path.write_text(json.dumps(trace))
    if form == "json":
        say_json(trace)
        for trouble in all_found.troubles:
            click.echo(f"clamor: {trouble}", err=True)
    elif path is not None:
        _print(all_found, path, sum(event["ph"] != "M" for event in trace))
    return WRONG if all_found.troubles else WELL
