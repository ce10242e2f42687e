"""An embedding service, deployed, updated and asked: the command line.

    python -m clamor_ray.workloads.serving --demo
    python -m clamor_ray.workloads.serving --rows 1000000 --seconds 60     under `ray job submit`

The session, its table and the application outlive the program, but for the demo's.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

import clamor_ray as clamor

from ..cli import options
from ..cli.program import CommandRun, program
from ..cli.results import print_rows
from ..data.errors import WrongResult
from . import running
from .client_rules import WrongAnswer
from .deployment import AppOptions
from .updates import open_table, update_rows

ENDPOINTS = ("lookup", "control")
LATE_S = 120.0  # of a load program, after its last arrival
FOLLOWS_S = 60.0  # for a replica, after the last update


class MissingAnswers(WrongResult):
    """Requests that had no answer after all tries of a client."""


class StaleAnswers(WrongResult):
    """The service does not follow the updates."""


def wait_for_update(url: str, number: int, timeout_s: float = FOLLOWS_S) -> None:
    """Until it is served: answers of an old update are right, so the load does not tell.

    Raises:
        StaleAnswers: It is not, in time.
    """
    try:
        running.wait_for(url, 1, lambda said: said["update"] >= number, timeout_s)
    except TimeoutError as error:
        raise StaleAnswers(f"update {number} was made, but {error}") from None


@contextlib.contextmanager
def loads(url: str, rate_per_s: float, seconds: float) -> Iterator[dict[str, Any]]:
    """Both endpoints under load, by a program each, from here to the end of the block.

    Yields what they have measured, which is there after the block.

    Raises:
        WrongAnswer, MissingAnswers: An answer was wrong; or there was none.
    """
    command = [sys.executable, "-m", "clamor_ray.workloads.serving.open_loop", "--url", url]
    command += ["--rate", str(rate_per_s / len(ENDPOINTS)), "--seconds", str(seconds)]
    programs = {
        path: subprocess.Popen([*command, "--path", path], stdout=subprocess.PIPE, text=True)
        for path in ENDPOINTS
    }
    measured: dict[str, Any] = {}
    try:
        yield measured
        for path, each in programs.items():
            said, _ = each.communicate(timeout=seconds + LATE_S)
            if not said:
                raise MissingAnswers(f"/{path}: its program ended with {each.returncode}")
            measured[path] = json.loads(said)
    finally:
        for each in programs.values():
            each.kill()
            each.wait()
    for path, record in measured.items():
        if record["n_wrong"]:
            raise WrongAnswer(f"{record['n_wrong']} of /{path}: {record['texts'][0]}")
        if record["n_failed"]:
            raise MissingAnswers(f"{record['n_failed']} of /{path}: {record['texts'][0]}")


@program("Two replicas on a local cluster, updated while they are asked.")
@click.option("--session", default="embeddings", show_default=True, help="Name of the session.")
@click.option("--table", default="table", show_default=True, help="Name of the variable.")
@options.number("--rows", 100_000, "Of the table, where the session has none.")
@options.number("--dim", 64, "Columns of such a table.")
@options.number("--replicas", 2, "Of the application.")
@options.count(
    "--port", None, "Of Serve's proxy, where none runs yet. Default: 8000; for the demo a free one."
)
@options.number("--seconds", 10, "How long it is asked.")
@options.real("--rate", 100, "Requests per second, half of them to the control.", above=True)
@options.real("--update-every", 1, "Seconds from one update to the next one.", above=True)
@click.option("--end", is_flag=True, help="End the application and the session afterwards.")
def main(
    asked: CommandRun,
    session: str,
    table: str,
    rows: int,
    dim: int,
    replicas: int,
    port: int | None,
    seconds: int,
    rate: float,
    update_every: float,
    end: bool,
) -> None:
    """Serves rows of a global variable over HTTP, updates them, and measures both.

    Each update changes one row in a hundred. Prints percentiles of the look-ups and of a control
    endpoint that touches no variable. Every answer is compared with what the table must hold.

    Exit status: 0; 1 where an answer was wrong, missing or too old; 2 where Serve runs at another
    port; 3 where the library cannot work here.
    """
    stages = asked.stages
    ends = end or asked.demo
    with (
        asked.attached(session=session, lifetime="detached"),
        contextlib.ExitStack() as at_end,  # all of it, though a part of it fails
    ):
        if ends:
            at_end.callback(clamor.shutdown, session=session)
        with stages.stage("table", f"a table of {rows:,} rows in session {session!r}"):
            ref = open_table(session, table, (rows, dim))
        with stages.stage("deploy", f"{replicas} replicas"):
            if ends:  # and Serve only where it is not somebody else's
                at_end.callback(running.end if running.is_started() else running.end_serve)
            url = running.start_http(port or (running.free_port() if asked.demo else 8000))
            # The table is there: a replica that finds none is not to make another one.
            running.deploy(AppOptions(session, table, 0, dim, replicas))
        n_updates = last_update = 0
        text = f"{rate:g} requests per second for {seconds} s"
        with stages.stage("load", text), loads(url, rate, seconds) as measured:
            over = time.monotonic() + seconds
            while time.monotonic() + update_every < over:
                time.sleep(update_every)
                last_update = update_rows(ref)
                n_updates += 1
        wait_for_update(url, last_update)
        asked.say(f"\nAll answers were right; {n_updates} updates came meanwhile.\n")
        print_rows(
            asked.console,
            ["endpoint", "answers", "again", "p50\nms", "p99\nms", "p99.9\nms"],
            [
                (
                    f"/{path}",
                    f"{record['n']:,}",
                    f"{record['n_retries']:,}",
                    *(f"{record[name]:.1f}" for name in ("p50_ms", "p99_ms", "p999_ms")),
                )
                for path, record in measured.items()
            ],
            names=True,
        )
        if not ends:
            asked.say(f"It goes on at {url}.")


if __name__ == "__main__":
    main()
