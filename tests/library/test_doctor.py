"""What `clamor doctor` makes of what it finds; tests/cluster/test_doctor_containers.py looks."""

from __future__ import annotations

import errno
import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from clamor_ray._protocol.config import Config
from clamor_ray.cli import ports
from clamor_ray.cli.machine import Directory, Finding, Machine, findings, look
from clamor_ray.cli.main import main

GIB = 1 << 30
WELL = Machine(
    refusals=(0, 0, 0),
    device_mode=0o666,
    kernel="6.18.4-cloud",
    shmem={"shmem_enabled": "never"},
    memory_bytes=16 * GIB,
    max_maps=65_530,
    descriptors=20_000,
    directories={"CLAMOR_SPILL_DIR": Directory("/data", "", 100 * GIB)},
    versions={"clamor-ray": "0.1.0", "ray": "2.60.0", "python": "3.11.7"},
)


def of(machine: Machine, **settings: object) -> dict[str, Finding]:
    return {each.check: each for each in findings(machine, Config.from_env({}, **settings))}


def test_all_is_well() -> None:
    found = of(WELL)
    assert {each.level for each in found.values()} == {"ok"}
    assert not any(each.remedy for each in found.values())
    assert found["memory"].says == (
        "16.0 GiB: cache 4.0 GiB, history 256.0 MiB, Ray's objects 4.8 GiB where nothing else was "
        "asked for; 5.3 GiB for variables and heaps"
    )


@pytest.mark.parametrize(
    ("change", "check", "level", "says", "remedy"),
    [
        (
            {"refusals": (errno.ENOENT, errno.EPERM, errno.ENOSYS), "device_mode": None},
            "trap",
            "note",
            "sigsegv",
            "This kernel, or its sandbox, has no userfaultfd",
        ),
        (
            {"refusals": (errno.EPERM, errno.EPERM, errno.EPERM), "seccomp": 2},
            "trap",
            "note",
            "sigsegv",
            "seccomp profile",
        ),
        ({"has_write_protect": False}, "exact reads", "note", "groups of 16 pages", "Linux 5.19"),
        (
            {"shmem": {"shmem_enabled": "always"}},
            "huge pages",
            "note",
            "copy what they send",
            "advise or never",
        ),
        (
            {
                "shmem": {
                    "shmem_enabled": "never",
                    "hugepages-64kB/shmem_enabled": "within_size",
                },
                "refusals": (errno.EPERM,) * 3,
            },
            "huge pages",
            "wrong",
            "does not start",
            "advise or never",
        ),
        ({"kernel": "6.1.0-13-amd64"}, "kernel", "note", "before 6.4", "6.7"),
        ({"page_bytes": 65_536}, "kernel", "wrong", "pages of 64.0 KiB", "pages of 4 KiB"),
        ({"kernel": "6.5.1"}, "kernel", "note", "PAGEMAP_SCAN", "6.7"),
        ({"memory_bytes": GIB // 2}, "memory", "note", "nothing is left", "object_store_memory"),
        (
            {"memory_bytes": 300 << 20},
            "memory",
            "wrong",
            "nothing is left",
            "CLAMOR_HISTORY_BYTES.",
        ),
        ({"memory_bytes": None}, "memory", "note", "does not say", ""),
        ({"descriptors": 1024}, "descriptors", "wrong", "1,024", "ulimit -Hn"),
        ({"descriptors": resource.RLIM_INFINITY}, "descriptors", "ok", "no limit", ""),
        ({"max_maps": 1000}, "maps", "note", "1,000", "vm.max_map_count"),
        ({"address_bytes": 8 * GIB}, "addresses", "wrong", "8.0 GiB", "ulimit -v unlimited"),
        (
            {"directories": {"X": Directory("/d", "gone")}},
            "disk",
            "wrong",
            "/d (X) takes",
            "exists",
        ),
        (
            {"directories": {"": Directory("/d", "", 1 << 20)}},
            "disk",
            "note",
            "1.0 MiB",
            "_SPILL_DIR",
        ),
        (
            {"directories": {"": Directory("/d", "", 9 * GIB, in_memory=True)}},
            "disk",
            "note",
            "tmpfs",
            "want a disk",
        ),
        ({"versions": {"ray": "2.49.1"}}, "versions", "wrong", "2.49.1", "Ray 2.50 or later"),
        ({"versions": {"python": "3.11"}}, "versions", "wrong", "Ray is not here", "pip install"),
    ],
)
def test_what_is_not_well(
    change: dict[str, object], check: str, level: str, says: str, remedy: str
) -> None:
    found = of(replace(WELL, **change))  # type: ignore[arg-type]
    assert found[check].level == level
    assert says in found[check].says
    assert remedy in found[check].remedy
    assert (remedy == "") == (found[check].remedy == "")
    others = {name for name, each in found.items() if each.level != "ok"} - {check, "trap"}
    assert not others - ({"huge pages"} if "refusals" in change else set())


def test_a_setting_that_cannot_be() -> None:
    assert of(replace(WELL, refusals=(errno.EPERM,) * 3), trap="uffd")["trap"].level == "wrong"
    asked = of(WELL, trap="sigsegv")["trap"]
    assert (asked.level, asked.says) == ("note", "sigsegv, because CLAMOR_TRAP says so")
    of_memory = Directory("/d", "", 9 * GIB, in_memory=True)
    on_memory = of(replace(WELL, directories={"": of_memory}), cache_disk_bytes="1GiB")["disk"]
    assert (on_memory.level, "wants a disk" in on_memory.says) == ("wrong", True)
    cache = of(WELL, cache_bytes="17GiB")["memory"]
    assert cache.level == "wrong"
    assert "Set it to 4.0 GiB" in cache.remedy


def test_this_machine_is_looked_at(tmp_path: Path) -> None:
    machine = look(Config.from_env({}, spill_dir=str(tmp_path), history_dir="/nothing/there"))
    assert machine.trap in ("uffd", "uffd-user", "sigsegv")
    assert machine.kernel
    assert machine.memory_bytes
    assert machine.directories["CLAMOR_SPILL_DIR"].free_bytes
    assert machine.directories["CLAMOR_HISTORY_DIR"].refusal == "No such file or directory"
    (tmp_path / "file").touch()
    file = look(Config.from_env({}, spill_dir=str(tmp_path / "file"))).directories
    assert file["CLAMOR_SPILL_DIR"].refusal == "it is no directory"
    assert machine.versions.keys() >= {"ray", "numpy", "python", "clamor-ray"}


def test_another_root(tmp_path: Path) -> None:
    """What the files say, not what this machine is."""
    files = {
        "proc/self/status": "Name:\tx\nSeccomp:\t2\nCapEff:\t0000000000080000\n",
        "proc/self/mounts": "/dev/sda / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n",
        "proc/sys/kernel/osrelease": "5.15.0-1\n",
        "proc/sys/vm/max_map_count": "4096\n",
        "proc/meminfo": "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [within_size] never",
        "sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled": "always [inherit]",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = look(Config.from_env({}, spill_dir="/tmp"), tmp_path)
    assert (machine.seccomp, machine.may_trace) == (2, True)
    assert list(machine.shmem.values()) == ["within_size", "inherit"]
    assert (machine.kernel, machine.max_maps, machine.device_mode) == ("5.15.0-1", 4096, None)
    assert machine.memory_bytes == GIB
    assert machine.directories["CLAMOR_SPILL_DIR"].in_memory


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    said = CliRunner().invoke(main, ["doctor", "--format", "json"])
    document = json.loads(said.stdout)
    levels = {each["level"] for each in document["findings"]}
    assert said.exit_code == int("wrong" in levels)
    text = CliRunner().invoke(main, ["doctor"]).stdout
    for each in document["findings"]:
        assert each["check"] in text
    monkeypatch.setenv("CLAMOR_CACHE_BYTES", "much")
    refused = CliRunner().invoke(main, ["doctor"])
    assert refused.exit_code == 2
    assert "CLAMOR_CACHE_BYTES is a number of bytes" in refused.stderr


AGENT_ENDS = """\
2026-11-28 18:14:52,350 ERROR agent.py:545 -- Agent is working abnormally.
Traceback (most recent call last):
  File "ray/_private/{}.py", line 329, in serve_http
    self.socket.bind(self.server_address)
OSError: [Errno 98] {}
"""
TAKEN = AGENT_ENDS.format("prometheus_exporter", "Address already in use")


@pytest.mark.parametrize(
    ("logs", "is_said"),
    [
        ({}, False),
        ({"dashboard_agent.log": "It serves.\n"}, False),
        ({"dashboard_agent.log": TAKEN}, True),
        ({"dashboard_agent.log": f"{TAKEN}It serves.\n"}, False),
        ({"dashboard_agent.log": "It serves.\n", "dashboard_agent.1.log": TAKEN}, True),
        ({f"dashboard_agent.{n}.log": TAKEN if n < 10 else "It serves." for n in (9, 10)}, False),
        ({"dashboard_agent.log": AGENT_ENDS.format("http", "Address already in use")}, False),
        ({"dashboard_agent.log": TAKEN.replace("98", "13")}, False),
    ],
)
def test_the_last_start_of_ray(logs: dict[str, str], is_said: bool, tmp_path: Path) -> None:
    for name, text in logs.items():
        (tmp_path / name).write_text(text)
    found = list(ports.of_last_start(tmp_path))
    assert bool(found) is is_said
    assert {each.level for each in found} <= {"note"}


def test_a_port_that_somebody_has_whom_nobody_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process of another user, or of another container."""
    monkeypatch.setattr(ports, "refusal", lambda port: errno.EADDRINUSE)
    (tmp_path / "proc/net").mkdir(parents=True)
    listens = "0: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 0 0 0 77 1"
    (tmp_path / "proc/net/tcp").write_text(f"the heads\n   {listens}\n")
    (tmp_path / "proc/7/fd").mkdir(parents=True)
    (tmp_path / "proc/7/cmdline").write_text("python\0-c\0\nserve()\0")
    assert ports.holder(8080, tmp_path) is None
    monkeypatch.setattr(ports, "holder", lambda port: None)
    found = ports.of_port(8080)
    assert (found.level, "another user or container" in found.says) == ("wrong", True)
    (tmp_path / "proc/7/fd/3").symlink_to("socket:[77]")
    monkeypatch.undo()
    assert ports.holder(8080, tmp_path) == ports.Holder(7, "python -c serve()")
    assert ports.holder(8081, tmp_path) is None


def test_a_port_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "refusal", lambda port: errno.EACCES)
    found = ports.of_port(80)
    assert found.level == "wrong"
    assert "80 is refused: Permission denied" in found.says
