"""`clamor.restore`: the variables of a checkpoint, as new ones of a session."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from clamor_ray import errors
from clamor_ray._backup.directory import Directory
from clamor_ray._backup.manifest import Manifest, SavedVariable, moved_stream
from clamor_ray._backup.saved_bytes import AHEAD, SavedBytes
from clamor_ray._backup.stream_refs import replaced
from clamor_ray._counting.anchors import Anchor
from clamor_ray._labels import capital, label
from clamor_ray._objects.layout import INLINE_BYTES, Plan
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session.process_sessions import with_current
from clamor_ray._session.session import Session
from clamor_ray.collection.io.files import Path

THREADS: Final = AHEAD


def restore(
    path: Path,
    *,
    number: int | None = None,
    keep_placement: bool = True,
    filesystem: Any = None,
) -> dict[str, GlobalRef[Any]]:
    """Makes the variables of a checkpoint again, in this session, which may have others.

    Each is a new variable at version 0. It has the name that it had; references inside of objects
    lead to the restored variables, at the version that the checkpoint has.

    Nothing else is made: if something fails, what was restored until then is freed. To unpickle
    what is in a backup is to run code: restore only what you trust.

    Args:
        path: that `clamor.checkpoint` was given.
        number: of the checkpoint (`CheckpointResult.number`); None: the newest.
        keep_placement: each variable is spread, has redundancy, or is on disk, as it was. False: it
            is homed on this node, in memory, or spread where this node has no room.
        filesystem: as `clamor.checkpoint`'s.

    Returns:
        References by name, and by the keys of `refs` that `clamor.checkpoint` was given. Variables
        that have neither are reached through those that hold references to them. A name does not
        keep its variable from going when it is dropped; a key is no name: who lets go of its
        reference lets go of the variable.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        NoBackupError: There is no backup there, or no such checkpoint.
        NameTakenError: A variable of this session has one of the names.
        DamagedBackupError: A file is missing or damaged; it says which variable and block.
        BackupFormatError: A newer clamor-ray has written it.
        StorageError: It cannot be read.
        OutOfMemoryError, NoSpaceError: There is no room for it.
        TooFewNodesError: A variable's redundancy needs more nodes; see `keep_placement`.

    Safe from any thread.

    Example:
        >>> import tempfile
        >>> path, ref = tempfile.mkdtemp(), clamor.put(np.arange(10**6))
        >>> clamor.checkpoint(path, refs={"mine": ref}).variables >= 1
        True
        >>> restored = clamor.restore(path)
        >>> bool((restored["mine"].get() == ref.get()).all()), restored["mine"] == ref
        (True, False)
    """
    directory = Directory.at(path, filesystem)

    def make(session: Session) -> dict[str, GlobalRef[Any]]:
        numbers = directory.numbers()
        if not numbers or (number is not None and number not in numbers):
            which = "no checkpoint" if number is None else f"no checkpoint {number}"
            raise errors.NoBackupError(f"{directory.name} has {which}.")
        manifest = directory.manifest(numbers[-1] if number is None else number)
        with ThreadPoolExecutor(THREADS, "clamor-restore") as pool:
            return _Restorer(session, directory, manifest, pool, keep_placement).make()

    return with_current(make)


class _Restorer:
    """Restores one checkpoint.

    Args:
        session: that gets the variables.
        directory: the backup.
        manifest: of the checkpoint.
        pool: reads data files.
        keep_placement: as `restore`'s.
    """

    def __init__(
        self,
        session: Session,
        directory: Directory,
        manifest: Manifest,
        pool: ThreadPoolExecutor,
        keep_placement: bool,
    ) -> None:
        self._session = session
        self._directory = directory
        self._manifest = manifest
        self._pool = pool
        self._keep_placement = keep_placement
        self._made: dict[tuple[int, int], GlobalRef[Any]] = {}  # by region and version, as saved
        self._newest: dict[int, int] = {}  # of each region the version that is saved as that

    def make(self) -> dict[str, GlobalRef[Any]]:
        """All of them."""
        names = [name for saved in self._manifest.variables for name in saved.names]
        for name in names:
            if self._session.rpc.find_name(name) is not None:
                raise errors.NameTakenError(
                    f"There is a variable named {name!r} already: nothing was restored."
                )
        try:
            for saved in self._manifest.variables:
                key = (saved.region, saved.state.version)
                if not saved.is_old:
                    self._newest[saved.region] = saved.state.version
                ref = self._made[key] = self._restored(saved)
                ref._name = min(saved.names, default=None)
            return self._named()
        except BaseException:
            for ref in self._made.values():
                with contextlib.suppress(errors.ClamorError):
                    self._session.free(ref)
            raise

    def _named(self) -> dict[str, GlobalRef[Any]]:
        found: dict[str, GlobalRef[Any]] = {}
        for saved in self._manifest.variables:
            ref = self._made[saved.region, saved.state.version]
            for name in saved.names:
                ref._name = name
                ref._packed_at = None
                self._session.rpc.give_name(name, ref._region, ref._packed())
            ref._name = min(saved.names, default=None)
            ref._packed_at = None
            found.update(dict.fromkeys((*saved.names, *saved.keys), ref))
        return found

    def _restored(self, saved: SavedVariable) -> GlobalRef[Any]:
        plan, payload = saved.state.plan, saved.state.payload
        inside: list[Anchor] = []

        def other(packed: bytes) -> bytes:
            ref = self._other(saved, GlobalRef._unpacked(packed))
            inside.extend(ref._anchors or ())
            return ref._packed()

        stream_end = plan.inband_offset + plan.inband_bytes
        if payload is not None:
            stream = payload[plan.inband_offset : stream_end]
            new = replaced(stream, other)
            if new is stream:
                return self._session.creator.inline(plan, payload, ())
            return self._inline(plan, payload, new, inside)
        content = SavedBytes(self._directory, self._manifest.number, saved, self._pool)
        stream = content.read(plan.inband_offset, stream_end)
        new = replaced(stream, other)
        if new is not stream:
            plan = moved_stream(plan, len(stream), len(new))
            content.put_over(plan.inband_offset, new)
        level = saved.level if self._keep_placement else None
        return self._session.creator.copied(plan, content.content, content.n_bytes, inside, level)

    def _inline(
        self, plan: Plan, payload: bytes, stream: bytes, inside: list[Anchor]
    ) -> GlobalRef[Any]:
        """Of an object below 4 KiB, whose references may need more room than they did."""
        plan = moved_stream(plan, plan.inband_bytes, len(stream))
        image = bytearray(payload.ljust(plan.total_bytes, b"\0"))
        image[plan.inband_offset : plan.inband_offset + len(stream)] = stream
        if plan.total_bytes < INLINE_BYTES:
            return self._session.creator.inline(plan, bytes(image), tuple(inside))

        def content(begin: int, end: int) -> list[tuple[int, memoryview]]:
            part = memoryview(image)[begin : min(end, len(image))]
            return [(begin, part)] if part.nbytes else []

        return self._session.creator.copied(plan, content, len(image), inside, None)

    def _other(self, saved: SavedVariable, ref: GlobalRef[Any]) -> GlobalRef[Any]:
        """What a reference leads to from now on."""
        region = ref._region
        version = self._newest.get(region)
        if ref._frozen and (region, ref.version) in self._made:
            version = ref.version
        made = None if version is None else self._made.get((region, version))
        if made is None:
            raise errors.DamagedBackupError(
                f"{capital(saved.label)} refers to {label(region)}, which the checkpoint does not "
                "have.",
                variable=saved.label,
            )
        return made.snapshot() if ref._frozen else made
