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
from clamor_ray._objects.layout import format_bytes
from clamor_ray._objects.memory import available_bytes, cache_budget, memory_bytes
from clamor_ray._protocol.config import Config
from clamor_ray._version import __version__

Level = Literal["ok", "note", "wrong"]

WAYS: Final = ("device", "call", "user call")  # as pc_userfaultfd_probe counts them
DEVICE: Final = "dev/userfaultfd"
CAP_SYS_PTRACE: Final = 19
SECCOMP_FILTERS: Final = 2
OBJECT_STORE_SHARE: Final = 0.3  # of a node's memory: what Ray takes by itself
FULL_SHARE: Final = 0.9  # of a limit: homes, cache, history, object store and heaps are below
LEAST_MAPS: Final = 65_530
LEAST_DESCRIPTORS: Final = 4096
LEAST_DISK_BYTES: Final = 1 << 30
OLDEST_RAY: Final = (2, 50)
OLDEST_SCAN: Final = (6, 7)  # Linux with PAGEMAP_SCAN
OLDEST_SINGLE: Final = (6, 4)  # before it khugepaged may fill holes
SETTINGS: Final = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
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
class Machine:
    """What was found; numbers that the kernel does not say are None.

    Args:
        refusals: the errno of each of `WAYS` to a userfaultfd; 0: it gives one.
        device_mode: the permissions of /dev/userfaultfd; None: there is none.
        seccomp: of this process: 0, none; 1, strict; 2, filters.
        may_trace: whether CAP_SYS_PTRACE is effective.
        shmem: the setting of huge pages in shared memory; "" where the kernel has none.
        memory_bytes: the least of the machine's and of the limits of cgroups.
        directory: where history and spilled homes go to.
        versions: of packages, by name.
    """

    refusals: tuple[int, int, int]
    has_write_protect: bool = True
    device_mode: int | None = None
    user: int = 0
    seccomp: int = 0
    may_trace: bool = False
    kernel: str = ""
    shmem: str = ""
    memory_bytes: int | None = None
    available_bytes: int | None = None
    max_maps: int | None = None
    descriptors: int = resource.RLIM_INFINITY
    address_bytes: int = resource.RLIM_INFINITY
    directory: str = ""
    disk_free_bytes: int | None = None
    disk_in_memory: bool = False
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
    setting = _text(root / SETTINGS.lstrip("/"))
    _, _, chosen = setting.partition("[")
    directory = Path(config.spill_dir or config.history_dir or os.environ.get("RAY_TMPDIR", "/tmp"))
    disk_free_bytes = None
    with contextlib.suppress(OSError):
        disk_free_bytes = shutil.disk_usage(directory).free
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
        shmem=chosen.partition("]")[0],
        memory_bytes=memory_bytes(root),
        available_bytes=available_bytes(root),
        max_maps=_number(root / "proc/sys/vm/max_map_count"),
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        address_bytes=resource.getrlimit(resource.RLIMIT_AS)[0],
        directory=str(directory),
        disk_free_bytes=disk_free_bytes,
        disk_in_memory=_file_system(directory, root) in ("tmpfs", "ramfs"),
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
    if machine.shmem in HUGE_SETTINGS:
        without = 0 not in machine.refusals
        yield Finding(
            "huge pages",
            "wrong" if without else "note",
            f"shared memory is made of huge pages ({SETTINGS} is {machine.shmem}): "
            + ("a page server does not start" if without else "page servers copy what they send"),
            f"Set {SETTINGS} to advise or never.",
        )
    else:
        yield Finding("huge pages", "ok", f"shared memory: {machine.shmem or 'no setting'}")
    kernel = _kernel_of(machine.kernel)
    if kernel < OLDEST_SINGLE:
        says = "before 6.4: scans of the page table are slow"
    elif kernel < OLDEST_SCAN:
        says = "before 6.7: without PAGEMAP_SCAN what was touched is found more slowly"
    else:
        says = ""
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
    store_bytes = int(OBJECT_STORE_SHARE * has_bytes)
    sum_bytes = cache_bytes + config.history_bytes + store_bytes
    parts = (
        f"cache {format_bytes(cache_bytes)}, history {format_bytes(config.history_bytes)}, Ray's "
        f"objects {format_bytes(store_bytes)}"
    )
    left_bytes = int(FULL_SHARE * has_bytes) - sum_bytes
    if left_bytes <= 0:
        yield Finding(
            "memory",
            "wrong",
            f"{format_bytes(has_bytes)}, and the budgets are {format_bytes(sum_bytes)} ({parts}): "
            "nothing is left for variables and heaps",
            "Give the container more memory, or lower CLAMOR_CACHE_BYTES, CLAMOR_HISTORY_BYTES or "
            "Ray's object_store_memory.",
        )
    else:
        yield Finding(
            "memory",
            "ok",
            f"{format_bytes(has_bytes)}: {parts}; {format_bytes(left_bytes)} for variables and "
            "heaps",
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


def _disk(machine: Machine) -> Iterator[Finding]:
    free_bytes = machine.disk_free_bytes
    if free_bytes is None:
        yield Finding(
            "disk",
            "wrong",
            f"{machine.directory} cannot be looked at",
            "CLAMOR_HISTORY_DIR and CLAMOR_SPILL_DIR are directories that exist.",
        )
        return
    says = f"{format_bytes(free_bytes)} free in {machine.directory}"
    if machine.disk_in_memory:
        yield Finding(
            "disk",
            "note",
            f"{says}, which is memory (tmpfs)",
            "Old versions and spilled variables want a disk: CLAMOR_HISTORY_DIR, CLAMOR_SPILL_DIR.",
        )
    elif free_bytes < LEAST_DISK_BYTES:
        yield Finding(
            "disk",
            "note",
            says,
            "Old versions and spilled variables find little room: CLAMOR_HISTORY_DIR, "
            "CLAMOR_SPILL_DIR.",
        )
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
        *_disk(machine),
        *_versions(machine),
    ]
