"""`clamor.checkpoint`: all variables of a session, as they are at one moment, into a directory.

begin       the registry pins the newest version of each variable, in one turn of its loop
graph       which of them are saved (`graph.py`)
chunks      which chunks may differ from what the last checkpoint has
copy        tasks near the homes copy those (`copying.py`), a file each
manifest    one file, put in place at the end: this is the checkpoint
tidy        checkpoints that are not kept go, and data files that nothing needs
"""

from __future__ import annotations

import contextlib
import datetime
import operator
import secrets
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._backup.copying import Copied, CopyOrder
from clamor_ray._backup.directory import Directory
from clamor_ray._backup.graph import GraphVariable, ObjectGraph
from clamor_ray._backup.manifest import ChunkPlace, Manifest, SavedVariable, to_bytes
from clamor_ray._backup.tasks import CopyTasks
from clamor_ray._backup.units import Units, blocks_of_chunk, chunks_with, level_of_known
from clamor_ray._backup.writer import Writer, writing
from clamor_ray._errors.base import level_of_caller
from clamor_ray._read.hashmap import HashMap
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session.process_sessions import with_current
from clamor_ray._session.session import Session
from clamor_ray._version import __version__
from clamor_ray.collection.io.files import Path

TRIES: Final = 3  # a variable may be freed while it is copied: then all is looked at again
STILL_S: Final = 20.0
KEEP_S: Final = 300.0  # without a word from here the registry lets go of the versions


@dataclass(frozen=True)
class CheckpointResult:
    """What `clamor.checkpoint` has done.

    Args:
        number: of the checkpoint in its backup, from 1 on.
        variables: how many it has.
        bytes: of all that it needs in the backup.
        bytes_written: of these, what was new since the last one.
        seconds: how long it took.
        left_out: variables of the session that no name and no saved object leads to, or that were
            to be left out.

    Example:
        >>> import tempfile
        >>> path, ref = tempfile.mkdtemp(), clamor.put(np.ones(10**6), name="counted")
        >>> first, second = clamor.checkpoint(path), clamor.checkpoint(path)
        >>> first.bytes_written >= 8 * 10**6, second.bytes_written, second.number
        (True, 0, 2)
        >>> clamor.free(ref)
    """

    number: int
    variables: int
    bytes: int
    bytes_written: int
    seconds: float
    left_out: int


def checkpoint(
    path: Path,
    *,
    refs: Mapping[str, GlobalRef[Any] | HashMap] | None = None,
    leave_out: Collection[str] = (),
    keep: int = 2,
    filesystem: Any = None,
) -> CheckpointResult:
    """Saves the session's variables to a directory, or to an object store, while commits go on.

    What is saved is the newest version that each variable has at one moment: of a transaction over
    several variables it has all or nothing. Saved are the variables that have a name, those in
    `refs`, and all that references inside of them lead to. Old versions are not, unless a frozen
    reference in a saved object needs one.

    Into a directory that has a checkpoint only chunks of 4 MiB are written that have changed since.
    If anything fails, or the process is killed, the last checkpoint stays as it is.

    The backup holds pickles: whoever can write to it can run code where it is restored. It is not
    encrypted.

    Args:
        path: of a directory, which is made; or "s3://bucket/key", or another URI that pyarrow
            knows.
        refs: variables without a name, by keys of the caller's choice; `clamor.restore` returns
            them by these.
        leave_out: names of variables that are not saved.
        keep: how many checkpoints stay in the directory, this one too; 1 or more.
        filesystem: a `pyarrow.fs.FileSystem`, or fsspec's, that the path belongs to.

    Returns:
        What was saved.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        ValueError: keep is below 1; or a key of refs is another variable's name.
        TypeError: refs has what is no reference, or leave_out is a str.
        NoSuchNameError: A name that is to be left out is no variable's.
        StorageError: The directory cannot be written: the disk is full, credentials are wrong, ...
        BackupInUseError: Another process writes into it.
        DamagedBackupError, BackupFormatError: Its last checkpoint cannot be read.
        DanglingReferenceError: A saved object holds a reference to a variable that was freed.
        FixedAddressError: A variable can only be at its address.
        FreedError: A variable was freed while it was copied, again and again.
        SnapshotExpired: What a frozen reference needs is kept no longer; or the history of old
            versions was too small for the commits that came while they were copied.
        HomeLostError: Blocks of a variable are lost.

    Safe from any thread.

    Example:
        >>> import tempfile
        >>> path, ref = tempfile.mkdtemp(), clamor.put(np.arange(10**6), name="saved")
        >>> clamor.checkpoint(path).variables >= 1
        True
        >>> clamor.free(ref)
        >>> int(clamor.restore(path)["saved"].get()[7])
        7
        >>> clamor.free(clamor.open("saved"))
    """
    keep = operator.index(keep)
    if keep < 1:
        raise ValueError(f"keep is 1 or more, not {keep}")
    if isinstance(leave_out, str):
        raise TypeError(f"leave_out is a list of names, not the str {leave_out!r}")
    given = {key: _ref_of(key, ref) for key, ref in (refs or {}).items()}
    begun_s = time.monotonic()
    directory = Directory.at(path, filesystem)

    def make(session: Session) -> CheckpointResult:
        directory.prepare()
        with writing(directory) as writer:
            maker = _Maker(session, directory, writer, given, leave_out)
            result = maker.make()
            _tidy(directory, result.number, keep)
        return replace(result, seconds=time.monotonic() - begun_s)

    return with_current(make)


def _ref_of(key: str, ref: Any) -> GlobalRef[Any]:
    ref_of = getattr(type(ref), "__clamor_ref__", None)
    found = ref if ref_of is None else ref_of(ref)
    if not isinstance(found, GlobalRef) or not isinstance(key, str):
        raise TypeError(f"refs is a dict of str -> GlobalRef, and has {key!r}: {ref!r}")
    return found


def _tidy(directory: Directory, number: int, keep: int) -> None:
    try:
        directory.tidy(number, keep)
    except errors.StorageError as error:
        warnings.warn(
            f"Checkpoint {number} is made, but what it replaces could not be deleted: "
            f"{error.message} The next one tries again.",
            errors.ClamorWarning,
            stacklevel=level_of_caller(),
        )


class _Maker:
    """Makes one checkpoint.

    Args:
        session: that it is of.
        directory: the backup, prepared.
        writer: this process's right to write there.
        refs: as `checkpoint`'s, references alone.
        leave_out: as `checkpoint`'s.
    """

    def __init__(
        self,
        session: Session,
        directory: Directory,
        writer: Writer,
        refs: Mapping[str, GlobalRef[Any]],
        leave_out: Collection[str],
    ) -> None:
        self._session = session
        self._directory = directory
        self._writer = writer
        self._refs = refs
        self._leave_out = leave_out
        self._pins = secrets.randbits(63)
        numbers = directory.numbers()
        self._last = directory.manifest(numbers[-1]) if numbers else None
        self._number = numbers[-1] + 1 if numbers else 1
        self._sizes = directory.data_sizes() if numbers else {}
        self._last_by_region: dict[tuple[int, bool], SavedVariable] = {}
        self._last_by_name: dict[str, SavedVariable] = {}
        for each in () if self._last is None else self._last.variables:
            if each.state.payload is None:
                self._last_by_region.setdefault((each.region, each.is_old), each)
                for name in (*each.names, *each.keys):
                    self._last_by_name.setdefault(name, each)
        self._told_s = time.monotonic()
        self._tasks = CopyTasks(session, directory, self._number, still_at_it=self._still_at_it)

    def make(self) -> CheckpointResult:
        """The checkpoint is there when this returns."""
        made_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        try:
            for left in reversed(range(TRIES)):
                try:
                    found = self._session.rpc.begin_checkpoint(self._pins)
                    graph = ObjectGraph(self._session, found, self._still_at_it)
                    variables = self._copy_all(graph)
                    break
                except errors.FreedError:
                    if not left or any(ref._freed for ref in self._refs.values()):
                        raise
        finally:
            self._over()
        manifest = Manifest(
            number=self._number,
            scope=self._session.scope,
            made_at=made_at,
            library_version=__version__,
            variables=tuple(variables),
        )
        self._check_there(variables)
        self._writer.check()
        self._directory.put_manifest(self._number, to_bytes(manifest))
        places = {place for each in variables for place in each.chunks.values()}
        regions = {each.region for each in variables if each.state.payload is None}
        return CheckpointResult(
            number=self._number,
            variables=len(variables),
            bytes=sum(place.n_bytes for place in places),
            bytes_written=self._tasks.n_written,
            seconds=0.0,
            left_out=graph.n_regions - len(regions),
        )

    def _still_at_it(self) -> None:
        """Called again and again while something is done that may take long."""
        if time.monotonic() - self._told_s > STILL_S:
            self._session.rpc.keep_checkpoint(self._pins, KEEP_S)
            self._writer.check()
            self._told_s = time.monotonic()

    def _over(self) -> None:
        with contextlib.suppress(errors.ClamorError):  # it finds out by itself
            self._session.rpc.keep_checkpoint(self._pins, 0.0)

    # -- what is copied

    def _copy_all(self, graph: ObjectGraph) -> list[SavedVariable]:
        graph.add_named(self._leave_out)
        graph.add_given(self._refs)
        saved = graph.in_order()
        units = Units(self._session.node_id)
        kept: list[dict[int, ChunkPlace]] = []
        for index, each in enumerate(saved):
            kept.append({})
            self._still_at_it()
            if each.ref._payload is None:
                kept[index], orders = self._look_at(each)
                for order in orders:
                    units.add(each, index, order)
        known = [dict(chunks) for chunks in kept]
        for index, order, copied in self._tasks.run(units.all()):
            self._note(known[index], order, copied)
        return [
            SavedVariable(
                region=each.ref._region,
                names=each.names,
                keys=tuple(each.keys),
                state=each.ref._state._replace(row=()),
                is_old=each.is_old,
                level=level_of_known(each.known),
                chunks={chunk: place for chunk, place in chunks.items() if place is not None},
            )
            for each, chunks in zip(saved, known, strict=True)
        ]

    @staticmethod
    def _note(chunks: dict[int, ChunkPlace], order: CopyOrder, copied: Copied) -> None:
        if copied.place is not None:
            chunks[order.chunk] = copied.place
        elif not copied.is_same:
            chunks.pop(order.chunk, None)

    def _last_of(self, saved: GraphVariable) -> tuple[SavedVariable | None, bool]:
        """What the last checkpoint has of a variable, and whether it is the very same one."""
        if self._last is None:
            return None, False
        if self._last.scope == self._session.scope:
            same = self._last_by_region.get((saved.ref._region, saved.is_old))
            if same is not None:
                return same, True
        found = map(self._last_by_name.get, (*saved.names, *saved.keys))
        return next(filter(None, found), None), False

    def _is_there(self, place: ChunkPlace) -> bool:
        """Whether its file has not gone, or become shorter. What is in it is not looked at."""
        return place.offset + place.n_bytes <= self._sizes.get(place.file, 0)

    def _check_there(self, variables: Iterable[SavedVariable]) -> None:
        """A manifest is never of files that are not there.

        Raises:
            StorageError: One is not.
        """
        self._sizes = self._directory.data_sizes()
        for place in (place for each in variables for place in each.chunks.values()):
            if not self._is_there(place):
                raise errors.StorageError(
                    f"{self._directory.name_of(place.file)} was written, and is not there: the "
                    "last checkpoint is as it was.",
                    hint="Something else deletes in the backup, or its path is another directory "
                    "on another node.",
                )

    def _look_at(self, saved: GraphVariable) -> tuple[dict[int, ChunkPlace], list[CopyOrder]]:
        """The chunks that the last checkpoint has as they are, or may have; and those that are to
        be looked at."""
        ref, rpc = saved.ref, self._session.rpc
        last, is_same = self._last_of(saved)
        had = {} if last is None else last.chunks
        chunks = {chunk: place for chunk, place in had.items() if self._is_there(place)}
        changed: BitMap | None = None
        if last is not None and is_same and len(chunks) == len(had):  # else all is looked at
            if last.state.version == ref.version:
                return dict(chunks), []
            packed = rpc.changes(ref._region, last.state.version, ref.version)
            changed = None if packed is None else BitMap.deserialize(packed)
        data = BitMap.deserialize(rpc.data_blocks(ref._region, ref.version))
        wanted = chunks_with(data if changed is None else changed)
        orders = []
        for chunk in wanted:
            blocks = data & BitMap(blocks_of_chunk(chunk))
            if blocks:
                digest = chunks[chunk].digest if chunk in chunks else ""
                orders.append(CopyOrder(chunk, bytes(blocks.serialize()), digest))
        looked_at = {order.chunk for order in orders}
        gone = set(wanted) if changed is not None else set(chunks)
        kept = {
            chunk: place
            for chunk, place in chunks.items()
            if chunk in looked_at or chunk not in gone
        }
        return kept, orders
