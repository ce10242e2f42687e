"""Which variables a checkpoint has: those with names, those that were given, and all that these
refer to, each after what it refers to.

A variable that is none of these only references of living processes lead to: nothing could open it
after a restore, and Ray would give it back at once. So it is not in the backup.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clamor_ray import errors
from clamor_ray._backup.manifest import label_of
from clamor_ray._backup.stream_refs import packed_in
from clamor_ray._labels import capital, label
from clamor_ray._protocol.messages import INLINE_BASE, CheckpointVariable
from clamor_ray._read.ref import GlobalRef

Key = tuple[int, int]  # region, version


@dataclass
class GraphVariable:
    """A variable that is to be in the checkpoint.

    Args:
        ref: the variable, frozen at its version.
        known: what the registry says of it; None: no commit has changed it, and it travels inside
            its references.
        is_old: it is no newest version.
        names, keys: that it has, and that the caller has given it.
    """

    ref: GlobalRef[Any]
    known: CheckpointVariable | None
    is_old: bool = False
    names: tuple[str, ...] = ()
    keys: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """For people."""
        return label_of(self.ref._region, self.names, self.keys)


def may_hold_references(ref: GlobalRef[Any]) -> bool:
    """Whether an object is more than an array of plain data."""
    kind = ref._plan.kind
    return kind.shape is None or np.dtype(kind.dtype).hasobject


class ObjectGraph:
    """See the file's head. Of one checkpoint.

    Args:
        session: that it is of.
        found: all variables of the session, at the versions of one moment.
        still_at_it: is called again and again while objects are read.
    """

    def __init__(
        self,
        session: Any,
        found: Iterable[CheckpointVariable],
        still_at_it: Callable[[], object],
    ) -> None:
        self._session = session
        self._still_at_it = still_at_it
        self._found = {each.latest.region: each for each in found}
        self._saved: dict[Key, GraphVariable] = {}
        self._inside: dict[Key, list[Key]] = {}

    @property
    def n_regions(self) -> int:
        """How many variables the session has, but for those inside references."""
        return sum(region < INLINE_BASE for region in self._found)

    def add_named(self, leave_out: Collection[str]) -> None:
        """All variables with a name, but for some.

        Args:
            leave_out: names; each name of a variable that has several.

        Raises:
            NoSuchNameError: No variable has one of the names.
        """
        named = {name for known in self._found.values() for name in known.names}
        if unknown := sorted(set(leave_out) - named):
            raise errors.NoSuchNameError(
                f"No variable of this session is named {unknown[0]!r}, which is to be left out."
            )
        for known in self._found.values():
            if known.packed is not None and (names := sorted(set(known.names) - {*leave_out})):
                ref: GlobalRef[Any] = GlobalRef._unpacked(known.packed)
                saved = self._saved[self._add(ref, "")]
                saved.names = tuple(names)

    def add_given(self, refs: Mapping[str, GlobalRef[Any]]) -> None:
        """Those that the caller names.

        Raises:
            ValueError: A key is the name of another variable.
            FreedError, SnapshotExpired: One of them is not there any more.
        """
        named = {
            name: known.latest.region for known in self._found.values() for name in known.names
        }
        for key, ref in refs.items():
            if named.get(key, ref._region) != ref._region:
                raise ValueError(f"refs: there is another variable named {key!r}")
            ref._check_not_freed()
            if ref._scope != self._session.scope:
                raise errors.SessionMismatchError(f"{ref!r} is of another session.")
            self._saved[self._add(ref, "")].keys.append(key)

    def in_order(self) -> list[GraphVariable]:
        """All of them, each after those that it refers to; their objects are read for that.

        Raises:
            DanglingReferenceError: One refers to a variable that is not there.
            FixedAddressError: One means nothing at another address.
            FreedError, SnapshotExpired, HomeLostError: One cannot be read.
        """
        order: dict[Key, GraphVariable] = {}
        begun: set[Key] = set()
        todo = list(self._saved)
        while todo:
            key = todo[-1]
            if key in order:
                todo.pop()
            elif key in begun:
                order[todo.pop()] = self._saved[key]
            else:
                begun.add(key)
                todo += [inside for inside in self._look_into(key) if inside not in begun]
        return list(order.values())

    def _look_into(self, key: Key) -> list[Key]:
        self._still_at_it()
        saved = self._saved[key]
        if saved.ref._plan.fixed:
            raise errors.FixedAddressError(
                f"{capital(saved.label)} holds pointers into itself: it cannot be backed up."
            )
        if not may_hold_references(saved.ref):
            return []
        return [
            self._add(GlobalRef._unpacked(packed), saved.label)
            for packed in packed_in(self._stream_of(saved.ref))
        ]

    def _stream_of(self, ref: GlobalRef[Any]) -> bytes:
        plan = ref._plan
        end = plan.inband_offset + plan.inband_bytes
        if ref._payload is not None:
            return ref._payload[plan.inband_offset : end]
        lease = self._session.open(ref, warns=False)
        try:
            stream: bytes = lease.bytes()[plan.inband_offset : end].tobytes()
        finally:
            lease.close()
        return stream

    def _add(self, ref: GlobalRef[Any], holder: str) -> Key:
        """
        Args:
            ref: a reference, at any version.
            holder: the variable that it is in, for people; "": none.
        """
        region = ref._region
        known = self._found.get(region)
        if ref._scope != self._session.scope or ref._freed:
            raise self._dangling(ref, holder)
        if known is None and region < INLINE_BASE:
            raise self._dangling(ref, holder)
        is_old = ref._frozen and known is not None and ref.version != known.latest.version
        if is_old:
            state = ref._state
            if region < INLINE_BASE:
                self._check_kept(ref, holder)
        elif known is None:  # no commit has changed it: a later one may move the reference
            state = ref._state if ref._frozen else ref._first
        else:
            state = ref._state_of(known.latest)
        key = (region, state.version)
        if key not in self._saved:
            at = ref._with(state, frozen=True)
            at._anchors = None  # what keeps it is the variable that it is in, or a name
            self._saved[key] = GraphVariable(
                ref=at, known=known, is_old=is_old
            )  # its names: `add_named`
        return key

    def _check_kept(self, ref: GlobalRef[Any], holder: str) -> None:
        try:
            self._session.rpc.at(ref._region, ref.version)
        except errors.SnapshotExpired as error:
            where = f", which is in {holder}," if holder else ""
            raise errors.SnapshotExpired(
                f"The frozen reference to version {ref.version} of {label(ref._region)}{where} "
                "leads to blocks that are kept no longer.",
                hint="Put the object again with a reference to a newer version, or leave it out: "
                "clamor.checkpoint(path, leave_out=[name]).",
            ) from error

    def _dangling(self, ref: GlobalRef[Any], holder: str) -> errors.ClamorError:
        what = label(ref._region, ref._name)
        if not holder:
            return errors.FreedError(f"{capital(what)} was freed.")
        how = "belongs to another session" if ref._scope != self._session.scope else "was freed"
        return errors.DanglingReferenceError(
            f"{capital(holder)} holds a reference to {what}, which {how}."
        )
