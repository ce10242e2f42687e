"""The driver of `hot_pages`, in the namespace of the first host: one session, one replication.

python -m bench.drivers.hot_driver OPTIONS_AS_JSON      prints one JSON object per run
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common
from bench.support.common import BLOCK_BYTES, emit, grown, note
from clamor_ray.workloads.data.stream import first_value, key_of, zipf

RECORD_BYTES = 1 + 8 + 8
TIMEOUT_S = 900
LEAD_S = 1.5  # for every reader to learn when it begins
COUNTERS = (
    "bytes_received",
    "bytes_sent",
    "blocks_fetched",
    "fetch_requests",
    "fetch_retries",
    "redirected_blocks",
    "redirect_misses",
    "peer_blocks_served",
    "peer_blocks_fetched",
)

Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Options:
    """Of one session's runs."""

    n_slots: int
    touched: float  # share of the blocks that the popular keys lie on
    hosts: tuple[int, ...]
    repetitions: int
    readers: int  # per host
    lookups: int  # per reader
    batch: int
    skew: float
    replication: str
    ray: bool


class Reader:
    """On a host that is not the home. All readers begin at one moment of the machine's clock."""

    def __init__(self, popular: Int64) -> None:
        self.popular = popular

    def prepare(self, m: Any, seed: int, options: Options) -> int:
        """Draws the keys and opens the map (its header comes, none of its slots)."""
        rng = np.random.default_rng(seed)
        self.keys = self.popular[zipf(rng, len(self.popular), options.lookups, options.skew)]
        self.batches = np.array_split(self.keys, max(1, len(self.keys) // options.batch))
        self.map = m
        return len(m) if m is not None else 0

    def look_up(self, begin: float) -> dict[str, Any]:
        """The timed part: batch by batch; while one is looked up, the next is on its way."""
        _sleep_until(begin)
        values = []
        self.map.prefetch(self.batches[0], wait=False)
        for number, keys in enumerate(self.batches, 1):
            if number < len(self.batches):
                self.map.prefetch(self.batches[number], wait=False)
            self.map.prefetch(keys)
            values.append(self.map.get(keys))
        end = time.monotonic()
        common.verify("look-ups", np.concatenate(values), first_value(self.keys))
        table = self.map._opened()
        blocks = np.unique(table.starts(self.keys) >> np.uint64(12))
        self.map = None
        return {"end": end, "blocks": blocks}

    def look_up_ray(self, box: list[Any], begin: float) -> dict[str, Any]:
        """The peer: the whole table by `ray.get`, then the same look-ups."""
        import ray

        from clamor_ray._objects.hashtable import Table

        _sleep_until(begin)
        arrays = ray.get(box[0], timeout=TIMEOUT_S)
        got = time.monotonic()
        table = Table(arrays["header"], arrays["slots"])
        values = [table.get(keys, None) for keys in self.batches]
        end = time.monotonic()
        common.verify("ray.get", np.concatenate(values), first_value(self.keys))
        return {"begin": begin, "end": end, "got": got}


def _sleep_until(moment: float) -> None:
    wait = moment - time.monotonic()
    if wait < 0:
        raise RuntimeError(f"this reader is {-wait:.3f} s late: the readers did not start together")
    time.sleep(wait)


def popular_keys(table: Any, share: float, rng: np.random.Generator) -> Int64:
    """Keys on that share of the table's blocks, in scattered places, in random order."""
    keys = key_of(np.arange(len(table)))
    starts = table.starts(keys)
    n_blocks = table.slots.nbytes // BLOCK_BYTES
    chosen = np.zeros(n_blocks + 1, bool)
    chosen[rng.choice(n_blocks, max(1, round(n_blocks * share)), replace=False)] = True
    # A search that begins near the end of a block may end in the next.
    inside = (starts & np.uint64(BLOCK_BYTES - 1)) < BLOCK_BYTES - 32 * RECORD_BYTES
    found: Int64 = rng.permutation(keys[chosen[starts >> np.uint64(12)] & inside])
    return found


def cpu_seconds() -> tuple[float, float]:
    """Busy and all CPU seconds of this machine since it started."""
    with open("/proc/stat") as lines:
        ticks = [int(word) for word in lines.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / 100, sum(ticks) / 100


class Session:
    """A session and its readers, on every host but the first."""

    def __init__(self, options: Options) -> None:
        import ray

        import clamor_ray as clamor
        from clamor_ray._objects.hashtable import Table

        ray.init(address="auto", log_to_driver=False, logging_level="error")
        self.options = options
        self.trap = clamor.init().trap
        own = ray.get_runtime_context().get_node_id()
        # In the order of the hosts' addresses, as the lab made them.
        nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]),
            key=lambda node: [int(part) for part in node["NodeManagerAddress"].split(".")],
        )
        self.nodes = [node["NodeID"] for node in nodes]
        if self.nodes[0] != own:
            raise RuntimeError("the driver is not on the first host")
        keys = key_of(np.arange(options.n_slots // 2))
        note(f"{options.replication}: building {len(keys)} keys")
        self.table = Table.build(keys, first_value(keys), len(keys))
        del keys
        self.popular = popular_keys(self.table, options.touched, np.random.default_rng(1))
        popular = ray.put(self.popular)
        self.readers: dict[int, list[Any]] = {
            host: [
                common.pinned(Reader, self.nodes[host]).remote(popular)
                for _ in range(options.readers)
            ]
            for host in range(1, len(self.nodes))
        }
        self.warm()

    def put(self) -> Any:
        import clamor_ray as clamor

        arrays = {"header": self.table.header, "slots": self.table.slots}
        return clamor.HashMap(clamor.put(arrays))

    def warm(self) -> None:
        """Workers, page servers and their connections exist after it."""
        import clamor_ray as clamor

        note(f"{self.options.replication}: starting readers")
        small = dataclasses.replace(self.options, lookups=400, batch=200)
        for _ in range(2):
            m = clamor.HashMap.build(self.popular, first_value(self.popular))
            readers = self.ready(len(self.nodes), m, small, 99)
            self.together(readers, "look_up")
            clamor.free(m.ref)

    def ready(self, n_hosts: int, m: Any, options: Options, number: int) -> list[tuple[int, Any]]:
        """The readers of the first `n_hosts` hosts, with their keys drawn."""
        import ray

        chosen = [(h, r) for h in range(1, n_hosts) for r in self.readers[h]]
        calls = [
            reader.prepare.remote(m, 1000 * number + at, options)
            for at, (_, reader) in enumerate(chosen)
        ]
        ray.get(calls, timeout=TIMEOUT_S)
        return chosen

    def together(
        self, readers: list[tuple[int, Any]], method: str, *arguments: Any
    ) -> dict[str, Any]:
        """Calls all of them at one moment; what they answered, and the time to the last one."""
        import ray

        begin = time.monotonic() + LEAD_S
        calls = [getattr(reader, method).remote(*arguments, begin) for _, reader in readers]
        _sleep_until(begin)
        busy, total = cpu_seconds()
        answers = ray.get(calls, timeout=TIMEOUT_S)
        busy_end, total_end = cpu_seconds()
        last = max(answer["end"] for answer in answers)
        return {
            "answers": answers,
            "seconds": last - begin,
            "first_reader_s": min(answer["end"] for answer in answers) - begin,
            # Until the last answer, the readers' own checks included.
            "cpu_busy": (busy_end - busy) / max(total_end - total, 1e-9),
        }

    def run(self, n_hosts: int, number: int) -> dict[str, Any]:
        """One cold variable, looked up on n - 1 hosts."""
        import clamor_ray as clamor

        m = self.put()
        try:
            readers = self.ready(n_hosts, m, self.options, number)
            before = [common.node_counters(node) for node in self.nodes]
            result = self.together(readers, "look_up")
            after = [common.node_counters(node) for node in self.nodes]
        finally:
            clamor.free(m.ref)
        touched: dict[int, set[int]] = {}
        for (host, _), answer in zip(readers, result.pop("answers"), strict=True):
            touched.setdefault(host, set()).update(answer["blocks"].tolist())
        counters = {
            name: [grown(one, two, name) for one, two in zip(before, after, strict=True)][:n_hosts]
            for name in COUNTERS
            if name in after[0]
        }
        per_host = [len(blocks) * BLOCK_BYTES for blocks in touched.values()]
        return {
            "side": "clamor",
            "replication": self.options.replication,
            "hosts": n_hosts,
            "repetition": number,
            **result,
            "touched_bytes": per_host,
            "distinct_bytes": len(set().union(*touched.values())) * BLOCK_BYTES,
            "popular_bytes": round(self.table.slots.nbytes * self.options.touched),
            **counters,
        }

    def run_ray(self) -> dict[str, Any]:
        """`ray.get` of the same arrays on all hosts."""
        import ray

        ref = ray.put({"header": self.table.header, "slots": self.table.slots})
        readers = self.ready(len(self.nodes), None, self.options, 1)
        result = self.together(readers, "look_up_ray", [ref])
        answers = result.pop("answers")
        return {
            "side": "ray",
            "hosts": len(self.nodes),
            "bytes": self.table.slots.nbytes,
            **result,
            "get_s": common.spread([answer["got"] - answer["begin"] for answer in answers]),
        }


def main(arguments: list[str]) -> int:
    import ray

    import clamor_ray as clamor

    fields = json.loads(arguments[0])
    options = Options(**{**fields, "hosts": tuple(fields["hosts"])})
    session = Session(options)
    try:
        emit({"session": options.replication, "trap": session.trap})
        for number in range(options.repetitions):
            for n_hosts in options.hosts:
                note(f"{options.replication}: {n_hosts} hosts")
                emit(session.run(n_hosts, number))
        if options.ray:
            note("ray.get on all hosts")
            emit(session.run_ray())
    finally:
        clamor.shutdown(force=True)
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
