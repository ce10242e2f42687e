"""What benchmarks share: output, the machine, content, the cluster, counters."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 4096
ROOT = Path(__file__).resolve().parents[2]
RAW = ROOT / "bench" / "raw"


# ------------------------------------------------------------------- output


_out: TextIO | None = None


def keep_stdout() -> None:
    """From now on stdout is for `emit`: Ray prints there what it hears of nodes that die."""
    global _out
    _out, sys.stdout = sys.stdout, sys.stderr


def stdout() -> TextIO:
    """What `emit` writes to."""
    return _out or sys.stdout


def emit(record: dict[str, Any]) -> None:
    """One JSON object on its own line of stdout."""
    print(json.dumps(record, allow_nan=False), file=stdout(), flush=True)


def summary(figures: Mapping[str, float | Mapping[str, float]]) -> None:
    """The last line. Figures of several cases nest: {case: {figure: value}}."""

    def rounded(value: float | Mapping[str, float]) -> Any:
        if isinstance(value, Mapping):
            return {name: round(each, 4) for name, each in value.items()}
        return round(value, 4)

    emit({"summary": {name: rounded(value) for name, value in figures.items()}})


def percentile(values: Sequence[float] | npt.NDArray[Any], q: float) -> float:
    """The q-th percentile (0 to 100), a value that was measured: never between two."""
    return float(np.percentile(np.asarray(values), q, method="inverted_cdf"))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, best and worst of a few repetitions' ratios or times, as measured."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def microseconds(nanoseconds: npt.NDArray[Any]) -> dict[str, float]:
    """p50, p99 and mean of many latencies."""
    return {
        "p50_us": percentile(nanoseconds, 50) / 1e3,
        "p99_us": percentile(nanoseconds, 99) / 1e3,
        "mean_us": float(np.mean(nanoseconds)) / 1e3,
        "n": len(nanoseconds),
    }


def environment(**more: Any) -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    import ray

    def field(path: str, key: str) -> str:
        with contextlib.suppress(OSError), open(path) as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
        return "unknown"

    return {
        "environment": {
            "kernel": platform.release(),
            "machine": platform.machine(),
            "cpu": field("/proc/cpuinfo", "model name"),
            "cores": len(os.sched_getaffinity(0)),
            "hypervisor": "hypervisor" in field("/proc/cpuinfo", "flags").split(),
            "memory": field("/proc/meminfo", "MemTotal"),
            "page_size": os.sysconf("SC_PAGE_SIZE"),
            "load_1m_at_start": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "ray": ray.__version__,
            "numpy": np.__version__,
            **more,
        }
    }


# ------------------------------------------------------------------ content
#
# Word i of an array with a given salt is known to everyone, differs from word to word and from
# array to array, and does not compress: whoever reads a block can say whether it is right.

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def expected_words(first: int, n: int, salt: int) -> npt.NDArray[np.uint64]:
    """Words [first, first + n) of the array with that salt."""
    return _words_at(np.arange(first, first + n, dtype=np.uint64), salt)


def expected_at(indices: npt.NDArray[np.int64], salt: int) -> npt.NDArray[np.uint64]:
    """The words with these indices, in an array of their shape."""
    return _words_at(indices.astype(np.uint64), salt)


def _words_at(out: npt.NDArray[np.uint64], salt: int) -> npt.NDArray[np.uint64]:
    out += np.uint64(salt << 40 | 1)
    out *= _MULTIPLIER
    out ^= out >> np.uint64(29)
    return out


def make_array(n_bytes: int, salt: int) -> npt.NDArray[np.uint64]:
    """The array, made in pieces so that no temporary is as large."""
    out = np.empty(n_bytes // 8, np.uint64)
    step = 1 << 20
    for first in range(0, len(out), step):
        n = min(step, len(out) - first)
        out[first : first + n] = expected_words(first, n, salt)
    return out


def expected_first_bytes(blocks: npt.NDArray[np.int64], salt: int) -> npt.NDArray[np.uint8]:
    """The first byte of each of the blocks."""
    words = blocks.astype(np.uint64) * np.uint64(BLOCK_BYTES // 8)
    words += np.uint64(salt << 40 | 1)
    words *= _MULTIPLIER
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[::8]


class WrongData(Exception):
    """What arrived is not what was put."""


def verify(what: str, got: Any, want: Any) -> None:
    """Ends the benchmark where data is wrong: a fast wrong answer has no figure."""
    if not np.array_equal(got, want):
        raise WrongData(f"{what}: data differs from what was put")


# ------------------------------------------------------------------ machine


def warm_memory(n_bytes: int) -> None:
    """Touches and frees memory, so that neither side pays for a VM's first touch of it.

    Through a memfd: what it frees are single pages, as both sides will ask for. (NumPy's own
    large arrays are made of huge pages, which the kernel would break up last.)
    """
    piece = bytes(8 << 20)
    fd = os.memfd_create("warm")
    try:
        for at in range(0, n_bytes, len(piece)):
            os.pwrite(fd, piece, at)
    finally:
        os.close(fd)


def compile_c(source: str, folder: Path, *, shared: bool) -> Path:
    """Compiles bench/raw/SOURCE into the folder."""
    out = folder / (Path(source).stem + (".so" if shared else ""))
    command = [os.environ.get("CC", "gcc"), "-O2", "-std=c11", "-Wall", "-Wextra", "-Werror"]
    command += ["-shared", "-fPIC"] if shared else []
    try:
        subprocess.run(
            [*command, "-o", str(out), str(RAW / source)],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except FileNotFoundError:
        raise SystemExit(f"bench: needs a C compiler; {command[0]!r} is not there") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"bench: {source} does not compile:\n{error.stderr}") from None
    return out


# ------------------------------------------------------------------ cluster


@dataclasses.dataclass(frozen=True)
class TwoNodes:
    """A fresh cluster: the driver is on a, nothing has ever been on b."""

    a: str
    b: str
    trap: str  # in force in the driver

    def on_b(self, cls: Any, *args: Any) -> Any:
        """Starts an actor of a plain class on node b."""
        return pinned(cls, self.b).remote(*args)


def pinned(target: Any, node_id: str, **options: Any) -> Any:
    """A plain function or class as a task or actor of one node, to be started with .remote()."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(target).options(num_cpus=0, scheduling_strategy=strategy, **options)


@dataclasses.dataclass(frozen=True)
class Nodes:
    """A fresh cluster: the driver is on the first node, nothing has ever been on the others."""

    ids: tuple[str, ...]
    trap: str  # in force in the driver


# The address of a cluster that runs: benchmarks take their nodes there, and leave it as it is. For
# tests, which read no figures: those are of a cluster that is new, and of as many nodes as it says.
RUNNING = "BENCH_ADDRESS"


@contextlib.contextmanager
def several_nodes(n_nodes: int, store_bytes: int, num_cpus: int = 2) -> Iterator[Nodes]:
    """Raylets of so many CPUs each on this machine, Ray and the library attached."""
    import ray
    from ray.cluster_utils import Cluster

    import clamor_ray as clamor

    # Workers import bench.* by name.
    known = os.environ.get("PYTHONPATH", "")
    if str(ROOT) not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), known]))
    with contextlib.ExitStack() as stack:
        how: dict[str, Any] = {"address": os.environ.get(RUNNING)}
        if how["address"]:
            # Its raylets have another environment than this process.
            names = [name for name in os.environ if name.startswith("CLAMOR_")] + ["PYTHONPATH"]
            how["runtime_env"] = {"env_vars": {name: os.environ[name] for name in names}}
        else:
            options: dict[str, Any] = {"num_cpus": num_cpus, "object_store_memory": store_bytes}
            # A dashboard would compute beside what is measured.
            head = {**options, "include_dashboard": False}
            cluster: Any = Cluster(initialize_head=True, head_node_args=head)
            stack.callback(cluster.shutdown)
            for _ in range(n_nodes - 1):
                cluster.add_node(**options)
            how["address"] = cluster.address
        stack.callback(ray.shutdown)
        ray.init(**how, log_to_driver=True, logging_level="error")
        stack.callback(_end_session)
        trap = clamor.init().trap
        own = ray.get_runtime_context().get_node_id()
        others = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != own]
        if len(others) < n_nodes - 1:
            raise RuntimeError(f"{len(others) + 1} nodes, and {n_nodes} are needed")
        yield Nodes((own, *others[: n_nodes - 1]), trap)


def _end_session() -> None:
    import clamor_ray as clamor

    with contextlib.suppress(Exception):
        clamor.shutdown(force=True)


@contextlib.contextmanager
def two_nodes(store_bytes: int) -> Iterator[TwoNodes]:
    """Two raylets on this machine, Ray and the library attached."""
    with several_nodes(2, store_bytes) as nodes:
        yield TwoNodes(nodes.ids[0], nodes.ids[1], nodes.trap)


def node_counters(node_id: str) -> dict[str, int]:
    """The counters of that node's page server."""
    import clamor_ray as clamor

    for node in clamor.stats().nodes:
        if node.node_id == node_id:
            if node.error:
                raise RuntimeError(f"the page server of node {node_id} is silent: {node.error}")
            return dataclasses.asdict(node.engine)
    return {}


def grown(before: dict[str, int], after: dict[str, int], name: str) -> int:
    """How much a counter grew."""
    return after.get(name, 0) - before.get(name, 0)


def now() -> float:
    """Seconds, monotonic."""
    return time.perf_counter()


def note(text: str) -> None:
    """Progress for a person, on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
