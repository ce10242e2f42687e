"""A large array homed on one node, read cold on another, against ``ray.get`` of the same array.

Coldness. Every repetition starts a fresh cluster. The figures compare first with first: the first
object that Ray moves there (into a plasma arena that nobody has touched) and objects of the
library, each of which is cold wherever it comes in a run, as its memfd is new. Ray's arena keeps
its memory, so its later transfers and puts can be faster: those are measured too, and printed as
``ray_later`` and ``*_speedup_ray_later``. Each side reads objects of its own that node b has
never seen. Before each timed step, on both sides alike, as much guest memory as it needs is touched
and freed: a hypervisor that takes freed pages back makes the first touch of a page cost ten times
the copy into it, at random for either side.

Timed: from holding a reference to holding the bytes asked for, ``get`` included on both sides.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common
from bench.support.common import BLOCK_BYTES, emit, grown, note, now

DENSITY = 0.01


class Reader:
    """On node b. References come in a list, so that nobody resolves them before the clock runs."""

    def ready(self, box: list[Any]) -> int:
        """Has everything started that starts once."""
        return len(box[0].get()) if box else 0

    def ray_read(
        self, box: list[Any], blocks: npt.NDArray[np.int64], salt: int
    ) -> dict[str, float]:
        """Ray's transfer, then the sparse touches and the sum, each timed apart."""
        import ray

        start = now()
        words = ray.get(box[0], timeout=600)
        got = now()
        first_bytes = words.view(np.uint8)[blocks * BLOCK_BYTES]
        touched = now()
        total = int(words.sum())
        summed = now()
        common.verify("ray.get", first_bytes, common.expected_first_bytes(blocks, salt))
        return {
            "get_s": got - start,
            "sparse_s": touched - start,
            "dense_s": (got - start) + (summed - touched),
            "total": total,
        }

    def fault(self, box: list[Any], blocks: npt.NDArray[np.int64], salt: int) -> dict[str, float]:
        """One byte of each block, by plain touches."""
        start = now()
        words = box[0].get()
        first_bytes = words.view(np.uint8)[blocks * BLOCK_BYTES]
        seconds = now() - start
        common.verify("faults", first_bytes, common.expected_first_bytes(blocks, salt))
        return {"seconds": seconds}

    def prefetch(
        self, box: list[Any], blocks: npt.NDArray[np.int64], salt: int
    ) -> dict[str, float]:
        """The same blocks, prefetched as a list of views, then touched and wholly checked."""
        import clamor_ray as clamor

        n = BLOCK_BYTES // 8
        start = now()
        words = box[0].get()
        views = [words[first : first + n] for first in (blocks * n).tolist()]
        clamor.prefetch(views, wait=True)
        fetched = now()
        first_bytes = words.view(np.uint8)[blocks * BLOCK_BYTES]
        end = now()
        common.verify("prefetch", first_bytes, common.expected_first_bytes(blocks, salt))
        for block, view in zip(blocks.tolist(), views, strict=True):
            common.verify("prefetch", view, common.expected_words(block * n, n, salt))
        return {"seconds": end - start, "touch_s": end - fetched}

    def dense(self, box: list[Any]) -> dict[str, float]:
        """Everything, in order."""
        start = now()
        total = int(box[0].get().sum())
        return {"seconds": now() - start, "total": total}

    def every_word(self, box: list[Any], salt: int) -> bool:
        """Checks the whole content, not timed."""
        words = box[0].get()
        step = 1 << 20
        for first in range(0, len(words), step):
            part = words[first : first + step]
            common.verify("dense", part, common.expected_words(first, len(part), salt))
        return True


def repetition(number: int, n_bytes: int) -> dict[str, Any]:
    """One fresh cluster; Ray goes first in even repetitions, the library in odd ones."""
    import ray

    import clamor_ray as clamor

    rng = np.random.default_rng(number)
    n_blocks = n_bytes // BLOCK_BYTES
    # In random order: nothing that reads ahead is helped.
    blocks = rng.permutation(n_blocks)[: max(1, round(n_blocks * DENSITY))].astype(np.int64)
    touched_bytes = len(blocks) * BLOCK_BYTES
    salts = iter(range(number * 16 + 1, number * 16 + 17))
    # Two objects of Ray's at a time, and room for its own.
    with common.two_nodes(store_bytes=2 * n_bytes + n_bytes // 2 + (256 << 20)) as nodes:
        reader = nodes.on_b(Reader)
        small = clamor.put(np.zeros(1 << 16, np.uint64))
        ray.get(reader.ready.remote([small]), timeout=120)
        clamor.free(small)
        ray.get(reader.ready.remote([]), timeout=120)
        out: dict[str, Any] = {
            "repetition": number,
            "trap": nodes.trap,
            "bytes": n_bytes,
            "blocks": len(blocks),
        }

        def ray_side() -> None:
            for name in ("ray", "ray_later"):
                salt = next(salts)
                words = common.make_array(n_bytes, salt)
                common.warm_memory(2 * n_bytes)
                start = now()
                ref = ray.put(words)
                put_s = now() - start
                total = int(words.sum())
                del words
                common.warm_memory(3 * n_bytes)
                read = ray.get(reader.ray_read.remote([ref], blocks, salt), timeout=900)
                common.verify("ray.get", read.pop("total"), total)
                out[name] = {"put_s": put_s, **read}
                del ref

        def our_side() -> None:
            puts = []
            for name in ("fault", "prefetch", "dense"):
                salt = next(salts)
                words = common.make_array(n_bytes, salt)
                common.warm_memory(2 * n_bytes)
                start = now()
                ref = clamor.put(words)
                puts.append(now() - start)
                total = int(words.sum())
                del words
                before = common.node_counters(nodes.b)
                common.warm_memory(3 * n_bytes)
                if name == "dense":
                    read = ray.get(reader.dense.remote([ref]), timeout=900)
                    common.verify("dense", read.pop("total"), total)
                else:
                    method = getattr(reader, name)
                    read = ray.get(method.remote([ref], blocks, salt), timeout=900)
                after = common.node_counters(nodes.b)
                useful = n_bytes if name == "dense" else touched_bytes
                read["bytes_received"] = grown(before, after, "bytes_received")
                read["bytes_ratio"] = read["bytes_received"] / useful
                read["fetch_requests"] = grown(before, after, "fetch_requests")
                out[name] = read
                if name == "dense":
                    ray.get(reader.every_word.remote([ref], salt), timeout=900)
                clamor.free(ref)
            out["put_s"] = puts

        for side in (ray_side, our_side) if number % 2 == 0 else (our_side, ray_side):
            side()
    for suffix, peer in (("", out["ray"]), ("_ray_later", out["ray_later"])):
        out[f"sparse_fault_speedup{suffix}"] = peer["sparse_s"] / out["fault"]["seconds"]
        out[f"sparse_prefetch_speedup{suffix}"] = peer["sparse_s"] / out["prefetch"]["seconds"]
        out[f"dense_speedup{suffix}"] = peer["dense_s"] / out["dense"]["seconds"]
    out["put_speedup"] = out["ray"]["put_s"] / out["put_s"][0]
    out["put_speedup_ray_later"] = out["ray_later"]["put_s"] / min(out["put_s"][1:])
    out["sparse_bytes_ratio"] = out["prefetch"]["bytes_ratio"]
    return out


FIGURES = (
    "sparse_fault_speedup",
    "sparse_prefetch_speedup",
    "sparse_bytes_ratio",
    "dense_speedup",
    "put_speedup",
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench cold_read", description=__doc__)
    parser.add_argument("--small", action="store_true", help="64 MiB, once")
    parser.add_argument("--mib", type=int, help="size of the array (1024)")
    parser.add_argument("--repetitions", type=int, help="fresh clusters (3)")
    options = parser.parse_args(arguments)
    n_bytes = (options.mib or (64 if options.small else 1024)) << 20
    repetitions = options.repetitions or (1 if options.small else 3)

    import clamor_ray as clamor

    note("touching memory")
    common.warm_memory(min(6 * n_bytes, 8 << 30))
    environment = common.environment(library=clamor.__version__, bench="cold_read")
    runs: list[dict[str, Any]] = []
    for number in range(repetitions):
        note(f"repetition {number + 1} of {repetitions}")
        runs.append(repetition(number, n_bytes))
        if number == 0:
            environment["environment"]["trap"] = runs[0]["trap"]
            emit(environment)
        emit(runs[-1])
    emit(
        {
            "coldness": "first object of a fresh cluster on both sides; the median of repetitions",
            "spread": {
                name: common.spread([run[name] for run in runs])
                for name in runs[0]
                if "speedup" in name or name == "sparse_bytes_ratio"
            },
        }
    )
    common.summary({name: statistics.median(run[name] for run in runs) for name in FIGURES})
    return 0
