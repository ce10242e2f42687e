"""Pictures: matplotlib is imported where one is drawn, and said to be missing where it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

INK = "#22303c"
FAINT = "#8a97a3"
PAPER = "#ffffff"


def new_figure(width_in: float, height_in: float, what: str) -> Any:
    """A matplotlib figure that belongs to no window and no global state.

    Args:
        width_in, height_in: inches.
        what: the call that needs it, for the error.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as failure:
        raise ImportError(
            f"{what} draws with matplotlib, which is not installed ({failure}). "
            'Install it (pip install matplotlib, or "clamor-ray[workloads]"), or leave the '
            "picture out: print() shows the same as text."
        ) from failure
    figure = Figure(figsize=(width_in, height_in), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Writes it; the format is the name's ending (.png, .svg, .pdf).

    Raises:
        OSError: The file cannot be written.
        ValueError: matplotlib knows no such format.
    """
    figure.savefig(path, dpi=130)
    return Path(path)
