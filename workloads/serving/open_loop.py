"""Requests whose times of arrival are fixed in advance, and how long each took from then on.

A client that sends its next request when the last one is answered asks less often while the service
is slow, and so hides what its users wait for (coordinated omission). Here requests arrive by a
Poisson process, whatever becomes of the earlier ones. A request that finds all connections busy
waits, and its latency counts from its time of arrival. Without a rate the loop is closed: that
measures how many requests per second the service answers at most.

    python -m clamor_ray.workloads.serving.open_loop --url http://127.0.0.1:8000 --rate 200

It prints one line of JSON. It imports neither Ray nor the library.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import numpy as np
import numpy.typing as npt

from . import client_rules
from .bodies import BYTES_TYPE, encode_ids
from .table import Int64, changed_rows

PERCENTILES: Final = {"p50_ms": 50.0, "p99_ms": 99.0, "p999_ms": 99.9}
MOST_TEXTS: Final = 5
MOST_KEPT_BYTES: Final = 256 << 20  # of answers that are still to be checked


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked for.

    Args:
        url: of the service, without a path.
        path: "lookup" or "control".
        seconds: in which requests arrive.
        rate_per_s: of arrivals, on average; None for a closed loop.
        n_clients: connections, each with a request at a time.
        n_ids: of a request.
        reaches: an update that is made meanwhile: an answer must be of it, or of a later one. None
            where nobody knows.
        of_update: ask for the rows that this update has changed, each once: `seconds` are then as
            many as that takes. None for any rows.
        seed: of the arrivals and the ids.
    """

    url: str
    path: str = "lookup"
    seconds: float = 10.0
    rate_per_s: float | None = None
    n_clients: int = 32
    n_ids: int = 16
    of_update: int | None = None
    reaches: int | None = None
    seed: int = 1


@dataclasses.dataclass
class Measured:
    """What came of it.

    Args:
        latencies_ms: of each request that was answered, from its arrival on, retries and all.
        seconds: from the first arrival to the last answer.
        n_retries: tries that were repeated.
        failed: requests without an answer after all tries.
        wrong: answers that were wrong.
        updates: that answers were of.
        reaches: see `Load`.
    """

    latencies_ms: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    n_retries: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    updates: set[int] = dataclasses.field(default_factory=set)
    reaches: int | None = None

    @property
    def stale(self) -> list[str]:
        """A text where all answers are of older updates than one of them must be."""
        largest = max(self.updates, default=None)
        if self.reaches is None or (largest is not None and largest >= self.reaches):
            return []
        return [f"update {self.reaches} was made, and the last one of an answer is {largest}"]

    @property
    def texts(self) -> list[str]:
        """What is not as it must be; none where all is well."""
        return [*self.wrong, *self.stale, *self.failed]

    def record(self) -> dict[str, Any]:
        """As JSON can have it."""
        return {
            **percentiles(self.latencies_ms),
            "n": len(self.latencies_ms),
            "requests_per_s": len(self.latencies_ms) / self.seconds if self.seconds else 0.0,
            "n_retries": self.n_retries,
            "n_failed": len(self.failed),
            "n_wrong": len(self.wrong),
            "updates": sorted(self.updates),
            "texts": self.texts[:MOST_TEXTS],
        }


def percentiles(latencies_ms: Sequence[float]) -> dict[str, float]:
    """p50, p99 and p99.9, each a latency that was measured; nothing of no latencies."""
    if not latencies_ms:
        return {}
    values = np.asarray(latencies_ms)
    return {
        name: float(np.percentile(values, q, method="inverted_cdf"))
        for name, q in PERCENTILES.items()
    }


def arrivals_s(load: Load) -> npt.NDArray[np.float64]:
    """When requests arrive, from the beginning on.

    Raises:
        ValueError: The loop is closed: nobody knows.
    """
    if load.rate_per_s is None:
        raise ValueError("a closed loop has no times of arrival: give a rate")
    rng = np.random.default_rng(load.seed)
    n_most = int(2 * load.rate_per_s * load.seconds) + 100
    times = np.cumsum(rng.exponential(1.0 / load.rate_per_s, n_most))
    return times[times < load.seconds]


class Clients:
    """Sends requests by the client's rules, and keeps what is to be checked when all is over."""

    def __init__(self, load: Load, shape: tuple[int, int], http: aiohttp.ClientSession) -> None:
        self.measured = Measured(reaches=load.reaches)
        self._load = load
        self._n_rows, self._dim = shape
        self._http = http
        self._rng = np.random.default_rng([load.seed, 1])
        self._answers: list[tuple[Int64, bytes]] = []
        self._kept_bytes = 0

    def batches(self) -> list[Int64] | None:
        """The ids of each request, where they are known before."""
        update = self._load.of_update
        if update is None:
            return None
        rows = self._rng.permutation(changed_rows(self._n_rows, update))
        n_requests = max(1, len(rows) // self._load.n_ids)
        return np.array_split(rows, n_requests)

    def draw(self) -> Int64:
        """The ids of one more request."""
        return self._rng.integers(0, self._n_rows, self._load.n_ids)

    async def ask(self, ids: Int64, arrived: float) -> None:
        """One request, from its arrival (`time.perf_counter`) to its answer, or to its failure."""
        try:
            trouble = await self._tried(ids, arrived)
        except Exception as error:  # whatever it was, there is no answer
            trouble = repr(error)
        if trouble is not None:
            self.measured.failed.append(trouble)

    async def _tried(self, ids: Int64, arrived: float) -> str | None:
        """Why there is no answer, after all tries; None where there is one."""
        url, data = f"{self._load.url}/{self._load.path}", encode_ids(ids)
        headers = {"content-type": BYTES_TYPE}
        trouble = ""
        for n_tries in range(client_rules.MOST_TRIES):
            if n_tries:
                self.measured.n_retries += 1
                await asyncio.sleep(client_rules.pause_s(n_tries))
            try:
                async with self._http.post(url, data=data, headers=headers) as response:
                    body = await response.read()
                    if response.status == 200:
                        latency_ms = 1e3 * (time.perf_counter() - arrived)
                        self._keep(ids, body)
                        self.measured.latencies_ms.append(latency_ms)
                        return None
                    trouble = f"status {response.status}: {body[:200].decode(errors='replace')}"
                    if response.status not in client_rules.RETRIED_STATUSES:
                        break
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                trouble = repr(error)
        return trouble

    def _keep(self, ids: Int64, body: bytes) -> None:
        # To check it now would delay the requests that are under way.
        if self._load.path == "lookup":
            self._answers.append((ids, body))
            self._kept_bytes += len(body)
            if self._kept_bytes > MOST_KEPT_BYTES:
                self.check()

    def check(self) -> None:
        """All answers that were not checked yet."""
        for ids, body in self._answers:
            try:
                self.measured.updates.add(client_rules.check(body, ids, self._dim))
            except client_rules.WrongAnswer as error:
                self.measured.wrong.append(str(error))
        self._answers.clear()
        self._kept_bytes = 0


async def _open_loop(load: Load, clients: Clients) -> int:
    """Returns how many requests arrived."""
    began = time.perf_counter()
    under_way: set[asyncio.Task[None]] = set()
    batches = clients.batches()
    times = arrivals_s(load)
    if batches is not None:
        longer = dataclasses.replace(load, seconds=3 * len(batches) / (load.rate_per_s or 1) + 1)
        times = arrivals_s(longer)[: len(batches)]
    for number, at_s in enumerate(times.tolist()):
        ids = clients.draw() if batches is None else batches[number]
        await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
        task = asyncio.create_task(clients.ask(ids, began + at_s))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    if under_way:
        await asyncio.gather(*under_way)
    return len(times)


async def _closed_loop(load: Load, clients: Clients) -> int:
    batches = clients.batches()
    end = time.perf_counter() + load.seconds
    n_arrived = 0

    async def client() -> None:
        nonlocal n_arrived
        while time.perf_counter() < end if batches is None else bool(batches):
            ids = clients.draw() if batches is None else batches.pop()
            n_arrived += 1
            await clients.ask(ids, time.perf_counter())

    await asyncio.gather(*(client() for _ in range(load.n_clients)))
    return n_arrived


async def run(load: Load) -> Measured:
    """All of it; every answer of a look-up is checked at the end.

    Raises:
        RuntimeError: A request was neither answered nor has it failed.
    """
    timeout = aiohttp.ClientTimeout(
        total=None,  # it would count the wait for a connection
        sock_connect=client_rules.TRY_TIMEOUT_S,
        sock_read=client_rules.TRY_TIMEOUT_S,
    )
    connector = aiohttp.TCPConnector(limit=load.n_clients)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        async with http.get(f"{load.url}/about") as response:
            response.raise_for_status()
            about = await response.json()
        clients = Clients(load, (int(about["n_rows"]), int(about["dim"])), http)
        measured = clients.measured
        began = time.perf_counter()
        loop = _closed_loop if load.rate_per_s is None else _open_loop
        n_arrived = await loop(load, clients)
        measured.seconds = time.perf_counter() - began
    n_done = len(measured.latencies_ms) + len(measured.failed)
    if n_done != n_arrived:
        raise RuntimeError(f"{n_arrived} requests arrived, and {n_done} were answered or failed")
    clients.check()
    return measured


def main(arguments: list[str]) -> int:
    """Exit status: 0; 1 where an answer was wrong, a request had none, or all were too old."""
    parser = argparse.ArgumentParser(
        prog="python -m clamor_ray.workloads.serving.open_loop", description=__doc__
    )
    parser.add_argument("--url", required=True, help="of the service, without a path")
    parser.add_argument("--path", choices=["lookup", "control"], default="lookup")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, help="requests per second; none: a closed loop")
    parser.add_argument("--clients", type=int, default=32, help="connections (32)")
    parser.add_argument("--ids", type=int, default=16, help="of a request (16)")
    parser.add_argument("--of-update", type=int, help="ask for the rows that it changed, each once")
    parser.add_argument("--reaches", type=int, help="the newest answer must be of this update")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--latencies", action="store_true", help="print each of them, too")
    given = parser.parse_args(arguments)
    if given.reaches is not None and given.path != "lookup":
        parser.error("--reaches is of look-ups: no other answer has an update")
    load = Load(
        given.url.rstrip("/"), given.path, given.seconds, given.rate, given.clients, given.ids,
        given.of_update, given.reaches, given.seed,
    )  # fmt: skip
    measured = asyncio.run(run(load))
    record = measured.record()
    if given.latencies:
        record["latencies_ms"] = [round(each, 4) for each in measured.latencies_ms]
    print(json.dumps(record))
    return 1 if measured.texts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
