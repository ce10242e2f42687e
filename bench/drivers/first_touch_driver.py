"""The cases of `first_touch`, between two nodes that are there.

python -m bench.drivers.first_touch_driver OPTIONS_AS_JSON      on the first host of a lab of two
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common
from bench.support.common import BLOCK_BYTES, emit, grown, note, now

TIMEOUT_S = 600
SALT = 7
CLUSTER_ROWS = 32
MOST_VERIFIED = 20_000
LEAK_VARIABLES = 1000
LEAK_TIMEOUT_S = 60.0
AUTO = 0
COUNTERS = ("bytes_received", "blocks_fetched", "rows_fetched", "fetch_requests", "faults")

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Options:
    """What is read, how much of it, and how.

    Args:
        table_bytes: of the table of float32.
        row_bytes: lengths of its rows.
        shares: of its rows that are read.
        orders: random, sorted, clustered.
        ways: index, gather, loop, ray.
        pages: fixed page sizes in bytes that loops are compared with.
        repetitions: of each.
    """

    table_bytes: int
    row_bytes: tuple[int, ...]
    shares: tuple[float, ...]
    orders: tuple[str, ...]
    ways: tuple[str, ...]
    pages: tuple[int, ...]
    repetitions: int


class Home:
    """On node b: has the table, and puts it anew for each reading."""

    def __init__(self, table_bytes: int) -> None:
        self.words = common.make_array(table_bytes, SALT)

    def put(self, row_bytes: int, way: str) -> list[Any]:
        """In a list, so that nobody opens it on the way."""
        import ray

        import clamor_ray as clamor

        table = self.words.view(np.float32).reshape(-1, row_bytes // 4)
        return [ray.put(table) if way == "ray" else clamor.put(table)]


class Reader:
    """On node a, in a process that asks for one page size."""

    def ready(self, box: list[Any]) -> int:
        """Everything that starts once has started."""
        import clamor_ray as clamor

        table = box[0].get()
        return len(table[np.arange(9)]) + len(clamor.gather(box[0], np.arange(9)))

    def read(self, way: str, box: list[Any], ids: Int64) -> tuple[float, int]:
        """Seconds, and how many blocks the rows lie on."""
        import ray

        import clamor_ray as clamor

        ref, numbers = box[0], ids.tolist()
        start = now()
        if way == "ray":
            table = ray.get(ref, timeout=TIMEOUT_S)
            got = table[ids]
        elif way == "gather":
            got = clamor.gather(ref, ids)
        elif way == "index":
            table = ref.get()
            got = table[ids]
        else:
            table = ref.get()
            got = np.empty((len(ids), table.shape[1]), table.dtype)
            for at, number in enumerate(numbers):
                got[at] = table[number]
        seconds = now() - start
        row_bytes = got.nbytes // len(got)
        words = ids[:MOST_VERIFIED, None] * (row_bytes // 8) + np.arange(row_bytes // 8)
        common.verify(way, got[:MOST_VERIFIED].view(np.uint64), common.expected_at(words, SALT))
        begin = 0 if way == "ray" else ref.get().__array_interface__["data"][0] % BLOCK_BYTES
        return seconds, len(blocks_of(ids, row_bytes, begin))

    def present(self, box: list[Any]) -> dict[str, float]:
        """What access to present blocks costs, in units of the same on a plain array: as NumPy
        makes one, of huge pages, and of pages of the size that a cache has (`small_pages`)."""
        import clamor_ray as clamor

        clamor.prefetch(box[0])
        table = box[0].get()
        plain = np.array(table)
        memory = mmap.mmap(-1, table.nbytes)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        small = np.frombuffer(memory, table.dtype).reshape(table.shape)
        small[...] = plain
        rng = np.random.default_rng(3)
        few, many = (rng.integers(0, len(plain), n) for n in (1_000, 100_000))
        rows = rng.integers(0, len(plain) - 8, 2_000).tolist()

        def scalar(array: Any) -> None:
            for row in rows:
                array[row, 1]

        def cut(array: Any) -> None:
            for row in rows:
                array[row : row + 8]

        return {
            "ids_1000": _ratio(lambda array: array[few], table, plain, 300),
            "ids_100000": _ratio(lambda array: array[many], table, plain, 9),
            "small_pages_1000": _ratio(lambda array: array[few], table, small, 300),
            "small_pages_100000": _ratio(lambda array: array[many], table, small, 9),
            "scalar": _ratio(scalar, table, plain, 40),
            "slice": _ratio(cut, table, plain, 40),
        }


class Holder:
    """Has references for a while."""

    def __init__(self) -> None:
        self.refs: list[Any] = []

    def keep(self, refs: list[Any]) -> None:
        self.refs = refs

    def drop(self) -> None:
        self.refs = []


def leak(b: str) -> dict[str, Any]:
    """Makes LEAK_VARIABLES of 16 KiB, passes them around, drops all references, and looks at what
    stays.

    Args:
        b: id of a node without the driver.
    """
    import ray

    import clamor_ray as clamor

    def home_bytes() -> int:
        return sum(node.engine.home_bytes for node in clamor.stats().nodes)

    def regions() -> set[int]:
        return {info.region for info in clamor.variables()}

    @ray.remote
    def given_back(refs: list[Any]) -> list[Any]:
        return refs

    @clamor.remote
    def total(array: npt.NDArray[Any]) -> float:
        return float(array.sum())

    holder = common.pinned(Holder, b).remote()
    ray.get(holder.keep.remote([]), timeout=TIMEOUT_S)
    before_regions, before_bytes = regions(), home_bytes()
    quarter = LEAK_VARIABLES // 4
    refs = [clamor.put(np.full(2048, number)) for number in range(LEAK_VARIABLES)]
    kept = ray.put({"nested": [refs[:quarter]]})
    there = holder.keep.remote(refs[quarter : 2 * quarter])
    back = given_back.remote(refs[2 * quarter : 3 * quarter])
    sums = ray.get([total.remote(ref) for ref in refs[3 * quarter :]], timeout=TIMEOUT_S)
    ray.get([there, back], timeout=TIMEOUT_S)
    if len(regions() - before_regions) != LEAK_VARIABLES or len(sums) != quarter:
        raise common.WrongData("variables went while there were references to them")
    del refs, kept, back
    ray.get(holder.drop.remote(), timeout=TIMEOUT_S)
    start = now()
    while True:
        left = len(regions() - before_regions) + max(0, home_bytes() - before_bytes)
        seconds = now() - start
        if not left or seconds > LEAK_TIMEOUT_S:
            return {"leak": left, "seconds": seconds}
        time.sleep(0.1)


def _ratio(access: Callable[[Any], Any], ours: Any, plain: Any, n: int) -> float:
    """Median of ours / median of plain, in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(n + 2):
        for side, array in enumerate((ours, plain)):
            start = now()
            access(array)
            if number >= 2:
                times[side].append(now() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


def blocks_of(ids: Int64, row_bytes: int, begin: int) -> Int64:
    """The blocks that rows lie on, counted from that of the table's first byte.

    Args:
        ids: of rows.
        row_bytes: of each.
        begin: where the table begins in its first block, in bytes.
    """
    first = (begin + ids * row_bytes) // BLOCK_BYTES
    last = (begin + (ids + 1) * row_bytes - 1) // BLOCK_BYTES
    return np.unique(np.concatenate([first, last]))


def choose(order: str, n_rows: int, share: float, rng: np.random.Generator) -> Int64:
    """Numbers of different rows; clustered: runs of CLUSTER_ROWS, in random order."""
    n = max(1, round(n_rows * share))
    if order == "clustered":
        runs = rng.choice(n_rows // CLUSTER_ROWS, -(-n // CLUSTER_ROWS), replace=False)
        return (runs[:, None] * CLUSTER_ROWS + np.arange(CLUSTER_ROWS)).reshape(-1)[:n]
    ids = rng.choice(n_rows, n, replace=False)
    return np.sort(ids) if order == "sorted" else ids


def cases(options: Options, a: str, b: str) -> Iterator[dict[str, Any]]:
    """One record for each reading. Each is of a table that node a has never seen.

    Args:
        a, b: ids of the reading node, where the driver is, and of the home.

    Raises:
        WrongData: what was read is not what was put.
    """
    import ray

    import clamor_ray as clamor

    home = common.pinned(Home, b).remote(options.table_bytes)
    readers = {}
    warm = clamor.put(np.zeros((100, 1000), np.float32))
    for page in (AUTO, *options.pages):
        environment = {"env_vars": {"CLAMOR_PAGE_BYTES": str(page)}}
        readers[page] = common.pinned(Reader, a, runtime_env=environment).remote()
        ray.get(readers[page].ready.remote([warm]), timeout=TIMEOUT_S)
    clamor.free(warm)

    def reading(way: str, page: int, row_bytes: int, ids: Int64) -> dict[str, Any]:
        (ref,) = ray.get(home.put.remote(row_bytes, way), timeout=TIMEOUT_S)
        common.warm_memory(options.table_bytes + len(ids) * row_bytes)
        before = common.node_counters(a)
        call = readers[page].read.remote(way, [ref], ids)
        seconds, touched = ray.get(call, timeout=TIMEOUT_S)
        after = common.node_counters(a)
        if way == "ray":
            del ref
        else:
            clamor.free(ref)
        counters = {name: grown(before, after, name) for name in COUNTERS}
        return {
            "seconds": seconds,
            "touched_bytes": touched * BLOCK_BYTES,
            "fetch_ratio": counters["bytes_received"] / (touched * BLOCK_BYTES),
            **counters,
        }

    rng = np.random.default_rng(1)
    for repetition in range(options.repetitions):
        for row_bytes in options.row_bytes:
            for share in options.shares:
                for order in options.orders:
                    ids = choose(order, options.table_bytes // row_bytes, share, rng)
                    note(f"{len(ids)} rows of {row_bytes} bytes, {order}")
                    turns = [(way, AUTO) for way in options.ways]
                    if "loop" in options.ways:
                        turns += [("loop", page) for page in options.pages]
                    for turn in rng.permutation(len(turns)).tolist():
                        way, page = turns[turn]
                        yield {
                            "row_bytes": row_bytes,
                            "share": share,
                            "order": order,
                            "way": way,
                            "page_bytes": page or "auto",
                            "repetition": repetition,
                            **reading(way, page, row_bytes, ids),
                        }
    for row_bytes in options.row_bytes:
        (ref,) = ray.get(home.put.remote(row_bytes, "present"), timeout=TIMEOUT_S)
        got = ray.get(readers[AUTO].present.remote([ref]), timeout=TIMEOUT_S)
        clamor.free(ref)
        yield {"row_bytes": row_bytes, "present": got}
    yield leak(b)


def main(arguments: list[str]) -> int:
    """On the first host of a lab."""
    import ray

    import clamor_ray as clamor

    fields = json.loads(arguments[0])
    options = Options(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    )
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    try:
        emit({"trap": clamor.init().trap})
        own = ray.get_runtime_context().get_node_id()
        (other,) = (n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != own)
        for record in cases(options, own, other):
            emit(record)
    finally:
        clamor.shutdown(force=True)
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
