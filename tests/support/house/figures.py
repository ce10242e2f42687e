"""The numbers of the house beside their targets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.house import c_side, graphs, lines, python_side, tree

GATE_SECONDS = Path("build") / "gate_seconds.txt"  # written by .ci/run


@dataclass(frozen=True)
class Figure:
    """One number.

    Args:
        name: what is counted, with its unit.
        value: None: it was not measured.
        most: the target: at most this.
        detail: what makes the number, for who wants to mend it.
    """

    name: str
    value: float | None
    most: float
    detail: str = ""

    @property
    def verdict(self) -> str:
        """`ok`, `over` or `not measured`."""
        if self.value is None:
            return "not measured"
        return "ok" if self.value <= self.most else "over"


def gate_minutes(root: Path) -> float | None:
    """What the last run of the gate took; None: no run has ended here."""
    path = root / GATE_SECONDS
    return float(path.read_text()) / 60 if path.exists() else None


def _pairs(pairs: list[tuple[str, str]]) -> str:
    return ", ".join(f"{one} -> {other}" for one, other in pairs)


def _shared(names: dict[str, list[str]]) -> str:
    return ", ".join(f"{name} ({' '.join(files)})" for name, files in names.items())


def figures(root: Path, minutes: float | None = None) -> list[Figure]:
    """All numbers of a checkout.

    Args:
        root: of the project.
        minutes: of the gate; None: what `.ci/run` has written, if it has.
    """
    n_files, folder = tree.fullest_folder(root)
    imports = python_side.imports_of(root)
    import_circles = graphs.circles(imports)
    call_circles = graphs.circles(c_side.calls(root))
    up = python_side.edges_to_actors(imports)
    down = python_side.edges_off_the_ground(imports)
    header_lines, header = c_side.largest_header(root)
    structs = c_side.shared_struct_names(root)
    classes = python_side.shared_class_names(root)
    twins = c_side.one_underscore_apart(root)
    took = gate_minutes(root) if minutes is None else minutes
    largest = call_circles[0] if call_circles else []
    kinds = lines.kinds(root)  # of what users run: no tests, no benchmarks
    of_kinds = ", ".join(f"{n:,} {kind}" for kind, n in kinds.most_common())
    return [
        Figure("files in a folder, most (no tests, no programs)", n_files, 15, folder),
        Figure(
            "import circles in Python at run time",
            len(import_circles),
            0,
            "; ".join(" ".join(circle) for circle in import_circles),
        ),
        Figure("largest call circle in C, files", len(largest), 6, " ".join(largest)),
        Figure("module edges clamor_ray -> actors", len(up), 2, _pairs(up)),
        Figure("module edges actors -> clamor_ray, past the ground", len(down), 0, _pairs(down)),
        Figure("longest C header, lines", header_lines, 300, header),
        Figure("names that structs share", len(structs), 0, _shared(structs)),
        Figure("names that classes share", len(classes), 3, _shared(classes)),
        Figure("pairs of functions one underscore apart", len(twins), 0, _pairs(twins)),
        Figure("lines of product code", kinds.total(), 62_000, of_kinds),
        Figure("the gate from a fresh clone, minutes", took, 30, str(GATE_SECONDS)),
    ]


def table(found: list[Figure], with_detail: bool = False) -> str:
    """The numbers as text, a line each; with what makes those that are over."""
    rows = []
    for figure in found:
        value = "-" if figure.value is None else f"{figure.value:,.5g}"
        if figure.value is not None and figure.value == int(figure.value):
            value = f"{int(figure.value):,}"
        most = f"{int(figure.most):,}"
        rows.append(f"{figure.name:<52} {value:>8}   <= {most:>6}   {figure.verdict}")
        if with_detail and figure.verdict == "over" and figure.detail:
            rows.append(f"    {figure.detail}")
    return "\n".join(rows)
