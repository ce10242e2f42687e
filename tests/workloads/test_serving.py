"""The embedding service without a cluster: its table, its bodies, and what measures it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from click.testing import CliRunner
from ray import serve

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray.workloads.serving import __main__ as command
from clamor_ray.workloads.serving import client_rules, followed, open_loop, running, table
from clamor_ray.workloads.serving.bodies import (
    MOST_IDS,
    Answer,
    BadAnswer,
    BadRequest,
    decode_answer,
    decode_ids,
    encode_answer,
    encode_ids,
)
from clamor_ray.workloads.serving.deployment import AppOptions, options_of
from clamor_ray.workloads.serving.open_loop import Load, Measured
from tests.support.lab import local_cluster, require_lab

N_ROWS, DIM = 1000, 8
BYTES = "application/octet-stream"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# ------------------------------------------------------------------ the table


def test_updates_one_by_one_make_the_table_of_the_last() -> None:
    rows = np.empty((N_ROWS, DIM), np.float32)
    table.fill(rows, 0)
    ids = np.arange(N_ROWS)
    for update in range(1, 2 * table.CYCLE + 7):
        changed = table.changed_rows(N_ROWS, update)
        assert len(changed) == N_ROWS // table.CYCLE
        assert table.wrong_rows(rows, ids, update) == changed.tolist()
        rows[changed] = table.rows_at(changed, update, DIM)
        assert table.wrong_rows(rows, ids, update) == []


def test_no_two_values_are_alike() -> None:
    rows = table.rows_at(np.arange(N_ROWS), 0, DIM)
    later = table.rows_at(np.arange(N_ROWS), table.CYCLE, DIM)
    assert not (rows == later).any()
    # Of 16 million numbers 8,000 were drawn.
    assert len(np.unique(rows)) > rows.size - 20
    assert 0 <= rows.min() < rows.max() < 1


# ----------------------------------------------------------------- the bodies


def test_bytes_come_back_as_they_went() -> None:
    ids = np.array([5, 0, MOST_IDS])
    assert decode_ids(encode_ids(ids), BYTES).tolist() == ids.tolist()
    rows = table.rows_at(ids, 3, DIM)
    found = decode_answer(encode_answer(Answer(3, 9, rows), BYTES))
    assert (found.update, found.version) == (3, 9)
    np.testing.assert_array_equal(found.rows, rows)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[1]", b"{}", b'{"ids": 3}', b'{"ids": []}', b'{"ids": [0.5]}', b'{"ids": ["1"]}'),
        *(b'{"ids": [true]}', b'{"ids": [[1]]}', b'{"ids": [1, [2]]}', b'{"ids": null}', b"\xff"),
        b'{"ids": ' + b"[" * 100_000,
    ],
)
def test_json_without_ids_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="ids"):
        decode_ids(body, "application/json; charset=utf-8")


def test_too_many_ids_are_refused() -> None:
    with pytest.raises(BadRequest, match=f"1 to {MOST_IDS} ids"):
        decode_ids(bytes(8 * (MOST_IDS + 1)), BYTES)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [(encode_ids(np.array([3, -1])), BYTES), (b'{"ids": [3, -1]}', "application/json")],
)
def test_ids_below_0_are_refused(body: bytes, content_type: str) -> None:
    """Numpy would count them from the end."""
    with pytest.raises(BadRequest, match="count from 0, and one of these is -1"):
        decode_ids(body, content_type)


@pytest.mark.parametrize("shape", [(-1, -1), (-1, 0), (0, 1 << 62), (1 << 62, 0), (1 << 62, 4)])
def test_rows_that_no_array_has_are_no_answer(shape: tuple[int, int]) -> None:
    size = 4 if shape == (-1, -1) else 0
    with pytest.raises(BadAnswer, match=f"bytes are not {shape[0]} rows"):
        decode_answer(struct.pack("<qqqq", 0, 0, *shape) + bytes(size))


@pytest.mark.parametrize("cut", [0, 31, 33])
def test_a_part_of_an_answer_is_a_wrong_answer(cut: int) -> None:
    ids = np.array([1, 2])
    body = encode_answer(Answer(0, 0, table.rows_at(ids, 0, DIM)), BYTES)
    assert client_rules.check(body, ids, DIM) == 0
    with pytest.raises(client_rules.WrongAnswer):
        client_rules.check(body[:cut], ids, DIM)


def test_rows_of_another_update_are_a_wrong_answer() -> None:
    ids = np.arange(200)
    rows = table.rows_at(ids, 4, DIM)
    rows[7] = table.rows_at(ids[7:8], 107, DIM)
    with pytest.raises(client_rules.WrongAnswer, match=r"rows \[7\] are not those of update 4"):
        client_rules.check(encode_answer(Answer(4, 4, rows), BYTES), ids, DIM)
    with pytest.raises(client_rules.WrongAnswer, match="200 rows for 199 ids"):
        client_rules.check(encode_answer(Answer(4, 4, rows), BYTES), ids[1:], DIM)


@pytest.mark.parametrize("dim", [0, DIM - 1])
def test_rows_with_too_few_columns_are_a_wrong_answer(dim: int) -> None:
    """What is left of each is right; of no columns there is nothing to compare."""
    ids = np.arange(5)
    body = encode_answer(Answer(4, 4, table.rows_at(ids, 4, dim)), BYTES)
    with pytest.raises(client_rules.WrongAnswer, match=f"rows of {dim} columns"):
        client_rules.check(body, ids, DIM)


# ---------------------------------------------------------------- the options


def test_options_are_read_from_texts() -> None:
    found = options_of({"n_rows": "5", "num_cpus": "0.1", "session": "s"})
    assert found == AppOptions(session="s", n_rows=5, num_cpus=0.1)
    assert found.shape == (5, 64)
    assert options_of({"n_rows": 0}).shape is None


@pytest.mark.parametrize("args", [{"rows": 5}, {"n_rows": "many"}, {"dim": 0}, {"n_rows": -1}])
def test_options_that_are_none_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rows|many|dim"):
        options_of(args)


def test_help_says_how_it_ends() -> None:
    result = CliRunner().invoke(command.main, ["-h"])
    assert result.exit_code == 0, result.output
    for part in ("--demo", "--session", "--cache-bytes", "Exit status: 0; 1 where"):
        assert part in result.output, result.output


def test_clients_import_neither_ray_nor_the_library() -> None:
    """Else locust, which patches sockets, would have gRPC in its process."""
    script = (
        "import sys, clamor_ray.workloads.serving.open_loop\n"
        "import clamor_ray.workloads.serving.locustfile\n"
        "print([name for name in ('ray', 'grpc', 'clamor_ray._native') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------- the load


def measured(load: Load, lookup: Handler) -> Measured:
    """What the load program says of a service that answers so."""

    async def about(_: web.Request) -> web.StreamResponse:
        return web.json_response({"n_rows": N_ROWS, "dim": DIM})

    async def work() -> Measured:
        service = web.Application()
        service.add_routes([web.get("/about", about), web.post("/lookup", lookup)])
        runner = web.AppRunner(service, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            asked = Load(**{**vars(load), "url": f"http://127.0.0.1:{port}"})
            return await asyncio.wait_for(open_loop.run(asked), 60)
        finally:
            await runner.cleanup()

    return asyncio.run(work())


async def right(request: web.Request) -> web.StreamResponse:
    ids = decode_ids(await request.read(), BYTES)
    return web.Response(body=encode_answer(Answer(0, 0, table.rows_at(ids, 0, DIM)), BYTES))


def test_who_arrives_while_the_service_hangs_has_waited() -> None:
    """A closed loop would count one slow answer for each client, and no more."""
    hangs_s, has_hung = 0.6, False

    async def hangs(request: web.Request) -> web.StreamResponse:
        nonlocal has_hung
        if not has_hung:
            has_hung = True
            # The whole service, and with it the loop that sends: arrivals are late, too.
            time.sleep(hangs_s)  # noqa: ASYNC251
        return await right(request)

    load = Load("", seconds=1.2, rate_per_s=100, n_clients=4, n_ids=3)
    found = measured(load, hangs)
    assert found.wrong == found.failed == []
    arrivals = open_loop.arrivals_s(load)
    assert len(found.latencies_ms) == len(arrivals)
    # Half of what arrived in that time has waited for a half of it at least, however fast the rest.
    n_while = int(((arrivals > arrivals[0]) & (arrivals < arrivals[0] + hangs_s / 2)).sum())
    waited = sum(each > 1e3 * hangs_s / 2 for each in found.latencies_ms)
    assert waited >= n_while > 10


def test_what_fails_for_now_is_asked_again() -> None:
    n_asked = 0

    async def fails_first(request: web.Request) -> web.StreamResponse:
        nonlocal n_asked
        n_asked += 1
        if n_asked <= 2:
            return web.Response(status=(500, 503)[n_asked - 1])
        if n_asked == 3:
            assert request.transport is not None
            request.transport.close()
        return await right(request)

    found = measured(Load("", seconds=0.3, n_clients=1, n_ids=3), fails_first)
    assert found.n_retries == 3
    assert found.failed == found.wrong == []
    assert found.updates == {0}
    assert len(found.latencies_ms) == n_asked - 3


@pytest.mark.parametrize("most_kept_bytes", [1, open_loop.MOST_KEPT_BYTES])
def test_what_is_wrong_or_refused_is_counted(
    most_kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_loop, "MOST_KEPT_BYTES", most_kept_bytes)
    n_asked = 0

    async def wrong(request: web.Request) -> web.StreamResponse:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 1:
            return web.Response(status=400, text="no such row")
        ids = decode_ids(await request.read(), BYTES)
        return web.Response(body=encode_answer(Answer(1, 1, table.rows_at(ids, 0, DIM)), BYTES))

    # The rows of the first update, each once: none of them is what the answer says.
    found = measured(Load("", n_clients=1, n_ids=5, of_update=1), wrong)
    assert found.failed == ["status 400: no such row"]
    assert len(found.wrong) == n_asked - 1 == 1
    record = found.record()
    assert (record["n_failed"], record["n_wrong"]) == (1, 1)
    assert "are not those of update 1" in record["texts"][0]
    json.dumps(record)


def test_the_last_try_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_rules, "MOST_TRIES", 3)

    async def fails(_: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="later")

    found = measured(Load("", n_clients=1, n_ids=N_ROWS, of_update=1), fails)
    assert (found.n_retries, found.failed) == (2, ["status 503: later"])


@pytest.mark.parametrize("rate_per_s", [None, 100.0])
def test_a_request_that_fails_in_another_way_has_failed(
    rate_per_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, n_kept = open_loop.Clients._keep, 0

    def fails_first(self: open_loop.Clients, ids: table.Int64, body: bytes) -> None:
        nonlocal n_kept
        n_kept += 1
        if n_kept == 1:
            raise RuntimeError("no memory")
        keep(self, ids, body)

    monkeypatch.setattr(open_loop.Clients, "_keep", fails_first)
    found = measured(Load("", seconds=0.5, rate_per_s=rate_per_s, n_clients=2, n_ids=3), right)
    assert found.failed == ["RuntimeError('no memory')"]
    assert len(found.latencies_ms) == n_kept - 1


def test_a_request_without_a_fate_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgets(*_: object) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(open_loop.Clients, "ask", forgets)
    with pytest.raises(RuntimeError, match=r"[1-9][0-9]* requests arrived, and 0 were answered"):
        measured(Load("", seconds=0.3, rate_per_s=100), right)


@pytest.mark.parametrize(("reaches", "n_stale"), [(None, 0), (0, 0), (1, 1)])
def test_answers_that_do_not_reach_an_update_are_told(reaches: int | None, n_stale: int) -> None:
    """Each of them is right, of the update that it names."""
    found = measured(Load("", seconds=0.2, n_clients=1, reaches=reaches), right)
    assert found.updates == {0}
    assert found.wrong == found.failed == []
    assert len(found.texts) == len(found.record()["texts"]) == n_stale
    assert all("update 1 was made" in text for text in found.texts)


def test_no_answers_reach_no_update() -> None:
    assert "is None" in Measured(reaches=0).texts[0]
    assert Measured().texts == []


@pytest.mark.parametrize(("seen", "status"), [(6, 1), (7, None)])
def test_locust_fails_where_answers_stay_behind(seen: int, status: int | None) -> None:
    script = (
        "from types import SimpleNamespace\n"
        "from locust import events\n"
        "from clamor_ray.workloads.serving.locustfile import Reader\n"
        f"Reader.largest_update = {seen}\n"
        "environment = SimpleNamespace(process_exit_code=None)\n"
        "events.quitting.fire(environment=environment)\n"
        "print(environment.process_exit_code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "SERVING_REACHES": "7"},
    )
    assert done.stdout.strip() == str(status)
    assert ("STALE ANSWERS" in done.stderr) == bool(status)


def test_arrivals_have_the_rate_and_come_by_chance() -> None:
    load = Load("", seconds=1000, rate_per_s=20)
    times = open_loop.arrivals_s(load)
    assert len(times) == pytest.approx(20_000, rel=0.05)
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # of a Poisson process
    with pytest.raises(ValueError, match="closed loop"):
        open_loop.arrivals_s(Load(""))


def test_percentiles_are_of_what_was_measured() -> None:
    values = [float(each) for each in range(1, 1001)]
    found = open_loop.percentiles(values)
    assert (found["p50_ms"], found["p99_ms"]) == (500.0, 990.0)
    assert found["p999_ms"] in (999.0, 1000.0)  # 0.999 is no binary fraction
    assert open_loop.percentiles([]) == {}


# -------------------------------------------------------------- how it follows


class Ref:
    """A reference as `followed` uses one, at a version whose object is known."""

    def __init__(self, version: int) -> None:
        self.version = version

    def snapshot(self) -> Ref:
        return self


def value_of(update: int) -> dict[str, Any]:
    return {"rows": np.zeros((3, 2), np.float32), "update": np.array([update])}


def follow(monkeypatch: pytest.MonkeyPatch, values: list[Any]) -> followed.Followed:
    """What is followed where each version has the next one of these values, or raises it."""
    news = list(values)

    async def watch(_: Ref) -> AsyncIterator[int]:
        while news:
            yield 0
        await asyncio.Event().wait()

    async def get(_: Ref) -> Any:
        value = news.pop(0)
        if isinstance(value, Exception):
            raise value
        return value

    async def gather(array: Any, ids: list[int]) -> Any:
        return array[ids]

    async def refresh(ref: Ref) -> Ref:
        return Ref(ref.version + 1)

    for function in (watch, get, gather, refresh):
        monkeypatch.setattr(clamor.aio, function.__name__, function)
    monkeypatch.setattr(followed, "AGAIN_S", 0.001)

    async def work() -> followed.Followed:
        first = followed.Opened(0, 0, value_of(0)["rows"])
        found = followed.Followed("table", Ref(0), first)  # type: ignore[arg-type]
        deadline = time.monotonic() + 30
        while found.failure is None and (news or found.now.update != LAST):
            assert time.monotonic() < deadline, "it neither follows nor says why"
            await asyncio.sleep(0.001)
        await found.end()
        return found

    return asyncio.run(work())


LAST = 9  # the update of the last value


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.zeros((3, 2)), IndexError),
        ({"rows": np.zeros((3, 2))}, KeyError),
        (RuntimeError("can't start new thread"), RuntimeError),
        (errors.NoSuchNameError("no table"), errors.NoSuchNameError),
    ],
)
def test_following_ends_with_a_failure_that_is_told(
    value: Any, what: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The replica is not to serve an old version for ever, and say that it is healthy."""
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)
    found = follow(monkeypatch, [value_of(1), value, value_of(LAST)])
    assert isinstance(found.failure, what)
    assert found.now.update == 1
    assert "table is followed no more" in caplog.text


def expired(n: int) -> list[Any]:
    return [errors.SnapshotExpired(f"version {each}") for each in range(n)]


def test_versions_that_are_gone_before_they_are_opened_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = followed.MOST_EXPIRED - 1
    found = follow(monkeypatch, [*expired(few), value_of(1), *expired(few), value_of(LAST)])
    assert found.failure is None
    assert found.now.update == LAST


def test_many_such_versions_in_a_row_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = follow(monkeypatch, [*expired(followed.MOST_EXPIRED), value_of(LAST)])
    assert isinstance(found.failure, errors.SnapshotExpired)
    assert found.now.update == 0


# ------------------------------------------------------------- Serve around it


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[int]:
    """The port of a server that says each of these to a connection, and the last one for ever.

    An empty one is said too late.
    """
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def work() -> None:
            left = list(answers)
            while not over.is_set():
                connection, _ = listener.accept()
                answer = left.pop(0) if len(left) > 1 else left[0]
                kept.append(connection)
                if answer and not over.is_set():
                    connection.recv(1 << 16)
                    connection.sendall(answer)
                    connection.close()

        kept: list[socket.socket] = []
        thread = threading.Thread(target=work)
        thread.start()
        port = int(listener.getsockname()[1])
        try:
            yield port
        finally:
            over.set()
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join()
            for each in kept:
                each.close()


def http(status: str, body: str, length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}".encode()


def test_about_is_asked_again_where_an_answer_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "TRY_TIMEOUT_S", 0.3)
    right = http("200 OK", '{"update": 3}')
    with answering(b"", http("200 OK", '{"upd', 90), http("503 X", ""), right) as port:
        assert running.about(f"http://127.0.0.1:{port}") == {"update": 3}


@pytest.mark.parametrize(
    ("answers", "is_there"),
    [
        ([http("503 Unavailable", "Route table is not populated yet.")], True),
        ([b"", http("200 OK", '{"/": "app"}')], True),
        ([http("404 Not Found", "")], False),
        ([http("200 OK", "<html>")], False),
        ([], False),
    ],
)
def test_a_url_without_a_proxy_of_serve_is_refused(
    answers: list[bytes], is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve.start` does nothing where Serve runs, whatever port it has."""
    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(running, "TRY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(running, "PROXY_S", 20.0 if is_there else 0.2)
    with answering(*answers) if answers else contextlib.nullcontext(running.free_port()) as port:
        if is_there:
            assert running.start_http(port) == f"http://127.0.0.1:{port}"
        else:
            with pytest.raises(running.NoProxy, match=rf"{port}: .*Give that port"):
                running.start_http(port)


@pytest.mark.parametrize(
    ("proxies", "before", "after", "ended"),
    [
        ([], [], [], "serve"),
        ([], [], ["embeddings"], "serve"),
        ([], [], ["embeddings", "theirs"], "embeddings"),  # deployed while this one ran
        ([], ["theirs"], ["embeddings", "theirs"], "embeddings"),
        (["node"], [], ["embeddings"], "embeddings"),  # Serve was started before
    ],
)
def test_the_end_ends_nobody_elses_application(
    proxies: list[str],
    before: list[str],
    after: list[str],
    ended: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the session ends, though the end of the application fails."""
    calls: list[str] = []
    applications = [before, after]

    def status() -> Any:
        return SimpleNamespace(
            proxies=dict.fromkeys(proxies), applications=dict.fromkeys(applications.pop(0))
        )

    def fails(what: str) -> None:
        calls.append(what)
        raise TimeoutError(what)

    def refused(*_: object) -> None:
        raise running.NoProxy("another port")

    monkeypatch.setattr(command.CommandRun, "attached", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(command, "open_table", lambda *_: None)
    monkeypatch.setattr(running, "start_http", refused)
    monkeypatch.setattr(serve, "status", status)
    monkeypatch.setattr(serve, "delete", fails)
    monkeypatch.setattr(serve, "shutdown", lambda: fails("serve"))
    monkeypatch.setattr(clamor, "shutdown", lambda session: calls.append(f"session {session}"))
    result = CliRunner().invoke(command.main, ["--end", "--session", "s"])
    assert isinstance(result.exception, TimeoutError), result.output
    assert calls == [ended, "session s"]


def test_updates_that_are_not_served_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"update": 3, "replica": "r"}
    monkeypatch.setattr(running, "about", lambda _: said)
    command.wait_for_update("", 3, 0.1)
    with pytest.raises(command.StaleAnswers, match=r"update 4 was made, but .*'update': 3"):
        command.wait_for_update("", 4, 0.1)


# ------------------------------------------------------------------- the demo


@pytest.mark.lab
@pytest.mark.soak
def test_the_demo_serves_rows_while_it_updates_them() -> None:
    require_lab("local")
    options = ["--demo", "--seconds", "8", "--rows", "20000", "--rate", "40"]
    with local_cluster(2, num_cpus=2, connect=False) as lab:
        done = subprocess.run(
            [sys.executable, "-m", "clamor_ray.workloads.serving", *options],
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
            env={**os.environ, **lab.environment, "COLUMNS": "120"},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"All answers were right; [1-9]\d* updates came meanwhile", done.stdout)
    assert re.search(r"/lookup +\d+ +\d+ +[\d.]+ +[\d.]+ +[\d.]+", done.stdout), done.stdout
