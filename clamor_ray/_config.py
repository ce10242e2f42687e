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
| CLAMOR_CONTROL_TIMEOUT_S | 60 | one call to the registry, page-server start included |
| CLAMOR_VIEW_REF_BYTES | 65536 | a view from this size on travels as a reference; 0: none does |
| CLAMOR_ORPHAN_S | 30 | how long a keeper holds memory for a page server that does not come back |
| CLAMOR_HISTORY_BYTES | 268435456 | old blocks that a page server keeps in memory, then |
| CLAMOR_HISTORY_DISK_BYTES | 4294967296 | on its node's disk; 0: none |
| CLAMOR_HISTORY_DIR | | where, on every node; empty: Ray's session directory (/tmp/ray/...) |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, cast

ReadSets = Literal["coarse", "exact", "off"]

_BYTES = ("history_bytes", "history_disk_bytes", "view_ref_bytes")
_CHOICES = {"trap": ("auto", "uffd", "sigsegv"), "read_sets": ("coarse", "exact", "off")}


def check_read_sets(value: str) -> ReadSets:
    """`value` as a read-set choice.

    Raises:
        ValueError: It is none.
    """
    if value not in _CHOICES["read_sets"]:
        raise ValueError(f"read_set is one of coarse, exact and off, not {value!r}")
    return cast(ReadSets, value)


def _page_bytes(variable: str, text: str) -> int:
    n = int(text) if text.isdigit() else -1
    if n != 0 and not (4096 <= n <= 8 << 20 and n & (n - 1) == 0):
        raise ValueError(f"{variable} is 0 or a power of two from 4096 to 8388608, not {text!r}")
    return n


def _bytes(variable: str, text: str) -> int:
    if not text.isdigit() or int(text) >= 1 << 62:
        raise ValueError(f"{variable} is a number of bytes, 0 or more, not {text!r}")
    return int(text)


def _directory(variable: str, text: str) -> str:
    if not os.path.isabs(text):
        raise ValueError(f"{variable} is the full path of a directory, not {text!r}")
    return text


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
    orphan_s: float = 30.0
    page_bytes: int = 0
    history_bytes: int = 256 << 20
    history_disk_bytes: int = 4 << 30
    history_dir: str = ""
    view_ref_bytes: int = 65536

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Reads `CLAMOR_*`; what is not set keeps its default.

        Raises:
            ValueError: A value makes no sense; the message names the variable.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for field in fields(cls):
            variable = f"CLAMOR_{field.name.upper()}"
            text = environ.get(variable, "").strip()
            if not text:
                continue
            choices = _CHOICES.get(field.name)
            if choices is not None:
                if text not in choices:
                    raise ValueError(f"{variable} is one of {', '.join(choices)}, not {text!r}")
                values[field.name] = text
                continue
            if field.name == "page_bytes":
                values[field.name] = _page_bytes(variable, text)
                continue
            if field.name in _BYTES:
                values[field.name] = _bytes(variable, text)
                continue
            if field.name == "history_dir":
                values[field.name] = _directory(variable, text)
                continue
            try:
                seconds = float(text)
            except ValueError:
                seconds = -1.0
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{variable} is a number of seconds above 0, not {text!r}")
            values[field.name] = seconds
        return cls(**values)  # type: ignore[arg-type]
