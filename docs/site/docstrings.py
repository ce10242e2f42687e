"""In: docstrings as people read them. Out: the same as reStructuredText asks for it.

Three things differ. `Raises:` may have several errors in one entry, and Sphinx links one for each.
The plural of code is written with an s behind the backtick. Indented lines in a text are code.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from names import resolve

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_SECTION: Final = re.compile(r"[A-Z]\w+:$")
_ENTRY: Final = re.compile(r" {4}(\w+(?:, (?:\w+|\.\.\.))*,?):(?: (.*))?$")
_CODE: Final = re.compile(r"(`[^`]+`)(\w?)")
_BEGUN: Final = re.compile(r" {4}\w+(?:, (?:\w+|\.\.\.))*,$")  # the names go on in the next line


def split(lines: list[str]) -> list[str]:
    """A docstring whose `Raises:` has one error in each entry.

    Args:
        lines: of the docstring, not indented.

    Returns:
        Its lines. `A, B, ...: text` becomes `A: text` and `B: text`.

    Example:
        >>> split(["Raises:", "    A, B: Both.", "        Long."])
        ['Raises:', '    A: Both.', '        Long.', '    B: Both.', '        Long.']
    """
    found: list[str] = []
    names: list[str] = []
    texts: list[str] = []

    def flush() -> None:
        for name in names:
            found.append(f"    {name}: {texts[0]}")
            found.extend(texts[1:])
        names.clear()
        texts.clear()

    section = ""
    for line in _joined(lines):
        if _SECTION.match(line):
            flush()
            section = line
        elif section in ("Returns:", "Yields:") and found[-1] == section:
            line = f"    :{line}"  # else what comes before a colon in the text would be its type
        elif (
            section == "Raises:"
            and line.startswith("    ")
            and not line.startswith("     ")
            and not _ENTRY.match(line)
        ):
            flush()
            line = f"    Exception: {line.strip()}"
        elif section == "Raises:" and (entry := _ENTRY.match(line)):
            flush()
            names += [name for name in re.split(", *", entry[1]) if name not in ("...", "")]
            texts.append(entry[2] or "")
            continue
        elif names and (line.startswith("     ") or not line):
            texts.append(line)
            continue
        else:
            flush()
        found.append(line)
    flush()
    return found


def _joined(lines: list[str]) -> list[str]:
    """With names that went on in the next line in one line."""
    found: list[str] = []
    for line in lines:
        if found and _BEGUN.match(found[-1]) and line.startswith("     "):
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    return found


def plurals(text: str) -> str:
    """With a mark that ends code where a letter follows.

    Example:
        >>> print(plurals("A `GlobalRef`, a `HashMap`, `ObjectRef`s."))
        A `GlobalRef`, a `HashMap`, `ObjectRef`\\ s.
    """
    return _CODE.sub(lambda found: rf"{found[1]}\ {found[2]}" if found[2] else found[0], text)


def _with_code(lines: list[str]) -> list[str]:
    """With a mark before indented lines that stand in the text, in no section."""
    found: list[str] = []
    in_section = in_code = False
    for before, line in zip(["", *lines], lines, strict=False):
        if _SECTION.match(line):
            in_section = True
        elif line and not line.startswith(" "):
            in_section = in_code = False
        elif line and not before and not in_section and not in_code:
            found += ["::", ""]
            in_code = True
        found.append(line)
    return found


def _process(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    lines[:] = plurals("\n".join(_with_code(split(lines)))).split("\n")
    if what in ("attribute", "property") and lines:
        lines[0] = f":{lines[0]}"  # as of Returns


def _constructor(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str, returns: str
) -> tuple[str, str | None] | None:
    """Nothing for what only the library makes: its arguments are private types, or an error's."""
    if what == "exception" and signature and "__init__" not in vars(value):
        return "", None  # as ClamorError's
    named = re.findall(r"~(clamor_ray\.[\w.]+)", signature or "")
    if what == "class" and any(resolve(each) is None for each in named):
        return "", None
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _process, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", _constructor)
    return {"parallel_read_safe": True}
