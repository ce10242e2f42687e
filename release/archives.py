"""The sdist and the wheels. The same Python, zlib and tools make the same bytes again.

    python -m release.archives sdist DIRECTORY
    python -m release.archives wheel x86_64|aarch64 SDIST DIRECTORY

The sdist has what git knows, as it is in the working tree. A wheel is built from the sdist, in a
directory of its own: what is in the tree beside it, such as an extension that was built there, does
not count. The compiler is Zig's clang, which has headers
and stubs of each glibc: so one machine builds for both processors, for the glibc of manylinux_2_28.
"""

from __future__ import annotations

import gzip
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")
# Archives have modes of files that the build makes: the user's umask must not be in them.
UMASK = 0o022


def built_by() -> str:
    """What else must be the same for the same bytes: tools are pinned, and these are not."""
    return (
        f"{platform.python_implementation()} {platform.python_version()}, "
        f"zlib {zlib.ZLIB_RUNTIME_VERSION}"
    )


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def changed_files() -> list[str]:
    """What git knows, and is not as the commit has it."""
    listed = _git("status", "--porcelain", "-z", "--no-renames", "--untracked-files=no")
    return [entry[3:] for entry in listed.split("\0") if entry]


def copy_tree(into: Path) -> None:
    """What git knows, as it is in the working tree. Nothing that only lies beside it.

    Args:
        into: The directory, which need not exist.
    """
    for name in filter(None, _git("ls-files", "-z").split("\0")):
        source = ROOT / name
        if source.is_file():  # one that was deleted is none
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, into / name)


def commit_epoch_s() -> int:
    """When the commit was made: the time of all that is built, unless SOURCE_DATE_EPOCH says it."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    return int(_git("log", "-1", "--format=%ct"))


def _build(tree: Path, kind: str, into: Path, environment: dict[str, str]) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(into)]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{command} failed")
    (built,) = into.iterdir()
    return built


def _same_everywhere(archive: Path, out: Path, epoch_s: int) -> None:
    """Writes an archive's files anew: in the order of their names, of nobody, of one time."""
    content = io.BytesIO()
    with (
        tarfile.open(archive) as before,
        tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as after,
    ):
        for member in sorted(before.getmembers(), key=lambda member: member.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = epoch_s
            member.pax_headers = {}
            # Its owner's umask is not part of it.
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            after.addfile(member, before.extractfile(member) if member.isfile() else None)
    with out.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=epoch_s) as packed:
        packed.write(content.getvalue())


def make_sdist(into: Path) -> Path:
    """Builds the sdist of what git knows, as it is in the working tree.

    Args:
        into: The directory, which need not exist.

    Returns:
        The sdist.
    """
    epoch_s = commit_epoch_s()
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        copy_tree(tree)
        built = _build(tree, "sdist", Path(scratch, "out"), {"SOURCE_DATE_EPOCH": str(epoch_s)})
        _same_everywhere(built, into / built.name, epoch_s)
    return into / built.name


def _headers_of(architecture: str, scratch: Path) -> Path:
    """A folder with ``pyconfig.h`` where Debian's Python looks for it, for another processor.

    Both processors have the same sizes of C's types, and an extension of the limited API takes
    nothing else from it.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = scratch / f"{architecture}-linux-gnu" / version
    folder.mkdir(parents=True)
    shutil.copy(sysconfig.get_config_h_filename(), folder / "pyconfig.h")
    return scratch


def make_wheel(architecture: str, sdist: Path, into: Path) -> Path:
    """Builds the wheel of one processor, and has auditwheel check that it is of manylinux_2_28.

    Args:
        architecture: Of ``ARCHITECTURES``.
        sdist: What ``make_sdist`` made.
        into: The directory, which need not exist.

    Returns:
        The wheel.

    Raises:
        SystemExit: It cannot be built; or it needs more than manylinux_2_28 has.
    """
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch / "tree", filter="data")
        (tree,) = (scratch / "tree").iterdir()
        headers = _headers_of(architecture, scratch / "headers")
        compiler = f"{sys.executable} -m ziglang cc -target {architecture}-linux-gnu.{GLIBC}"
        environment = {
            "SOURCE_DATE_EPOCH": str(commit_epoch_s()),
            "_PYTHON_HOST_PLATFORM": f"linux-{architecture}",
            "CC": compiler,
            "LDSHARED": f"{compiler} -shared",
            "CFLAGS": f"-I{headers} -ffile-prefix-map={scratch}=.",
            "LDFLAGS": "-Wl,--strip-debug",
        }
        built = _build(tree, "wheel", scratch / "out", environment)
        return Path(shutil.copy(_tagged(built, architecture, scratch / "tagged"), into))


def _tagged(wheel: Path, architecture: str, into: Path) -> Path:
    """The wheel as one of manylinux_2_28, where auditwheel finds that it is, or of an older one."""
    tools = {**os.environ, "SOURCE_DATE_EPOCH": str(commit_epoch_s())}
    tools["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(*command: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", *command], env=tools, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{done.stderr}\n{command} failed")

    # Of another processor's policies it takes "auto" alone.
    run("auditwheel", "repair", "--only-plat", "--plat=auto", f"--wheel-dir={into}", str(wheel))
    (found,) = into.iterdir()
    needed = re.search(rf"-manylinux_(\d+)_(\d+)_{architecture}\.whl$", found.name)
    if needed is None or tuple(map(int, needed.groups())) > tuple(map(int, GLIBC.split("."))):
        raise SystemExit(f"{found.name} needs more than glibc {GLIBC}")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{architecture}"
    run("wheel", "tags", "--remove", f"--platform-tag={tag}", str(found))
    (tagged,) = into.iterdir()
    return tagged


def main(arguments: list[str]) -> None:
    os.umask(UMASK)
    match arguments:
        case ["sdist", into]:
            print(make_sdist(Path(into)))
        case ["wheel", architecture, sdist, into] if architecture in ARCHITECTURES:
            print(make_wheel(architecture, Path(sdist), Path(into)))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
