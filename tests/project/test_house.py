"""The numbers of `make house`, on small trees that have one mistake each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.house import c_side, figures, graphs, lines, python_side, tree

ROOT = Path(figures.__file__).resolve().parents[3]


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# ------------------------------------------------------------------ circles


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ({}, []),
        ({"a": ["b"], "b": ["c"]}, []),
        ({"a": ["a"]}, []),  # itself is no circle
        ({"a": ["b"], "b": ["a"]}, [["a", "b"]]),
        ({"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": ["d"]},
         [["a", "b", "c"], ["d", "e"]]),
        ({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": ["b"]}, [["b", "d"]]),
    ],
)  # fmt: skip
def test_circles(edges: dict[str, list[str]], expected: list[list[str]]) -> None:
    assert graphs.circles(edges) == expected


def test_a_circle_that_is_longer_than_python_recurses() -> None:
    n = 3 * sys.getrecursionlimit()
    edges = {str(i): [str((i + 1) % n)] for i in range(n)}
    (circle,) = graphs.circles(edges)
    assert len(circle) == n


# ------------------------------------------------------------------ Python


def test_imports_in_functions_count_and_those_for_types_do_not(tmp_path: Path) -> None:
    make(tmp_path, {
        "clamor_ray/__init__.py": "",
        "clamor_ray/_a.py": "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from clamor_ray._c import C\nelse:\n    import clamor_ray._d\n"
        "def f():\n    from clamor_ray import _b\n",
        "clamor_ray/_b.py": "import clamor_ray._a\n",
        "clamor_ray/_c.py": "from clamor_ray._a import f\n",
        "clamor_ray/_d.py": "",
    })  # fmt: skip
    imports = python_side.imports_of(tmp_path)
    assert imports["clamor_ray._a"] == {"clamor_ray._b", "clamor_ray._d"}
    assert graphs.circles(imports) == [["clamor_ray._a", "clamor_ray._b"]]


def test_relative_imports(tmp_path: Path) -> None:
    make(tmp_path, {
        "workloads/__init__.py": "",
        "workloads/knn.py": "from .data import places\nfrom .data.places import load\n",
        "workloads/data/__init__.py": "",
        "workloads/data/places.py": "from ..knn import main\n",
    })  # fmt: skip
    imports = python_side.imports_of(tmp_path)
    places = "clamor_ray.workloads.data.places"
    assert imports["clamor_ray.workloads.knn"] == {places}
    assert imports[places] == {"clamor_ray.workloads.knn"}


def test_edges_between_the_packages(tmp_path: Path) -> None:
    make(tmp_path, {
        "clamor_ray/__init__.py": "",
        "clamor_ray/errors.py": "",
        "actors/__init__.py": "",
        "clamor_ray/_protocol/messages.py": "",
        "clamor_ray/_native/ring.py": "",
        "clamor_ray/_store/redo.py": "def redo():\n    from clamor_ray._read.ref import Ref\n",
        "clamor_ray/cli/fsck.py": "from clamor_ray.actors.registry.registry import create\n",
        "clamor_ray/_read/ref.py": "from clamor_ray import errors\n"
        "from clamor_ray.actors.registry.registry import create\n",
        "actors/registry/registry.py": "from clamor_ray._protocol import messages\n"
        "from clamor_ray._native.ring import Ring\n"
        "def create():\n    from clamor_ray._read import ref\n",
    })  # fmt: skip
    ref, registry = "clamor_ray._read.ref", "clamor_ray.actors.registry.registry"
    imports = python_side.imports_of(tmp_path)
    assert python_side.edges_to_actors(imports) == [(ref, registry)]  # a program stands above both
    off = [("clamor_ray._store.redo", ref), (registry, ref)]
    assert python_side.edges_off_the_ground(imports) == off


def test_class_names_that_are_shared(tmp_path: Path) -> None:
    make(tmp_path, {
        "clamor_ray/_a.py": "class Plan: ...\nclass One: ...\n",
        "actors/b.py": "def f():\n    class Plan: ...\n",
    })  # fmt: skip
    shared = python_side.shared_class_names(tmp_path)
    assert shared == {"Plan": ["clamor_ray/_a.py", "actors/b.py"]}


# ------------------------------------------------------------------ C

HEADER = "#ifndef A\n#define A\nstruct pc__map {\n    int a;\n};\nint pc__a(void);\n#endif\n"


@pytest.mark.parametrize("room", ["", "engine/"])
def test_files_that_call_each_other(tmp_path: Path, room: str) -> None:
    make(tmp_path, {
        f"pagecache_c/{room}a.h": HEADER,
        f"pagecache_c/{room}a.c": "int pc__a(void)\n{\n    return pc__b(1);\n}\n",
        f"pagecache_c/{room}b.c": "static int mine(void)\n{\n    return 0;\n}\n\n"
        "int pc__b(int long_name,\n          int b)\n{\n    run(pc__a); return mine();\n}\n",
        f"pagecache_c/{room}c.c": "/* pc__d() */\nint pc__c(void)\n{\n    pc__a();\n"
        '    return log("pc__d()");\n}\n',
        f"pagecache_c/{room}d.c": "int pc__d(void)\n{\n    return pc__c();\n}\n",
        "pagecache_c/tests/test_a.c": "int pc__e(void)\n{\n    return pc__a();\n}\n",
    })  # fmt: skip
    names = {name: f"pagecache_c/{room}{name}.c" for name in "abcd"}
    assert c_side.definitions(tmp_path) == {f"pc__{name}": names[name] for name in "abcd"}
    assert graphs.circles(c_side.calls(tmp_path)) == [[names["a"], names["b"]]]


def test_names_in_c(tmp_path: Path) -> None:
    make(tmp_path, {
        "pagecache_c/client.h": HEADER,
        "pagecache_c/engine.h": HEADER + "/* one more line */\n",
        "pagecache_c/pagecache.h": "\n" * 900,
        "pagecache_c/client.c": "struct part {\n    int a;\n};\n"
        "PC_API int pc_open(void)\n{\n    return 0;\n}\n",
        "pagecache_c/control.c": "struct part {\n    int b;\n};\n"
        "int pc__open(void)\n{\n    return 0;\n}\nint pc__shut(void)\n{\n    return 0;\n}\n",
        "pagecache_c/tests/harness.h": HEADER + "\n" * 1000,
    })  # fmt: skip
    assert c_side.one_underscore_apart(tmp_path) == [("pc_open", "pc__open")]
    both = ["pagecache_c/client.h", "pagecache_c/engine.h"]
    assert c_side.shared_struct_names(tmp_path) == {"pc__map": both}
    assert c_side.largest_header(tmp_path) == (8, "pagecache_c/engine.h")


# ------------------------------------------------------------------ files, and the whole


def test_the_fullest_folder(tmp_path: Path) -> None:
    program = 'def main():\n    ...\n\n\nif __name__ == "__main__":\n    main()\n'
    make(tmp_path, {
        **{f"workloads/program_{i}.py": program for i in range(9)},
        **{f"tests/test_{i}.py": "" for i in range(9)},
        **{f"pagecache_c/tests/test_{i}.c": "" for i in range(9)},
        **{f"pagecache_c/build/x_{i}.c": "" for i in range(9)},
        **{f"clamor_ray/_read/m_{i}.py": "" for i in range(4)},
        "workloads/_rows.py": "",
        "clamor_ray/_pagecache.c": "",
    })  # fmt: skip
    assert tree.fullest_folder(tmp_path) == (4, "clamor_ray/_read")


def test_a_clean_tree_is_ok_and_the_gate_is_read(tmp_path: Path) -> None:
    make(tmp_path, {"clamor_ray/__init__.py": "A = 1\n", "build/gate_seconds.txt": "1500\n"})
    found = figures.figures(tmp_path)
    assert {figure.verdict for figure in found} == {"ok"}
    assert found[-1].value == 25
    assert found[-2].value == 1
    assert figures.figures(tmp_path, minutes=31)[-1].verdict == "over"


def test_a_gate_that_has_not_run_is_said(tmp_path: Path) -> None:
    make(tmp_path, {"clamor_ray/__init__.py": ""})
    found = figures.figures(tmp_path)
    assert found[-1].verdict == "not measured"
    assert "not measured" in figures.table(found)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.support.house", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_command(tmp_path: Path) -> None:
    make(tmp_path, {
        "clamor_ray/_a.py": "import clamor_ray._b\n",
        "clamor_ray/_b.py": "import clamor_ray._a\n",
    })  # fmt: skip
    said = run("--root", str(tmp_path))
    assert said.returncode == 0, said.stderr
    line = next(line for line in said.stdout.splitlines() if line.startswith("import circles"))
    assert line.split()[-4:] == ["1", "<=", "0", "over"]
    checked = run("--root", str(tmp_path), "--check", "--detail")
    assert checked.returncode == 1
    assert "clamor_ray._a clamor_ray._b" in checked.stdout


def test_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    said = run("--root", str(tmp_path))
    assert said.returncode == 2
    assert "no checkout" in said.stderr


def test_this_checkout_is_read() -> None:
    found = {figure.name: figure.value for figure in figures.figures(ROOT)}
    assert found["lines of product code"] > 10_000
    assert all(
        value is not None for name, value in found.items() if not name.startswith("the gate")
    )
    assert len(c_side.definitions(ROOT)) > 200


# ------------------------------------------------------------------ lines


def test_lines_are_code_docstrings_comments_or_blank(tmp_path: Path) -> None:
    make(tmp_path, {
        "clamor_ray/a.py": '"""Two\n\nlines."""\n\n# why\ndef f():\n    """One."""\n'
        '    return """\n\n"""\n',
        "pagecache_c/a.c": "/* Two\n\n * lines. */\n\nint a; /* code */\n// one\nint b;\n",
        "pagecache_c/tests/b.c": "int c;\n",
        "bench/c.py": "a = 1\n",
    })  # fmt: skip
    kinds = lines.kinds(tmp_path)
    assert kinds == {"docstrings": 4, "comments": 1 + 4, "code": 3 + 2, "blank": 1 + 1 + 1}
    (found,) = (one for one in figures.figures(tmp_path) if "product" in one.name)
    assert found.value == kinds.total() == 10 + 7
    assert "5 code" in found.detail
