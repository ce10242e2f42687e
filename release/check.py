"""Is what lies in a directory fit to be uploaded?

    python -m release.check DIRECTORY

* ``twine check --strict``: the page of the index shows.
* ``abi3audit --strict``: the extensions use nothing but the limited API of Python 3.10.
* The working tree is as the commit has it.
* Built again, in another directory and under another umask, the sdist and each wheel have the same
  bytes. That is said of one Python and zlib, which ``SHA256SUMS`` names: another one may pack
  otherwise.
* The wheel for this machine works in an environment that has nothing else (``smoke.py``). The bill
  of materials has the versions of that environment.
* ``SHA256SUMS`` has what was checked.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from release import sbom
from release.archives import ARCHITECTURES, ROOT, built_by, changed_files

BUILD_S = 900
INSTALL_S = 1200
SMOKE_S = 400


def _run(
    command: list[str], timeout_s: float = 300, cwd: Path | None = None, umask: int = -1
) -> None:
    print("+", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, timeout=timeout_s, cwd=cwd, env=environment, umask=umask)


def _architecture_of(wheel: Path) -> str:
    return next(name for name in ARCHITECTURES if wheel.stem.endswith(f"_{name}"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_is_committed() -> None:
    """
    Raises:
        SystemExit: What would be uploaded is of no commit.
    """
    if changed := changed_files():
        raise SystemExit(f"not as the commit has it: {', '.join(changed)}. Commit, or restore.")


def check_same_bytes(sdist: Path, wheels: list[Path]) -> None:
    """Builds all again, as a user whose files nobody else may read.

    Raises:
        SystemExit: Something has other bytes.
    """

    def build(*arguments: str | Path) -> None:
        command = [sys.executable, "-m", "release.archives", *map(str, arguments)]
        _run(command, BUILD_S, ROOT, umask=0o077)

    # Not beside the first build, and with another length of the path.
    with tempfile.TemporaryDirectory(prefix="again-in-a-longer-path-") as name:
        again = Path(name)
        build("sdist", again)
        for wheel in wheels:
            build("wheel", _architecture_of(wheel), again / sdist.name, again)
        for first in (sdist, *wheels):
            second = again / first.name
            if not second.is_file() or _sha256(first) != _sha256(second):
                raise SystemExit(f"{first.name} differs when it is built again")
            print(f"the same bytes: {_sha256(first)}  {first.name}")


def check_works(wheel: Path, scratch: Path) -> Path:
    """Installs a wheel in an environment of its own, and runs ``smoke.py`` there.

    Returns:
        The Python of the environment.
    """
    environment = scratch / "environment"
    _run([sys.executable, "-m", "venv", str(environment)])
    python = environment / "bin" / "python"
    _run([str(python), "-m", "pip", "install", "-q", str(wheel.resolve())], INSTALL_S)
    shutil.copy(ROOT / "release" / "smoke.py", scratch / "smoke.py")
    _run([str(python), "smoke.py"], SMOKE_S, scratch)
    return python


def main(directory: Path) -> None:
    check_is_committed()
    (sdist,) = directory.glob("*.tar.gz")
    wheels = sorted(directory.glob("*.whl"))
    if {_architecture_of(wheel) for wheel in wheels} != set(ARCHITECTURES):
        raise SystemExit(f"{directory} has not one wheel for each of {ARCHITECTURES}")
    files = [str(path) for path in (sdist, *wheels)]
    _run([sys.executable, "-m", "twine", "check", "--strict", *files])
    _run([sys.executable, "-m", "abi3audit", "--strict", "--summary", *files[1:]])
    check_same_bytes(sdist, wheels)
    with tempfile.TemporaryDirectory(prefix="clamor-") as name:
        (here,) = (wheel for wheel in wheels if _architecture_of(wheel) == platform.machine())
        bill = sbom.write(directory, check_works(here, Path(name)))
    sums = "".join(f"{_sha256(path)}  {path.name}\n" for path in (sdist, *wheels, bill))
    sums = f"# built by {built_by()}\n{sums}"  # a comment for `sha256sum --check`
    (directory / "SHA256SUMS").write_text(sums)
    print(sums, end="")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
