"""Spans, and the trace that is made of them; tests/cluster/test_timeline_lab.py asks a cluster."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from clamor_ray._session import span_sender
from clamor_ray._spans import record
from clamor_ray._spans.chrome_trace import Row, events_of, merged
from clamor_ray._spans.record import LEAST_NS, Record, Span, span, thinned
from clamor_ray.actors.page_server.node_spans import FAULT_WAIT, PROCESS_WAIT, FaultWaits, KeptSpans
from clamor_ray.cli.output import NotAskedError
from clamor_ray.cli.timeline import read_trace, sums

MS = 10**6
S = 10**9
NODE, OTHER = "a" * 56, "b" * 56
WORKER = Row("10.0.0.1", "worker:01", NODE, 7)


def spanned(name: str, start_ms: float, ms: float, thread: str = "", **details: Any) -> Span:
    return Span(name, int(start_ms * MS), int(ms * MS), thread, details)


# ------------------------------------------------------------------ what is recorded


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Record:
    fresh = Record(most=4)
    fresh.begin("s")
    monkeypatch.setattr(record, "here", fresh)
    return fresh


def test_what_takes_long_is_recorded_and_the_rest_is_not(here: Record) -> None:
    before_ns = time.time_ns()
    with span("s", "short"):
        pass
    with span("s", "long", region=3) as found:
        time.sleep(2 * LEAST_NS / S)
        found.details["rows"] = 5
    with contextlib.suppress(KeyError), span("s", "fails"):
        time.sleep(2 * LEAST_NS / S)
        raise KeyError(1)
    long, fails = here.spans()
    assert (long.name, long.thread, long.details) == ("long", "", {"region": 3, "rows": 5})
    assert before_ns <= long.start_ns
    assert long.duration_ns >= 2 * LEAST_NS
    assert long.start_ns + long.duration_ns <= fails.start_ns
    assert fails.details == {"error": "KeyError"}


def test_the_thread_is_said(here: Record) -> None:
    def work() -> None:
        here.note("s", "there", time.time_ns() - S)

    thread = threading.Thread(target=work, name="feeder")
    thread.start()
    thread.join(10)
    assert [each.thread for each in here.spans()] == ["feeder"]


def long_ago(seconds: float) -> int:
    return time.time_ns() - int(seconds * S)


def test_no_more_is_kept_than_there_is_room_for(here: Record) -> None:
    for number in range(9):
        here.note("s", str(number), long_ago(1))
        here.note("off", str(number), long_ago(1))
    assert [each.name for each in here.spans()] == ["5", "6", "7", "8"]
    assert here.take("off") == []
    assert len(here.take("s")) == 4
    assert here.take("s") == []
    here.note("s", "last", long_ago(1))
    here.end("s")
    here.note("s", "after", long_ago(1))
    assert here.spans() == []


def test_what_was_over_an_hour_ago_is_not_said(here: Record) -> None:
    here.add("s", Span("over", long_ago(3610), 5 * S, "", {}))
    here.add("s", Span("just over", long_ago(3610), 20 * S, "", {}))
    assert [each.name for each in here.spans()] == ["just over"]


def test_who_takes_them_is_woken_once_until_then(here: Record) -> None:
    woken: list[int] = []
    can_wake = False

    def wake() -> bool:
        woken.append(1)
        return can_wake

    here.hand_over(wake)
    here.note("s", "0", long_ago(1))
    can_wake = True  # it was not: the next one does it
    here.begin("t")
    for number in range(1, 4):
        here.note("st"[number % 2], str(number), long_ago(1))
    assert len(woken) == 2
    assert [each.name for each in here.take("s")] == ["0", "2"]
    assert [each.name for each in here.take("t")] == ["1", "3"]
    here.note("s", "4", long_ago(1))
    assert len(woken) == 3


def test_no_thread_for_it_is_no_error_of_the_caller(
    here: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(span_sender, "_thread", None)
    here.hand_over(span_sender._wake)
    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", start)
        here.note("s", "of a commit that was made", long_ago(1))
    assert span_sender._thread is None
    here.note("s", "another", long_ago(1))
    assert span_sender._thread is not None


class Gone:
    """A session whose cluster goes when it is looked at."""

    node_id, is_ending, was_told, in_driver = NODE, False, False, True
    scope = "s"

    def __init__(self) -> None:
        self.is_here = True


def test_ray_that_goes_meanwhile_is_not_started(
    here: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    session = Gone()
    known = span_sender._Known(cast(Any, weakref.ref(session)))
    monkeypatch.setitem(span_sender._known, "s", known)
    here.note("s", "x", long_ago(1))
    assert not ray.is_initialized()
    with span_sender._lock:
        span_sender._send("s", known)
    assert known.last is None
    known.server, known.last = object(), object()
    span_sender._end(cast(Any, session))
    assert not ray.is_initialized()
    assert known.is_over
    assert "s" not in span_sender._known
    assert not here.keeps("s")


def test_who_leaves_does_not_wait_for_a_ray_that_hangs(
    here: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers, over = threading.Event(), threading.Event(), threading.Event()

    def get_actor(name: str, namespace: str) -> None:
        asked.set()
        answers.wait(20)
        over.set()
        raise ValueError(name)

    monkeypatch.setattr(span_sender, "LAST_S", 0.2)
    monkeypatch.setattr(span_sender.ray_state, "get_actor", get_actor)
    session = Gone()
    known = span_sender._Known(cast(Any, weakref.ref(session)))
    monkeypatch.setitem(span_sender._known, "s", known)
    here.note("s", "x", long_ago(1))
    try:
        span_sender._end(cast(Any, session))
        assert not over.is_set()
        assert known.is_over
        assert asked.wait(60)
    finally:
        answers.set()
    with span_sender._lock:  # what the thread had of it is over
        assert known.last is None


def test_a_child_of_fork_has_none_of_its_parents() -> None:
    record.here.begin("s")
    record.here.note("s", "of the parent", long_ago(1))
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writer, str(len(record.here.spans())).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"0"
    assert [each.name for each in record.here.take("s")] == ["of the parent"]
    record.here.end("s")
    os.close(reader)
    os.close(writer)


class Ours:
    """Says where it is let go of."""

    def __init__(self, writer: int) -> None:
        self.writer = writer

    def __del__(self) -> None:
        os.write(self.writer, b"gone")


def test_a_child_of_fork_lets_go_of_nothing_that_is_rays() -> None:
    reader, writer = os.pipe()
    session = Ours(writer)  # Ray waits for a lock where the last reference to one of its own goes
    span_sender._known["s"] = span_sender._Known(cast(Any, weakref.ref(session)), Ours(writer))
    if (pid := os.fork()) == 0:
        os.write(writer, f"{len(span_sender._known)} known".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100) == b"0 known"
    del span_sender._known["s"]
    assert os.read(reader, 100) == b"gone"
    del session
    assert os.read(reader, 100) == b"gone"
    os.close(reader)
    os.close(writer)


def test_what_is_left_out_is_old_and_short() -> None:
    now_ns = 10 * 3600 * S
    start_ms = now_ns / MS - 10_000
    gone = spanned("an hour ago", start_ms - 3600_000, 1)
    old = [spanned("old", start_ms + n, n) for n in range(1, 9)]
    new = [spanned("new", start_ms + 100 + n, 1) for n in range(4)]
    left = thinned([*new, gone, *old], 8, now_ns)
    assert [each.duration_ns // MS for each in left] == [5, 6, 7, 8, 1, 1, 1, 1]
    assert left == sorted(left, key=lambda each: each.start_ns)
    assert thinned(new, 8, now_ns) == new


# ------------------------------------------------------------------ what a page server has


def test_spans_of_a_node_are_bounded() -> None:
    kept = KeptSpans(most=100)
    now_ms = time.time_ns() / MS
    for number in range(30):
        kept.add("worker:01", 7, [spanned("x", now_ms + 10 * number + n, 1) for n in range(10)])
        kept.add("worker:02", 8, [spanned("slow", now_ms + 10 * number, 50)])
    found = {(who, pid): spans for who, pid, spans in kept.all(time.time_ns())}
    assert 50 <= sum(map(len, found.values())) <= 100
    slow = [each.start_ns for each in found["worker:02", 8]]
    assert len(slow) > 20  # they are a tenth of what came, and the longer ones


def test_waits_of_faults_are_what_has_grown() -> None:
    waits = FaultWaits[int](99 * S, of_ended=True)

    def look(now_s: float, *counters: tuple[int, int, float]) -> dict[Any, Any]:
        found = waits.look(
            {
                key: {"faults": faults, "fault_wait_ns": int(wait_ms * MS)}
                for key, faults, wait_ms in counters
            },
            int(now_s * S),
        )
        assert {each.name for each in found.values()} <= {FAULT_WAIT}
        return {
            key: (each.start_ns / S, each.duration_ns / S, *each.details.values())
            for key, each in found.items()
        }

    assert look(100.0, (1, 5, 70)) == {1: (99.0, 1.0, 5, 70.0)}
    assert look(100.5, (1, 7, 90), (2, 1, 3), (3, 0, 0.5)) == {
        1: (100.0, 0.5, 2, 20.0),
        2: (100.0, 0.5, 1, 3.0),
    }
    assert look(101.0, (1, 7, 90), (2, 1, 3)) == {}
    assert look(101.5, (1, 9, 91), (2, 1, 4.5)) == {
        1: (101.0, 0.5, 2, 1.0),
        2: (101.0, 0.5, 0, 1.5),  # one waits still
    }
    assert look(102.0, (2, 3, 4004.5)) == {2: (100.0, 2.0, 2, 4000.0)}  # they began before


def test_waits_that_go_on_began_with_the_look() -> None:
    waits = FaultWaits[int](99 * S, of_ended=False)
    (found,) = waits.look({1: {"faults": 0, "fault_wait_ns": 32 * S}}, 100 * S).values()
    assert (found.start_ns, found.duration_ns) == (99 * S, S)
    assert found.details == {"faults": 0, "wait_ms": 32_000.0}


def test_a_process_is_called_as_it_calls_itself() -> None:
    kept = KeptSpans()
    for process, pid in (("", 7), ("", 8), ("worker:01", 7), ("", 0)):
        kept.add(process, pid, [spanned("x", time.time_ns() / MS, 1)])
    assert Counter((who, pid) for who, pid, _ in kept.all(time.time_ns())) == {
        ("worker:01", 7): 2,
        ("process 8", 8): 1,
        ("processes of other namespaces", 0): 1,
    }


# ------------------------------------------------------------------ the trace


def within(part: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Whether an event lies in another's time. A float holds a quarter of a microsecond."""
    ends = part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 0.5
    return bool(part["ts"] >= whole["ts"] - 0.5 and ends)


def rows_of(trace: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[str, str]]:
    """What the rows are called, by pid and tid."""
    nodes = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    return {
        (e["pid"], e["tid"]): (nodes[e["pid"]], e["args"]["name"])
        for e in trace
        if e["name"] == "thread_name"
    }


def check_form(trace: list[dict[str, Any]]) -> None:
    """What Chrome and Perfetto ask of it, and that no event is half of another."""
    rows = rows_of(json.loads(json.dumps(trace)))
    last_us = 0.0
    open_us: dict[tuple[int, int], list[float]] = {}
    for event in trace:
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert isinstance(event["args"]["name"], str)
            continue
        assert event["ph"] == "X"
        row = (event["pid"], event["tid"])
        assert row in rows
        assert event["ts"] >= last_us
        last_us = event["ts"]
        assert event["dur"] >= 0
        ends = open_us.setdefault(row, [])
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        if ends and event.get("cat") == "clamor":
            assert event["ts"] + event["dur"] <= ends[-1] + 0.5  # a float holds a quarter of a µs
        ends.append(event["ts"] + event["dur"])


def test_one_that_begins_where_another_ends_is_beside_it() -> None:
    """A float holds a quarter of a microsecond of a time, and all of a duration."""
    start_ns, spans = 1_795_890_640_285_529_137, []
    for n in range(100):
        spans.append(Span("look", start_ns, 500_532_925 + 7 * n, "", {}))
        start_ns += spans[-1].duration_ns
    trace = merged(events_of([(WORKER, spans)], {}))
    check_form(trace)
    looks = [event for event in trace if event["ph"] == "X"]
    for one, following in itertools.pairwise(looks):
        assert one["ts"] + one["dur"] == following["ts"]


def test_form_of_the_trace() -> None:
    now_ms = 1.8e12
    server = Row("10.0.0.1", "clamor page server", NODE, 9)
    rows = [
        (WORKER, [spanned("transaction", now_ms, 20, region=4), spanned("commit", now_ms + 5, 10)]),
        (WORKER, [spanned("commit", now_ms + 30, 10, region=5), spanned("x", now_ms, 5, "t")]),
        (server, [spanned("take", now_ms, 20), spanned("take", now_ms + 10, 20)]),
        (Row("10.0.0.2", "worker:02", OTHER, 7), [spanned("y", now_ms - 5, 1)]),
    ]
    trace = merged(events_of(rows, {4: "index"}))
    check_form(trace)
    names = rows_of(trace)
    events = [event for event in trace if event["ph"] == "X"]
    assert [event["name"] for event in events][:2] == ["y", "transaction index"]
    (whole,) = (event for event in events if event["name"] == "transaction index")
    assert (whole["ts"], whole["dur"]) == (now_ms * 1000, 20_000.0)
    assert whole["args"] == {"region": 4, "variable": "index", "node_id": NODE, "os_pid": 7}
    assert "commit (variable 5)" in {event["name"] for event in events}
    assert sorted(names.values()) == [
        ("Node 10.0.0.1", "clamor page server"),
        ("Node 10.0.0.1", "clamor page server (2)"),  # they overlap
        ("Node 10.0.0.1", "worker:01"),
        ("Node 10.0.0.1", "worker:01 (t)"),
        ("Node 10.0.0.2", "worker:02"),
    ]


def test_a_part_that_is_noted_after_the_whole_stays_in_it() -> None:
    spans = [spanned("whole", 0, 10), spanned("part", 5, 5.1)]
    trace = merged(events_of([(WORKER, spans)], {}))
    check_form(trace)
    assert len(rows_of(trace)) == 1


RAYS = {"ph": "X", "cat": "task:execute", "name": "task:execute", "args": {}}


def test_it_merges_with_rays() -> None:
    ours = events_of([(WORKER, [spanned("gather", 10, 5)])], {})
    theirs = [{**RAYS, "pid": "10.0.0.1", "tid": "worker:01", "ts": 9_000.0, "dur": 7_000.0}]
    of_dashboard = [
        {**RAYS, "pid": 0, "tid": 0, "ts": 20_000.0, "dur": 1.0},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "Node 10.0.0.1"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "worker:01"}},
    ]
    trace = merged(ours, theirs, of_dashboard)
    check_form(trace)
    assert list(rows_of(trace).values()) == [("Node 10.0.0.1", "worker:01")]
    assert [e["name"] for e in trace if e["ph"] == "X"] == [
        "task:execute",
        "gather",
        "task:execute",
    ]
    assert merged(trace) == trace  # what it has written it reads
    assert merged() == []


def test_sums_count_what_was_waited() -> None:
    rows = [
        (WORKER, [spanned("gather", 0, 40), spanned("gather", 50, 20)]),
        (WORKER, [spanned(FAULT_WAIT, 0, 500, faults=9, wait_ms=90.0, region=1)]),
        (WORKER, [spanned(PROCESS_WAIT, 0, 500, faults=9, wait_ms=90.0)]),
    ]
    waits, gathers = sums(events_of(rows, {1: "index"}))
    assert (waits.name, waits.n, waits.total_ms) == ("faults wait for index", 9, 90.0)
    assert (gathers.name, gathers.node_id, gathers.n) == ("gather", NODE, 2)
    assert (gathers.total_ms, gathers.longest_ms) == (60.0, 40.0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", '{"traceEvents": 3}', "[1]", '"x"', '[{"name": "no phase"}]'),
        *('[{"ph": "M", "args": null}]', '[{"ph": "X", "ts": "5"}]'),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(NotAskedError, match=r"t\.json is no Chrome trace: .*ray timeline"):
        read_trace(path)
    path.write_text(json.dumps({"traceEvents": [RAYS]}))
    assert read_trace(path) == [RAYS]
