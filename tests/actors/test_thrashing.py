"""A budget that is too small: said once, counted always."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from clamor_ray._native import client as _native
from clamor_ray._native.builder import C_DIR
from clamor_ray._observe import stats as _stats
from clamor_ray._protocol.messages import RegistryReport, ServerInfo, ServerReport
from clamor_ray.actors.page_server.engine_like import EventKind
from tests.support.server_rig import HERE, FakeEvent, Node, until

INFO = ServerInfo(HERE, "node", "127.0.0.1", 1, "socket", "0")


def test_one_warning_and_a_count(run_core, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "clamor_ray.page_server")

    async def work() -> None:
        async with Node(HERE) as here:
            assert here.core.thrashing == 0
            for n_blocks in (17, 18, 19):
                here.engine.ask(FakeEvent(EventKind.THRASHING, text=f"{n_blocks} of 1000 blocks"))
            await until(lambda: here.core.thrashing == 3)

    run_core(work)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "17 of 1000 blocks" in said
    for what_to_do in ("CLAMOR_CACHE_BYTES", "smaller parts", "stats().thrashing"):
        assert what_to_do in said


def test_stats_show_the_budget_and_who_thrashes() -> None:
    engine = {"cached_bytes": 40, "evicted_blocks": 7, "refetched_blocks": 5, "rows_fetched": 3}
    report = RegistryReport(
        {},
        0,
        (
            ServerReport(INFO, engine, cache_bytes=100, thrashing=2),
            ServerReport(dataclasses.replace(INFO, node_id="other"), engine, cache_bytes=50),
        ),
    )
    stats = _stats.from_report(report)
    assert (stats.cache_bytes, stats.cached_bytes) == (150, 80)
    (bad,) = stats.thrashing
    assert (bad.node_id, bad.thrashing, bad.cache_bytes) == ("node", 2, 100)
    assert bad.engine.evicted_blocks == 7
    assert bad.engine["refetched_blocks"] == 5
    assert bad.engine.rows_fetched == 3


def test_no_counter_of_the_engine_is_missing() -> None:
    text = (C_DIR / "pagecache.h").read_text()
    body = text.partition("struct pc_engine_stats {")[2].partition("};")[0]
    words = [
        word.strip()
        for line in body.splitlines()
        for word in line.partition("/*")[0].replace("uint64_t", "").replace(";", ",").split(",")
    ]
    assert {word for word in words if word} == {
        field.name for field in dataclasses.fields(_stats.EngineStats)
    }


def test_the_event_is_the_headers() -> None:
    assert EventKind.THRASHING == _native.EVENT_THRASHING
