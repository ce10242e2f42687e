"""One abi3 wheel with the extension in it, and nothing that lands beside the package."""

from __future__ import annotations

import ast
import configparser
import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from clamor_ray import __version__

ROOT = Path(__file__).parents[2]
PARTS = ["clamor_ray", "actors", "workloads", "pagecache_c"]
FILES = ["setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "CHANGELOG.md",
         "SECURITY.md", "CITATION.cff"]  # fmt: skip


def _copy(into: Path) -> Path:
    tree = into / "tree"
    tree.mkdir()
    ignore = shutil.ignore_patterns("*.so", "*.o", "_pagecache.c", "__pycache__", "build")
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    readme = ROOT / "README.md"
    (tree / "README.md").write_text(readme.read_text() if readme.exists() else "clamor-ray\n")
    return tree


def _run(*command: str, cwd: Path, path: Path | None = None) -> None:
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only wheel that a build of a copy of this tree gives, by way of the sdist."""
    place = tmp_path_factory.mktemp("packaging")
    tree = _copy(place)
    out = place / "dist"
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=tree)
    wheels = list(out.glob("*.whl"))
    assert len(wheels) == 1, wheels
    return wheels[0]


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_is_one_abi3_wheel_for_linux(wheel: Path) -> None:
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("clamor_ray", __version__, "cp310", "abi3")
    assert platform.startswith(("linux_", "manylinux"))
    assert "none-any" not in wheel.name


def test_the_extension_and_the_packages_are_in_it(names: list[str]) -> None:
    assert "clamor_ray/_pagecache.abi3.so" in names
    assert "clamor_ray/_array_type.abi3.so" in names
    assert "clamor_ray/py.typed" in names
    assert "clamor_ray/actors/__init__.py" in names
    assert "clamor_ray/workloads/__init__.py" in names


def test_nothing_lands_beside_the_package(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert tops == {"clamor_ray", f"clamor_ray-{__version__}.dist-info"}


def test_no_sources_of_the_extension_are_in_the_wheel(names: list[str]) -> None:
    assert [name for name in names if name.endswith((".c", ".h", ".o"))] == []


def test_every_module_is_packaged(names: list[str]) -> None:
    for folder, package in [
        ("clamor_ray", "clamor_ray"),
        ("actors", "clamor_ray/actors"),
        ("workloads", "clamor_ray/workloads"),
    ]:
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{path.relative_to(ROOT / folder)}" in names


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"clamor_ray-{__version__}.dist-info/METADATA").decode()
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    metadata = email.message_from_string(text)
    assert metadata["Name"] == "clamor-ray"
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Apache-2.0" in (metadata["License-Expression"] or metadata["License"])
    needs = [line.split(";")[0] for line in metadata.get_all("Requires-Dist", [])]
    for package in ("ray", "numpy", "cffi", "cloudpickle", "uvloop", "pyarrow"):
        assert any(need.startswith(package) for need in needs), package
    assert {"workloads", "test"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_sdist_carries_the_c_sources(wheel: Path) -> None:
    (archive,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    folder = ROOT / "pagecache_c"
    inner = [p.relative_to(folder) for p in folder.rglob("*.[ch]")]
    sources = [f"pagecache_c/{p}" for p in inner if p.parts[0] not in ("build", "tests")]
    assert sources
    assert set(sources) <= names
    assert {"setup.py", "LICENSE", "SECURITY.md", "clamor_ray/_native/builder.py"} <= names


def test_the_extension_loads_and_has_every_function(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import clamor_ray, pathlib, sys;"
        "from clamor_ray import _pagecache as m;"
        f"assert pathlib.Path(m.__file__).is_relative_to({str(tmp_path)!r}), m.__file__;"
        "assert m.ffi.string(m.lib.pc_strerror(-6));"
        "missing = [n for n in ('pc_client_open', 'pc_engine_start', 'pc_keeper_run', 'pc_copy_in')"
        " if not hasattr(m.lib, n)];"
        "assert not missing, missing"
    )
    _run(sys.executable, "-c", code, cwd=tmp_path, path=tmp_path)


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    folders = {
        "clamor_ray": "clamor_ray",
        "actors": "clamor_ray/actors",
        "workloads": "clamor_ray/workloads",
    }
    packages = [
        str(package / path.parent.relative_to(ROOT / folder)).replace("/", ".")
        for folder, package in ((f, Path(p)) for f, p in folders.items())
        for path in (ROOT / folder).rglob("__init__.py")
    ]
    assert config["options"]["packages"].split() == sorted(packages)
    assert config["bdist_wheel"]["py_limited_api"] == "cp310"


def test_setup_py_has_only_what_setup_cfg_cannot() -> None:
    imported, called = ast.parse((ROOT / "setup.py").read_text()).body
    assert ast.unparse(imported) == "from setuptools import Extension, setup"
    assert isinstance(called, ast.Expr)
    assert isinstance(called.value, ast.Call)
    assert [keyword.arg for keyword in called.value.keywords] == ["cffi_modules", "ext_modules"]
    assert not called.value.args
