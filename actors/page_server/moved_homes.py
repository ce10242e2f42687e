"""A page server's part where a home that lives moves: as the giver, and as the taker.

The giver stages what the taker then pulls. The taker has one attempt for each region, from its
beginning until it is said to be the home, or the attempt is dropped. An attempt of which nobody
says anything for ``SILENCE_S`` has no registry any more that knows it: it is dropped, and one that
was sealed only after the registry has said that this server is not the home. (No registry writes
down that it is, so long after the seal: it holds commits back until then, for seconds.)

Methods wait for layers: they are called on the actor's threads, never on its loop.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._native import client as _native
from clamor_ray._objects.layout import BLOCK_BYTES
from clamor_ray._objects.memory import COMMIT_HINT, check_room
from clamor_ray._protocol.messages import LookupAnswer, RegionRecord
from clamor_ray._spans.record import span
from clamor_ray.actors.lost_homes import new_home
from clamor_ray.actors.lost_homes.repairs import Staged
from clamor_ray.actors.page_server.rebuilt_homes import Pull
from clamor_ray.actors.page_server.version_questions import runs_of

logger = logging.getLogger("clamor_ray.page_server")

SILENCE_S = 60.0
PULLS_AT_ONCE = 8  # of one call
LOOK_S = 1.0  # between looks at what goes on, while anything does


@dataclass
class _Attempt:
    """One at the taker.

    Args:
        number: The registry's.
        record: The region's, with this server as its home.
        fd: Of what is prepared.
        heard_s: When the registry last said something of it.
        is_sealed: All of it is here.
        busy: Held while it takes something.
    """

    number: int
    record: RegionRecord
    fd: int
    heard_s: float
    is_sealed: bool = False
    busy: threading.Lock = field(default_factory=threading.Lock)


class MovedHomes:
    """See the file's head. Safe from any thread.

    Args:
        engine: Has the homes.
        pull: See ``PageServer.pull``.
        look_up: Asks the registry what the region is.
        rehome: See ``PageServer.rehome``.
        unpin: Lets go of the Ray object that a region was served from.
        syncs: What is taken goes to the disk as it comes, so that its last sync is short.
    """

    def __init__(
        self,
        engine: _native.Engine,
        pull: Pull,
        look_up: Callable[[int], LookupAnswer],
        rehome: Callable[[RegionRecord], None],
        unpin: Callable[[int], None],
        syncs: bool = False,
    ) -> None:
        self._engine = engine
        self._pull = pull
        self._look_up = look_up
        self._rehome = rehome
        self._unpin = unpin
        self._syncs = syncs
        self._lock = threading.Lock()  # of what follows; nothing is waited for under it
        self._attempts: dict[int, _Attempt] = {}  # by region
        self._leaving: set[int] = set()  # regions whose object is still read
        self._is_watching = False
        self._closed = threading.Event()

    def close(self) -> None:
        """Looks after nothing any more; the engine may end then."""
        self._closed.set()

    # -- the giver

    def home_blocks(self, region: int, version: int) -> bytes:
        """The blocks of a home here that hold data at a version: a serialized BitMap.

        Raises:
            What ``Engine.home_blocks`` raises.
        """
        found = new_home.blocks_of(self._engine.home_blocks(region, version))
        return bytes(found.serialize())

    def stage_home(self, region: int, version: int, commit_id: int, blocks: bytes) -> int:
        """Makes a layer of blocks of a home here, which the taker pulls.

        Args:
            region: Its id.
            version: That the blocks are to have.
            commit_id: What the layer is staged under.
            blocks: Serialized BitMap.

        Returns:
            The layer's bytes.

        Raises:
            OutOfMemoryError: There is no room for it.
            What ``Engine.stage_home`` raises.
        """
        n_bytes = len(BitMap.deserialize(blocks)) * BLOCK_BYTES
        check_room(n_bytes, f"Giving blocks of {label(region)} to its next home", COMMIT_HINT)
        return self._engine.stage_home(region, version, commit_id, runs_of(blocks))

    def stage_records(
        self, region: int, first_version: int, commit_ids: list[int], most_bytes: int
    ) -> list[int]:
        """Makes layers of records of the history of a home here: what a version and those after it
        had in the blocks that the next commit replaced.

        Args:
            region: Its id.
            first_version: Of the first record; the others follow without a gap.
            commit_ids: What each is staged under.
            most_bytes: No further one is staged when there are so many.

        Returns:
            The bytes of each layer; 0: that record, and all before it, are of no use any more. Of
            the first ones only, where they were too many.

        Raises:
            NoVersionError: The commit after one of them is not known here yet.
            What else the engine raises.
        """
        layers_bytes: list[int] = []
        for version, commit_id in enumerate(commit_ids, first_version):
            try:
                layers_bytes.append(self._engine.stage_record(region, version, commit_id))
            except (errors.SnapshotExpired, errors.HomeLostError):
                layers_bytes.append(0)
            if sum(layers_bytes) >= most_bytes:
                break
        return layers_bytes

    def stage_versions(self, region: int, wanted: list[tuple[int, int, bytes]]) -> list[int]:
        """Makes layers of blocks of a home here, for what others of its group make again.

        Args:
            region: Its id.
            wanted: (version, commit id, serialized BitMap) of each.

        Returns:
            The bytes of each layer; 0: that version is kept no longer, or some of it is lost.

        Raises:
            What ``stage_home`` raises; nothing stays staged then.
        """
        layers_bytes: list[int] = []
        try:
            for version, commit_id, blocks in wanted:
                try:
                    layers_bytes.append(self.stage_home(region, version, commit_id, blocks))
                except (errors.SnapshotExpired, errors.HomeLostError):
                    layers_bytes.append(0)
        except BaseException:
            self.drop_layers(region, [commit_id for _, commit_id, _ in wanted])
            raise
        return layers_bytes

    def drop_layers(self, region: int, commit_ids: list[int]) -> None:
        """What was staged here for the taker is there, or is not wanted."""
        for commit_id in commit_ids:
            self._engine.drop_staged(region, commit_id)

    def left(self, region: int) -> None:
        """This server was the home of a region that it serves from a Ray object. That is let go of
        when no reply reads from it any more."""
        with self._lock:
            self._leaving.add(region)
        self._watch()

    # -- the taker

    def begin(self, record: RegionRecord, attempt: int, n_bytes: int, lost: bytes) -> None:
        """Begins to get ready to be the home. Another attempt for the region is dropped.

        Args:
            record: The region's, with its newest version, and this server as its home.
            attempt: The registry's number for it.
            n_bytes: What will come, at least.
            lost: Serialized BitMap of blocks that nobody has; b"": none.

        Raises:
            OutOfMemoryError: There is no room for it.
            WaitTimeoutError: This server was the home a moment ago: ask again.
            What else ``Engine.rebuild_begin`` raises.
        """
        region = record.region
        if not record.on_disk:
            check_room(n_bytes, f"Becoming the home of {label(region)}", COMMIT_HINT)
        with self._lock:
            before = self._attempts.pop(region, None)
        if before is not None:
            self._end(before)
        fd = self._engine.rebuild_begin(
            region,
            record.version,
            record.base_address,
            record.length_bytes,
            runs_of(lost or BitMap().serialize()),
            record.term,
            record.on_disk,
            record.in_file,
        )
        with self._lock:
            self._attempts[region] = _Attempt(
                number=attempt, record=record, fd=fd, heard_s=time.monotonic()
            )
        self._watch()

    def take(
        self, region: int, attempt: int, from_server: int, layers: list[tuple[int, int]]
    ) -> None:
        """Takes blocks.

        Args:
            region: Its id.
            attempt: As in ``begin``.
            from_server: Where they are staged.
            layers: (commit id, bytes).

        Raises:
            ServerUnavailableError: There is no such attempt here any more.
            What ``PageServer.pull`` and ``Engine.rebuild_take`` raise.
        """
        found = self._find(region, attempt)
        self._take_all(found, from_server, layers, self._engine.rebuild_take)

    def take_records(
        self, region: int, attempt: int, from_server: int, layers: list[tuple[int, int]]
    ) -> None:
        """Takes records of the history, in the order of their versions. As ``take``."""
        found = self._find(region, attempt)
        self._take_all(found, from_server, layers, self._engine.rebuild_take_record)

    def adopt(self, record: RegionRecord, attempt: int, fd: int) -> None:
        """What a rebuild has begun is gone on with as an attempt. Owns fd.

        Args:
            record: As in ``begin``.
            attempt: The registry's number for it.
            fd: Of what is prepared.
        """
        with self._lock:
            before = self._attempts.pop(record.region, None)
            self._attempts[record.region] = _Attempt(
                number=attempt, record=record, fd=fd, heard_s=time.monotonic()
            )
        if before is not None:
            self._end(before)
        self._watch()

    def take_repaired(
        self, region: int, attempt: int, are_records: bool, staged: list[Staged]
    ) -> None:
        """Takes what others of the piece's group make: the XOR of their layers of each version.

        Args:
            region: The piece.
            attempt: As in ``begin``.
            are_records: Of the history, in the order of their versions; else they are blocks.
            staged: (version, [(server, region, commit id, bytes)]).

        Raises:
            As ``take``.
        """
        found = self._find(region, attempt)
        engine = self._engine
        take = engine.rebuild_take_record if are_records else engine.rebuild_take
        with found.busy, span("", "rebuild by parity", region=region):
            made: list[int] = []
            try:
                self._pull_all(
                    (commit_id, member, server, layer_bytes)
                    for _, layers in staged
                    for server, member, commit_id, layer_bytes in layers
                )
                for version, layers in staged:
                    parts = [(member, commit_id) for _, member, commit_id, _ in layers]
                    made.append(secrets.randbits(64) | 1)
                    engine.stage_xor(region, version, made[-1], parts)
                    take(region, found.fd, made[-1])
            except BaseException:
                for _, layers in staged:
                    for _, member, commit_id, _ in layers:
                        engine.drop_staged(member, commit_id)
                for commit_id in made:
                    engine.drop_staged(region, commit_id)
                raise
        found.heard_s = time.monotonic()

    def _take_all(
        self,
        attempt: _Attempt,
        from_server: int,
        layers: list[tuple[int, int]],
        take: Callable[[int, int, int], None],
    ) -> None:
        region = attempt.record.region
        with attempt.busy, span("", "take home of", region=region):
            try:
                self._pull_all((commit_id, region, from_server, n) for commit_id, n in layers)
                for commit_id, _ in layers:
                    take(region, attempt.fd, commit_id)
                if self._syncs:
                    os.fdatasync(attempt.fd)
            except BaseException:
                for commit_id, _ in layers:  # nobody would ask for them soon
                    self._engine.drop_staged(region, commit_id)
                raise
        attempt.heard_s = time.monotonic()

    def _pull_all(self, layers: Iterable[tuple[int, int, int, int]]) -> None:
        """Side by side: records are many and small, and each takes a round trip. None is under way
        when this is over: who drops them drops all.

        Args:
            layers: What ``PageServer.pull`` gets: commit id, region, server, bytes.
        """
        with ThreadPoolExecutor(PULLS_AT_ONCE, "clamor-pull") as threads:
            pulls = [threads.submit(self._pull, *each) for each in layers]
            try:
                for pull in pulls:
                    pull.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def seal(self, region: int, attempt: int, version: int) -> None:
        """All of it is here, at this version. It serves once ``rehome`` has said so.

        Raises:
            ServerUnavailableError: There is no such attempt here any more.
            What ``Engine.rebuild_seal_at`` raises.
        """
        found = self._find(region, attempt)
        with found.busy:
            self._engine.rebuild_seal_at(region, found.fd, version)
            found.is_sealed = True
        found.heard_s = time.monotonic()

    def drop(self, region: int, attempt: int) -> None:
        """The attempt is given up. One that is not known here, because this process has begun
        since, goes with all of it that its keeper had; one of later than that stays."""
        with self._lock:
            found = self._attempts.get(region)
            if found is not None and found.number != attempt:
                return
            self._attempts.pop(region, None)
        if found is not None:
            self._end(found)
        else:
            self._engine.rebuild_drop(region)

    def told(self, record: RegionRecord) -> None:
        """Who the homes of a region are from now on: an attempt that was before that is over."""
        with self._lock:
            found = self._attempts.get(record.region)
            if found is None or found.record.term > record.term:
                return
            del self._attempts[record.region]
        self._end(found)  # where it has become the home nothing is prepared any more

    def _find(self, region: int, attempt: int) -> _Attempt:
        with self._lock:
            found = self._attempts.get(region)
        if found is None or found.number != attempt:
            raise errors.ServerUnavailableError(
                f"The page server that is to take {label(region)} does not know this attempt: it "
                "was dropped, or the server was restarted.",
                hint="It begins again.",
            )
        found.heard_s = time.monotonic()
        return found

    def _end(self, attempt: _Attempt) -> None:
        """By whoever has taken it out of the table, and nobody else."""
        try:
            self._engine.rebuild_drop(attempt.record.region, attempt.fd)  # what it takes now fails
        finally:
            with attempt.busy:
                os.close(attempt.fd)

    # -- what nobody asks for any more

    def _watch(self) -> None:
        with self._lock:
            if self._is_watching:
                return
            self._is_watching = True
        threading.Thread(target=self._look_for_ever, name="clamor-moves", daemon=True).start()

    def _look_for_ever(self) -> None:
        """While there is anything to look at: an idle server wakes up for nothing."""
        while True:
            if self._closed.wait(LOOK_S):
                return
            try:
                self.look(time.monotonic())
            except Exception as failure:  # any: it is looked at again
                logger.warning("cannot look after homes that move: %r", failure)
            with self._lock:
                if not self._attempts and not self._leaving:
                    self._is_watching = False
                    return

    def look(self, now_s: float) -> None:
        """Drops attempts that nobody asks for any more, and objects that nobody reads any more."""
        with self._lock:
            leaving = set(self._leaving)
            silent = [
                attempt
                for attempt in self._attempts.values()
                if now_s - attempt.heard_s >= SILENCE_S and not attempt.busy.locked()
            ]
        if leaving:
            read = {each["region"] for each in self._engine.region_stats() if each["leaves_home"]}
            for region in leaving - read:
                self._unpin(region)
            with self._lock:
                self._leaving &= read | (self._leaving - leaving)
        for attempt in silent:
            self._give_up(attempt)

    def _give_up(self, attempt: _Attempt) -> None:
        region = attempt.record.region
        if attempt.is_sealed:
            try:
                answer = self._look_up(region)
            except Exception as failure:  # any: only the registry says who the home is
                logger.info("nobody says who has %s: %r", label(region), failure)
                return
            if isinstance(answer, RegionRecord) and answer.term >= attempt.record.term:
                self._rehome(answer)
                return
        logger.warning("the move of %s to here is given up: nobody asks for it", label(region))
        self.drop(region, attempt.number)
