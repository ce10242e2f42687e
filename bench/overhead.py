"""What a task costs that does nothing: `@clamor.remote` with one `GlobalRef`, against Ray alone.

Two nodes. Tasks on the node where the variable is homed ("home") and on the other one ("away"),
one after the other ("sync") and many at once ("async"): the same number on both sides, in turn, in
short blocks, after a warm-up in which Ray starts its workers and the node fetches what it needs.
Ray's own task takes no argument and returns None; so does ours, but for the reference, which
arrives as the object. Read sets and replay are as they are by default: the page server is told what
tasks touched.

`task_overhead_ratio` is time per task of ours / of Ray's: the median of the blocks' ratios, of the
worst case. `--peer-argument` gives Ray's task bytes of the size of a pickled reference, for a look
at what is Ray's own price of an argument; it is not the figure.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.support import common
from bench.support.common import BLOCK_BYTES, emit, note, now

N_BYTES = 16 << 20
SALT = 5
TIMEOUT_S = 600


def nothing(*_: Any) -> None:
    """The task."""


def first_words(words: Any) -> Any:
    """A look at every block, in a task."""
    return words[:: BLOCK_BYTES // 8].copy()


def one_by_one(submit: Callable[[], Any], n: int) -> float:
    """Seconds per task, each awaited before the next."""
    import ray

    start = now()
    for _ in range(n):
        ray.get(submit(), timeout=TIMEOUT_S)
    return (now() - start) / n


def at_once(submit: Callable[[], Any], n: int) -> float:
    """Seconds per task of n that are submitted before the first is awaited."""
    import ray

    start = now()
    ray.get([submit() for _ in range(n)], timeout=TIMEOUT_S)
    return (now() - start) / n


MODES = {"sync": one_by_one, "async": at_once}


def measure(
    name: str, mode: str, sides: dict[str, Callable[[], Any]], n_tasks: int, n_blocks: int
) -> float:
    """One case; its ratio."""
    run = MODES[mode]
    took: dict[str, list[float]] = {side: [] for side in sides}
    for block in range(n_blocks + 1):
        order = list(sides) if block % 2 else list(reversed(sides))
        for side in order:
            seconds = run(sides[side], n_tasks)
            if block:  # the first one warms up
                took[side].append(seconds)
    ratios = [ours / ray for ours, ray in zip(took["ours"], took["ray"], strict=True)]
    emit(
        {
            "case": name,
            "mode": mode,
            "tasks": n_tasks,
            "blocks": n_blocks,
            "ours_us": {k: v * 1e6 for k, v in common.spread(took["ours"]).items()},
            "ray_us": {k: v * 1e6 for k, v in common.spread(took["ray"]).items()},
            "ratio": common.spread(ratios),
        }
    )
    return statistics.median(ratios)


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench overhead", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a run of seconds: no figure")
    parser.add_argument("--tasks", type=int, default=0, help="of a block")
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--peer-argument", action="store_true")
    parser.add_argument("--cases", default="home,away")
    args = parser.parse_args(argv)
    n_tasks = args.tasks or (20 if args.small else 200)
    n_blocks = args.blocks or (3 if args.small else 15)

    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import clamor_ray as clamor

    with common.two_nodes(256 << 20) as nodes:
        emit(common.environment(trap=nodes.trap))
        ref = clamor.put(common.make_array(N_BYTES, SALT))
        want = common.expected_words(0, N_BYTES // 8, SALT)[:: BLOCK_BYTES // 8]
        worst = 0.0
        for name, node_id in (("home", nodes.a), ("away", nodes.b)):
            if name not in args.cases.split(","):
                continue
            note(name)
            options: dict[str, Any] = {
                "num_cpus": 1,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
            }
            ours = clamor.remote(nothing).options(**options)
            plain = ray.remote(nothing).options(**options)
            look = clamor.remote(first_words).options(**options)
            check(name, look, ref, want)
            given = (bytes(len(pickle.dumps(ref))),) if args.peer_argument else ()
            sides = {
                "ours": functools.partial(ours.remote, ref),
                "ray": functools.partial(plain.remote, *given),
            }
            for mode in MODES:
                worst = max(worst, measure(name, mode, sides, n_tasks, n_blocks))
            check(name, look, ref, want)
        common.summary({"task_overhead_ratio": worst})


def check(name: str, look: Any, ref: Any, want: Any) -> None:
    import ray

    common.verify(name, ray.get(look.remote(ref), timeout=TIMEOUT_S), want)
