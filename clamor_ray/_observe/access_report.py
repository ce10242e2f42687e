"""`clamor.read_report`: which tasks read which blocks of a variable, as numbers, text or picture.

The lineage registry has what each attempt of a task touched (`actors/lineage/lineage.py`); here it
is added up. Nothing here asks the page servers: `clamor.block_map` says what they did.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from clamor_ray._objects.layout import BLOCK_BYTES, format_bytes
from clamor_ray._protocol.attempt_record import PLAIN_RUN, AttemptRecord
from clamor_ray._read import opener

MOST_LINES = 40
SPARK_BUCKETS = 18
PICTURE_BUCKETS = 512
MOST_LABELS = 48
_SPARKS = "▁▂▃▄▅▆▇█"

Counts = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class BlocksRead:
    """What one attempt of a task read of a variable.

    Args:
        function: what ran.
        stage: name of the stage; "" for a task that belongs to no collection.
        partition: its number; -1 for a task that belongs to no collection.
        node: Ray's hex id of the node where it ran.
        version: of the variable, as the task saw it.
        n_blocks: how many blocks of 4 KiB it touched.
        blocks: which, counted from the variable's first.
        attempt: counts the attempts of the partition.
        outcome: "done", "failed: ..." or "cancelled".
        collection: id of the collection; 0: none.
        start_ns, end_ns: wall clock.

    Example:
        >>> ref = clamor.put(np.arange(10**5))
        >>> ray.get(clamor.remote(lambda x: int(x[0])).remote(ref))
        0
        >>> import time
        >>> while not (report := clamor.read_report(ref)).by:  # known soon after the task's end
        ...     time.sleep(0.01)
        >>> report.by[0].version, report.by[0].outcome
        (0, 'done')
    """

    function: str
    stage: str
    partition: int
    node: str
    version: int
    n_blocks: int
    blocks: BitMap = field(repr=False)
    attempt: int = 0
    outcome: str = "done"
    collection: int = PLAIN_RUN
    start_ns: int = 0
    end_ns: int = 0

    @property
    def reader(self) -> tuple[int, str, str, int]:
        """What the attempts of a partition share: (collection, stage, function, partition).
        So have the calls of one plain task.
        """
        return (self.collection, self.stage, self.function, self.partition)

    @property
    def short(self) -> str:
        """The function without its module."""
        return self.function.rpartition(".")[2] or self.function


def _bucketed(blocks: BitMap, n_blocks: int, n_buckets: int) -> npt.NDArray[np.int64]:
    places = np.frombuffer(blocks.to_array(), np.uint32).astype(np.int64)
    return np.bincount(places * n_buckets // n_blocks, minlength=n_buckets)


class AccessReport:
    """Who read which blocks of a variable. See `clamor.read_report`.

    Args:
        name: of the variable, for people.
        version: that the reference stands at.
        n_blocks: of the variable: one of 4 KiB where it travels inside its reference.
        by: one entry for each attempt and version, in the order in which they ended.

    Attributes are the arguments'; `by` is a list of `BlocksRead`.

    Example:
        >>> report = clamor.read_report(clamor.put(np.arange(10**5)))
        >>> report.n_blocks, len(report.blocks)  # no task has read it
        (197, 0)
    """

    def __init__(self, name: str, version: int, n_blocks: int, by: Iterable[BlocksRead]) -> None:
        self.name = name
        self.version = version
        self.by = list(by)
        self.n_blocks = max([n_blocks, *(e.blocks.max() + 1 for e in self.by if e.blocks)])

    @property
    def blocks(self) -> BitMap:
        """All blocks that anybody read."""
        return BitMap.union(*(entry.blocks for entry in self.by)) if self.by else BitMap()

    def readers(self) -> dict[tuple[int, str, str, int], list[BlocksRead]]:
        """The entries, grouped by partition or by plain function: in the order of stages, then of
        partitions.

        Returns:
            `BlocksRead.reader` -> the entries of its attempts.

        Example:
            >>> report = clamor.read_report(clamor.put(np.arange(1000)))
            >>> report.readers()  # no task has read it
            {}
        """
        stages: dict[tuple[int, str, str], int] = {}
        for entry in self.by:
            stages.setdefault(entry.reader[:3], len(stages))
        found: dict[tuple[int, str, str, int], list[BlocksRead]] = {}
        for entry in sorted(self.by, key=lambda e: (stages[e.reader[:3]], e.partition)):
            found.setdefault(entry.reader, []).append(entry)
        return found

    def counts(self, n_buckets: int | None = None) -> Counts:
        """How often blocks were read: a block counts once for each partition that read it.

        Args:
            n_buckets: equal parts of the variable; None: one for each block.

        Returns:
            One number per part, dtype uint32.

        Raises:
            ValueError: Fewer than one part.

        Example:
            >>> ref = clamor.put(np.arange(10**5))
            >>> clamor.read_report(ref).counts(4)
            array([0, 0, 0, 0], dtype=uint32)
        """
        n_buckets = self.n_blocks if n_buckets is None else n_buckets
        if n_buckets < 1:
            raise ValueError(f"n_buckets is at least 1, not {n_buckets}")
        total = np.zeros(n_buckets, np.int64)
        for row in self._rows(n_buckets):
            total += row
        return total.astype(np.uint32)

    def _rows(self, n_buckets: int) -> list[npt.NDArray[np.int64]]:
        unions = (BitMap.union(*(e.blocks for e in group)) for group in self.readers().values())
        return [_bucketed(blocks, self.n_blocks, n_buckets) for blocks in unions]

    # -- for people

    def __repr__(self) -> str:
        return (
            f"Reads({self.name}, version {self.version}: {len(self.readers())} readers, "
            f"{len(self.blocks)} of {self.n_blocks} blocks)"
        )

    def _head(self) -> str:
        size = format_bytes(self.n_blocks * BLOCK_BYTES)
        return f"{self.name}, version {self.version}, {size}"

    def __str__(self) -> str:
        n_read = len(self.blocks)
        lines = [
            f"{self._head()}: {n_read:,} of {self.n_blocks:,} blocks were read "
            f"({_percent(n_read, self.n_blocks)})"
        ]
        if not self.by:
            return f"{lines[0]}\nnobody is known to have read it"
        lines.append(
            f"{'reader':<22}{'function':<14}{'node':<9}{'version':>7}{'blocks':>8}  "
            f"where (of {format_bytes(self.n_blocks * BLOCK_BYTES)})"
        )
        groups = list(self.readers().values())
        for group in groups[:MOST_LINES]:
            lines.append(self._line(group))
        if len(groups) > MOST_LINES:
            lines.append(f"... and {len(groups) - MOST_LINES} more readers (all are in .by)")
        return "\n".join(lines)

    def _line(self, group: list[BlocksRead]) -> str:
        newest = group[-1]
        blocks = BitMap.union(*(entry.blocks for entry in group))
        versions = sorted({entry.version for entry in group})
        nodes = {entry.node for entry in group}
        node = newest.node[:8] if len(nodes) == 1 else f"{len(nodes)} nodes"
        version = str(versions[0]) if len(versions) == 1 else f"{versions[0]}..{versions[-1]}"
        label, number = "(task)", ""
        if newest.collection:
            label, number = newest.stage, f"[{newest.partition}]"
        where = _spark(_bucketed(blocks, self.n_blocks, SPARK_BUCKETS))
        return (
            f"{_cut(label, 21 - len(number)) + number:<22}{_cut(newest.short, 13):<14}"
            f"{node:<9}{version:>7}{len(blocks):>8,}  {where}"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draws the heat map: a row per partition, a column per part of the variable.

        Args:
            path: of the picture; its ending is the format (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib is not installed.
            OSError: The file cannot be written.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "reads.png")
            >>> clamor.read_report(clamor.put(np.arange(1000))).save(path)
            >>> os.path.exists(path)
            True
        """
        from clamor_ray._observe import picture as _picture

        groups = list(self.readers().values())
        n_buckets = min(PICTURE_BUCKETS, self.n_blocks)
        height_in = 2.2 + 0.2 * min(max(1, len(groups)), MOST_LABELS)
        figure = _picture.new_figure(10, height_in, "clamor.read_report(picture=...)")
        top, heat = figure.subplots(
            2, 1, sharex=True, gridspec_kw={"height_ratios": [0.7, height_in - 1.5]}
        )
        self._draw_sum(top, n_buckets)
        self._draw_heat(figure, heat, groups, n_buckets)
        top.set_title(
            f"{self._head()}: blocks read by {len(groups)} "
            f"{'reader' if len(groups) == 1 else 'readers'}",
            loc="left",
            color=_picture.INK,
            fontsize=11,
        )
        _picture.save(figure, path)

    def _edges(self, n_buckets: int) -> tuple[npt.NDArray[np.float64], str]:
        """Where the columns begin and end, and in which unit."""
        unit_bytes, unit = next(
            (size, name)
            for size, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
            if self.n_blocks * BLOCK_BYTES >= 2 * size or size == 1 << 10
        )
        first = np.ceil(np.arange(n_buckets + 1) * self.n_blocks / n_buckets)
        return first * BLOCK_BYTES / unit_bytes, unit

    def _draw_sum(self, axes: Any, n_buckets: int) -> None:
        from matplotlib.ticker import MaxNLocator

        from clamor_ray._observe import picture as _picture

        edges, _ = self._edges(n_buckets)
        touched = sum((row > 0 for row in self._rows(n_buckets)), np.zeros(n_buckets, np.int64))
        axes.stairs(touched, edges, fill=True, color="#5b7f95")
        axes.set_ylabel("readers", fontsize=8, color=_picture.INK)
        axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))
        axes.set_ylim(0, max(1, int(touched.max())) * 1.15)
        axes.tick_params(labelsize=7, colors=_picture.INK, bottom=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    def _draw_heat(
        self, figure: Any, axes: Any, groups: list[list[BlocksRead]], n_buckets: int
    ) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import ListedColormap
        from matplotlib.ticker import MaxNLocator

        from clamor_ray._observe import picture as _picture

        edges, unit = self._edges(n_buckets)
        axes.set_xlabel(f"offset in the variable ({unit})", fontsize=9, color=_picture.INK)
        axes.set_facecolor("#f3f5f7")
        axes.tick_params(labelsize=7, colors=_picture.INK)
        if not groups:
            axes.set_yticks([])
            axes.set_xlim(edges[0], edges[-1])
            axes.text(
                0.5,
                0.5,
                "nobody is known to have read it",
                transform=axes.transAxes,
                ha="center",
                va="center",
                color=_picture.FAINT,
            )
            return
        image = np.array(self._rows(n_buckets))
        most = max(2, int(image.max()))
        # A single block must be seen against the paper: the palest colours are left out.
        colors = ListedColormap(colormaps["YlOrRd"](np.linspace(0.25, 1, 256)))
        mesh = axes.pcolormesh(
            edges,
            np.arange(len(groups) + 1) - 0.5,
            np.ma.masked_equal(image, 0),
            cmap=colors,
            vmin=1,
            vmax=most,
            rasterized=True,
        )
        per_bucket = -(-self.n_blocks // n_buckets)
        if per_bucket > 1:
            bar = figure.colorbar(mesh, ax=axes, pad=0.01, aspect=30, fraction=0.03)
            bar.set_label(f"blocks read, of {per_bucket} in a column", fontsize=8)
            bar.ax.tick_params(labelsize=7)
            bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        self._label_rows(axes, groups)
        axes.set_ylim(len(groups) - 0.5, -0.5)

    def _label_rows(self, axes: Any, groups: list[list[BlocksRead]]) -> None:
        """Each row where there is room; else where each stage begins."""
        from clamor_ray._observe import picture as _picture

        begins = [
            row
            for row, group in enumerate(groups)
            if row == 0 or group[0].reader[:3] != groups[row - 1][0].reader[:3]
        ]
        for row in begins[1:]:
            axes.axhline(row - 0.5, color=_picture.FAINT, linewidth=0.6)
        step = -(-len(groups) // MOST_LABELS)
        rows = sorted({*begins, *range(0, len(groups), step)})
        if step > 1:  # not two labels on one another
            rows = [
                row for row in rows if row in begins or all(abs(row - b) >= step for b in begins)
            ]
        axes.set_yticks(rows, [_cut(_label_of(groups[row][-1]), 40) for row in rows])


def _label_of(entry: BlocksRead) -> str:
    if not entry.collection:
        return entry.short
    return f"{_cut(entry.stage, 26)}[{entry.partition}] {entry.short}"


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.0f}%" if share >= 10 or not part else f"{share:.2g}%"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _spark(counts: npt.NDArray[np.int64]) -> str:
    most = max(1, int(counts.max()))
    return "".join(
        "·" if not count else _SPARKS[(int(count) * len(_SPARKS) - 1) // most] for count in counts
    )


def from_records(
    name: str, version: int, n_blocks: int, records: Iterable[AttemptRecord]
) -> AccessReport:
    """What is known of a variable.

    Args:
        name, version, n_blocks: as `AccessReport`'s.
        records: whose reads are all of this variable.
    """
    by = []
    for record in records:
        for _, read_version, packed in record.reads:
            blocks = BitMap(range(n_blocks)) if packed is None else BitMap.deserialize(packed)
            by.append(
                BlocksRead(
                    function=record.function,
                    stage=record.stage,
                    partition=record.partition,
                    node=record.node_id,
                    version=read_version,
                    n_blocks=len(blocks),
                    blocks=blocks,
                    attempt=record.attempt,
                    outcome=record.outcome,
                    collection=record.run_id,
                    start_ns=record.start_ns,
                    end_ns=record.end_ns,
                )
            )
    return AccessReport(name, version, n_blocks, by)


def read_report(ref: Any, *, picture: str | os.PathLike[str] | None = None) -> AccessReport:
    """Tells who read which blocks of a global variable: partitions of collections, and plain
    tasks.

    What a task read is known soon after its end, from its read set; of attempts whose collections
    are gone, and of plain tasks, only the newest are kept.

    Args:
        ref: the variable (a reference, or a `HashMap`); every version that was read is in the
            answer.
        picture: where to draw a heat map: a row per partition, a column per part of the variable.

    Returns:
        An object with `by`, `blocks`, `counts(n_buckets)` and `save(path)`; `print` shows a table.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        FreedError: The variable was freed.
        TypeError: It is no variable.
        ImportError: A picture, and matplotlib is not installed.

    Safe from any thread.

    Example:
        >>> ref = clamor.put(np.arange(10**5))
        >>> ray.get(clamor.remote(lambda x: int(x[:512].sum())).remote(ref))
        130816
        >>> import time
        >>> while not (report := clamor.read_report(ref)).by:  # known soon after the task's end
        ...     time.sleep(0.01)
        >>> len(report.by)
        1
    """
    from clamor_ray._read.ref import GlobalRef

    if (ref_of := getattr(type(ref), "__clamor_ref__", None)) is not None:
        ref = ref_of(ref)
    if not isinstance(ref, GlobalRef):
        raise TypeError(f"read_report takes a GlobalRef or a HashMap, not {type(ref).__qualname__}")
    ref._check_not_freed()
    packed = opener.current(ref._scope).rpc.reads_of(ref._region)
    n_blocks = max(1, ref._length_bytes // BLOCK_BYTES)
    found = from_records(ref._label, ref.version, n_blocks, map(AttemptRecord.of, packed))
    if picture is not None:
        found.save(picture)
    return found
