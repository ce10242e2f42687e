"""In: a page. Out: its fenced blocks, and the comment above each that says who runs it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FENCE: Final = re.compile(
    r"(?:^(?P<mark>[^\n]*)\n)?^(?P<ticks>`{3,})(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=ticks)`*[ \t]*$",
    re.M | re.S,
)
PYTHON: Final = ("python",)
SHELL: Final = ("sh", "console")
# Nothing that could be run, and Sphinx's directives.
OTHER: Final = re.compile(r"text|c|\{[a-z-]+\}.*")


@dataclass(frozen=True)
class Fence:
    """One block.

    Args:
        mark: the line above it.
        language: what stands behind the backticks.
        code: its lines.
        line: number of its first backticks, from 1 on.
    """

    mark: str
    language: str
    code: str
    line: int

    @property
    def commands(self) -> list[str]:
        """Of a shell's block: what is typed, without the output that a console's has."""
        lines = [line for line in self.code.splitlines() if line.strip()]
        if self.language == "console":
            return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return lines


def fences(text: str) -> list[Fence]:
    """All blocks of a page, in order.

    Example:
        >>> fences("<!-- mark -->\\n```sh\\nls\\n```\\n")
        [Fence(mark='<!-- mark -->', language='sh', code='ls\\n', line=2)]
    """
    return [
        Fence(
            found["mark"] or "",
            found["info"],
            found["code"],
            text.count("\n", 0, found.start("ticks")) + 1,
        )
        for found in _FENCE.finditer(text)
    ]


def pages(root: Path) -> list[Path]:
    """All pages with examples: at the root of the project, and in docs/."""
    docs = [*root.glob("docs/*.md"), *root.glob("docs/*/*.md")]
    at_root = [root / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    return [*at_root, *sorted(docs)]
