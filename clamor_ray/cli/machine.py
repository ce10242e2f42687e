"""In: what the kernel says of this machine. Out: facts, and what they mean for a session here."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from clamor_ray._native import base
from clamor_ray._objects.layout import BLOCK_BYTES, format_bytes
from clamor_ray._objects.memory import (
    FULL_SHARE,
    budget_trouble,
    cache_budget,
    memory_bytes,
)
from clamor_ray._protocol.config import Config
from clamor_ray._version import __version__

Level = Literal["ok", "note", "wrong"]

WAYS: Final = ("device", "call", "user call")  # as pc_userfaultfd_probe counts them
DEVICE: Final = "dev/userfaultfd"
CAP_SYS_PTRACE: Final = 19
SECCOMP_FILTERS: Final = 2
OBJECT_STORE_SHARE: Final = 0.3  # of a node's memory: what Ray takes by itself, and at most
MOST_OBJECT_STORE_BYTES: Final = 200 * 10**9
LEAST_MAPS: Final = 65_530
LEAST_DESCRIPTORS: Final = 4096
LEAST_DISK_BYTES: Final = 1 << 30
OLDEST_RAY: Final = (2, 50)
OLDEST_SCAN: Final = (6, 7)  # Linux with PAGEMAP_SCAN
OLDEST_SINGLE: Final = (6, 4)  # before it khugepaged may fill holes
SETTINGS: Final = "/sys/kernel/mm/transparent_hugepage"
SETTING: Final = "shmem_enabled"  # of all sizes, and in a folder for each
HUGE_SETTINGS: Final = ("always", "within_size", "force")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        check: its name.
        level: "ok"; "note": it works, and something is slower or narrower; "wrong": it does not.
        says: what was found.
        remedy: what to do; "" where nothing is to be done.
    """

    check: str
    level: Level
    says: str
    remedy: str = ""


@dataclass(frozen=True)
class Directory:
    """One that files go to.

    Args:
        path: of it.
        refusal: why nothing can be written there; "": it can.
        free_bytes: there.
        in_memory: whether its file system is memory.
    """

    path: str
    refusal: str = ""
    free_bytes: int = 0
    in_memory: bool = False


@dataclass(frozen=True)
class Machine:
    """What was found; numbers that the kernel does not say are None.

    Args:
        refusals: the errno of each of `WAYS` to a userfaultfd; 0: it gives one.
        device_mode: the permissions of /dev/userfaultfd; None: there is none.
        seccomp: of this process: 0, none; 1, strict; 2, filters.
        may_trace: whether CAP_SYS_PTRACE is effective.
        page_bytes: of the kernel.
        shmem: the settings of huge pages in shared memory, by file below `SETTINGS`.
        memory_bytes: the least of the machine's and of the limits of cgroups.
        directories: where history and spilled homes go to, by the variable that says so; "" for
            Ray's own.
        versions: of packages, by name.
    """

    refusals: tuple[int, int, int]
    has_write_protect: bool = True
    device_mode: int | None = None
    user: int = 0
    seccomp: int = 0
    may_trace: bool = False
    kernel: str = ""
    page_bytes: int = BLOCK_BYTES
    shmem: dict[str, str] = field(default_factory=dict)
    memory_bytes: int | None = None
    max_maps: int | None = None
    descriptors: int = resource.RLIM_INFINITY
    address_bytes: int = resource.RLIM_INFINITY
    directories: dict[str, Directory] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def trap(self) -> str:
        """The best that is to be had: as `clamor.stats()` names it."""
        device, call, user_call = self.refusals
        if 0 in (device, call):
            return "uffd"
        return "uffd-user" if user_call == 0 else "sigsegv"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    with contextlib.suppress(ValueError):
        return int(_text(path))
    return None


def _status(root: Path) -> dict[str, str]:
    lines = _text(root / "proc/self/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _file_system(directory: Path, root: Path) -> str:
    """Its type, by the longest mount above the directory."""
    found = ("", "")
    for line in _text(root / "proc/self/mounts").splitlines():
        _, mount, kind, *_ = [*line.split(), "", "", ""]
        above = mount == "/" or f"{directory}/".startswith(f"{mount}/")
        if above and len(mount) >= len(found[0]):
            found = (mount, kind)
    return found[1]


def _directory(path: str, root: Path) -> Directory:
    try:
        free_bytes = shutil.disk_usage(path).free
    except OSError as refusal:
        return Directory(path, refusal.strerror or type(refusal).__name__)
    if not os.path.isdir(path):
        return Directory(path, "it is no directory")
    if not os.access(path, os.W_OK | os.X_OK):
        return Directory(path, "this user may not write there")
    in_memory = _file_system(Path(path), root) in ("tmpfs", "ramfs")
    return Directory(path, "", free_bytes, in_memory)


def _shmem(settings: Path) -> dict[str, str]:
    """What is chosen in each file, as `huge_pages.c` looks: [always] advise never."""
    found = {}
    for path in (settings / SETTING, *sorted(settings.glob(f"hugepages-*/{SETTING}"))):
        chosen = _text(path).partition("[")[2].partition("]")[0]
        if chosen:
            found[str(path.relative_to(settings))] = chosen
    return found


def probe() -> tuple[tuple[int, int, int], bool]:
    """Asks the kernel for a userfaultfd in each way: the refusals, and whether one that is given
    protects pages from writes, without which reads are recorded by the page table alone."""
    refusals, protects = [], []
    has = base.c.ffi.new("int *")
    for way in range(len(WAYS)):
        refusals.append(int(base.c.lib.pc_userfaultfd_probe(way, has)))
        protects.append(bool(has[0]))
    device, call, user_call = refusals
    return (device, call, user_call), any(protects)


def look(config: Config, root: Path = Path("/")) -> Machine:
    """What this machine is.

    Args:
        config: the settings of this process.
        root: of the file system that holds /proc, /sys and /dev; tests give their own.
    """
    refusals, has_write_protect = probe()
    status = _status(root)
    device_mode = None
    with contextlib.suppress(OSError):
        device_mode = stat.S_IMODE((root / DEVICE).stat().st_mode)
    asked = {"CLAMOR_HISTORY_DIR": config.history_dir, "CLAMOR_SPILL_DIR": config.spill_dir}
    directories = {name: _directory(path, root) for name, path in asked.items() if path}
    if not directories:
        directories = {"": _directory(os.environ.get("RAY_TMPDIR", "/tmp"), root)}
    versions = {"python": sys.version.split()[0], "clamor-ray": __version__}
    for package in ("ray", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return Machine(
        refusals=refusals,
        has_write_protect=has_write_protect,
        device_mode=device_mode,
        user=os.geteuid(),
        seccomp=int(status.get("Seccomp", "0") or 0),
        may_trace=bool(int(status.get("CapEff", "0") or "0", 16) >> CAP_SYS_PTRACE & 1),
        kernel=_text(root / "proc/sys/kernel/osrelease").strip(),
        page_bytes=resource.getpagesize(),
        shmem=_shmem(root / SETTINGS.lstrip("/")),
        memory_bytes=memory_bytes(root),
        max_maps=_number(root / "proc/sys/vm/max_map_count"),
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        address_bytes=resource.getrlimit(resource.RLIMIT_AS)[0],
        directories=directories,
        versions=versions,
    )


def _kernel_of(release: str) -> tuple[int, int]:
    numbers = release.replace("-", ".").split(".")
    with contextlib.suppress(ValueError, IndexError):
        return int(numbers[0]), int(numbers[1])
    return (0, 0)


def _why_no_device(machine: Machine) -> str:
    refusal = machine.refusals[0]
    if machine.device_mode is None:
        return (
            "There is no /dev/userfaultfd here (Linux 6.1 and later have it; a container must be "
            "given it)."
        )
    if refusal == errno.EACCES:
        return (
            f"/dev/userfaultfd has mode {machine.device_mode:04o}, and this is user "
            f"{machine.user}: a udev rule on the machine makes it 0666."
        )
    if refusal == errno.EPERM:
        return (
            "/dev/userfaultfd is here, and the container's cgroup forbids it: it wants a device "
            "rule (a device plugin, or --device), not only a mount."
        )
    return f"/dev/userfaultfd is refused: {os.strerror(refusal)}."


def _why_no_call(machine: Machine) -> str:
    refusal = machine.refusals[2]
    if refusal == errno.ENOSYS:
        return "This kernel, or its sandbox, has no userfaultfd."
    if machine.seccomp == SECCOMP_FILTERS:
        return (
            "The seccomp profile of this container refuses userfaultfd: use a profile that allows "
            "it (Localhost, in Kubernetes), or give the container /dev/userfaultfd."
        )
    return f"userfaultfd(2) is refused: {os.strerror(refusal)}."


def _trap(machine: Machine, config: Config) -> Iterator[Finding]:
    trap = machine.trap
    if config.trap == "sigsegv":
        yield Finding("trap", "note", "sigsegv, because CLAMOR_TRAP says so")
    elif trap == "uffd":
        way = WAYS[machine.refusals.index(0)]
        yield Finding("trap", "ok", f"uffd, by the {way}: system calls wait for absent pages, too")
    elif trap == "uffd-user":
        wants = "CAP_SYS_PTRACE as root, or vm.unprivileged_userfaultfd=1, or the device. "
        has = " (CAP_SYS_PTRACE is effective, and was not enough)" if machine.may_trace else ""
        yield Finding(
            "trap",
            "note",
            f"uffd-user: a system call on an absent page fails (Bad address){has}",
            f"To have it wait: {wants}{_why_no_device(machine)} Without it: "
            "clamor.prefetch(array) before the call.",
        )
    else:
        yield Finding(
            "trap",
            "wrong" if config.trap == "uffd" else "note",
            "sigsegv: a fault costs a signal, and a system call on an absent page fails",
            f"{_why_no_call(machine)} {_why_no_device(machine)}",
        )
    if trap != "sigsegv" and not machine.has_write_protect:
        yield Finding(
            "exact reads",
            "note",
            "this kernel's userfaultfd does not protect shared memory from writes: what tasks read "
            "is known in groups of 16 pages",
            "Linux 5.19 or later.",
        )


def _pages(machine: Machine) -> Iterator[Finding]:
    huge = {name: chosen for name, chosen in machine.shmem.items() if chosen in HUGE_SETTINGS}
    if huge:
        without = 0 not in machine.refusals
        name, chosen = next(iter(huge.items()))
        yield Finding(
            "huge pages",
            "wrong" if without else "note",
            f"shared memory is made of huge pages ({SETTINGS}/{name} is {chosen}): "
            + ("a page server does not start" if without else "page servers copy what they send"),
            f"Set {' and '.join(f'{SETTINGS}/{each}' for each in huge)} to advise or never.",
        )
    else:
        said = machine.shmem.get(SETTING, "no setting")
        yield Finding("huge pages", "ok", f"shared memory: {said}")
    kernel = _kernel_of(machine.kernel)
    if kernel < OLDEST_SINGLE:
        says = "before 6.4: scans of the page table are slow"
    elif kernel < OLDEST_SCAN:
        says = "before 6.7: without PAGEMAP_SCAN what was touched is found more slowly"
    else:
        says = ""
    if machine.page_bytes != BLOCK_BYTES:
        yield Finding(
            "kernel",
            "wrong",
            f"Linux {machine.kernel} has pages of {format_bytes(machine.page_bytes)}: a block has "
            f"{format_bytes(BLOCK_BYTES)}, and must be a page",
            "Boot a kernel with pages of 4 KiB (of arm64 there are both).",
        )
        return
    yield Finding(
        "kernel",
        "note" if says else "ok",
        f"Linux {machine.kernel}" + (f", {says}" if says else ""),
        "Linux 6.7 or later." if says else "",
    )


def _memory(machine: Machine, config: Config) -> Iterator[Finding]:
    has_bytes = machine.memory_bytes
    if has_bytes is None:
        yield Finding("memory", "note", "the kernel does not say how much there is")
        return
    if config.cache_bytes > has_bytes:
        yield Finding(
            "memory",
            "wrong",
            f"CLAMOR_CACHE_BYTES is {format_bytes(config.cache_bytes)}, and this node has "
            f"{format_bytes(has_bytes)}: no session begins",
            f"Set it to {format_bytes(cache_budget(0, has_bytes, ''))}, or leave it away.",
        )
        return
    cache_bytes = cache_budget(config.cache_bytes, has_bytes, "")
    store_bytes = min(int(OBJECT_STORE_SHARE * has_bytes), MOST_OBJECT_STORE_BYTES)
    own_bytes = cache_bytes + config.history_bytes
    left_bytes = int(FULL_SHARE * has_bytes) - own_bytes - store_bytes
    says = (
        f"{format_bytes(has_bytes)}: cache {format_bytes(cache_bytes)}, history "
        f"{format_bytes(config.history_bytes)}, Ray's objects {format_bytes(store_bytes)} where "
        "nothing else was asked for; "
    )
    if left_bytes > 0:
        yield Finding("memory", "ok", f"{says}{format_bytes(left_bytes)} for variables and heaps")
        return
    # What Ray was given nobody knows here: its share alone makes nothing wrong.
    is_wrong = budget_trouble(has_bytes, cache_bytes, config.history_bytes) is not None
    yield Finding(
        "memory",
        "wrong" if is_wrong else "note",
        f"{says}nothing is left for variables and heaps",
        "Give the container more memory, or lower CLAMOR_CACHE_BYTES or CLAMOR_HISTORY_BYTES"
        + ("." if is_wrong else ", or Ray's object_store_memory."),
    )


def _limits(machine: Machine) -> Iterator[Finding]:
    hard = machine.descriptors
    few = hard != resource.RLIM_INFINITY and hard < LEAST_DESCRIPTORS
    yield Finding(
        "descriptors",
        "wrong" if few else "ok",
        "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,} for a process",
        f"A page server has one for each variable: ulimit -Hn {LEAST_DESCRIPTORS} or more."
        if few
        else "",
    )
    if machine.max_maps is not None:
        little = machine.max_maps < LEAST_MAPS
        yield Finding(
            "maps",
            "note" if little else "ok",
            f"{machine.max_maps:,} for a process",
            f"sysctl vm.max_map_count={LEAST_MAPS} or more: variables of many pieces need them."
            if little
            else "",
        )
    if machine.address_bytes != resource.RLIM_INFINITY:
        yield Finding(
            "addresses",
            "wrong",
            f"a process may have {format_bytes(machine.address_bytes)} of addresses",
            "Sessions map variables at the same addresses everywhere: ulimit -v unlimited.",
        )


def _disk(machine: Machine, config: Config) -> Iterator[Finding]:
    for name, directory in machine.directories.items():
        named = f"{directory.path}{name and f' ({name})'}"
        if directory.refusal:
            yield Finding(
                "disk",
                "wrong",
                f"{named} takes no files: {directory.refusal}; no page server starts",
                "A directory that exists on every node, and that its user may write to.",
            )
            continue
        says = f"{format_bytes(directory.free_bytes)} free in {named}"
        remedy = "Old versions and spilled variables want a disk: CLAMOR_HISTORY_DIR, "
        if directory.in_memory:
            wants_disk = config.cache_disk_bytes > 0
            yield Finding(
                "disk",
                "wrong" if wants_disk else "note",
                f"{says}, which is memory (tmpfs)"
                + (": CLAMOR_CACHE_DISK_BYTES wants a disk" if wants_disk else ""),
                f"{remedy}CLAMOR_SPILL_DIR.",
            )
        elif directory.free_bytes < max(LEAST_DISK_BYTES, config.cache_disk_bytes):
            yield Finding("disk", "note", f"{says}, which is little", f"{remedy}CLAMOR_SPILL_DIR.")
        else:
            yield Finding("disk", "ok", says)


def _versions(machine: Machine) -> Iterator[Finding]:
    said = ", ".join(f"{name} {version}" for name, version in sorted(machine.versions.items()))
    ray = machine.versions.get("ray")
    if ray is None:
        yield Finding("versions", "wrong", f"{said}; Ray is not here", "pip install ray")
    elif _kernel_of(ray) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        yield Finding("versions", "wrong", said, f"Ray {oldest} or later.")
    else:
        yield Finding("versions", "ok", said)


def findings(machine: Machine, config: Config) -> list[Finding]:
    """What a session here would meet, in the order in which it would.

    Args:
        machine: what was found.
        config: the settings of this process.
    """
    return [
        *_trap(machine, config),
        *_pages(machine),
        *_memory(machine, config),
        *_limits(machine),
        *_disk(machine, config),
        *_versions(machine),
    ]
