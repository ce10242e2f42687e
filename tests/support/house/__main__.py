"""`python -m tests.support.house`: prints the numbers of the house."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.support.house.figures import figures, table

ROOT = Path(__file__).resolve().parents[3]


def main(arguments: list[str] | None = None) -> int:
    """Prints the table. Returns 1 with `--check` where a number is over its target."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.house")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (this one)")
    parser.add_argument("--gate-minutes", type=float, help="instead of what .ci/run has written")
    parser.add_argument("--detail", action="store_true", help="what makes a number too large")
    parser.add_argument("--check", action="store_true", help="exit status 1 if one is over")
    options = parser.parse_args(arguments)
    if not (options.root / "clamor_ray").is_dir():
        parser.error(f"{options.root} has no clamor_ray: it is no checkout of this project")
    found = figures(options.root, options.gate_minutes)
    print(table(found, options.detail))
    return int(options.check and any(figure.verdict == "over" for figure in found))


if __name__ == "__main__":
    sys.exit(main())
