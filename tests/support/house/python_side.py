"""What Python modules import at run time, and the names of their classes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.house.tree import module_of, python_files

PACKAGE = "clamor_ray"
# What actors may stand on: folders that import nothing above them, and no actor.
GROUND = (
    "_protocol", "_native", "_objects", "_redundancy", "_files", "_store", "_counting",
    "_labels", "_errors", "errors", "_version",
)  # fmt: skip
# Above the library and the actors: workloads and programs.
PUBLIC_PARTS = ("clamor_ray.actors", "clamor_ray.workloads", "clamor_ray.cli")


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(
        getattr(part, "id", getattr(part, "attr", "")) == "TYPE_CHECKING"
        for part in ast.walk(node.test)
    )


def _imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports that may run: those in functions too, those for type checkers not."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif _is_for_types(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield from _imports(ast.Module([other], []))
        else:
            yield from _imports(child)


def imports_of(root: Path) -> dict[str, set[str]]:
    """The modules that each module imports, of those of the project.

    A package counts where something that its `__init__` defines is imported from it, not where one
    of its modules is.

    Raises:
        SyntaxError: A file is no Python.
    """
    paths = {module_of(root, path): path for path in python_files(root)}
    edges: dict[str, set[str]] = {}
    for module, path in paths.items():
        edges[module] = found = set()
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in _imports(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names if alias.name in paths}
                continue
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            parts = [*base, node.module or ""] if node.level else [node.module or ""]
            source = ".".join(part for part in parts if part)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if inner in paths:
                    found.add(inner)
                elif source in paths:
                    found.add(source)
        found.discard(module)
    return edges


def _is_actors(module: str) -> bool:
    return module.startswith(f"{PACKAGE}.actors.") or module == f"{PACKAGE}.actors"


def _is_library(module: str) -> bool:
    return module.split(".")[0] == PACKAGE and not module.startswith(PUBLIC_PARTS)


def edges_to_actors(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of the library that lead to the actors."""
    return sorted(
        (module, other)
        for module, others in edges.items()
        if _is_library(module)
        for other in others
        if _is_actors(other)
    )


def edges_off_the_ground(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of the actors, and of what both stand on, that lead to the rest of the library."""
    return sorted(
        (module, other)
        for module, others in edges.items()
        if _is_actors(module) or (module != PACKAGE and _is_library(module) and _is_ground(module))
        for other in others
        if _is_library(other) and other != PACKAGE and not _is_ground(other)
    )


def _is_ground(module: str) -> bool:
    return module.split(".")[1] in GROUND


def shared_class_names(root: Path) -> dict[str, list[str]]:
    """Names that several classes have: the files of each."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in python_files(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(root)))
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}
