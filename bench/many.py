"""What `put` and `free` of one small variable cost among thousands of them.

One node. A row of puts of 8 KiB, then a row of frees: milliseconds each, by thousand. Beside them,
in the same cluster: `ray.put` of the same array, and an empty call of an actor, one after the
other; both before the first variable, and again beside all of them.

`put_ms` and `free_ms` are of the slowest thousand, `put_growth` is what the last thousand puts took
of what the first took. The bars are 2 ms, and 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from bench import _common
from bench._common import emit, note, now

N_ITEMS = 1024
BATCH = 1000
STORE_BYTES = 512 << 20
TIMEOUT_S = 600


class Nobody:
    """An actor that does nothing."""

    def nothing(self) -> None: ...


def ms_each(work: Callable[[], object], n: int) -> float:
    start = now()
    for _ in range(n):
        work()
    return (now() - start) / n * 1e3


def beside(actor: Any, array: Any, n: int) -> dict[str, float]:
    import ray

    call_ms = ms_each(lambda: ray.get(actor.nothing.remote(), timeout=TIMEOUT_S), n)
    return {"actor_call_ms": call_ms, "ray_put_ms": ms_each(lambda: ray.put(array), n)}


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench many", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a run of seconds: no figure")
    parser.add_argument("--variables", type=int, default=0)
    args = parser.parse_args(argv)
    n = args.variables or (2 * BATCH if args.small else 20 * BATCH)

    import numpy as np
    import ray

    import clamor_ray as clamor

    with _common.several_nodes(1, STORE_BYTES) as nodes:
        emit(_common.environment(trap=nodes.trap))
        actor = ray.remote(Nobody).options(num_cpus=0).remote()
        array = np.arange(N_ITEMS, dtype=np.float64)
        beside(actor, array, 50)  # a warm-up
        clamor.free(clamor.put(array))
        emit({"variables": 0, **beside(actor, array, 200)})
        refs: list[Any] = []
        puts, frees = [], []
        for first in range(0, n, BATCH):
            count = min(BATCH, n - first)
            puts.append(ms_each(lambda: refs.append(clamor.put(array)), count))
            note(f"put of {first:6} to {first + count:6}: {puts[-1]:.2f} ms each")
        for ref in (refs[0], refs[-1]):
            _common.verify("what was put", ref.get(), array)
        among = beside(actor, array, 200)
        emit({"variables": n, **among})
        for first in range(0, n, BATCH):
            count = min(BATCH, len(refs))
            frees.append(ms_each(lambda: clamor.free(refs.pop()), count))
            note(f"free of {first:6} to {first + count:6}: {frees[-1]:.2f} ms each")
        emit({"put_ms": puts, "free_ms": frees})
        figures = {"put_ms": max(puts), "free_ms": max(frees), "put_growth": puts[-1] / puts[0]}
        _common.summary({**figures, **among})
