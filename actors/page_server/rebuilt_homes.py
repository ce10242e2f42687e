"""A page server where the home of a region is lost: what it has of it, and how it becomes its home.

Methods wait for layers and for Ray: they are called on the actor's threads, never on its loop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Protocol

import ray
from pyroaring import BitMap
from ray.exceptions import (
    GetTimeoutError,
    ObjectFetchTimedOutError,
    ObjectLostError,
    RayTaskError,
    WorkerCrashedError,
)

from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._native import client as _native
from clamor_ray._objects.layout import BLOCK_BYTES, take_apart
from clamor_ray._objects.memory import COMMIT_HINT, check_room
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import RebuildOrder, RegionRecord
from clamor_ray._protocol.source import NOT_EQUAL_HINT
from clamor_ray._spans.record import span
from clamor_ray.actors.lost_homes import new_home, shared_objects
from clamor_ray.actors.page_server.version_questions import runs_of

FETCH_OBJECT_S = 120.0
RAISED_HINT = "Put the variable again."


class Pull(Protocol):
    """See ``PageServer.pull``."""

    def __call__(self, commit_id: int, region: int, from_server: int, layer_bytes: int) -> None: ...


def layer_error(
    code: int, commit_id: int, region: int, from_server: int, home: int
) -> errors.ClamorError:
    """Why a home could not fetch a layer. One that is gone is no loss of the region: the writer, if
    it lives, has its blocks and stages them again. A shortage is the home's."""
    if code == _native.PC_ERR_TIMEOUT:
        return errors.WaitTimeoutError(
            f"The home of {label(region)} did not take the blocks of commit {commit_id:#x} in "
            f"time: page server {from_server:#x}, where they were staged, does not give them, or "
            "the keeper of the home's node takes nothing. The home's log says which.",
            code=code,
            hint="Nothing is lost: commit again.",
        )
    if code != _native.PC_ERR_HOME_LOST:
        limit = {
            _native.PC_ERR_DESCRIPTORS: "its limit is RLIMIT_NOFILE",
            _native.PC_ERR_NO_SPACE: "the disk of its CLAMOR_SPILL_DIR",
        }.get(code, "")
        staged_at = None if limit or code == _native.PC_ERR_NO_MEMORY else f"{from_server:#x}"
        where = {"page_server": f"{home:#x}", "staged_at": staged_at}
        return _native.error_for(code, limit, region=region, **where)
    return errors.CommitAbortedError(
        f"The blocks that commit {commit_id:#x} changes of {label(region)} are gone: page server "
        f"{from_server:#x}, where they were staged, ended together with its keeper.",
        code=code,
    )


class RebuiltHomes:
    """See the file's head.

    Args:
        engine: Has the blocks.
        keep: See ``VersionQuestions.keep``.
        on_loop: Runs a coroutine on the server's loop, and waits for it.
        pull: See ``PageServer.pull``.
        go_on: See ``MovedHomes.adopt``.
    """

    def __init__(
        self,
        engine: _native.Engine,
        keep: Callable[[RegionRecord, int, int], None],
        on_loop: Callable[..., Any],
        pull: Pull,
        go_on: Callable[[RegionRecord, int, int], None],
    ) -> None:
        self._engine = engine
        self._keep = keep
        self._on_loop = on_loop
        self._pull = pull
        self._go_on = go_on

    def holdings(
        self, record: RegionRecord, commits: list[tuple[int, int]]
    ) -> list[tuple[int, bytes]]:
        """What is here of a region: (version, serialized BitMap of its blocks).

        Args:
            record: What it is; its home is lost.
            commits: (version, commit id) of its last commits. What this node has staged of them
                counts, also where the writer died before it could say what became of it.
        """
        region = record.region

        async def keep() -> None:
            for version, commit_id in commits:
                # It is freed meanwhile, or this was its home and has nothing of it.
                with contextlib.suppress(errors.FreedError, errors.HomeLostError):
                    self._keep(record, version, commit_id)

        self._on_loop(keep())
        return [
            (version, bytes(new_home.blocks_of(runs).serialize()))
            for version in self._engine.cached_versions(region)
            if len(runs := self._engine.cached_blocks(region, version))
        ]

    def stage_cached(self, region: int, version: int, commit_id: int, blocks: bytes) -> int:
        """Makes a layer of cached blocks, which the new home pulls, and then drops.

        Args:
            region: Its id.
            version: That the blocks are cached at.
            commit_id: What the layer is staged under.
            blocks: Serialized BitMap.

        Returns:
            The layer's bytes.

        Raises:
            OutOfMemoryError: There is no room for it.
            InternalError: Some of the blocks are not here any more.
        """
        n_bytes = len(BitMap.deserialize(blocks)) * BLOCK_BYTES
        check_room(n_bytes, f"Giving the blocks of {label(region)} to its new home", COMMIT_HINT)
        return self._engine.stage_cached(region, version, commit_id, runs_of(blocks))

    def rebuild(self, order: RebuildOrder, made: list[Any]) -> None:
        """Gets ready to be the home of a region; ``rehome`` makes it that.

        Args:
            order: What comes from where.
            made: A list of one ObjectRef of what the source has made, or an empty one. It is there:
                this call takes one of the actor's threads.

        Raises:
            OutOfMemoryError: There is no room for it.
            SourceError: The source raised, or has made something else than it did.
            WaitTimeoutError: What it has made cannot be had now.
            What the engine raises.
        """
        record = order.record
        region = record.region
        what = f"Becoming the home of {label(region)}"
        if not record.on_disk:
            check_room(new_home.written_bytes(order), what, COMMIT_HINT)
        lost = runs_of(order.lost or BitMap().serialize())
        fd = self._engine.rebuild_begin(
            *(region, record.version, record.base_address, record.length_bytes, lost),
            record.term,
            record.on_disk,
            record.in_file,
        )
        try:
            with span("", "rebuild", region=region):
                for version, blocks in order.cached:
                    self._engine.rebuild_copy(region, fd, version, runs_of(blocks))
                for server_id, commit_id, layer_bytes in order.takes:
                    self._pull(commit_id, region, server_id, layer_bytes)
                    self._engine.rebuild_take(region, fd, commit_id)
                if order.from_source:
                    new_home.fill_from_source(fd, order, self._pieces(order, made))
                if order.attempt:  # its group makes the rest, and then it is sealed
                    self._go_on(record, order.attempt, os.dup(fd))
                else:
                    self._engine.rebuild_seal(region, fd)
        except BaseException:
            self._engine.rebuild_drop(region, fd)
            raise
        finally:
            os.close(fd)

    def drop(self, region: int) -> None:
        """The region is lost for good: lets go of what was got ready here, and refuses who opens
        it."""
        self._engine.rebuild_drop(region)
        with contextlib.suppress(errors.FreedError):  # nobody has used it here
            self._engine.region_lost(region, _native.PC_ERR_HOME_LOST)

    @staticmethod
    def _pieces(order: RebuildOrder, made: list[Any]) -> list[tuple[int, Any]]:
        if not made:
            return list(order.pieces)
        try:
            found = ray.get(made[0], timeout=FETCH_OBJECT_S)
        except RayTaskError as failure:
            cause = failure.cause
            if isinstance(cause, errors.SourceError):
                raise cause from None
            if shared_objects.is_shortage(cause):
                raise errors.WaitTimeoutError(
                    f"The source found no room: {cause_of(cause)}"
                ) from failure
            raise errors.SourceError(f"It raised: {cause!r}.", hint=RAISED_HINT) from failure
        except GetTimeoutError as failure:
            raise errors.WaitTimeoutError(
                f"What the source has made was not brought within {FETCH_OBJECT_S:g} s."
            ) from failure
        except (
            ObjectFetchTimedOutError,
            WorkerCrashedError,
        ) as failure:  # killed for want of memory?
            raise errors.WaitTimeoutError(
                f"The source was not run: {cause_of(failure)}"
            ) from failure
        except ObjectLostError as failure:
            raise errors.SourceError(
                f"Ray cannot bring it: {cause_of(failure)}", hint=RAISED_HINT
            ) from failure
        if not order.digest:
            return list(found)
        pickled = take_apart(found)
        if shared_objects.digest_of(pickled) != order.digest:
            raise errors.SourceError(
                "The shared object was made again by Ray, and pickles to a different layout.",
                hint=NOT_EQUAL_HINT,
            )
        return list(pickled.pieces())
