"""C++ libraries that tests compile."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REQUIRE_VARIABLE = "CLAMOR_REQUIRE_LAB"


def unavailable(why: str) -> None:
    """Skips, or fails where everything must be tested."""
    if os.environ.get(REQUIRE_VARIABLE) == "1":
        pytest.fail(f"{why} ({REQUIRE_VARIABLE}=1)", pytrace=False)
    pytest.skip(why)


def compile_library(source: str, folder: Path, *flags: str) -> Path:
    """Builds a shared library of one of the sources here.

    Skips the test where there is no g++; a source that does not compile fails it.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        unavailable("there is no g++ (Debian: apt-get install g++)")
        raise AssertionError("unreachable")
    target = folder / f"lib{Path(source).stem}.so"
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", *flags]
    subprocess.run([*command, str(HERE / source), "-o", str(target)], check=True, timeout=300)
    return target


def require_nanoflann() -> None:
    """Skips the test where the third-party library is not installed."""
    if not any(
        Path(root, "nanoflann.hpp").exists() for root in ("/usr/include", "/usr/local/include")
    ):
        unavailable("there is no nanoflann.hpp (Debian: apt-get install libnanoflann-dev)")
