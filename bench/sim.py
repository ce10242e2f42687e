"""Replication past this machine: 10 to 10,000 nodes, simulated with the engine's own choice.

One home, links of 1 Gbit/s, and on every other node a reader that looks up, batch by batch, pieces
of 64 KiB out of 8 MiB that everybody wants, by Zipf and uniformly. For each number of nodes and
each policy: time to the last reader against the ideal (the time for which the busiest link is
needed at the least), and load skew, the most bytes that one node sent against the mean. What is
simulated, and what is left out, is in bench/support/sim.py. Beyond 2,000 nodes only by Zipf. Then,
at one size, nodes that die and links that are slow.

``off``, ``random`` and ``p2c`` are the engine. ``p2c, late`` is not: there a node counts as a
holder when it has the block, and not from when it is on its way. ``p2c, rotated``: each reader asks
for its batch from a place of its own on, so that not all ask for the same first.

--measured FILE takes the lines of `make bench B=hot_pages` and simulates the same runs: links of
the rate of its raw stream, pieces of one block, its readers, look-ups and batches. Where that
bench was told other figures than its defaults, tell this one too.

One JSON object per line. --out DIR draws completion time and load skew against nodes there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from bench.support import sim
from bench.support.common import emit, note, now
from bench.support.sim import World

NODES = (10, 20, 50, 100, 200, 500, 1000, 2000, 10_000)
ALL_UP_TO = 2000  # nodes; beyond it Zipf alone: a run takes half a minute
WORLD = World(
    nodes=50,
    pieces=128,
    piece_bytes=64 << 10,
    rate=1e9 / 8,
    lookups=512,
    batch=64,
    skew=0.99,
    request_pieces=4,  # of 64 blocks, as the engine asks
)
ACCESS = {"zipf": 0.99, "uniform": 0.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "off": ("off", {}),
    "random": ("random", {}),
    "p2c": ("p2c", {}),
    "p2c, rotated": ("p2c", {"ordered": False}),
    "p2c, late": ("p2c", {"promised": False}),
}
TROUBLE: dict[str, dict[str, Any]] = {
    "none": {},
    "a tenth of the nodes die": {"dying": 0.1, "dying_s": 0.2},
    "a tenth of the links are ten times slower": {"slow": 0.1},
}
RECORD_BYTES = 17  # of hot_pages: a slot; half of them are taken, and keys near a block's end are
KEYS_SHARE = 0.5 * 0.87  # not looked up


def measure(world: World, variant: str, seed: int, **more: Any) -> dict[str, Any]:
    """One run, printed."""
    policy, change = VARIANTS[variant]
    world = dataclasses.replace(world, **change)
    begin = now()
    outcome = sim.simulate(world, policy, seed)
    ideal = sim.ideal_s(world, outcome)
    record = {
        **more,
        "variant": variant,
        "nodes": world.nodes,
        "seed": seed,
        "seconds": outcome.seconds,
        "ideal_s": ideal,
        "ideal_ratio": outcome.seconds / ideal,
        "load_skew": sim.skew(outcome),
        "home_share": float(outcome.sent_bytes[: world.homes].sum() / outcome.sent_bytes.sum()),
        "redirected": outcome.redirected,
        "missed": outcome.missed,
        "events": outcome.events,
        "simulated_in_s": now() - begin,
    }
    emit(record)
    return record


def sweep(nodes: list[int], seeds: int) -> list[dict[str, Any]]:
    """Every number of nodes, access and variant."""
    out = []
    for n in nodes:
        note(f"{n} nodes")
        world = dataclasses.replace(WORLD, nodes=n)
        for access, skew in ACCESS.items():
            if n > ALL_UP_TO and access != "zipf":
                continue
            world = dataclasses.replace(world, skew=skew)
            for variant in VARIANTS:
                for seed in range(1, (seeds if n <= 200 else 1) + 1):
                    out.append(measure(world, variant, seed, access=access))
    return out


def draw(records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Two pictures, one panel for each access."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = {
        "off": ("#8c8c8c", "s"),
        "random": ("#d98032", "^"),
        "p2c": ("#1f5fa8", "o"),
        "p2c, rotated": ("#5fa8d3", "v"),
        "p2c, late": ("#2c8c4a", "D"),
    }
    paths = []
    for key, name, title in (
        ("seconds", "completion", "time to the last reader, s"),
        ("load_skew", "skew", "most bytes sent by one node / mean"),
    ):
        figure, panels = pyplot.subplots(1, len(ACCESS), figsize=(10, 4.2), sharey=True)
        for panel, access in zip(panels, ACCESS, strict=True):
            of_access = [r for r in records if r["access"] == access]
            nodes = sorted({r["nodes"] for r in of_access})

            def median(variant: str, n: int, what: str, rows: Any = of_access) -> float:
                return statistics.median(
                    r[what] for r in rows if r["variant"] == variant and r["nodes"] == n
                )

            for variant, (color, marker) in styles.items():
                values = [median(variant, n, key) for n in nodes]
                panel.plot(nodes, values, color=color, marker=marker, markersize=4, label=variant)
            ideal = [median("p2c", n, "ideal_s") if key == "seconds" else 1.0 for n in nodes]
            panel.plot(nodes, ideal, color="black", linestyle="--", label="ideal")
            panel.set(xscale="log", yscale="log", xlabel="nodes", title=access)
            panel.grid(True, alpha=0.3)
        panels[0].set_ylabel(title)
        panels[0].legend(frameon=False, fontsize=8)
        figure.tight_layout()
        paths.append(folder / f"sim-{name}.png")
        figure.savefig(paths[-1], dpi=110)
        pyplot.close(figure)
    return paths


def compare(lines: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, float]:
    """The runs of hot_pages, simulated: simulated / measured time, for each policy and size.

    Raises:
        SystemExit: the lines lack what is needed.
    """
    rates = [line["link_bytes_per_s"]["one_stream"] for line in lines if "link_bytes_per_s" in line]
    runs = [line for line in lines if line.get("side") == "clamor"]
    if not rates or not runs:
        raise SystemExit(f"bench: {options.measured} has no lines of hot_pages")
    out = {}
    for policy, hosts in sorted({(run["replication"], run["hosts"]) for run in runs}):
        same = [r for r in runs if (r["replication"], r["hosts"]) == (policy, hosts)]
        popular = same[0]["popular_bytes"]
        world = World(
            nodes=hosts,
            pieces=max(1, popular // sim.BLOCK_BYTES),
            piece_bytes=sim.BLOCK_BYTES,
            rate=rates[0],
            latency_s=options.latency_us / 1e6,
            readers=options.readers,
            lookups=options.lookups,
            batch=options.batch,
            keys=max(1, int(popular / RECORD_BYTES * KEYS_SHARE)),
            skew=options.skew,
        )
        outcomes = [sim.simulate(world, policy, seed) for seed in range(1, 4)]
        simulated = statistics.median(outcome.seconds for outcome in outcomes)
        measured = statistics.median(run["seconds"] for run in same)
        wanted = [int(n) * sim.BLOCK_BYTES for n in outcomes[0].wanted[1:].sum(1)]
        record = {
            "replication": policy,
            "hosts": hosts,
            "measured_s": measured,
            "simulated_s": simulated,
            "simulated_to_measured": simulated / measured,
            "measured_touched_bytes": statistics.mean(same[0]["touched_bytes"]),
            "simulated_touched_bytes": statistics.mean(wanted),
            "simulated_home_bytes": int(outcomes[0].sent_bytes[0]),
        }
        if "bytes_sent" in same[0]:
            record["measured_home_bytes"] = same[0]["bytes_sent"][0]
        emit(record)
        out[f"{policy}_{hosts}"] = simulated / measured
    return out


def main(arguments: list[str]) -> int:
    """Sweeps, or compares with what was measured, and prints the summary."""
    parser = argparse.ArgumentParser(prog="python -m bench sim", description=__doc__)
    parser.add_argument("--small", action="store_true", help="up to 50 nodes")
    parser.add_argument("--nodes", help="how many, homes included (10 to 10000)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, up to 200 nodes (3)")
    parser.add_argument("--out", type=Path, help="folder for the pictures")
    parser.add_argument("--measured", type=Path, help="lines of hot_pages, to compare with")
    parser.add_argument("--latency-us", type=float, default=200.0, help="with --measured (200)")
    parser.add_argument("--readers", type=int, default=2, help="as hot_pages was told (2)")
    parser.add_argument("--lookups", type=int, default=100_000, help="likewise (100000)")
    parser.add_argument("--batch", type=int, default=100_000, help="likewise (100000)")
    parser.add_argument("--skew", type=float, default=0.99, help="likewise (0.99)")
    options = parser.parse_args(arguments)
    if options.measured:
        text = options.measured.read_text().splitlines()
        lines = [json.loads(line) for line in text if line.startswith("{")]
        ratios = compare(lines, options)
        figures = {name: round(ratio, 3) for name, ratio in ratios.items()}
        worst = max(ratios.values(), key=lambda ratio: max(ratio, 1 / ratio))
        emit({"summary": {"farthest_off": round(worst, 3), "simulated_to_measured": figures}})
        return 0
    if options.nodes:
        nodes = [int(word) for word in options.nodes.split(",")]
    else:
        nodes = [n for n in NODES if n <= (50 if options.small else max(NODES))]
    emit({"world": dataclasses.asdict(WORLD), "access": ACCESS})
    records = sweep(nodes, options.seeds)
    at = min(200, max(nodes))
    for trouble, change in TROUBLE.items():
        world = dataclasses.replace(WORLD, nodes=at, **change)
        for variant in VARIANTS:
            measure(world, variant, 1, trouble=trouble)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for path in draw(records, options.out):
            note(f"drew {path}")
    summary: dict[str, dict[str, float]] = {}
    for access in ACCESS:
        of_access = [r for r in records if r["access"] == access]
        most = max(r["nodes"] for r in of_access) if of_access else 0
        for variant in VARIANTS:
            ratios = [
                r["ideal_ratio"] for r in of_access if (r["variant"], r["nodes"]) == (variant, most)
            ]
            if ratios:
                summary.setdefault(f"{access}_{most}", {})[variant] = round(
                    statistics.median(ratios), 3
                )
    emit({"summary": {"ideal_ratio": summary}})
    return 0
