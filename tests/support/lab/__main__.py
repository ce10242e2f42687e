"""The lab by hand.

python -m tests.support.lab local -n 3                     until Ctrl-C, prints how to connect
python -m tests.support.lab netns -n 3 --rate 1gbit        the same, in namespaces (root)
python -m tests.support.lab netns -n 2 -- python prog.py   runs one command on node 0, then leaves
python -m tests.support.lab clean                          removes what crashed labs left (root)
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from tests.support.lab import lab_unavailable, local_cluster, netns_cluster, remove_stale
from tests.support.lab.cluster import OBJECT_STORE_BYTES


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("form", choices=["local", "netns", "clean"])
    parser.add_argument("-n", "--nodes", type=int, default=3)
    parser.add_argument("--cpus", type=int, default=1, help="of each node")
    parser.add_argument("--object-store-memory", type=int, default=OBJECT_STORE_BYTES)
    parser.add_argument("--rate", default="1gbit", help="of each link; '' for no shaping")
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="that links add")
    parser.epilog = "What follows -- is run on node 0 instead of waiting."
    said = sys.argv[1:]
    at = said.index("--") if "--" in said else len(said)
    arguments = parser.parse_args(said[:at])
    arguments.command = said[at + 1 :]
    return arguments


def _serve(command: list[str], environment: dict[str, str], inside: list[str]) -> int:
    if command:
        return subprocess.call([*inside, *command], env={**os.environ, **environment})
    print("connect with:", flush=True)
    shown = " ".join(f"{name}={value}" for name, value in environment.items())
    print(f"  env {shown} {' '.join(inside)} python ...", flush=True)
    print("Ctrl-C ends it.", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


def main() -> int:
    """Returns the process's exit status."""
    arguments = _arguments()
    if arguments.form == "clean":
        for name in remove_stale():
            print("removed", name)
        return 0
    reason = lab_unavailable(arguments.form)
    if reason is not None:
        print(f"the {arguments.form} lab cannot run: {reason}", file=sys.stderr)
        return 2
    if not arguments.command:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    shape = (arguments.nodes, arguments.cpus, arguments.object_store_memory)
    if arguments.form == "local":
        with local_cluster(*shape, connect=False, log_to_driver=True) as local:
            return _serve(arguments.command, local.environment, [])
    with netns_cluster(*shape, rate=arguments.rate, round_trip_ms=arguments.round_trip_ms) as netns:
        inside = ["ip", "netns", "exec", netns.namespaces[0]]
        return _serve(arguments.command, dict(netns.environment), inside)


if __name__ == "__main__":
    sys.exit(main())
