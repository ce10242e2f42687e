"""The embedding service without a cluster: its table, its bodies, and what measures it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from click.testing import CliRunner

from clamor_ray.workloads.serving import __main__ as command
from clamor_ray.workloads.serving import client_rules, open_loop, table
from clamor_ray.workloads.serving.bodies import (
    MOST_IDS,
    Answer,
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
    ],
)
def test_json_without_ids_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="ids"):
        decode_ids(body, "application/json; charset=utf-8")


def test_too_many_ids_are_refused() -> None:
    with pytest.raises(BadRequest, match=f"1 to {MOST_IDS} ids"):
        decode_ids(bytes(8 * (MOST_IDS + 1)), BYTES)


@pytest.mark.parametrize("cut", [0, 31, 33])
def test_a_part_of_an_answer_is_a_wrong_answer(cut: int) -> None:
    ids = np.array([1, 2])
    body = encode_answer(Answer(0, 0, table.rows_at(ids, 0, DIM)), BYTES)
    assert client_rules.check(body, ids) == 0
    with pytest.raises(client_rules.WrongAnswer):
        client_rules.check(body[:cut], ids)


def test_rows_of_another_update_are_a_wrong_answer() -> None:
    ids = np.arange(200)
    rows = table.rows_at(ids, 4, DIM)
    rows[7] = table.rows_at(ids[7:8], 107, DIM)
    with pytest.raises(client_rules.WrongAnswer, match=r"rows \[7\] are not those of update 4"):
        client_rules.check(encode_answer(Answer(4, 4, rows), BYTES), ids)
    with pytest.raises(client_rules.WrongAnswer, match="200 rows for 199 ids"):
        client_rules.check(encode_answer(Answer(4, 4, rows), BYTES), ids[1:])


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
        return web.json_response({"n_rows": N_ROWS})

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
