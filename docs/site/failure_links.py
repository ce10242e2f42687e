"""In: the tables of docs/failure.md, and the headings of docs/how-to. Out: each row's how-to.

A row gets the how-to of each error that it names. Without one, its words say what a user sees: a
process that ends, a full disk, nothing but a wait. In tables of what goes on inside, it gets its
section's. The links are in the site alone: on GitHub the page links to the list of all how-tos.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HOW_TO: Final = Path(__file__).resolve().parents[1] / "how-to"
_HEADING: Final = re.compile(r"^#{2} (.*)$", re.M)
_ERROR: Final = re.compile(
    r"`(?:clamor\.)?(?:errors\.)?([A-Z]\w*(?:Error|Conflict|Expired|Warning))`"
)
_RULE: Final = re.compile(r"\|[\s|:-]+\|")
# What a row for users says, if it names no error -> the page for that: the first that fits.
SIGNS: Final = (
    (r"exit code 70|ends the (?:process|child)", "ended-processes.md"),
    (r"metrics-export-port", "installation.md"),
    (r"\bdisk\b", "full.md"),
    (r"\(store\.md\)", "stores-and-backups.md"),
    (r"[Nn]othing|\bwait|\bretr|Ray restarts|again|drops", "waits.md"),
)
# Tables of what the library does inside -> what their rows are about, if they name no error.
INSIDE: Final = {
    "A region whose home is lost": "lost-data.md",
    "A peer that is silent": "waits.md",
    "A home that moves": "nodes.md",
    "A variable in pieces": "waits.md",
    "A variable with redundancy": "nodes.md",
    "A read without its home": "waits.md",
    "What goes wrong with programs": "programs.md",
}


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub and MyST make it.

    Example:
        >>> slug("`ExistsError`, `RangeError`")
        'existserror-rangeerror'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@functools.cache
def headings() -> dict[str, str]:
    """Each error -> the page and heading that say what to do about it."""
    found: dict[str, str] = {}
    for page in sorted(HOW_TO.glob("*.md")):
        for heading in _HEADING.findall(page.read_text()):
            for name in _ERROR.findall(heading):
                found.setdefault(name, f"{page.name}#{slug(heading)}")
    return found


def rows(text: str) -> list[tuple[int, str, str]]:
    """(number of the line, heading of its section, the line) of each row of a page's tables."""
    lines = text.splitlines()
    rules = {n for n, line in enumerate(lines) if _RULE.fullmatch(line.strip())}
    section, found = "", []
    for n, line in enumerate(lines):
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("|") and n not in rules and n + 1 not in rules:
            found.append((n, section, line))
    return found


def how_to(section: str, row: str) -> list[str]:
    """The how-tos of a row, as paths from docs/how-to; none if nothing is known of it."""
    named = dict.fromkeys(_ERROR.findall(row))
    found = [headings()[name] for name in named if name in headings()]
    if not found and section in INSIDE:
        found = [INSIDE[section]]
    elif not found:
        found = [page for sign, page in SIGNS if re.search(sign, row)][:1]
    return list(dict.fromkeys(found))


def _label(target: str) -> str:
    page, _, anchor = target.partition("#")
    title = HOW_TO.joinpath(page).read_text().splitlines()[0].removeprefix("# ")
    heads = _HEADING.findall(HOW_TO.joinpath(page).read_text())
    return next((head for head in heads if anchor and slug(head) == anchor), title)


def linked(text: str) -> str:
    """The page, with the how-tos of each row at its end."""
    lines = text.splitlines()
    for n, section, row in rows(text):
        links = ", ".join(f"[{_label(each)}](how-to/{each})" for each in how_to(section, row))
        if links:
            lines[n] = f"{row.rstrip().removesuffix('|')} How-to: {links} |"
    return "\n".join(lines) + "\n"


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    if page == "docs/failure":
        source[0] = linked(source[0])


def _docstring(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """The reference of an error leads to its how-to."""
    target = headings().get(name.rpartition(".")[2])
    if what == "exception" and target is not None:
        page = target.partition("#")[0].removesuffix(".md")
        lines += ["", f"What to do: :doc:`/docs/how-to/{page}`.", ""]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _read, priority=100)
    app.connect("autodoc-process-docstring", _docstring, priority=900)
    return {"parallel_read_safe": True}
