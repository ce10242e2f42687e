"""Docstrings of the public API: they have their sections, and their examples run."""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ClamorCluster
from tests.support.backups import drop_all

MODULES = (
    *("clamor_ray", "clamor_ray.aio", "clamor_ray.collective", "clamor_ray.data"),
    *("clamor_ray.errors", "clamor_ray.ray_collective", "clamor_ray.schedule"),
)
OLD_NAMES = ("accumulate", "reads", "region")  # they have the docstrings of the new ones
# What no `__all__` names, and a user gets all the same: options, and what public functions return.
ALSO = {
    "clamor_ray.collection.options": ("Options", "from_env"),
    "clamor_ray._build.arena": ("MallocFunctions",),
    "clamor_ray._observe.access_report": ("AccessReport", "BlocksRead"),
    "clamor_ray._read.hashmap": ("MutableHashMap",),
    "clamor_ray._protocol.messages": ("MoveCounters", "ReadPredictorCounters"),
    "clamor_ray._session.variables": ("open",),
    "clamor_ray._observe.stats": ("EngineStats", "NodeStats", "RegionStats", "Stats"),
}
# These need the death of a process, another machine or kernel, or an error of ours.
NOT_ON_ONE_SESSION = {
    "AddressClashError",
    "CommitAbortedError",
    "DeniedError",
    "DescriptorLimitError",
    "ExistsError",
    "FileAccessError",
    "HomeLostError",
    "InternalError",
    "JournalFullError",
    "LostBlocksWarning",
    "MemberLostError",
    "DrainCancelledError",
    "NoOtherNodeError",
    "NodeLostError",
    "NondeterministicError",
    "ObjectsInUseError",
    "PrefetchTimeoutError",
    "ProtocolError",
    "RangeError",
    "ServerUnavailableError",
    "SystemCallError",
    "TrapUnavailableError",
    "UnsupportedPlatformError",
    "VersionMismatchError",
    "WaitTimeoutError",
}
# What these do to a process or to its session stays so: they run in a driver of their own.
OWN_DRIVER = (
    "clamor_ray.Region.malloc",
    "clamor_ray.shutdown",
    *(
        f"clamor_ray.errors.{name}"
        for name in (
            "CacheBudgetError",
            "ForkedError",
            "NotInitializedError",
            "SessionEndedError",
            "SessionMismatchError",
        )
    ),
)
DRIVER_S = 200.0
SOURCES = ("actors", "clamor_ray", "workloads")
SECTION = re.compile(r"([A-Z]\w+)(?: \([^)]*\))?:$")


def _members(name: str, cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class has from this library."""
    for member in dir(cls):
        owner = next(base for base in cls.__mro__ if member in vars(base))
        found = inspect.getattr_static(cls, member)
        if member.startswith("_") or not owner.__module__.startswith("clamor_ray"):
            continue
        if issubclass(cls, np.ndarray) and hasattr(np.ndarray, member):
            continue  # NumPy's documentation has it
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        if inspect.isfunction(found) or isinstance(found, property):
            yield f"{name}.{member}", found


def public() -> dict[str, Any]:
    """Everything public that has a docstring, or should have one, by its name."""
    names = {module: importlib.import_module(module).__all__ for module in MODULES}
    found: dict[str, Any] = {}
    found.update({module: importlib.import_module(module) for module in MODULES})
    for module, exported in {**names, **ALSO}.items():
        for exported_name in exported:
            if exported_name in OLD_NAMES:
                continue
            value = getattr(importlib.import_module(module), exported_name)
            if module == "clamor_ray" and getattr(value, "__module__", "") == errors.__name__:
                continue  # it is looked at where it is
            name = f"{module}.{exported_name}"
            if inspect.isclass(value):
                found[name] = value
                if not issubclass(value, Warning | errors.ClamorError):
                    found.update(_members(name, value))
            elif callable(value):
                found[name] = value
    return found


PUBLIC = public()


def sections(docstring: str) -> dict[str, str]:
    """The text of each section; "" is what comes before the first."""
    found: dict[str, list[str]] = {"": []}
    now = ""
    for line in docstring.splitlines():
        heading = SECTION.match(line)
        if heading:
            now = heading[1]
        elif now and line and not line.startswith(" "):
            now = ""
        found.setdefault(now, []).append(line)
    return {name: "\n".join(lines) for name, lines in found.items()}


def _parameters(value: Any) -> list[str]:
    if inspect.isclass(value) and not dataclasses.is_dataclass(value):
        if "__init__" not in vars(value):
            return []  # its base's, which has them
        value = vars(value)["__init__"]
    names = list(inspect.signature(value).parameters)
    return [name for name in names if name not in ("self", "cls")]


def _described(arguments: str) -> set[str]:
    """The names at the beginning of the entries of an Args section."""
    found: set[str] = set()
    for names in re.findall(r"^    ([\w, ]+?):", arguments, re.M):
        found.update(re.split(", *", names))
    return found


def raised(value: Any) -> set[str]:
    """The classes of errors that the text of a function, or of a constructor, raises."""
    if inspect.isclass(value):
        value = vars(value).get("__init__")
    if not inspect.isfunction(value) or value.__code__.co_filename == "<string>":  # a dataclass's
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            if _is_error(name):
                found.add(name)
    return found


def _is_error(name: str) -> bool:
    cls = getattr(errors, name, None) or getattr(builtins, name, None)
    return inspect.isclass(cls) and issubclass(cls, Exception)


def _returns_something(value: Any) -> bool:
    if inspect.isclass(value):
        return False
    annotation = inspect.signature(value).return_annotation
    return annotation not in ("None", "NoReturn", "Iterator[None]")


def missing(name: str, value: Any) -> list[str]:
    """What the docstring of one public name lacks."""
    parts = sections(inspect.cleandoc(value.__doc__ or ""))
    if not parts[""].strip():
        return ["a docstring"]
    if isinstance(value, (property, ModuleType)):
        return []
    found = []
    described = _described(parts.get("Args", ""))
    undescribed = [each for each in _parameters(value) if each not in described]
    if undescribed:
        found.append(f"Args: {', '.join(undescribed)}")
    if _returns_something(value) and not {"Returns", "Yields"} & set(parts):
        found.append("Returns")
    told = parts.get("Raises", "")
    untold = sorted(each for each in raised(value) if not re.search(rf"\b{each}\b", told))
    if untold:
        found.append(f"Raises: {', '.join(untold)}")
    named = re.findall(r"\b[A-Z]\w+(?:Error|Conflict|Expired)\b", told)
    if unknown := [each for each in named if not _is_error(each)]:
        found.append(f"Raises has what is no error: {', '.join(unknown)}")
    if name.rpartition(".")[2] not in NOT_ON_ONE_SESSION and ">>> " not in parts.get("Example", ""):
        found.append("Example")
    return found


def test_public_names_have_their_sections() -> None:
    lacks = {name: missing(name, value) for name, value in PUBLIC.items()}
    told = [f"{name} lacks {'; '.join(found)}" for name, found in lacks.items() if found]
    assert not told, "\n" + "\n".join(told)


def test_no_example_is_skipped() -> None:
    root = Path(__file__).parents[2]
    sources = [path for name in SOURCES for path in sorted((root / name).rglob("*.py"))]
    assert sources
    assert not [path for path in sources if "+SKIP" in path.read_text()]


def test_exemptions_are_errors() -> None:
    assert set(errors.__all__) >= NOT_ON_ONE_SESSION


def run_example(name: str, docstring: str, names: dict[str, Any]) -> None:
    # As in a program: what an example defines is its own, and tasks get it by value.
    names = {**names, "__name__": "__main__", "clamor": clamor, "np": np, "ray": ray}
    test = doctest.DocTestParser().get_doctest(docstring, names, name, None, 0)
    told: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    outcome = doctest.DocTestRunner(optionflags=flags).run(test, out=told.append)
    assert outcome.attempted
    assert not outcome.failed, "".join(told)


def internal_examples() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, docstring, names of its module) of what is not public and has an example."""
    known = {inspect.cleandoc(value.__doc__ or "") for value in PUBLIC.values()}
    for package in (clamor, importlib.import_module("clamor_ray.actors")):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.startswith("clamor_ray.workloads"):
                continue
            module = importlib.import_module(found.name)
            for test in doctest.DocTestFinder().find(module, found.name):
                if test.examples and inspect.cleandoc(test.docstring) not in known:
                    yield test.name, test.docstring, vars(module)


@pytest.mark.lab
def test_internal_examples(clamor_cluster: ClamorCluster) -> None:
    examples = list(internal_examples())
    assert len(examples) > 20
    for name, docstring, names in examples:
        run_example(name, docstring, names)


HERE = [name for name in PUBLIC if name not in OWN_DRIVER and ">>>" in (PUBLIC[name].__doc__ or "")]


@pytest.mark.lab
@pytest.mark.parametrize("name", HERE)
def test_example(
    name: str,
    clamor_cluster: ClamorCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # some examples write files
    with contextlib.suppress(errors.NotInitializedError):
        drop_all()  # of the examples before it: some look at all names
    run_example(name, PUBLIC[name].__doc__, {})


def run_in_own_driver() -> None:
    for name in OWN_DRIVER:
        clamor.init()  # some end the session
        run_example(name, PUBLIC[name].__doc__, {})


@pytest.mark.lab
def test_examples_in_a_driver_of_their_own(clamor_cluster: ClamorCluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import run_in_own_driver as run; run()"],
        # What Ray says of an actor that has ended is no part of an example's output.
        env={**os.environ, **clamor_cluster.lab.environment, "RAY_LOG_TO_DRIVER": "0"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DRIVER_S,
    )
    assert done.returncode == 0, done.stdout
