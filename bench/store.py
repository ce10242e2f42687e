"""A session whose variables outlive the cluster, on one disk: against the disk itself, and peers.

commit_share      bytes per second of a commit that changes every block of a variable, until it
                  returns, which is when a power cut cannot take it back any more / those of
                  `dd oflag=direct,dsync` of as many bytes at its best block size, just before and
                  on the same disk. Likewise of a large put.
small_commit_rate commits of one block by eight processes at the same time, per second / syncs of
                  one block by one thread, per second.
open_ms           until the first value of a large variable of a store that there is, in a cluster
                  that is new, beyond what a session without a store takes to start there and to
                  have a first value.
recovery_rate     a log of commits that no checkpoint has taken over when all processes are
                  killed -9: its blocks per second of what the next opening takes beyond one after
                  an orderly end.
lmdb, sqlite3, memmap, rocksdict
                  what these take on the same disk / what we take: to put a million rows of 256
                  bytes, to read a row at random, to read a thousand at random, and to overwrite a
                  hundred at random for good. Beyond 1 we are faster. All is warm: in memory.

Each opening has a cluster of its own. All that is read is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.drivers.store_driver import Options
from bench.peers import row_stores
from bench.support import common, disk, row_times
from bench.support.common import BLOCK_BYTES, emit, note

DRIVER_S = 3600.0
GONE_S = 60.0
MIB = 1 << 20


def command(case: str, options: Options) -> list[str]:
    """A driver's."""
    fields = json.dumps(dataclasses.asdict(options))
    return [sys.executable, "-m", "bench.drivers.store_driver", case, fields]


def run(case: str, options: Options) -> dict[str, Any]:
    """The last line of a driver, which has to end well."""
    note(case)
    done = subprocess.run(
        command(case, options),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=DRIVER_S,
        cwd=common.ROOT,
    )
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def run_and_kill(case: str, options: Options) -> None:
    """A driver that says what it has started; then it is killed with all of it, at once."""
    from tests.support.lab.cluster import descendants

    note(f"{case}, and kill -9")
    with subprocess.Popen(
        command(case, options), stdout=subprocess.PIPE, text=True, cwd=common.ROOT
    ) as driver:
        assert driver.stdout is not None
        pids: set[int] = set()
        try:
            for line in driver.stdout:
                with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                    pids = set(json.loads(line)["pids"])
                    break
        finally:
            pids |= {driver.pid, *descendants(driver.pid)}
            for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody sees another one die
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
        if len(pids) < 3:
            raise SystemExit(f"bench: {case} ended by itself")
    deadline = time.monotonic() + GONE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            raise SystemExit(f"bench: processes live {GONE_S:g} s after kill -9")
        time.sleep(0.02)


def blocks_in_layers(store: Path) -> int:
    """About: each layer's file has a head and checksums beside its blocks."""
    return sum(path.stat().st_size for path in store.rglob("*.layer")) // (BLOCK_BYTES + 8)


def openings(options: Options, repetitions: int) -> dict[str, float]:
    """Both sides in turn, each in a cluster of its own."""
    run("fill", options)
    plain_s, open_s = [], []
    for _ in range(repetitions):
        plain_s.append(run("plain", options)["seconds"])
        open_s.append(run("opening", options)["seconds"])
    emit({"case": "openings", "plain_s": plain_s, "open_s": open_s})
    return {"open_ms": (statistics.median(open_s) - statistics.median(plain_s)) * 1e3}


def recovery(options: Options) -> dict[str, float]:
    """A log that was cut off, and the opening after it."""
    run("fill", options)
    run_and_kill("until_killed", options)
    n_blocks = blocks_in_layers(Path(options.directory) / "store")
    after_kill_s = run("opening", options)["seconds"]
    orderly_s = run("opening", options)["seconds"]
    emit(
        {
            "case": "recovery",
            "blocks": n_blocks,
            "committed_blocks": options.log_blocks,
            "after_kill_s": after_kill_s,
            "orderly_s": orderly_s,
        }
    )
    return {"recovery_rate": n_blocks / max(after_kill_s - orderly_s, 1e-3)}


def rows(options: Options) -> dict[str, dict[str, float]]:
    """Us and each peer, one after the other."""
    directory = Path(options.directory)
    times = {"ours": run("rows", options)}
    for name in row_stores.installed():
        note(name)
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=directory) as folder:
            store = row_stores.PEERS[name](Path(folder))
            times[name] = row_times.measure(store, options.rows, options.row_bytes)
    emit({"case": "rows", "rows": options.rows, "row_bytes": options.row_bytes, "seconds": times})
    return speedups(times)


def speedups(times: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of each peer, by kind."""
    ours = times["ours"]
    return {
        peer: {kind: seconds[f"{kind}_s"] / ours[f"{kind}_s"] for kind in row_times.FIGURES}
        for peer, seconds in times.items()
        if peer != "ours"
    }


def shares(record: dict[str, Any]) -> dict[str, float]:
    """By the size of what was written."""
    found = {f"{each['bytes'] // MIB} MiB": each["share"] for each in record["commits"]}
    return {**found, f"put of {record['put']['bytes'] // MIB} MiB": record["put"]["share"]}


CASES = ("layers", "small", "open", "recovery", "rows")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench store", description=__doc__)
    parser.add_argument("--small", action="store_true", help="little of everything, once")
    parser.add_argument("--only", choices=CASES, action="append", help="one of them, or more")
    parser.add_argument("--directory", help="on the disk to measure (that of temporary files)")
    parser.add_argument("--mib", type=int, action="append", help="a layer (64, 256, 1024)")
    parser.add_argument("--put-mib", type=int, help="of the put, and of what is opened (8192)")
    parser.add_argument("--log-blocks", type=int, help="of the log that is redone (1,048,576)")
    parser.add_argument("--rows", type=int, help="of 256 bytes (1,000,000)")
    parser.add_argument("--seconds", type=float, help="of small commits (10)")
    parser.add_argument("--repetitions", type=int, help="of layers and openings (5)")
    given = parser.parse_args(arguments)
    few = given.small

    import clamor_ray as clamor

    emit(common.environment(library=clamor.__version__, bench="store"))
    wanted = given.only or CASES
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=given.directory) as top:
        disk.check_direct(Path(top))

        def options(case: str, **more: Any) -> Options:
            """Each case has a store of its own."""
            directory = Path(top, case)
            directory.mkdir(mode=0o700)
            return Options(str(directory), **more)

        repetitions = given.repetitions or (1 if few else 5)
        put_bytes = (given.put_mib or (32 if few else 8192)) * MIB
        if "layers" in wanted:
            sizes = given.mib or ([4, 16] if few else [64, 256, 1024])
            layers = options(
                "layers",
                sizes=tuple(each * MIB for each in sizes),
                put_bytes=put_bytes,
                repetitions=repetitions,
            )
            record = run("layers", layers)
            emit({"case": "layers", **record})
            figures["commit_share"] = shares(record)
        if "small" in wanted:
            record = run("small", options("small", seconds=given.seconds or (1.0 if few else 10.0)))
            emit({"case": "small", **record})
            figures["small_commit_rate"] = record["rate"]
        if "open" in wanted:
            figures |= openings(options("open", put_bytes=put_bytes), repetitions)
        if "recovery" in wanted:
            n_blocks = given.log_blocks or (1 << 12 if few else 1 << 20)
            figures |= recovery(options("recovery", log_blocks=n_blocks))
        if "rows" in wanted:
            figures |= rows(options("rows", rows=given.rows or (10_000 if few else 1_000_000)))
    common.summary(figures)
    return 0
