"""What a touch costs: of a block that the node has, and of a page that another node has.

node_hit     every 4 KiB block of a region, in order, touched for the first time by a process
             after another process of the node has fetched them all; against the same touches of a
             plain memfd mapping in the same process. The figure is the ratio of the totals: the
             kernel maps neighbours along, so single touches are either a minor fault or nothing.
remote_fault one byte of each 64 KiB page of a region homed on the other node, in random order,
             one at a time; against a raw TCP request-response of 64 KiB over loopback between two
             processes that block in recv, run between the repetitions. The figure is the ratio of
             the p50s. The library sizes pages by use, and would shrink them here; for this
             benchmark CLAMOR_PAGE_BYTES holds them at 64 KiB, and it is checked that they were.

Each trap runs in a process of its own, over clusters of its own. The summary holds userfaultfd's
figures (SIGSEGV's where the kernel has no userfaultfd, or with --trap sigsegv); the line before
it has every trap's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common
from bench.support.common import BLOCK_BYTES, emit, grown, microseconds, note, percentile

PAGE_BYTES = 64 << 10
TRAPS = ("uffd", "sigsegv")


class Toucher:
    """On node b; a fresh process each, as a first touch happens once."""

    def __init__(self, library: str) -> None:
        self._touch = ctypes.CDLL(library)
        self._touch.touch_all.restype = ctypes.c_uint64

    def where(self) -> int:
        """The process has started."""
        return os.getpid()

    def read_all(self, box: list[Any]) -> int:
        """Has the node fetch every block."""
        return int(box[0].get().sum())

    def _run(
        self, address: int, offsets: npt.NDArray[np.uint64], each: bool
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64], int]:
        # Resident before the clock runs: zeroed pages would fault in between.
        got = np.ones(len(offsets), np.uint8)
        ns = np.ones(len(offsets), np.uint64)
        arguments = (
            ctypes.c_void_p(address),
            offsets.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(len(offsets)),
            got.ctypes.data_as(ctypes.c_void_p),
        )
        if each:
            self._touch.touch_each(*arguments, ns.ctypes.data_as(ctypes.c_void_p))
            return got, ns, int(ns.sum())
        return got, ns, int(self._touch.touch_all(*arguments))

    def touch(
        self, box: list[Any], offsets: npt.NDArray[np.uint64], salt: int, each: bool
    ) -> tuple[npt.NDArray[np.uint64], int]:
        """Nanoseconds of each touch of the variable, and of all."""
        words = box[0].get()
        got, ns, total = self._run(words.ctypes.data, offsets, each)
        blocks = (offsets // BLOCK_BYTES).astype(np.int64)
        common.verify("touch", got, common.expected_first_bytes(blocks, salt))
        return ns, total

    def touch_plain(
        self, n_bytes: int, offsets: npt.NDArray[np.uint64], salt: int, each: bool
    ) -> tuple[npt.NDArray[np.uint64], int]:
        """The same on a memfd that was filled by writes of a page, mapped, no trap armed."""
        fd = os.memfd_create("plain")
        try:
            os.ftruncate(fd, n_bytes)
            content = common.make_array(n_bytes, salt).view(np.uint8)
            for at in range(0, n_bytes, PAGE_BYTES):
                os.pwrite(fd, content[at : at + PAGE_BYTES].data, at)
            del content
            with mmap.mmap(fd, n_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
                view = np.frombuffer(mapped, np.uint8)
                got, ns, total = self._run(view.ctypes.data, offsets, each)
                del view
        finally:
            os.close(fd)
        blocks = (offsets // BLOCK_BYTES).astype(np.int64)
        common.verify("plain", got, common.expected_first_bytes(blocks, salt))
        return ns, total


def one_trap(trap: str, small: bool, folder: Path) -> dict[str, float]:
    """Both figures for one trap, in this process."""
    import ray

    import clamor_ray as clamor

    os.environ["CLAMOR_TRAP"] = trap
    os.environ["CLAMOR_PAGE_BYTES"] = str(PAGE_BYTES)
    touch = str(common.compile_c("touch.c", folder, shared=True))
    exchange = str(common.compile_c("exchange.c", folder, shared=False))
    hit_bytes = (32 << 20) if small else (256 << 20)
    pages = 256 if small else 2048
    repetitions = 2 if small else 5
    hits, remotes = [], []
    with common.two_nodes(store_bytes=256 << 20) as nodes:
        emit({"trap": trap, "in_force": nodes.trap})
        for number in range(repetitions):
            note(f"{trap}: node hits, repetition {number + 1} of {repetitions}")
            hits.append(_node_hit(trap, nodes, touch, number, hit_bytes))
            emit(hits[-1])
        for number in range(repetitions):
            note(f"{trap}: remote faults, repetition {number + 1} of {repetitions}")
            salt = 100 + number
            ref = clamor.put(common.make_array(pages * PAGE_BYTES, salt))
            order = np.random.default_rng(number).permutation(pages).astype(np.uint64)
            toucher = nodes.on_b(Toucher, touch)
            ray.get(toucher.where.remote(), timeout=120)
            before = common.node_counters(nodes.b)
            raw_before = _raw(exchange, pages)
            ns, _ = ray.get(
                toucher.touch.remote([ref], order * np.uint64(PAGE_BYTES), salt, True), timeout=600
            )
            raw_after = _raw(exchange, pages)
            after = common.node_counters(nodes.b)
            raw = np.concatenate([raw_before, raw_after])
            faults = max(1, grown(before, after, "faults"))
            bytes_per_fault = grown(before, after, "bytes_received") / faults
            # Another size on our side of the ratio would be another benchmark.
            if not 0.95 * PAGE_BYTES < bytes_per_fault < 1.1 * PAGE_BYTES:
                raise RuntimeError(
                    f"{faults} faults for {pages} pages brought {bytes_per_fault:,.0f} bytes each, "
                    f"not pages of {PAGE_BYTES:,}"
                )
            record = {
                "case": "remote_fault",
                "trap": trap,
                "repetition": number,
                "page_bytes": PAGE_BYTES,
                "fault": microseconds(ns),
                "raw_exchange": microseconds(raw),
                "faults": faults,
                "bytes_per_fault": bytes_per_fault,
                "remote_fault_ratio": percentile(ns, 50) / percentile(raw, 50),
                "p99_ratio": percentile(ns, 99) / percentile(raw, 99),
            }
            emit(record)
            remotes.append(record)
            clamor.free(ref)
            ray.kill(toucher)
    return {
        "node_hit_ratio": statistics.median(r["node_hit_ratio"] for r in hits),
        "remote_fault_ratio": statistics.median(r["remote_fault_ratio"] for r in remotes),
    }


def _node_hit(
    trap: str, nodes: common.TwoNodes, touch: str, number: int, n_bytes: int
) -> dict[str, Any]:
    import ray

    import clamor_ray as clamor

    salt = number + 1
    words = common.make_array(n_bytes, salt)
    total = int(words.sum())
    ref = clamor.put(words)
    del words
    offsets = np.arange(0, n_bytes, BLOCK_BYTES, dtype=np.uint64)
    # One process has the node fetch; its mapping stays, as another reader's would.
    fetcher = nodes.on_b(Toucher, touch)
    common.verify("fetch", ray.get(fetcher.read_all.remote([ref]), timeout=600), total)
    record: dict[str, Any] = {"case": "node_hit", "trap": trap, "repetition": number}
    # Totals and single touches need a first touch each, so a process each.
    for each in (False, True):
        toucher = nodes.on_b(Toucher, touch)
        ray.get(toucher.where.remote(), timeout=120)
        before = common.node_counters(nodes.b)
        calls = {
            "hit": lambda who=toucher, e=each: who.touch.remote([ref], offsets, salt, e),
            "plain": lambda who=toucher, e=each: who.touch_plain.remote(n_bytes, offsets, salt, e),
        }
        for name in ("hit", "plain") if number % 2 == 0 else ("plain", "hit"):
            ns, all_ns = ray.get(calls[name](), timeout=600)
            if each:
                record[name] = microseconds(ns)
            else:
                record[f"{name}_ns_per_block"] = all_ns / len(offsets)
        grew = grown(before, common.node_counters(nodes.b), "blocks_fetched")
        if grew:
            raise RuntimeError(f"node hits fetched {grew} blocks: they were not hits")
        ray.kill(toucher)
    ray.kill(fetcher)
    clamor.free(ref)
    record["node_hit_ratio"] = record["hit_ns_per_block"] / record["plain_ns_per_block"]
    return record


def _raw(exchange: str, exchanges: int) -> npt.NDArray[np.int64]:
    done = subprocess.run(
        [exchange, str(PAGE_BYTES), str(exchanges)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return np.array(done.stdout.split(), np.int64)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench faults", description=__doc__)
    parser.add_argument("--small", action="store_true", help="less data, fewer repetitions")
    parser.add_argument("--trap", choices=TRAPS, help="only this one")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_process:
        with tempfile.TemporaryDirectory(prefix="clamor-bench-") as folder:
            figures = one_trap(options.trap, options.small, Path(folder))
        emit({"trap": options.trap, "figures": figures})
        return 0

    import clamor_ray as clamor

    traps = [options.trap] if options.trap else list(TRAPS)
    emit(common.environment(library=clamor.__version__, bench="faults", trap=traps))
    figures_by_trap: dict[str, dict[str, float]] = {}
    for trap in traps:
        command = [sys.executable, "-m", "bench", "faults", "--in-process", "--trap", trap]
        command += ["--small"] if options.small else []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=common.ROOT) as run:
            assert run.stdout is not None
            for line in run.stdout:
                record = json.loads(line) if line.startswith("{") else None
                if record is None:
                    print(line, end="", file=sys.stderr)
                elif "figures" in record:
                    figures_by_trap[trap] = record["figures"]
                else:
                    emit(record)
        if run.returncode != 0 or trap not in figures_by_trap:
            emit({"trap": trap, "failed": run.returncode})
            if trap == options.trap or trap == "sigsegv":
                return 1
    emit({"figures_by_trap": figures_by_trap})
    common.summary(next(figures_by_trap[trap] for trap in TRAPS if trap in figures_by_trap))
    return 0
