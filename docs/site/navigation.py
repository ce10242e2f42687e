"""In: which page is under which. Out: the site's navigation.

The pages themselves have no `toctree`: people read them on GitHub, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# A page -> the pages under it, from the root of the repository, some with a shorter title.
UNDER: Final[dict[str, tuple[str, ...]]] = {
    "docs/index": (
        "docs/get-started",
        "User guide <docs/guide>",
        "How-to <docs/how-to/index>",
        "docs/concepts",
        "docs/reference/index",
        "docs/comparisons",
        "docs/figures",
    ),
    "docs/get-started": ("README", "CHANGELOG"),
    "docs/guide": (
        "docs/adapters",
        "docs/files",
        "docs/transactions",
        "docs/hashmap",
        "docs/building",
        "docs/scatter_add",
        "docs/stages",
        "docs/recipes",
        "docs/aggregation",
        "docs/groups",
        "docs/homes",
        "docs/caching",
        "docs/memory",
        "docs/backup",
        "docs/store",
        "docs/serving",
        "Kubernetes <k8s/README>",
        "docs/cli",
        "docs/fsck",
        "docs/metrics",
        "docs/workloads",
        "docs/limits",
        "SECURITY",
    ),
    "docs/how-to/index": (
        "docs/how-to/lost-data",
        "docs/how-to/ended-processes",
        "docs/how-to/waits",
        "docs/how-to/full",
        "docs/how-to/commits",
        "docs/how-to/sessions",
        "docs/how-to/nodes",
        "docs/how-to/groups",
        "docs/how-to/files",
        "docs/how-to/stores-and-backups",
        "docs/how-to/collections",
        "docs/how-to/programs",
        "docs/how-to/values",
        "docs/how-to/installation",
    ),
    "docs/concepts": (
        "docs/design",
        "docs/failure",
        "docs/faults",
        "docs/replication",
        "docs/concurrency",
        "ARCHITECTURE",
        "docs/testing",
        "CONTRIBUTING",
    ),
    "docs/reference/index": (
        "docs/reference/sessions",
        "docs/reference/variables",
        "docs/reference/changes",
        "docs/reference/building",
        "docs/reference/collections",
        "docs/reference/programs",
        "docs/reference/groups",
        "docs/reference/coroutines",
        "docs/reference/backups",
        "docs/reference/observing",
        "docs/reference/errors",
        "docs/reference/command-line",
        "docs/reference/metrics",
    ),
    "docs/figures": ("docs/performance",),
}


def _entry(under: str) -> str:
    title, opens, target = under.partition("<")
    return f"{title}</{target}" if opens else f"/{under}"


def _with_toctree(app: Sphinx, page: str, source: list[str]) -> None:
    if page in UNDER:
        entries = "\n".join(_entry(under) for under in UNDER[page])
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:maxdepth: 2\n\n{entries}\n```\n"


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _with_toctree)
    return {"parallel_read_safe": True}
