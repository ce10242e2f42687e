"""Where the store of a session is: looked for on all nodes before the session's registry is made.

The registry goes to the node that has the registry's part of the store. Nothing is written here: a
store that is incomplete, or another's, stays as it is.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._protocol import names, ray_state
from clamor_ray._protocol.cause import cause_of
from clamor_ray._store import description
from clamor_ray._store.description import Description
from clamor_ray._store.directories import Here, what_is_here
from clamor_ray._store.layout import REGISTRY, check_session_name

LOOK_S: Final = 60.0


class RegistryPlace(NamedTuple):
    """Where a session with a store has its registry.

    Args:
        node_id: Ray's hex id of the node.
        root: of the session's part of the store: `layout.session_directory`.
        store_id: of the store, 32 hex digits.
        scope: of the session, the same at every opening.
    """

    node_id: str
    root: str
    store_id: str
    scope: str


def check_arguments(store: str | os.PathLike[str] | None, session: str | None) -> str:
    """Of `clamor.init`: the absolute path; "" without a store.

    Raises:
        TypeError, ValueError: They make no sense.
    """
    if store is None:
        return ""
    path = os.fspath(store)
    if not isinstance(path, str):
        raise TypeError(f"store is a path, not {type(store).__qualname__}")
    if not path:
        raise ValueError("store is the path of a directory, not ''")
    if session is None:
        raise ValueError(
            "a store is of a session with a name: clamor.init(store='...', session='...')"
        )
    check_session_name(session)
    return os.path.abspath(path)


def root_of(store: str, session: str) -> str:
    """See `RegistryPlace`."""
    return os.path.join(store, session)


def check_same(now: str, asked: str, session: str) -> None:
    """A session that is attached to has the store that is asked for.

    Args:
        now: the root of the session that there is; "" where it has no store.
        asked: the root that `init` asks for.
        session: its name.

    Raises:
        ValueError: It has another one.
    """
    if now != asked:
        has = f"has the store {os.path.dirname(now)!r}" if now else "has no store"
        raise ValueError(
            f"store={os.path.dirname(asked)!r}, and session {session!r}, which runs, {has}: leave "
            f"store out, or end the session first with clamor.shutdown(session={session!r})"
        )


def find(store: str, session: str) -> RegistryPlace:
    """Looks on all living nodes where the registry of a store is, or is to be.

    Args:
        store: absolute path, on each node.
        session: name of the session.

    Raises:
        StoreIncompleteError: The registry's part is nowhere, or there are two.
        StoreFormatError, StoreAccessError, StoreDamagedError: See `open_registry`.
        ServerUnavailableError: A node does not say within `LOOK_S` what it has.
    """
    root = root_of(store, session)
    here = ray.get_runtime_context().get_node_id()
    return choose(_look(root, here), here, root, session)


def choose(found: Mapping[str, Here], here: str, root: str, session: str) -> RegistryPlace:
    """The place of the registry. Pure.

    Args:
        found: what each node has.
        here: the node where a new store has its registry.
        root: see `RegistryPlace`.
        session: name of the session.

    Raises:
        StoreIncompleteError: As in `find`.
    """
    registries = {node: has.registry for node, has in found.items() if has.registry is not None}
    stores = {each.store for each in registries.values()}
    if len(stores) > 1:
        said = ", ".join(f"node {node} has {each.store}" for node, each in registries.items())
        raise errors.StoreIncompleteError(
            f"There are several stores at {root}: {said}.",
            hint="Move all but one away, or open another path.",
        )
    if registries:  # several: one disk that these nodes share
        node = here if here in registries else min(registries)
        at: Description = registries[node]
        return RegistryPlace(node, root, at.store, at.scope)
    by_store: dict[str, list[str]] = defaultdict(list)
    for node, has in found.items():
        for part in has.nodes:
            by_store[part.store].append(node)
    trouble = [f"node {node}: {each}" for node, has in found.items() for each in has.trouble]
    if by_store or trouble:
        parts = [
            f"node{'s' if len(set(nodes)) > 1 else ''} {', '.join(sorted(set(nodes)))} "
            f"ha{'ve' if len(set(nodes)) > 1 else 's'} parts of the store {store}"
            for store, nodes in by_store.items()
        ]
        raise errors.StoreIncompleteError(
            f"The registry's part, {root}/{REGISTRY}, is on no node that lives: "
            f"{'; '.join([*parts, *trouble])}.",
            hint="Start the node that has it, or bring the directory back from a copy; then call "
            "init again. Where there is none, move what is left away.",
        )
    return RegistryPlace(here, root, uuid.uuid4().hex, names.new_named_scope(session))


def _what_is_here(root: str) -> Here:
    """Runs on each node."""
    found = what_is_here(Path(root))
    if found.registry is None and found.trouble:
        for path in (Path(root), Path(root, REGISTRY)):  # these are not there, or must be right
            if not os.path.lexists(path):
                continue
            has = os.lstat(path)
            if has.st_uid != os.geteuid() or has.st_mode & 0o077:
                raise errors.StoreAccessError(found.trouble[0])
            if path.name == REGISTRY:
                description.read(path)  # says why
    return found


def _look(root: str, here: str) -> dict[str, Here]:
    """What each living node has of a store; this one is asked first.

    Raises:
        ServerUnavailableError: One does not answer.
        StoreError: One cannot read the registry's part.
    """
    deadline = time.monotonic() + LOOK_S
    found = {here: _what_is_here(root)}
    look = ray.remote(_what_is_here)
    asked: dict[str, Any] = {}
    for node in sorted(ray_state.alive_nodes() - {here}):
        on_it = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[node] = look.options(
            name="clamor store", num_cpus=0, max_retries=0, scheduling_strategy=on_it
        ).remote(root)
    silent: list[str] = []
    for node, answer in asked.items():
        try:
            found[node] = ray.get(answer, timeout=max(0.1, deadline - time.monotonic()))
        except errors.ClamorError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, errors.ClamorError) else error from None
        except ray.exceptions.RayError as error:
            if node in ray_state.alive_nodes():
                silent.append(f"node {node}: {cause_of(error)}")
    if silent:
        raise errors.ServerUnavailableError(
            f"Where the store {root} is is not known: {'; '.join(silent)}.",
            hint=f"Each living node is asked, and has {LOOK_S:g} s. Try again, or drain the node.",
        )
    return found
