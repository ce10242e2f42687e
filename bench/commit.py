"""What a commit costs, for one block and for many, and what writing and building cost before it.

small_commit_ms   the end of `with clamor.update(ref)` over one changed 4 KiB block: p50 and p99.
small_commit_ratio  that against one call of an actor method that does nothing, on the registry's
                  node. Both in the same process, in turn by batches, so that both meet the same
                  machine. Beside it: the whole update (begin, write, commit), and a variable whose
                  home is the other node, to which the block travels before the commit is decided.
bulk_commit_ratio the commit of 1 GiB, every block of it changed, to a home on the same node
                  against a plain memcpy of as much, by one thread, into memory that was touched
                  before. Beside it: into fresh memory, which is what a commit has to write to.
cow_write_ratio   the first write to each block inside a transaction against the same writes to a
                  MAP_PRIVATE mapping of a memfd with the same content. The variable is homed here
                  (no trap); beside it one that is cached here, all of it resident (trapped).
build_in_place_ratio  the most memory that a session and its driver come to hold while an array is
                  built in a region and published, above what they held before, to the array's
                  size. In a fresh driver. See bench/support/processes.py for what is counted.

`--long` instead: many commits of one block, and what they leave behind.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.drivers import commit_memory
from bench.drivers.commit_small import Peer, small_commits
from bench.support import common
from bench.support.common import BLOCK_BYTES, emit, note, now

WORDS_PER_BLOCK = BLOCK_BYTES // 8
CHUNK_WORDS = 1 << 20
TIMEOUT_S = 600

# ------------------------------------------------------------------ many blocks


def memcpy_s(source: npt.NDArray[np.uint64], target: npt.NDArray[np.uint64]) -> float:
    start = now()
    np.copyto(target, source)
    return now() - start


def fresh_memory(n_bytes: int) -> tuple[mmap.mmap, npt.NDArray[np.uint64]]:
    """Anonymous memory that nobody has touched, of single pages as a memfd's are."""
    memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory, np.frombuffer(memory, np.uint64)


def bulk_commit(n_bytes: int, number: int) -> dict[str, Any]:
    """A variable homed here, all of it changed, committed once."""
    import clamor_ray as clamor

    old, new = 3000 + 2 * number, 3001 + 2 * number
    ref = clamor.put(common.make_array(n_bytes, old))
    n_words = n_bytes // 8
    source = common.make_array(n_bytes, new)
    target = np.ones(n_words, np.uint64)
    warm_s = min(memcpy_s(source, target) for _ in range(3))
    del target
    common.warm_memory(n_bytes)
    memory, target = fresh_memory(n_bytes)
    fresh_s = memcpy_s(source, target)
    common.verify("memcpy", target[:: 1 << 12], source[:: 1 << 12])
    del target
    memory.close()
    transaction = clamor.update(ref)
    words = transaction.begin()
    np.copyto(words, source)
    del source
    common.warm_memory(2 * n_bytes)
    start = now()
    transaction.commit()
    commit_s = now() - start
    del words
    got = ref.get()
    for first in range(0, n_words, CHUNK_WORDS):
        part = got[first : first + CHUNK_WORDS]
        common.verify("bulk commit", part, common.expected_words(first, len(part), new))
    del got
    clamor.free(ref)
    return {
        "case": "bulk_commit",
        "repetition": number,
        "bytes": n_bytes,
        "commit_s": commit_s,
        "memcpy_warm_s": warm_s,
        "memcpy_fresh_s": fresh_s,
        "ratio": commit_s / warm_s,
        "ratio_fresh": commit_s / fresh_s,
    }


# ------------------------------------------------------------------ first writes


def first_writes_s(words: npt.NDArray[np.uint64], value: int) -> float:
    """One word in each block."""
    start = now()
    words[::WORDS_PER_BLOCK] = value
    return now() - start


def plain_writes_s(content: npt.NDArray[np.uint64], value: int) -> float:
    """The same in a private mapping of a memfd that holds the content."""
    n_bytes = content.nbytes
    fd = os.memfd_create("plain")
    try:
        os.ftruncate(fd, n_bytes)
        whole = content.view(np.uint8)
        for at in range(0, n_bytes, 1 << 20):
            os.pwrite(fd, whole[at : at + (1 << 20)].data, at)
        with mmap.mmap(fd, n_bytes, mmap.MAP_PRIVATE) as mapped:
            common.warm_memory(2 * n_bytes)
            words = np.frombuffer(mapped, np.uint64)
            seconds = first_writes_s(words, value)
            common.verify("plain", words[1::WORDS_PER_BLOCK], content[1::WORDS_PER_BLOCK])
            del words
    finally:
        os.close(fd)
    return seconds


def cow_repetition(ref: Any, salt: int, number: int) -> dict[str, Any]:
    """Either side once; nothing is committed."""
    import clamor_ray as clamor

    words = ref.get()
    content = common.make_array(words.nbytes, salt)
    common.verify("resident", words, content)  # has the node fetch what it has not
    del words

    def ours() -> float:
        transaction = clamor.update(ref)
        words = transaction.begin()
        common.warm_memory(2 * content.nbytes)
        seconds = first_writes_s(words, number)
        written = np.full(len(content) // WORDS_PER_BLOCK, number, np.uint64)
        common.verify("writes", words[::WORDS_PER_BLOCK], written)
        common.verify("copies", words[1::WORDS_PER_BLOCK], content[1::WORDS_PER_BLOCK])
        transaction.abort()
        return seconds

    if number % 2:
        ours_s, plain_s = ours(), plain_writes_s(content, number)
    else:
        plain_s, ours_s = plain_writes_s(content, number), ours()
    n_blocks = len(content) // WORDS_PER_BLOCK
    return {
        "case": "cow_write",
        "repetition": number,
        "blocks": n_blocks,
        "transaction_us_per_block": ours_s / n_blocks * 1e6,
        "plain_us_per_block": plain_s / n_blocks * 1e6,
        "ratio": ours_s / plain_s,
    }


class Writer:
    """On the other node."""

    def first_writes(self, box: list[Any], salt: int, repetitions: int) -> list[dict[str, Any]]:
        """To a variable that is homed elsewhere, with all of it resident here."""
        return [cow_repetition(box[0], salt, number) for number in range(repetitions)]


# ------------------------------------------------------------------ all of it


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Four digits after the point, as other summaries; some figures have percentiles inside."""
    return {
        name: rounded(value) if isinstance(value, dict) else round(value, 4)
        for name, value in figures.items()
    }


def in_fresh_process(case: str, n_bytes: int) -> dict[str, Any]:
    """Its last line."""
    command = [sys.executable, "-m", "bench", "commit", "--in-process", case]
    done = subprocess.run(
        [*command, "--bytes", str(n_bytes)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        cwd=common.ROOT,
    )
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def run_on_two_nodes(
    nodes: common.TwoNodes, options: argparse.Namespace, figures: dict[str, Any]
) -> None:
    """All cases that want a page server or two."""
    import ray

    import clamor_ray as clamor

    small = options.small
    repetitions = options.repetitions or (1 if small else 5)
    wanted = options.only or ("small", "bulk", "cow")
    if "small" in wanted:
        n_bytes = (1 << 20) if small else (16 << 20)
        here = clamor.put(common.make_array(n_bytes, 1))
        keeper = nodes.on_b(Peer)
        (there,) = ray.get(keeper.put.remote(n_bytes, 2), timeout=TIMEOUT_S)
        for suffix, ref, salt in (("", here, 1), ("_other_home", there, 2)):
            note(f"small commits{suffix.replace('_', ' ')}")
            record = small_commits(
                "other node" if suffix else "same node",
                nodes,
                ref,
                salt,
                samples=options.samples or (40 if small else 600),
                warm_up=10 if small else 100,
            )
            emit(record)
            times, ratio = record["commit_ms"], record["ratio"]
            figures[f"small_commit_ms{suffix}"] = {"p50": times["p50"], "p99": times["p99"]}
            figures[f"small_commit_ratio{suffix}"] = ratio
            clamor.free(ref)
        ray.kill(keeper)
    if "cow" in wanted:
        n_bytes = (8 << 20) if small else (256 << 20)
        ref = clamor.put(common.make_array(n_bytes, 11))
        note("first writes")
        records = [cow_repetition(ref, 11, number) for number in range(repetitions)]
        emit({"home": "same node", "records": records})
        figures["cow_write_ratio"] = statistics.median(r["ratio"] for r in records)
        writer = nodes.on_b(Writer)
        records = ray.get(writer.first_writes.remote([ref], 11, repetitions), timeout=TIMEOUT_S)
        emit({"home": "other node", "records": records})
        figures["cow_write_ratio_cached"] = statistics.median(r["ratio"] for r in records)
        ray.kill(writer)
        clamor.free(ref)
    if "bulk" in wanted:
        records = []
        for number in range(min(3, repetitions)):
            note(f"bulk commit {number + 1}")
            records.append(bulk_commit((32 << 20) if small else (1 << 30), number))
            emit(records[-1])
        figures["bulk_commit_ratio"] = statistics.median(r["ratio"] for r in records)
        figures["bulk_commit_ratio_fresh"] = statistics.median(r["ratio_fresh"] for r in records)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench commit", description=__doc__)
    parser.add_argument("--small", action="store_true", help="less data, fewer samples")
    parser.add_argument("--only", choices=("small", "bulk", "cow", "build"), help="one of them")
    parser.add_argument("--samples", type=int, help="of a small commit, each home (600)")
    parser.add_argument("--repetitions", type=int, help="of bulk commits and first writes (5)")
    parser.add_argument("--long", action="store_true", help="many commits of one block instead")
    parser.add_argument("--commits", type=int, default=100_000, help="of --long (100000)")
    parser.add_argument("--in-process", choices=("build",), help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_process:
        emit(commit_memory.build_in_place(options.bytes))
        return 0
    if options.long:
        common.summary(commit_memory.long_run(options.commits))
        return 0
    import clamor_ray as clamor

    environment = common.environment(library=clamor.__version__, bench="commit")
    figures: dict[str, Any] = {}
    note("touching memory")
    common.warm_memory((64 << 20) if options.small else (4 << 30))
    if options.only != "build":
        with common.two_nodes(store_bytes=256 << 20) as nodes:
            environment["environment"]["trap"] = nodes.trap
            emit(environment)
            run_on_two_nodes(nodes, options, figures)
    if options.only in (None, "build"):
        note("building in place")
        n_bytes = (64 << 20) if options.small else (2 << 30)
        common.warm_memory(n_bytes)
        record = in_fresh_process("build", n_bytes)
        emit(record)
        figures["build_in_place_ratio"] = record["ratio"]
    emit({"summary": rounded(figures)})
    return 0
