"""Variables by name: `clamor.open`, `get_or_create`, `drop`, `variables`; `clamor.put(x, name=...)`
gives the name. The registry has the names (`actors/registry/variable_names.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clamor_ray import errors
from clamor_ray._counting.anchors import Anchor, Anchors
from clamor_ray._protocol.messages import Latest, VariableRecord
from clamor_ray._protocol.names import check_name
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session.process_sessions import current, with_current

if TYPE_CHECKING:
    from clamor_ray._session.session import Session


@dataclass(frozen=True)
class VariableInfo:
    """A variable of the session.

    Args:
        name: its name; None where it has none. `clamor.open(name)` gives a reference.
        region: its id, as in `clamor.stats()`.
        version: its newest version.
        kind: its type, and an array's dtype and shape; "" where it has no name.
        nbytes: size of the object; where it has no name, of its region, whole blocks.
        nodes: Ray's hex ids of the nodes whose page servers are its homes; empty where the object
            travels inside its references.

    Example:
        >>> ref = clamor.put(np.zeros(1000), name="listed")
        >>> [info.version for info in clamor.variables() if info.name == "listed"]
        [0]
    """

    name: str | None
    region: int
    version: int
    kind: str
    nbytes: int
    nodes: tuple[str, ...]


def _found(session: Session, name: str) -> GlobalRef[Any] | None:
    found = session.rpc.find_name(name)
    if found is None:
        return None
    packed, latest, anchor = found
    return ref_at(packed, latest, (Anchor(anchor),))


def ref_at(packed: bytes, latest: Latest, held_by: Anchors | None = None) -> GlobalRef[Any]:
    ref = GlobalRef._unpacked(packed, held_by)
    ref._move(ref._state_of(latest))
    return ref


def _put(name: str, obj: Any, session: Session) -> GlobalRef[Any]:
    return session.named(name, lambda: session.creator.put(obj, named=True))


def open(name: str) -> GlobalRef[Any]:
    """The variable of this session that has the name, at its newest version.

    Args:
        name: that `put`, `zeros`, `share` or `get_or_create` gave it.

    Returns:
        A new reference, which `refresh` and updates move.

    Raises:
        NoSuchNameError: No variable has the name.
        NotInitializedError: Before `clamor.init()`.

    Safe from any thread.

    Example:
        >>> ref = clamor.put(np.arange(1000), name="squares")
        >>> int(clamor.open("squares").get()[7])
        7
    """
    check_name(name, "variable")
    ref = with_current(lambda session: _found(session, name))
    if ref is None:
        raise errors.NoSuchNameError(f"No variable of this session is named {name!r}.")
    return ref


def get_or_create(name: str, make: Callable[[], Any]) -> GlobalRef[Any]:
    """The variable that has the name; where there is none, what `make` returns is put under it.

    Several processes may call it at the same time: all get the same variable. `make` may run in
    more than one of them then; what the others made is freed.

    Args:
        name: of the variable.
        make: a callable without arguments that returns the object.

    Returns:
        A new reference to the newest version.

    Raises:
        TypeError: `make` cannot be called.
        NotInitializedError: Before `clamor.init()`.
        What `make` and `clamor.put` raise.

    Safe from any thread.

    Example:
        >>> ref = clamor.get_or_create("table", lambda: np.zeros(1000))
        >>> clamor.get_or_create("table", lambda: np.ones(1000)) == ref
        True
    """
    check_name(name, "variable")
    if not callable(make):
        raise TypeError(f"make is a callable without arguments, not {type(make).__qualname__}")
    while True:
        ref = with_current(lambda session: _found(session, name))
        if ref is not None:
            return ref
        put = functools.partial(_put, name, make())
        try:
            return with_current(put)
        except errors.NameTakenError:
            del put  # somebody was faster; theirs may be gone again when we look


def drop(name: str) -> None:
    """Takes a variable's name away.

    The variable itself stays as long as there are references to it; `clamor.free` ends it, with
    its name. Dropping a name that no variable has changes nothing.

    Args:
        name: of the variable.

    Raises:
        NotInitializedError: Before `clamor.init()`.

    Example:
        >>> ref = clamor.put(np.arange(1000), name="old")
        >>> clamor.drop("old")
        >>> int(ref.get()[7])
        7
    """
    check_name(name, "variable")
    with_current(lambda session: session.rpc.drop_name(name))


def variables() -> list[VariableInfo]:
    """The variables of this session that can be opened; one that has two names is listed twice.

    Objects below 4 KiB travel inside their references: they are listed where they have a name.

    Returns:
        Those with a name first, by name; then the others, by id.

    Raises:
        NotInitializedError: Before `clamor.init()`.

    Example:
        >>> ref = clamor.put(np.arange(1000), name="numbers")
        >>> [info.nbytes >= 8000 for info in clamor.variables() if info.name == "numbers"]
        [True]
    """
    return listed(current().rpc.variables())


def listed(records: Iterable[VariableRecord]) -> list[VariableInfo]:
    """What the registry says of variables, as `clamor.variables` returns it."""
    found = []
    for record in records:
        kind, nbytes = "", record.length_bytes
        if record.packed is not None:
            ref = ref_at(record.packed, record.latest)
            kind, nbytes = str(ref._plan.kind), ref.nbytes
        for name in record.names or (None,):
            found.append(
                VariableInfo(
                    name=name,
                    region=record.region,
                    version=record.latest.version,
                    kind=kind,
                    nbytes=nbytes,
                    nodes=record.nodes,
                )
            )
    return sorted(found, key=lambda info: (info.name is None, info.name or "", info.region))
