"""`clamor.get`: all references in a nest of containers, opened at once."""

from __future__ import annotations

import dataclasses
from typing import Any

from clamor_ray._read.ref import GlobalRef, Mode


def get(obj: Any, mode: Mode = "r") -> Any:
    """Opens each `GlobalRef` in dicts, lists, tuples, named tuples and dataclasses.

    Tasks and actors get references at top level as objects, and those inside containers as they
    are: so it is with Ray's own `ObjectRef`s. This opens the others.

    Args:
        obj: a reference, or a container of them at any depth. Other values, sets and containers of
            other types are returned as they are. It is not changed.
        mode: as in `GlobalRef.get`.

    Returns:
        The same structure, with the objects in place of their references. Containers without any
        reference are the same objects as before.

    Raises:
        FreedError, SnapshotExpired, HomeLostError, NotInitializedError, ...: As `GlobalRef.get`, of
            the first reference that cannot be opened.
        RecursionError: It contains itself.

    Example:
        >>> batch = {"x": clamor.put(np.arange(1000)), "labels": [clamor.put(np.ones(1000)), "a"]}
        >>> opened = clamor.get(batch)
        >>> int(opened["x"][7]), float(opened["labels"][0].sum()), opened["labels"][1]
        (7, 1000.0, 'a')
    """
    if isinstance(obj, GlobalRef):
        return obj.get(mode)
    cls = type(obj)
    if cls is dict:
        made = {key: get(value, mode) for key, value in obj.items()}
        return obj if all(made[key] is value for key, value in obj.items()) else made
    if cls is list or isinstance(obj, tuple):
        values = [get(value, mode) for value in obj]
        if all(value is before for value, before in zip(values, obj, strict=True)):
            return obj
        if cls is list or cls is tuple:
            return cls(values)
        return cls._make(values) if hasattr(cls, "_make") else obj
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        changed = {}
        for field in dataclasses.fields(obj):
            value = getattr(obj, field.name)
            if field.init and (opened := get(value, mode)) is not value:
                changed[field.name] = opened
        return dataclasses.replace(obj, **changed) if changed else obj
    return obj
