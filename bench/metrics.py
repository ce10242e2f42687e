"""What metrics cost: on the way of a fault, and of a node that does nothing else.

Two raylets with Ray's own agents, and sessions with CLAMOR_METRICS=on and off in turn; each has a
cluster of its own. Another session before them is left out.

fault_ratio    one byte of each 64 KiB page of a variable that is homed on the other node, in random
               order, one at a time: p50 with metrics / without, each over the touches of all its
               sessions.
core_percent   what a page server computes, percent of a core: with metrics - without, by the
               kernel's own clock of its threads. Nothing is touched meanwhile; there are variables.
               The median of pairs of sessions, and of both page servers.
registry_core_percent  the same of the registry.

The line before the summary has the percents of each session.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import common, processes
from bench.support.common import emit, note, percentile

PAGE_BYTES = 64 << 10
STORE_BYTES = 256 << 20
TIMEOUT_S = 300
SETTLE_S = 3.0  # a session begins, and what it started reads its files
N_VARIABLES = 20
SWITCHES = ("on", "off")


def put(n_bytes: int, salt: int) -> list[Any]:
    """On node b."""
    import clamor_ray as clamor

    return [clamor.put(common.make_array(n_bytes, salt))]


def cpu_ns(pid: int) -> int:
    """Time that a process's threads have computed."""
    ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            ns += int((thread / "schedstat").read_text().split()[0])
    return ns


def faults_us(nodes: common.TwoNodes, n_pages: int, salt: int) -> list[float]:
    """Microseconds of each touch."""
    import ray

    (ref,) = ray.get(nodes.on_b(put, n_pages * PAGE_BYTES, salt), timeout=TIMEOUT_S)
    words = ref.get()
    step = PAGE_BYTES // 8
    order = np.random.default_rng(salt).permutation(n_pages) * step
    took = []
    got = []
    for index in order.tolist():
        begin = time.perf_counter_ns()
        word = words[index]
        took.append((time.perf_counter_ns() - begin) / 1e3)
        got.append(word)
    common.verify("touched", np.array(got), common.expected_at(order, salt))
    return took


def idle_percent(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Of a core, by process."""
    before = {name: cpu_ns(pid) for name, pid in pids.items()}
    begin = time.monotonic_ns()
    time.sleep(seconds)
    spent_ns = time.monotonic_ns() - begin
    return {name: (cpu_ns(pid) - before[name]) / spent_ns * 100 for name, pid in pids.items()}


def session(switch: str, n_pages: int, seconds: float, salt: int) -> dict[str, Any]:
    """One cluster with one session, from its begin to its end."""
    import clamor_ray as clamor

    os.environ["CLAMOR_METRICS"] = switch
    os.environ["CLAMOR_PAGE_BYTES"] = str(PAGE_BYTES)
    with common.two_nodes(STORE_BYTES) as nodes:
        took = faults_us(nodes, n_pages, salt)
        kept = [clamor.put(common.make_array(PAGE_BYTES, n + 1)) for n in range(N_VARIABLES)]
        pids = processes.session_pids()
        del pids["driver"]
        time.sleep(SETTLE_S)
        percents = idle_percent(pids, seconds)
        assert len(kept) == N_VARIABLES  # they lived until here
        return {"metrics": switch, "trap": nodes.trap, "took_us": took, "percents": percents}


def figures(sessions: list[dict[str, Any]]) -> dict[str, float]:
    """From pairs of sessions, in order."""
    of = {switch: [each for each in sessions if each["metrics"] == switch] for switch in SWITCHES}
    p50 = {
        switch: percentile([us for each in found for us in each["took_us"]], 50)
        for switch, found in of.items()
    }

    def beyond(prefix: str) -> float:
        return statistics.median(
            on["percents"][name] - off["percents"][name]
            for on, off in zip(of["on"], of["off"], strict=True)
            for name in on["percents"]
            if name.startswith(prefix)
        )

    return {
        "fault_ratio": p50["on"] / p50["off"],
        "core_percent": beyond("page_server"),
        "registry_core_percent": beyond("registry"),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench metrics", description=__doc__)
    parser.add_argument("--small", action="store_true", help="one pair, 3 s each")
    parser.add_argument("--pairs", type=int, help="of sessions (5)")
    parser.add_argument("--seconds", type=float, help="without work, of each session (30)")
    options = parser.parse_args(arguments)
    pairs = options.pairs or (1 if options.small else 5)
    seconds = options.seconds or (3.0 if options.small else 30.0)
    n_pages = 128 if options.small else 1024

    import clamor_ray as clamor

    emit(common.environment(library=clamor.__version__, bench="metrics"))
    session("on", 16, 0.5 if options.small else 1.0, 1)  # files are read for the first time
    sessions = []
    for pair in range(pairs):
        for switch in SWITCHES if pair % 2 == 0 else reversed(SWITCHES):
            note(f"pair {pair + 1} of {pairs}: metrics {switch}")
            sessions.append(session(switch, n_pages, seconds, pair + 2))
            last = sessions[-1]
            emit({**last, "took_us": {"p50": percentile(last["took_us"], 50)}})
    common.summary(figures(sessions))
    return 0
