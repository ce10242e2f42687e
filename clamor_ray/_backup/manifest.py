"""The manifest of a checkpoint: which variables there are, and where each chunk is. Pure.

A manifest is a file of two lines, both JSON: what it is (format, length and digest of the second
line), and the checkpoint. So one of a newer format says so before anything else of it is read.

Plans, and the content of variables that travel inside their references, are pickles.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._objects.layout import Plan
from clamor_ray._read.state import State, packed_state, state_of
from clamor_ray._redundancy.levels import Level

FORMAT: Final = 1
DATA: Final = "data"
_KEY: Final = "clamor-backup"
_NAME: Final = re.compile(r"checkpoint-(\d{8,})\.json")


def name_of(number: int) -> str:
    """Name of a manifest's file."""
    return f"checkpoint-{number:08d}.json"


def number_of(name: str) -> int | None:
    """The number of the checkpoint whose manifest has this name; None: it is no manifest.

    Example:
        >>> number_of(name_of(7)), number_of("notes.txt")
        (7, None)
    """
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class ChunkPlace(NamedTuple):
    """Where a chunk's record is.

    Args:
        file: name of the data file.
        offset, n_bytes: of the record in it.
        digest: of the record, hex.
    """

    file: str
    offset: int
    n_bytes: int
    digest: str


@dataclass(frozen=True)
class SavedVariable:
    """A variable in a checkpoint.

    Args:
        region: its id in the session that it was saved from.
        names: that it had; it may have none.
        keys: that the caller has given it.
        state: the version, and what lies where; its row is no part of it.
        is_old: it is no newest version: a frozen reference in another variable needs it.
        level: how it was placed; None: it had one home.
        chunks: of the number of each chunk that is not all zeros, where that is.
    """

    region: int
    names: tuple[str, ...]
    keys: tuple[str, ...]
    state: State
    is_old: bool
    level: Level | None
    chunks: dict[int, ChunkPlace] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For people."""
        return label_of(self.region, self.names, self.keys)


def label_of(region: int, names: Iterable[str], keys: Iterable[str] = ()) -> str:
    """A variable for people: by its name, or by the caller's key for it."""
    return label(region, min(names, default=min(keys, default=None)))


@dataclass(frozen=True)
class Manifest:
    """A checkpoint.

    Args:
        number: counts from 1.
        scope: the session that it is of.
        made_at: when it was begun, for people.
        library_version: that wrote it.
        variables: a variable comes after those that it refers to.
    """

    number: int
    scope: str
    made_at: str
    library_version: str
    variables: tuple[SavedVariable, ...]

    @property
    def files(self) -> set[str]:
        """Names of the data files that it needs."""
        return {place.file for each in self.variables for place in each.chunks.values()}


def _text_of(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value, 4)).decode()


def _value_of(text: str) -> Any:
    return pickle.loads(base64.b64decode(text, validate=True))


def to_bytes(manifest: Manifest) -> bytes:
    """The file's content."""
    files = sorted(manifest.files)
    numbers = {name: number for number, name in enumerate(files)}
    body = {
        "number": manifest.number,
        "session": manifest.scope,
        "made_at": manifest.made_at,
        "library": manifest.library_version,
        "files": files,
        "variables": [
            {
                "region": each.region,
                "names": each.names,
                "keys": each.keys,
                "version": each.state.version,
                "old": each.is_old,
                "level": None if each.level is None else each.level._asdict(),
                "state": _text_of(packed_state(each.state)),
                "chunks": [
                    [index, numbers[place.file], place.offset, place.n_bytes, place.digest]
                    for index, place in sorted(each.chunks.items())
                ],
            }
            for each in manifest.variables
        ],
    }
    second = json.dumps(body, separators=(",", ":")).encode()
    digest = hashlib.sha256(second).hexdigest()
    first = json.dumps({_KEY: FORMAT, "bytes": len(second), "sha256": digest}).encode()
    return first + b"\n" + second + b"\n"


def of_bytes(content: bytes, file: str) -> Manifest:
    """The manifest that `to_bytes` was given.

    Args:
        content: of the file.
        file: its name, for people.

    Raises:
        BackupFormatError: It is of a newer format.
        DamagedBackupError: It is not what was written.
    """
    first, _, rest = content.partition(b"\n")
    try:
        head = json.loads(first)
        written = head[_KEY]
    except (ValueError, KeyError, TypeError):
        raise _damaged(file, "has no head of a manifest") from None
    if type(written) is not int or written < 1:
        raise _damaged(file, "has no head of a manifest")
    if written > FORMAT:
        raise errors.BackupFormatError(
            f"{file} has format {written} of a backup; this clamor-ray knows {FORMAT} and older."
        )
    second = rest[:-1]
    if len(second) != head.get("bytes") or rest[-1:] != b"\n":
        raise _damaged(file, f"has {len(second)} bytes of {head.get('bytes')}")
    if hashlib.sha256(second).hexdigest() != head.get("sha256"):
        raise _damaged(file, "does not have the digest that it was written with")
    body = json.loads(second)
    files = body["files"]
    return Manifest(
        number=body["number"],
        scope=body["session"],
        made_at=body["made_at"],
        library_version=body["library"],
        variables=tuple(_variable(each, files) for each in body["variables"]),
    )


def _variable(saved: dict[str, Any], files: list[str]) -> SavedVariable:
    level = saved["level"]
    return SavedVariable(
        region=saved["region"],
        names=tuple(saved["names"]),
        keys=tuple(saved["keys"]),
        state=state_of(*_value_of(saved["state"])),
        is_old=saved["old"],
        level=None if level is None else Level(**level),
        chunks={
            index: ChunkPlace(files[number], offset, n_bytes, digest)
            for index, number, offset, n_bytes, digest in saved["chunks"]
        },
    )


def _damaged(file: str, how: str) -> errors.DamagedBackupError:
    return errors.DamagedBackupError(f"The manifest {file} is damaged: it {how}.", file=file)


def moved_stream(plan: Plan, old_bytes: int, new_bytes: int) -> Plan:
    """The plan of an object whose pickle stream is another one: in its old place where there is
    room, else behind everything.

    Args:
        plan: of the object.
        old_bytes, new_bytes: lengths of the streams.
    """
    if new_bytes <= old_bytes:
        begin, end = plan.inband_offset, plan.total_bytes
    else:
        begin = -(-max(plan.total_bytes, plan.capacity_bytes) // 64) * 64
        end = begin + new_bytes
    return Plan(
        total_bytes=end,
        inband_bytes=new_bytes,
        buffers=plan.buffers,
        inband_offset=begin,
        capacity_bytes=plan.capacity_bytes,
        fixed=plan.fixed,
        kind=plan.kind,
    )
