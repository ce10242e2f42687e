"""In: spans of processes, and a trace of Ray's. Out: one Chrome trace.

`chrome://tracing` and Perfetto read it: a list of events, of which those with `ph` "X" have a
beginning and a duration in microseconds, and those with `ph` "M" say what a row is called. A `pid`
is a node, a `tid` one of its processes, as in `ray timeline`. That names both by texts, which
Perfetto does not take: here they are numbers, and texts where they are read. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from clamor_ray._spans.record import LEAST_NS, Span

_NODE: Final = "Node "  # what the dashboard's trace has before a node's address
_US: Final = 1000.0  # nanoseconds

Event = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A process.

    Args:
        host: address of its node, as `ray timeline` has it.
        process: "worker:<id>" and "driver:<id>" are `ray timeline`'s rows, too.
        node_id: Ray's, for the details of an event.
        pid: the kernel's, likewise.
    """

    host: str
    process: str
    node_id: str
    pid: int


def _lanes(spans: Iterable[Span]) -> Iterable[tuple[int, Span]]:
    """Spans of one row, and which of several lines each is drawn in: on one line a span is within
    another, or beside it, and never half of it. A part may be noted a moment after the whole."""
    lanes: list[list[int]] = []  # of each line, the ends of those that are open
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.duration_ns)):
        end_ns = span.start_ns + span.duration_ns
        for open_ns in lanes:
            while open_ns and open_ns[-1] <= span.start_ns:
                open_ns.pop()
        fits = (n for n, line in enumerate(lanes) if not line or end_ns - line[-1] < LEAST_NS)
        number = next(fits, len(lanes))
        if number == len(lanes):
            lanes.append([])
        line = lanes[number]
        if line and end_ns > line[-1]:
            end_ns = line[-1]
            span = span._replace(duration_ns=end_ns - span.start_ns)
        line.append(end_ns)
        yield number, span


def events_of(rows: Iterable[tuple[Row, Sequence[Span]]], names: Mapping[int, str]) -> list[Event]:
    """Spans as events whose `pid` and `tid` are texts.

    Args:
        rows: a row may come more than once.
        names: of variables, by their ids and those of their pieces.
    """
    by_line: dict[tuple[Row, str], list[Span]] = {}
    for row, spans in rows:
        for span in spans:
            by_line.setdefault((row, span.thread), []).append(span)
    events = []
    for (row, thread), spans in by_line.items():
        name = f"{row.process} ({thread})" if thread else row.process
        for lane, span in _lanes(spans):
            details = dict(span.details)
            start_us, end_us = span.start_ns / _US, (span.start_ns + span.duration_ns) / _US
            if (region := details.get("region")) is not None:
                details["variable"] = names.get(region, f"(variable {region})")
            events.append(
                {
                    "ph": "X",
                    "cat": "clamor",
                    "name": _title(span.name, details),
                    "pid": row.host,
                    "tid": name if not lane else f"{name} ({lane + 1})",
                    "ts": start_us,
                    # A float holds a quarter of a microsecond of a time. So what begins where
                    # this ends does so by the sum of both, too.
                    "dur": end_us - start_us,
                    "args": {**details, "node_id": row.node_id, "os_pid": row.pid},
                }
            )
    return events


def _title(name: str, details: Mapping[str, Any]) -> str:
    variable = details.get("variable")
    return f"{name} {variable}" if variable else name


def _by_texts(events: Iterable[Mapping[str, Any]]) -> list[Event]:
    """A trace whose rows may be numbers with names: they are texts, and the names are left out."""
    nodes: dict[Any, str] = {}
    processes: dict[tuple[Any, Any], str] = {}
    for event in events:
        if event.get("ph") != "M":
            continue
        name = str(event.get("args", {}).get("name", ""))
        if event.get("name") == "process_name":
            nodes[event.get("pid")] = name.removeprefix(_NODE)
        elif event.get("name") == "thread_name":
            processes[event.get("pid"), event.get("tid")] = name
    return [
        {
            **event,
            "pid": nodes.get(event.get("pid"), str(event.get("pid"))),
            "tid": processes.get((event.get("pid"), event.get("tid")), str(event.get("tid"))),
        }
        for event in events
        if event.get("ph") != "M"
    ]


def merged(*traces: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Several traces as one: what has the same address is one node, what has the same name there
    one row.

    Args:
        traces: of `events_of`, `ray timeline`, Ray's dashboard, or of this.

    Returns:
        The names of the rows first, then events by time.
    """
    events = [event for trace in traces for event in _by_texts(trace)]
    events.sort(key=lambda event: (event.get("ts", 0.0), -event.get("dur", 0.0)))
    pids = {host: number for number, host in enumerate(sorted({e["pid"] for e in events}), 1)}
    rows = sorted({(event["pid"], event["tid"]) for event in events})
    tids = {row: number for number, row in enumerate(rows, 1)}
    said: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{_NODE}{host}"}}
        for host, pid in pids.items()
    ]
    said += [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": pids[host],
            "tid": tid,
            "args": {"name": process},
        }
        for (host, process), tid in tids.items()
    ]
    return said + [
        {**event, "pid": pids[event["pid"]], "tid": tids[event["pid"], event["tid"]]}
        for event in events
    ]
