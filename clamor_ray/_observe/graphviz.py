"""A graph as DOT text → a file: as it is, or drawn by Graphviz."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

DEADLINE_S: Final = 120.0


def write_graph(text: str, path: str | os.PathLike[str], call: str, size: str) -> None:
    """Writes a graph: as DOT text (.dot, .gv), or drawn by Graphviz (.png, .svg, .pdf).

    Args:
        text: DOT.
        path: its ending is the format.
        call: what the user called, for messages: "lineage(picture='a.png')".
        size: of the graph, for messages: "3 stages".

    Raises:
        FileNotFoundError: The format needs Graphviz, and there is no `dot` on PATH.
        ValueError: The name has no ending; Graphviz does not know it, or takes too long.
        OSError: The file cannot be written.
    """
    path = Path(path)
    ending = path.suffix[1:].lower()
    if not ending:
        raise ValueError(
            f"{str(path)!r} does not say its format: end it with .dot, .png, .svg or .pdf."
        )
    if ending in ("dot", "gv"):
        path.write_text(text, encoding="utf-8")
        return
    try:
        drawn = subprocess.run(
            ["dot", f"-T{ending}"], input=text.encode(), capture_output=True, timeout=DEADLINE_S
        )
    except FileNotFoundError as failure:
        raise FileNotFoundError(
            f"{call} is drawn by Graphviz, and there is no `dot` on PATH. "
            "Install it (apt install graphviz, brew install graphviz), or give a name that ends "
            "with .dot: that needs nothing, and any Graphviz viewer shows it."
        ) from failure
    except subprocess.TimeoutExpired as failure:
        raise ValueError(
            f"Graphviz did not lay out {size} in {DEADLINE_S:.0f} s. "
            "Give a name that ends with .dot, and draw it with another layout (sfdp)."
        ) from failure
    if drawn.returncode:
        said = drawn.stderr.decode(errors="replace").strip()
        raise ValueError(f"Graphviz cannot draw {str(path)!r}: {said}")
    path.write_bytes(drawn.stdout)
