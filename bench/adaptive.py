"""The page that is chosen by use against every fixed page, for three kinds of readers.

A variable is homed on node a and read cold on node b: by queries through a k-d tree (that of
workloads.knn: places, ratings and metadata of which a query touches little), by a sequential scan,
and by uniform random rows. The reader's process asks for a page of 4 KiB to 4 MiB, or leaves the
choice to the page server. Each measurement is of a variable that node b has never seen, so that
nothing is cached and nothing is learned; the sizes take turns in a new order in each repetition.

``worst_ratio`` is the largest, over the three patterns, of time(by use) / time(best fixed page),
each the median of the repetitions. ``bytes`` are those that node b received.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common
from bench.support.common import emit, grown, note, now

AUTO = 0
FIXED = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
ROW_BYTES = 256
METADATA_BYTES = 2048
K = 10


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is put and read."""

    places: int
    queries: int
    scan_bytes: int
    table_bytes: int
    rows: int


class Reader:
    """On node b, in a process that asks for one size."""

    def ready(self, box: list[Any]) -> float:
        """Everything that starts once has started, and what queries import is imported."""
        import clamor_ray.workloads.models.nearest  # noqa: F401

        return float(np.sum(box[0].get()))

    def scan(self, box: list[Any]) -> tuple[float, int]:
        """Everything, in order."""
        start = now()
        total = int(box[0].get().sum())
        return now() - start, total

    def rows(self, box: list[Any], ids: npt.NDArray[np.int64]) -> tuple[float, Any]:
        """Rows by number, one after the other."""
        start = now()
        got = box[0].get()[ids]
        return now() - start, got

    def tree(self, box: list[Any], lat: Any, lon: Any) -> tuple[float, Any]:
        """The nearest places of each query, in batches as tasks have them."""
        from clamor_ray.workloads.models import nearest

        start = now()
        index = box[0].get()
        answers = nearest.query(index, 0, lat, lon, K)
        return now() - start, answers


def _index(n_places: int) -> Any:
    from clamor_ray.workloads.data import places
    from clamor_ray.workloads.models import nearest

    lat, lon = places.generate_coordinates(n_places, 1)
    index = nearest.build(lat, lon, places.generate_ratings(n_places, 1), METADATA_BYTES)
    index.metadata[:] = (
        common.make_array(n_places * METADATA_BYTES, 1)
        .view(np.uint8)
        .reshape(n_places, METADATA_BYTES)
    )
    return index


class Patterns:
    """What is put, what is asked, and whether the answer is right."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        from clamor_ray.workloads.data import places
        from clamor_ray.workloads.models import nearest

        self._sizes = sizes
        self._index = _index(sizes.places)
        self._queries = places.generate_queries(sizes.queries, seed)
        self._answers = nearest.query(self._index, 0, *self._queries, K)
        self._rng = np.random.default_rng(seed)
        self._salt = seed * 1000

    def measure(self, pattern: str, reader: Any, node_id: str) -> dict[str, float]:
        """One cold reading.

        Raises:
            WrongData: what was read is not what was put.
        """
        import ray

        import clamor_ray as clamor

        if pattern == "tree":
            ref = clamor.put(self._index)
            call = (reader.tree, *self._queries)
        else:
            self._salt += 1
            n_bytes = self._sizes.scan_bytes if pattern == "sequential" else self._sizes.table_bytes
            words = common.make_array(n_bytes, self._salt)
            if pattern == "sequential":
                ref, call = clamor.put(words), (reader.scan,)
            else:
                table = words.reshape(-1, ROW_BYTES // 8)
                ids = self._rng.integers(0, len(table), self._sizes.rows)
                ref, call = clamor.put(table), (reader.rows, ids)
        common.warm_memory(ref.nbytes)
        before = common.node_counters(node_id)
        seconds, got = ray.get(call[0].remote([ref], *call[1:]), timeout=600)
        after = common.node_counters(node_id)
        if pattern == "tree":
            if not got.equals(self._answers):
                raise common.WrongData("queries through the variable differ from local ones")
        elif pattern == "sequential":
            common.verify(pattern, got, int(words.sum()))
        else:
            common.verify(pattern, got, table[ids])
        clamor.free(ref)
        return {
            "seconds": seconds,
            "bytes": grown(before, after, "bytes_received"),
            "requests": grown(before, after, "fetch_requests"),
            "faults": grown(before, after, "faults"),
        }


PATTERNS = ("tree", "sequential", "random")


def repetition(number: int, sizes: Sizes) -> list[dict[str, Any]]:
    """Every pattern with every size, in an order of its own, on one fresh cluster."""
    import ray

    import clamor_ray as clamor

    out = []
    patterns = Patterns(sizes, number + 1)
    rng = np.random.default_rng(number)
    with common.two_nodes(store_bytes=256 << 20) as nodes:
        warm = clamor.put(np.zeros(1 << 20))
        readers = {}
        for size in (AUTO, *FIXED):
            readers[size] = common.pinned(
                Reader, nodes.b, runtime_env={"env_vars": {"CLAMOR_PAGE_BYTES": str(size)}}
            ).remote()
            ray.get(readers[size].ready.remote([warm]), timeout=120)
        clamor.free(warm)
        for pattern in PATTERNS:
            for size in rng.permutation((AUTO, *FIXED)).tolist():
                measured = patterns.measure(pattern, readers[size], nodes.b)
                record = {
                    "pattern": pattern,
                    "page_bytes": size or "auto",
                    "repetition": number,
                    "trap": nodes.trap,
                    **measured,
                }
                emit(record)
                out.append(record)
    return out


def figures(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each pattern: the median of each size, the best fixed one, and the ratio to it."""
    times: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    moved: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        times[record["pattern"]][record["page_bytes"]].append(record["seconds"])
        moved[record["pattern"]][record["page_bytes"]].append(record["bytes"])
    out = {}
    for pattern, by_size in times.items():
        median = {size: statistics.median(values) for size, values in by_size.items()}
        best = min((size for size in median if size != "auto"), key=lambda size: median[size])
        out[pattern] = {
            "ratio": median["auto"] / median[best],
            "best_fixed_bytes": float(best),
            "seconds": median["auto"],
            "best_fixed_seconds": median[best],
            "moved_ratio": statistics.median(moved[pattern]["auto"])
            / statistics.median(moved[pattern][best]),
        }
    return out


def main(arguments: list[str]) -> int:
    """Runs the repetitions and prints the summary."""
    parser = argparse.ArgumentParser(prog="bench adaptive", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a quick run, no figure to quote")
    parser.add_argument("--repetitions", type=int, default=0, help="default: 5, small: 1")
    options = parser.parse_args(arguments)
    sizes = (
        Sizes(1 << 14, 500, 32 << 20, 32 << 20, 400)
        if options.small
        else Sizes(1 << 17, 3000, 512 << 20, 512 << 20, 4000)
    )
    emit(common.environment(benchmark="adaptive", **dataclasses.asdict(sizes)))
    records = []
    for number in range(options.repetitions or (1 if options.small else 5)):
        note(f"repetition {number + 1}")
        records += repetition(number, sizes)
    by_pattern = figures(records)
    emit({"by_pattern": by_pattern})
    rounded = {
        pattern: {name: round(value, 4) for name, value in values.items()}
        for pattern, values in by_pattern.items()
    }
    worst = max(values["ratio"] for values in by_pattern.values())
    emit({"summary": {"worst_ratio": round(worst, 4), **rounded}})
    return 0
