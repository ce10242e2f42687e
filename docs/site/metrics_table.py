"""In: the table of metrics that exporters use. Out: `{metrics}`, a table of them on a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from docutils import nodes
from docutils.parsers.rst import Directive

from clamor_ray._protocol.metrics import NODE_METRICS, SESSION_METRICS, Metric

if TYPE_CHECKING:
    from sphinx.application import Sphinx

TABLES: Final = {"node": NODE_METRICS, "session": SESSION_METRICS}


def _row(*cells: nodes.Node) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


def _table(metrics: tuple[Metric, ...]) -> nodes.table:
    head = _row(nodes.Text("metric"), nodes.Text("kind"), nodes.Text("what"))
    rows = [
        _row(nodes.literal("", each.exported), nodes.Text(each.kind), nodes.Text(each.help))
        for each in metrics
    ]
    columns = [nodes.colspec("", colwidth=width) for width in (40, 10, 50)]
    group = nodes.tgroup("", *columns, nodes.thead("", head), nodes.tbody("", *rows), cols=3)
    return nodes.table("", group)


class Metrics(Directive):
    """`{metrics} node` and `{metrics} session`: those of a page server, and of the registry."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The table, as Sphinx calls for it."""
        if self.arguments[0] not in TABLES:
            raise self.error(f"metrics: {self.arguments[0]} is none of {', '.join(TABLES)}")
        return [_table(TABLES[self.arguments[0]])]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("metrics", Metrics)
    return {"parallel_read_safe": True}
