"""PageRank with less local memory than its graph, by each policy of eviction (Camelot 4).

Two nodes. The graph and the vector are homed on the first, with the driver; all tasks run on the
second, whose cache has a budget of 50% and of 33% of both, and at 100% one that holds both below
its high water mark. Every case is a session of its own, with its own budget and policy, over one
graph.

A case begins with an iteration in which the cache fills; it is printed, and in no figure. Timed are
the iterations after it, each from before its commit to its last task's answer; their median counts.
The ranks of every case are checked against SciPy's, and the node's cache against its budget, after
each iteration.

`best_policy_slowdown` is the time of the best policy at 33% / the median of all policies' times at
100%, where none of them has anything to do. Random is not among those that can be the best, so that
`best_vs_random`, the best one's time at 33% / random's, can be above 1.

The workload goes over the edges backwards in every other iteration (see workloads/pagerank.py);
--cyclic has it begin anew in each instead, which is the worst case of eviction by age.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from bench.support import common
from bench.support.common import emit, grown, note
from clamor_ray.workloads.data import graphs

POLICIES = ("sieve", "fifo", "lru", "lfu", "random")
FRACTIONS = (1.0, 0.5, 0.33)
SMALL_POLICIES = ("sieve", "random")
SMALL_FRACTIONS = (1.0, 0.33)
DAMPING = 0.85
HIGH_WATER = 0.9  # of the budget: from there on a node evicts
SLACK = 1.05  # of the budget, while a batch comes in

COUNTERS = (
    *("faults", "bytes_received", "blocks_fetched"),
    *("evicted_blocks", "refetched_blocks", "prefetched_blocks"),
)


def run_case(
    nodes: common.TwoNodes,
    graph: graphs.Graph,
    expected: Any,
    policy: str,
    budget_bytes: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """A session with this policy and budget, and all iterations in it."""
    import clamor_ray as clamor
    from clamor_ray.workloads import pagerank

    clamor.init(cache_bytes=budget_bytes, cache_policy=policy)
    try:
        graph_ref = clamor.put(graph)
        vector_ref = clamor.zeros(graph.n_vertices)
        ranges = graphs.balanced_ranges(graph.first_edge, options.tasks)
        tasks = pagerank.Tasks(
            graph_ref,
            vector_ref,
            pagerank.place(ranges, [(nodes.b, 2)]),
            zigzag=not options.cyclic,
            whole=pagerank.whole_vector(
                vector_ref.nbytes, graph.n_edges // len(ranges), budget_bytes
            ),
        )
        ranks: Any = None
        lines: list[dict[str, Any]] = []
        before: dict[str, int] = {}
        steps = graphs.iterate(graph, tasks.step, DAMPING, options.iterations + 1, 0.0)
        for new in steps:
            ranks = new[0]
            after = common.node_counters(nodes.b)
            if after["cached_bytes"] > SLACK * budget_bytes:
                raise AssertionError(
                    f"{policy}: {after['cached_bytes']:,} bytes are cached, {budget_bytes:,} may be"
                )
            line: dict[str, Any] = {name: grown(before, after, name) for name in COUNTERS}
            line["seconds"] = tasks.update_s + tasks.tasks_s
            line["cached_bytes"] = after["cached_bytes"]
            lines.append(line)
            before = after
        graphs.check(ranks, expected)
    finally:
        clamor.shutdown(force=True)
    timed = lines[1:]
    return {
        "iteration_s": common.spread([line["seconds"] for line in timed]),
        "first_s": lines[0]["seconds"],
        "most_cached_bytes": max(line["cached_bytes"] for line in lines),
        **{name: sum(line[name] for line in timed) for name in COUNTERS},
    }


def budget_bytes(graph_bytes: int, fraction: float) -> int:
    """Of the node: that part of the graph, or what all of it fits into."""
    if fraction < 1.0:
        return int(fraction * graph_bytes)
    return int(graph_bytes / HIGH_WATER) + (1 << 20)


def figures(seconds: dict[tuple[str, float], float]) -> dict[str, Any]:
    """The summary, from the time of each policy at each fraction.

    Args:
        seconds: with random and at least one other policy, at 1.0 and at the least fraction.
    """
    least = min(fraction for _, fraction in seconds)
    policies = sorted({policy for policy, _ in seconds})
    base = statistics.median(seconds[policy, 1.0] for policy in policies)
    best = min((p for p in policies if p != "random"), key=lambda p: seconds[p, least])
    return {
        "best_policy_slowdown": seconds[best, least] / base,
        "best_policy": best,
        "best_vs_random": seconds[best, least] / seconds["random", least],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench pressure", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a graph of 11 MiB, two policies")
    parser.add_argument("--vertices", type=int, help="of the graph, 84 bytes each (2**21)")
    parser.add_argument("--iterations", type=int, help="timed, after the first (6)")
    parser.add_argument("--tasks", type=int, default=8, help="of an iteration (8)")
    parser.add_argument("--repeats", type=int, help="of every case; medians count (1)")
    parser.add_argument("--cyclic", action="store_true", help="never backwards")
    parser.add_argument("--policies", help="separated by commas; random must be one of them")
    options = parser.parse_args(arguments)
    n_vertices = options.vertices or (1 << 17 if options.small else 1 << 21)
    options.iterations = options.iterations or (2 if options.small else 6)
    repeats = options.repeats or 1
    policies = SMALL_POLICIES if options.small else POLICIES
    if options.policies:
        policies = tuple(options.policies.split(","))
        if "random" not in policies or len(policies) < 2 or not set(policies) <= set(POLICIES):
            parser.error(f"--policies: random, and others of {', '.join(POLICIES)}")
    fractions = SMALL_FRACTIONS if options.small else FRACTIONS

    import clamor_ray as clamor

    note("generating the graph, and its ranks by SciPy")
    graph = graphs.generate(n_vertices, 16 * n_vertices, 2.1, seed=1)
    expected = graphs.reference(graph, DAMPING, options.iterations + 1)
    graph_bytes = sum(array.nbytes for array in vars(graph).values()) + 8 * n_vertices
    note("touching memory")
    common.warm_memory(min(4 * graph_bytes, 8 << 30))
    environment = common.environment(library=clamor.__version__, bench="pressure")
    seconds: dict[tuple[str, float], list[float]] = {}
    with common.two_nodes(store_bytes=256 << 20) as nodes:
        clamor.shutdown(force=True)  # every case has its own
        environment["environment"].update(
            trap=nodes.trap,
            vertices=n_vertices,
            edges=graph.n_edges,
            graph_bytes=graph_bytes,
            iterations=options.iterations,
            zigzag=not options.cyclic,
        )
        emit(environment)
        run_case(nodes, graph, expected, "sieve", 2 * graph_bytes, options)  # workers start
        for repeat in range(repeats):
            for fraction in fractions:
                for policy in policies:
                    note(f"{policy} at {fraction:.0%}")
                    budget = budget_bytes(graph_bytes, fraction)
                    case = run_case(nodes, graph, expected, policy, budget, options)
                    seconds.setdefault((policy, fraction), []).append(case["iteration_s"]["median"])
                    emit(
                        {
                            "case": {
                                "policy": policy,
                                "fraction": fraction,
                                "budget_bytes": budget,
                                "repeat": repeat,
                                **case,
                            }
                        }
                    )
    medians = {case: statistics.median(values) for case, values in seconds.items()}
    base = statistics.median(medians[policy, 1.0] for policy in policies)
    emit(
        {
            "slowdown": {
                policy: {f"{f:.0%}": round(medians[policy, f] / base, 3) for f in fractions}
                for policy in policies
            }
        }
    )
    found = figures(medians)
    emit(
        {
            "summary": {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in found.items()
            }
        }
    )
    return 0
