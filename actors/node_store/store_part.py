"""A page server's directory of its session's store (docs/store.md): what is put there, and when.

    a region is sealed      -> its base and checksums get their names, synced   ``keep``
    a layer is at its home  -> a file of its own, synced                        ``keep_layer``
    its commit is decided   -> the file's name says the version; then the home
                               acknowledges it                                  ``name``
    a base has had enough   -> it is synced, and its layers' files go           ``checkpoint``
    a region leaves         -> its files go                                     ``drop_region``

A page server that starts without a keeper has only these files: ``open_again`` brings the bases to
the newest versions, and gives them to the new keeper, as if that had held them all the time. One
whose keeper lives goes on with what that has: the files are the same.

Safe from any thread. Files of one region are changed by one thread at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._native import client as _native
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import (
    Publication,
    RegionRecord,
    ServerConfig,
    StoredRegion,
    StoreState,
)
from clamor_ray._store import bases, directories, disk, layer_files
from clamor_ray._store.base_copies import replace_with_copy
from clamor_ray._store.checkpoint import checkpoint, merge
from clamor_ray._store.layout import REGIONS, LayerName, base_path, layer_path
from clamor_ray._store.redo import redo
from clamor_ray.actors.node_store.mapped import FileId, id_of, mapped_files

logger = logging.getLogger("clamor_ray.page_server")

TICK_S: Final = 0.5
CHECKPOINT_S: Final = 20.0  # a layer's file is kept so long at least, for others to come with it
CHECKPOINT_BYTES: Final = 512 << 20  # of one region's layers: then at once
CHECKPOINT_LAYERS: Final = 4096  # of one region: a redo opens each of them
MERGE_BYTES: Final = 256 << 20  # of layers whose base stays behind, beside its length
UNDECIDED_S: Final = 60.0  # a layer that is nobody's is asked about
AGAIN_S: Final = 5.0
CLOSE_S: Final = 5.0
KEEPS_AT_ONCE: Final = 8
MOST_OVER: Final = 1 << 16  # a question about a layer may come when its commit is over

_Name = tuple[int, int]  # region, commit id


@dataclass
class _Layers:
    """Of one region: the files of layers that its base may not have, by version."""

    bytes_of: dict[int, int] = field(default_factory=dict)
    since_s: float = 0.0
    not_before_s: float = 0.0


class StorePart:
    """See the file's head. Locked until ``close``, or the end of the process.

    Args:
        config: Of the session, which has a store.
        noted: A file that says which directory this page server had before it was restarted.

    Raises:
        StoreError: The directory cannot be used; the text says why.
    """

    def __init__(self, config: ServerConfig, noted: Path) -> None:
        self._config = config
        self._noted = noted
        self._directory = self._open(_read_note(noted))
        noted.write_text(self._directory.directory_id)
        self._engine: _native.Engine | None = None
        self._outcome: Callable[[int], dict[int, int]] = lambda commit_id: {}
        self._lock = threading.Lock()
        self._locks: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        self._layers: dict[int, _Layers] = {}
        self._undecided: dict[_Name, float] = {}  # when they came
        self._written: set[_Name] = set()  # of those, what this process has synced
        self._over: dict[_Name, None] = {}  # the last ones of which it is known what became of them
        self._taking = threading.Lock()
        self._taken: dict[str, directories.NodeDirectory] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def _open(self, directory_id: str | None) -> directories.NodeDirectory:
        if directory_id is not None:
            try:  # what it had before it was restarted
                return self._open_that(directory_id)
            except (errors.StoreInUseError, errors.StoreIncompleteError) as failure:
                logger.warning("another directory of the store is taken: %s", failure)
        return self._open_that(None)

    def _open_that(self, directory_id: str | None) -> directories.NodeDirectory:
        """None: the first that is free, or a new one."""
        where = Path(self._config.store), self._config.store_id, self._config.job_scope
        return directories.open_node(*where, directory_id=directory_id)

    @property
    def directory_id(self) -> str:
        """32 hex digits: who this page server is, whatever its node."""
        return self._directory.directory_id

    @property
    def path(self) -> Path:
        """The directory."""
        return self._directory.path

    @property
    def sums_path(self) -> Path:
        """Where checksums of bases are."""
        return self.path / REGIONS

    # -- starting

    def open_again(self, state: StoreState, keeper: _native.Keeper) -> dict[int, str]:
        """Without a keeper's memory: all bases to their newest versions, and to the new keeper.
        What the registry does not name goes.

        Args:
            state: The regions that are homed here.
            keeper: A new one.

        Returns:
            Why regions are not here though they should be: files are missing, or not as they were
            written, or the disk refuses them. They are left as they are.

        Raises:
            StoreError: The directory cannot be read.
        """
        began_s = time.monotonic()
        damaged: dict[int, str] = {}
        names, mapped = layer_files.scan_layers(self.path), mapped_files()
        there = {*bases.bases_of(self.path), *names}
        self._drop_unnamed(there - {each.record.region for each in state.regions}, state)
        for each in state.regions:
            region = each.record.region
            try:
                self._bring_back(self.path, each, names.get(region, []), mapped)
                disk.unlink(self._refused(region))
                fd = self._base_of(each.record)
            except (errors.StoreError, errors.NoSpaceError) as failure:
                logger.error("%s cannot be opened: %s", label(region), failure)
                damaged[region] = cause_of(failure)
                continue
            try:
                keeper.put_home(
                    region,
                    each.record.version,
                    each.record.base_address,
                    each.record.length_bytes,
                    fd,
                    in_file=each.record.in_file,
                    term=each.record.term,
                )
            finally:
                os.close(fd)
        logger.info(
            "the store's directory %s has brought back %d variables in %.2f s",
            *(self.path, len(state.regions) - len(damaged), time.monotonic() - began_s),
        )
        return damaged

    def _drop_unnamed(self, regions: set[int], state: StoreState) -> None:
        """What another home has meanwhile, or was freed. Of what the registry will only give out,
        this directory is newer than the registry's: it stays."""
        for region in regions:
            if region < state.next_region:
                bases.drop_region(self.path, region)
            else:
                logger.error(
                    "the registry's part of the store is older than %s: variable %d stays there, "
                    "and cannot be read",
                    *(self.path, region),
                )

    @staticmethod
    def _bring_back(
        directory: Path, stored: StoredRegion, names: list[LayerName], mapped: set[FileId]
    ) -> None:
        """The base is at the newest version, and nobody maps it."""
        region = stored.record.region
        path = base_path(directory, region)
        with disk.asking(path, "opening it"), disk.open_file(path) as fd:
            is_mapped = id_of(fd) in mapped
        if is_mapped:  # by who has an array of a session before: that stays as it is
            replace_with_copy(directory, region)
        committed = {commit_id: version for version, commit_id in stored.commits}
        redo(directory, region, stored.record.version, committed, names=names)

    def _base_of(self, record: RegionRecord) -> int:
        path = base_path(self.path, record.region)
        with disk.asking(path, "opening it"):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def serve(self, engine: _native.Engine, outcome: Callable[[int], dict[int, int]]) -> None:
        """The engine runs: files that are there from before are looked after from now on.

        Args:
            engine: Has the homes.
            outcome: Asks the registry what became of a commit: versions by region, {} if nothing.
        """
        self._engine = engine
        self._outcome = outcome
        now_s = time.monotonic()
        for names in layer_files.scan_layers(self.path).values():
            for name in names:
                if name.version:
                    self._note(name, now_s)
                else:
                    self._undecided[name.region, name.commit_id] = now_s
        self._thread = threading.Thread(target=self._run, name="clamor-store", daemon=True)
        self._thread.start()

    # -- directories of others

    def free_directories(self) -> list[str]:
        """Directories of this store at this node's path that no page server has open.

        Raises:
            StoreError: They cannot be looked at.
        """
        return directories.free_nodes(Path(self._config.store), self._config.store_id)

    def take_directory(self, directory_id: str, state: StoreState) -> list[int]:
        """Gets ready to be the home of what another directory has, which is locked until
        ``drop_directory``. Again: as the first time.

        Args:
            directory_id: Its uuid.
            state: The regions that are homed there.

        Returns:
            The regions whose files are whole: they are here, too, and the engine has them.

        Raises:
            StoreError: It cannot be opened, or the disk refuses something.
            What the engine raises.
        """
        assert self._engine is not None
        with self._taking:
            other = self._taken.get(directory_id)
            if other is None:
                other = self._taken[directory_id] = self._open_that(directory_id)
            names, mapped = layer_files.scan_layers(other.path), mapped_files()
            return [
                each.record.region
                for each in state.regions
                if self._take(other.path, each, names.get(each.record.region, []), mapped)
            ]

    def _take(
        self, source: Path, stored: StoredRegion, names: list[LayerName], mapped: set[FileId]
    ) -> bool:
        assert self._engine is not None
        record = stored.record
        with self._one(record.region):
            try:
                self._bring_back(source, stored, names, mapped)
                bases.link_base(source, self.path, record.region)
            except (errors.StoreDamagedError, errors.StoreFormatError) as failure:
                logger.error("%s is not taken over: %s", label(record.region), failure)
                return False
            fd = self._base_of(record)
            try:
                home = _native.HomeFile(
                    fd=fd,
                    version=record.version,
                    base_address=record.base_address,
                    length_bytes=record.length_bytes,
                    in_file=record.in_file,
                )
                self._engine.rebuild_from_file(record.region, home, record.term)
            finally:
                os.close(fd)
        return True

    def drop_directory(self, directory_id: str) -> None:
        """All that a directory had is homed here: it goes. One that is gone is no error.

        Raises:
            StoreError: It cannot be deleted.
        """
        with self._taking:
            other = self._taken.pop(directory_id, None)
            if other is not None:
                directories.remove_node(other)

    def close(self) -> None:
        """The session has ended, or this server: lets go of the directory. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():  # it writes still: the end of the process lets go
                return
        for other in self._taken.values():
            other.close()
        self._noted.unlink(missing_ok=True)
        self._directory.close()

    # -- what is kept

    def keep(self, region: int) -> None:
        """The region outlives this process from now on. It is whole here, and does not change.

        Raises:
            FreedError: It is not here.
            NoSpaceError: The disk is full.
            StoreError: The disk refuses it.
        """
        with self._one(region):
            home = self._home_file(region)
            try:
                bases.keep_base(
                    *(self.path, region, home.fd),
                    *(home.version, home.base_address, home.length_bytes),
                    in_file=home.in_file,
                )
            finally:
                os.close(home.fd)

    def keep_layer(self, region: int, commit_id: int) -> None:
        """The layer of a commit that is not decided yet, which is staged here.

        Raises:
            NoSpaceError, StoreError: As ``keep``.
            FreedError: It is not staged here.
        """
        with self._one((region, commit_id)):  # and no commit waits for a checkpoint
            if (region, commit_id) in self._written or (region, commit_id) in self._over:
                return
            self._write(region, commit_id, 0)
            with self._lock:
                self._written.add((region, commit_id))
                self._undecided[region, commit_id] = time.monotonic()

    def keep_own_layer(self, region: int, commit_id: int) -> bool:
        """Whether a layer is on the disk now, and its home is here. If not, the registry asks for
        it, and hears why."""
        try:
            os.close(self._home_file(region).fd)
            self.keep_layer(region, commit_id)
        except errors.FreedError:  # it is on its way to another home
            return False
        except errors.ClamorError as failure:
            logger.warning("a layer of %s is not on the disk: %s", label(region), failure)
            return False
        return True

    def answering(
        self, process: int
    ) -> tuple[
        Callable[[int, int], Awaitable[int]], Callable[[int, int], Coroutine[Any, Any, None]]
    ]:
        """``keep_own_layer``, for an event loop: the process that has it, or 0; and what drops it
        again."""
        threads = ThreadPoolExecutor(KEEPS_AT_ONCE, thread_name_prefix="clamor-keep")

        async def keep(region: int, commit_id: int) -> int:
            loop = asyncio.get_running_loop()
            is_kept = await loop.run_in_executor(threads, self.keep_own_layer, region, commit_id)
            return process if is_kept else 0

        async def drop(region: int, commit_id: int) -> None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(threads, self.drop_layers, commit_id, [region])

        return keep, drop

    def keep_whole(self, region: int, commit_id: int, version: int) -> None:
        """A delta was made whole, and the base may change once this returns. In place of the delta.

        Raises:
            As ``keep_layer``.
        """
        with self._one(region):
            self._write(region, commit_id, version)
            layer_files.drop_layer(self.path, region, commit_id)
            self._decided(region, commit_id)
            self._note(LayerName(region, commit_id, version), time.monotonic())

    def _write(self, region: int, commit_id: int, version: int) -> None:
        assert self._engine is not None
        fd, n_bytes = self._engine.layer_file(region, commit_id)
        try:
            layer_files.write_layer(self.path, region, commit_id, fd, n_bytes, version=version)
        finally:
            os.close(fd)

    def name(self, items: Iterable[Publication]) -> None:
        """These commits were made: their layers stay until the base has them.

        Raises:
            StoreError: The disk refuses it.
        """
        now_s = time.monotonic()
        items = list(items)
        with contextlib.ExitStack() as held:
            for region in sorted({each.region for each in items}):
                held.enter_context(self._one(region))
            for name in sorted({(each.region, each.commit_id) for each in items}):
                held.enter_context(self._one(name))
            with self._lock:
                new = [each for each in items if (each.region, each.commit_id) in self._undecided]
            # The others have their names, or are in a base that has come here since.
            layer_files.name_committed(
                self.path, [(each.region, each.commit_id, each.version) for each in new]
            )
            for each in new:
                self._note(LayerName(each.region, each.commit_id, each.version), now_s)
                self._decided(each.region, each.commit_id)

    def drop_layers(self, commit_id: int, regions_of_it: Iterable[int]) -> None:
        """The commit was refused."""
        for region in regions_of_it:
            with self._one(region), self._one((region, commit_id)):
                layer_files.drop_layer(self.path, region, commit_id)
                self._decided(region, commit_id)

    def _decided(self, region: int, commit_id: int) -> None:
        with self._lock:
            self._undecided.pop((region, commit_id), None)
            self._written.discard((region, commit_id))
            self._over[region, commit_id] = None
            if len(self._over) > MOST_OVER:
                del self._over[next(iter(self._over))]

    def drop_region(self, region: int) -> None:
        """It is freed."""
        with self._one(region):
            self._drop(region)

    def drop_unless_here(self, region: int) -> None:
        """It has another home, or what was got ready here is not needed; as far as that is still
        so: a word of an earlier home may come late."""
        with self._one(region):
            try:
                os.close(self._home_file(region).fd)
            except errors.FreedError:
                self._drop(region)
            except errors.SystemCallError:  # it is, and the disk has refused a part of it
                pass

    def _drop(self, region: int) -> None:
        bases.drop_region(self.path, region)
        disk.unlink(self._refused(region))
        with self._lock:
            self._layers.pop(region, None)
            names = [name for name in self._undecided if name[0] == region]
        for name in names:
            self._decided(*name)

    # -- checkpoints

    def _run(self) -> None:
        while not self._stopping.wait(TICK_S):
            now_s = time.monotonic()
            with self._lock:
                due = [region for region, layers in self._layers.items() if _is_due(layers, now_s)]
                old = [name for name, at_s in self._undecided.items() if now_s - at_s > UNDECIDED_S]
            for region in due:
                self._try(region, functools.partial(self.checkpoint, region))
            for name in old:
                self._try(name[0], functools.partial(self._settle, *name))

    def _try(self, region: int, work: Callable[[], object]) -> None:
        if self._stopping.is_set():
            return
        try:
            work()
        except Exception as failure:  # any: it is tried again, and nothing is lost meanwhile
            logger.warning(
                "the files of %s: %s; again in %g s", label(region), cause_of(failure), AGAIN_S
            )
            with self._lock:
                if (layers := self._layers.get(region)) is not None:
                    layers.not_before_s = time.monotonic() + AGAIN_S
                for name in self._undecided:
                    if name[0] == region:
                        self._undecided[name] = time.monotonic() - UNDECIDED_S + AGAIN_S

    def checkpoint(self, region: int) -> None:
        """The base has on disk what it is at, and layers up to there are needed no more.

        Raises:
            StoreError, NoSpaceError: The disk refuses it. Nothing is lost.
        """
        with self._one(region):
            with self._lock:
                layers = self._layers.get(region)
                versions = sorted(layers.bytes_of) if layers else []
            if not versions:
                return
            self._check_refused(region)
            try:
                home = self._synced_home(region)
            except errors.FreedError:  # it goes, and its files with it
                with self._lock:
                    self._layers.pop(region, None)
                return
            except (errors.SystemCallError, OSError):
                self._note_refused(region)
                raise
            try:
                if home.version >= versions[0]:
                    checkpoint(self.path, region, home.fd, home.version)
                    self._forget(region, home.version)
                elif self._kept_bytes(region) > home.length_bytes + MERGE_BYTES:
                    self._merge(region, home.version, versions[-1])
                else:
                    self._wait(region)
            finally:
                os.close(home.fd)

    def _refused(self, region: int) -> Path:
        """A file that says that the disk has refused a part of the region's base. A later sync says
        nothing of it, and the next process knows nothing: only a redo makes the base right."""
        return self.path / REGIONS / f"{region}.refused"

    def _note_refused(self, region: int) -> None:
        with disk.asking(path := self._refused(region), "making it"):
            path.touch(mode=0o600)
        disk.sync_directory(self.path / REGIONS)

    def _check_refused(self, region: int) -> None:
        if self._refused(region).exists():
            raise errors.StoreError(
                f"{base_path(self.path, region)}: the disk has refused a part of it.",
                hint="All commits are in the store's layers. Look at the disk, then open the store "
                "anew: that writes them again.",
            )

    def _synced_home(self, region: int) -> _native.HomeFile:
        """Its file, on the disk at its version. The caller closes it.

        What the disk refuses to write is said once to each description: to this one, or to the
        engine's before, which then says it at the second look.
        """
        home = self._home_file(region)
        try:
            os.fdatasync(home.fd)
            os.close(self._home_file(region).fd)
        except BaseException:
            os.close(home.fd)
            raise
        return home

    def _merge(self, region: int, above: int, up_to: int) -> None:
        """The base is leased at an older version for long: its layers become one."""
        merged = merge(self.path, region, above, up_to)
        self._wait(region)
        if merged is None:
            return
        n_bytes = os.stat(merged).st_size
        with self._lock:
            layers = self._layers[region]
            for version in [each for each in layers.bytes_of if above < each <= up_to]:
                del layers.bytes_of[version]
            layers.bytes_of[up_to] = n_bytes

    def _settle(self, region: int, commit_id: int) -> None:
        """Whose a layer is that nobody has named or dropped."""
        assert self._engine is not None
        with self._lock:
            if (region, commit_id) not in self._undecided:
                return
            self._undecided[region, commit_id] = time.monotonic()  # the next look is as far away
        if self._engine.has_layer(region, commit_id):
            return  # the engine asks
        if version := self._outcome(commit_id).get(region, 0):
            self.name([Publication(region, version, commit_id)])
        else:
            self.drop_layers(commit_id, [region])

    # -- private

    @contextlib.contextmanager
    def _one(self, what: int | _Name) -> Iterator[None]:
        """Nobody else changes the region's files meanwhile, or writes the layer."""
        with self._lock:
            lock = self._locks.setdefault(what, threading.RLock())  # there as long as it is held
        with lock:
            yield

    def _home_file(self, region: int) -> _native.HomeFile:
        assert self._engine is not None
        return self._engine.home_file(region)

    def _note(self, name: LayerName, now_s: float) -> None:
        """A layer has its committed name."""
        with disk.asking(path := layer_path(self.path, name), "looking at it"):
            n_bytes = os.stat(path).st_size
        with self._lock:
            layers = self._layers.setdefault(name.region, _Layers())
            if not layers.bytes_of:
                layers.since_s = now_s
            layers.bytes_of[name.version] = n_bytes

    def _forget(self, region: int, up_to: int) -> None:
        with self._lock:
            if (layers := self._layers.get(region)) is None:
                return
            for version in [each for each in layers.bytes_of if each <= up_to]:
                del layers.bytes_of[version]
            layers.since_s = time.monotonic()
            if not layers.bytes_of:
                del self._layers[region]

    def _kept_bytes(self, region: int) -> int:
        with self._lock:
            layers = self._layers.get(region)
            return sum(layers.bytes_of.values()) if layers else 0

    def _wait(self, region: int) -> None:
        with self._lock:
            if (layers := self._layers.get(region)) is not None:
                layers.not_before_s = time.monotonic() + AGAIN_S


def _is_due(layers: _Layers, now_s: float) -> bool:
    if not layers.bytes_of or now_s < layers.not_before_s:
        return False
    if now_s - layers.since_s >= CHECKPOINT_S or len(layers.bytes_of) >= CHECKPOINT_LAYERS:
        return True
    return sum(layers.bytes_of.values()) >= CHECKPOINT_BYTES


def _read_note(noted: Path) -> str | None:
    try:
        return noted.read_text().strip() or None
    except OSError:
        return None
