"""What the environment sets, in one table.

| variable | default | meaning |
|---|---|---|
| CLAMOR_TRAP | auto | auto, uffd or sigsegv: how an absent block is noticed |
| CLAMOR_READ_SETS | coarse | coarse, exact or off: what tasks record of what they touched |
| CLAMOR_REATTACH_S | 30 | how long a blocked thread waits for a restarted page server |
| CLAMOR_FETCH_TIMEOUT_S | 10 | one request from one page server to another |
| CLAMOR_FAULT_TIMEOUT_S | 60 | all tries of one block; also the default of prefetch |
| CLAMOR_CONNECT_TIMEOUT_S | 5 | connecting to the page server of this node |
| CLAMOR_PAGE_BYTES | 0 | size of a demand fetch, a power of two, 4096 to 8388608; 0: by use |
| CLAMOR_CACHE_BYTES | 0 | cached blocks that a node keeps; 0: a quarter of the node's memory |
| CLAMOR_CACHE_DISK_BYTES | 0 | what was evicted of them that a node keeps on disk; 0: nothing |
| CLAMOR_WRITE_BYTES | 0 | what a transaction keeps here of a spread variable; 0: a quarter |
| CLAMOR_CACHE_POLICY | sieve | what goes first: sieve, fifo, lru, lfu, random |
| CLAMOR_REPLICATION | p2c | whom a busy home sends askers to: p2c, random or off |
| CLAMOR_CONTROL_TIMEOUT_S | 60 | one call to the registry, page-server start included |
| CLAMOR_VIEW_REF_BYTES | 65536 | a view from this size on travels as a reference; 0: none does |
| CLAMOR_ORPHAN_S | 21600 | how long a keeper holds memory for a page server that is not there |
| CLAMOR_IDLE_NODE_S | 0 | an autoscaler's node that is idle so long is drained; 0: none is |
| CLAMOR_HISTORY_BYTES | 268435456 | old blocks that a page server keeps in memory, then |
| CLAMOR_HISTORY_DISK_BYTES | 4294967296 | on its node's disk; 0: none |
| CLAMOR_REPAIR_BYTES_S | 268435456 | read a second to make lost pieces again; 0: no limit |
| CLAMOR_SOCKET_DIR | /tmp | where our directory of Unix sockets is made, on every node |
| CLAMOR_HISTORY_DIR | | where, on every node; empty: Ray's session directory (/tmp/ray/...) |
| CLAMOR_SPILL_DIR | | where spill=True and the cache's disk put files; empty: CLAMOR_HISTORY_DIR |
| CLAMOR_METRICS | on | whether page servers and the registry export metrics: on or off |
| CLAMOR_SPANS | on | whether spans are recorded for `clamor timeline`: on or off |

Numbers of bytes may have a unit: 512MB (millions), 4GiB (powers of 1024).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal, cast

from clamor_ray._protocol.names import SOCKETS_BELOW, SOCKETS_BELOW_BYTES

ReadSets = Literal["coarse", "exact", "off"]

LEAST_CACHE_BYTES: Final = 1 << 20
# Of each: the least that is not 0, of what, and what 0 stands for.
_LEAST: Final = {
    "cache_bytes": (LEAST_CACHE_BYTES, "", "a quarter of each node's memory"),
    "cache_disk_bytes": (8 << 20, "", "nothing on disk"),
    "repair_bytes_s": (1 << 20, " a second", "no limit"),
}
_BYTES = ("history_bytes", "history_disk_bytes", "view_ref_bytes", "write_bytes")
_CHOICES = {
    "trap": ("auto", "uffd", "sigsegv"),
    "read_sets": ("coarse", "exact", "off"),
    "cache_policy": ("sieve", "fifo", "lru", "lfu", "random"),
    "replication": ("p2c", "random", "off"),
    "metrics": ("on", "off"),
    "spans": ("on", "off"),
}
_UNITS: Final = dict.fromkeys(("", "b"), 1) | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("kmgt", 1)
    for unit, base in (("b", 1000), ("ib", 1024))
}


def parse_bytes(text: str) -> int | None:
    """A number of bytes, with or without a unit; None where it is none.

    Example:
        >>> parse_bytes("4GiB"), parse_bytes("1.5 MB"), parse_bytes("1e9")
        (4294967296, 1500000, None)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text, re.ASCII)
    unit = _UNITS.get(found[2].lower()) if found is not None else None
    if found is None or unit is None or (unit == 1 and "." in found[1]):
        return None
    return int(found[1]) * unit if "." not in found[1] else int(float(found[1]) * unit)


def check_read_sets(value: str) -> ReadSets:
    """`value` as a read-set choice.

    Raises:
        ValueError: It is none.
    """
    if value not in _CHOICES["read_sets"]:
        raise ValueError(f"read_set is one of coarse, exact and off, not {value!r}")
    return cast(ReadSets, value)


def read_sets_of_env() -> ReadSets:
    """What CLAMOR_READ_SETS says now, as `Config.from_env` has it: for every call, so that alone.

    Raises:
        ValueError: It makes no sense.
    """
    text = os.environ.get("CLAMOR_READ_SETS", "").strip()
    return cast(ReadSets, _read("read_sets", "CLAMOR_READ_SETS", text)) if text else "coarse"


def check_page_bytes(variable: str, text: str) -> int:
    """A page size, 0 included.

    Raises:
        ValueError: It is none; the message begins with the variable's name.
    """
    n = parse_bytes(text)
    if n is None or (n != 0 and not (4096 <= n <= 8 << 20 and n & (n - 1) == 0)):
        raise ValueError(f"{variable} is 0 or a power of two from 4096 to 8388608, not {text!r}")
    return n


def _bytes(variable: str, text: str) -> int:
    n = parse_bytes(text)
    if n is None or n >= 1 << 62:
        raise ValueError(f"{variable} is a number of bytes, 0 or more, not {text!r}")
    return n


def _bytes_from(field: str, variable: str, text: str) -> int:
    n, (least, unit, zero) = _bytes(variable, text), _LEAST[field]
    if 0 < n < least:
        raise ValueError(
            f"{variable} is at least {least} bytes ({least >> 20} MiB){unit}, or 0 for {zero}, not "
            f"{text!r}"
        )
    return n


def _directory(variable: str, text: str) -> str:
    if not os.path.isabs(text):
        raise ValueError(f"{variable} is the full path of a directory, not {text!r}")
    return text


def _socket_directory(variable: str, text: str) -> str:
    if len(os.fsencode(_directory(variable, text))) > SOCKETS_BELOW_BYTES:
        raise ValueError(
            f"{variable} has at most {SOCKETS_BELOW_BYTES} bytes, because the kernel takes 107 for "
            f"the path of a Unix socket; {text!r} is longer"
        )
    return text


ANSWER_S: Final = 5.0  # that the page server of this node has to say why there is nothing
# A seal is answered when the keeper has heard of it. The page server ends a keeper that takes
# nothing for 30 s (SLOW_NS of keeping.c), gives up 30 s after that, and says why: whoever asks
# waits longer.
SEAL_S: Final = 70.0


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of this process; `from_env` reads them, the table above says what they mean."""

    trap: str = "auto"
    read_sets: ReadSets = "coarse"
    reattach_s: float = 30.0
    fetch_timeout_s: float = 10.0
    fault_timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    control_timeout_s: float = 60.0
    orphan_s: float = 21600.0
    idle_node_s: float = 0.0
    page_bytes: int = 0
    cache_bytes: int = 0
    cache_disk_bytes: int = 0
    write_bytes: int = 0
    cache_policy: str = "sieve"
    replication: str = "p2c"
    history_bytes: int = 256 << 20
    history_disk_bytes: int = 4 << 30
    repair_bytes_s: int = 256 << 20
    history_dir: str = ""
    spill_dir: str = ""
    socket_dir: str = SOCKETS_BELOW
    view_ref_bytes: int = 65536
    metrics: str = "on"
    spans: str = "on"

    @property
    def patience_s(self) -> float:
        """How long blocks are waited for where no timeout is given. The page server gives up
        before: it knows which server is not reached, and why."""
        return self.fault_timeout_s + ANSWER_S

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **given: object) -> Config:
        """Reads `CLAMOR_*`; what is not set keeps its default.

        Args:
            environ: instead of this process's.
            given: by the names of the fields; what is not None comes before the environment.

        Raises:
            ValueError: A value makes no sense; the message names the variable, or the argument.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for field in fields(cls):
            name = f"CLAMOR_{field.name.upper()}"
            text = environ.get(name, "").strip()
            if (value := given.get(field.name)) is not None:
                name, text = field.name, str(value)
            if text or value is not None:
                values[field.name] = _read(field.name, name, text)
        return cls(**values)  # type: ignore[arg-type]


def _read(field: str, name: str, text: str) -> object:
    choices = _CHOICES.get(field)
    if choices is not None:
        if text not in choices:
            raise ValueError(f"{name} is one of {', '.join(choices)}, not {text!r}")
        return text
    if field == "page_bytes":
        return check_page_bytes(name, text)
    if field in _LEAST:
        return _bytes_from(field, name, text)
    if field in _BYTES:
        return _bytes(name, text)
    if field == "socket_dir":
        return _socket_directory(name, text)
    if field in ("history_dir", "spill_dir"):
        return _directory(name, text)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    may_be_zero = field == "idle_node_s"
    if not (0 < seconds < float("inf") or (may_be_zero and seconds == 0)):
        least = ", 0 or more" if may_be_zero else " above 0"
        raise ValueError(f"{name} is a number of seconds{least}, not {text!r}")
    return seconds
