"""Makes a variable in pieces: each is filled on this node, sealed, and moved to its home.

So this node needs memory for the pieces that are under way, and for those that stay.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from clamor_ray import errors
from clamor_ray._build.room import ensure_room, homes_give_room
from clamor_ray._native.client import Client, copy_in
from clamor_ray._objects.layout import round_up
from clamor_ray._protocol.config import SEAL_S, Config
from clamor_ray._protocol.messages import CreatedPieces, RegionRecord
from clamor_ray._protocol.registry_client import RegistryClient

UNIT_BYTES: Final = 2 << 20
PIECES_A_SERVER: Final = 4
MOST_PIECES: Final = 64  # of what is no larger than these pieces of 1 GiB
LARGE_BYTES: Final = 1 << 30
LARGE_ON_DISK_BYTES: Final = 32 << 20
MOST_LARGE: Final = 1024
UNDER_WAY: Final = 2  # on their way to their homes
EMPTY_UNDER_WAY: Final = 8  # of those that have no bytes, so that they take no memory
LEAST_RATE: Final = 10e6  # bytes per second, for deadlines
PLACE_S: Final = 60.0
_NO_MORE: Final = object()
LAYERS_BYTES: Final = 64 << 20  # in which pieces are on their way: `actors/moves/moves.py`

Content = Sequence[tuple[int, memoryview]]
ContentOf = Callable[[int, int], Iterable[tuple[int, memoryview]]]


def piece_bytes_of(
    length_bytes: int, n_servers: int, width: int = 0, *, on_disk: bool = False
) -> int:
    """Of each piece but the last: some for each server, not too many, none too large.

    Args:
        length_bytes: of the variable.
        n_servers: that it is spread over.
        width: pieces of a group: as many of them as make the parities least, and half of what it
            would be without groups at least.
        on_disk: a commit needs memory for one piece after the other, so they are small.

    Returns:
        A multiple of 2 MiB.

    Example:
        >>> piece_bytes_of(100 << 20, 4) >> 20, piece_bytes_of(1 << 20, 4) >> 20
        (8, 2)
        >>> piece_bytes_of(1 << 40, 4) >> 30, piece_bytes_of(10 << 30, 1, on_disk=True) >> 20
        (1, 32)
        >>> piece_bytes_of(64 << 20, 3) >> 20, piece_bytes_of(64 << 20, 3, width=2) >> 20
        (6, 8)
    """
    n_pieces = min(MOST_PIECES, PIECES_A_SERVER * n_servers)
    large_bytes = LARGE_ON_DISK_BYTES if on_disk else LARGE_BYTES
    n_pieces = max(n_pieces, min(MOST_LARGE, -(-length_bytes // large_bytes)))
    if width < 2:
        return round_up(-(-length_bytes // n_pieces), UNIT_BYTES)

    step_bytes = max(UNIT_BYTES, length_bytes // 64)  # less is not worth fewer pieces

    def parity_steps(piece_bytes: int) -> int:
        n_groups, rest_bytes = divmod(length_bytes, width * piece_bytes)  # of full ones
        return (n_groups * piece_bytes + min(rest_bytes, piece_bytes)) // step_bytes

    most = max(1, n_pieces // width)
    sizes = [
        round_up(-(-length_bytes // (n_groups * width)), UNIT_BYTES)
        for n_groups in range(most, most // 2, -1)
    ]
    return min(sizes, key=parity_steps)  # the first of equal ones: the most pieces


def xor_of(contents: Sequence[Content], length_bytes: int) -> list[tuple[int, memoryview]]:
    """The XOR of several pieces' bytes.

    Args:
        contents: of each (offset, bytes) of all that is not zeros.
        length_bytes: of the longest.

    Returns:
        The same of the XOR.

    Example:
        >>> one, other = memoryview(bytes([1, 2])), memoryview(bytes([3, 4]))
        >>> parts = xor_of([[(0, one)], [(1, other)]], 10)
        >>> [(offset, list(view)) for offset, view in parts]
        [(0, [1, 1, 4])]
    """
    spans = sorted((at, at + view.nbytes) for parts in contents for at, view in parts)
    if not spans:
        return []
    made = np.zeros(length_bytes, np.uint8)  # what nobody writes takes no memory
    for parts in contents:
        for at, view in parts:
            out = made[at : at + view.nbytes]
            np.bitwise_xor(out, np.frombuffer(view, np.uint8), out=out)
    joined = [spans[0]]
    for begin, end in spans[1:]:
        if begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return [(begin, memoryview(made.data)[begin:end]) for begin, end in joined]


class PieceMaker:
    """See the file's head. For one variable, by one thread.

    Args:
        created: what the registry has made.
        content: (offset, bytes) of all that is not zeros; or a function of (begin, end) that gives
            these of a part of the variable, again each time that it is called.
        client: of this node's page server.
        rpc: calls the registry.
        config: of this process.
        node_id: Ray's hex id of this node.
        until_answered: makes a call of the registry again whose answer was lost.
        away: no piece stays on this node.
        before: is called with the index of each piece before that is filled.
    """

    def __init__(
        self,
        created: CreatedPieces,
        content: Content | ContentOf,
        *,
        client: Client,
        rpc: RegistryClient,
        config: Config,
        node_id: str,
        until_answered: Callable[[Callable[[], Any]], Any],
        away: bool = False,
        before: Callable[[int], None] = lambda index: None,
    ) -> None:
        self._created = created
        self._content = content
        self._client = client
        self._rpc = rpc
        self._config = config
        self._node_id = node_id
        self._until_answered = until_answered
        self._away = away
        self._before = before
        self._placing: collections.deque[concurrent.futures.Future[None]] = collections.deque()
        self._here: list[RegionRecord] = []  # pieces that stay on this node

    def make(self) -> None:
        """All pieces are at their homes when this returns.

        Raises:
            OutOfMemoryError: No node has room for one of them.
            NoSpaceError: They are on disk, and that has none.
            ServerUnavailableError: A page server was restarted, or is lost: make all of it again.
            WaitTimeoutError: A piece could not be moved in time.
        """
        pool = concurrent.futures.ThreadPoolExecutor(EMPTY_UNDER_WAY, "clamor-pieces")
        try:
            regions = zip(self._created.pieces, self._created.homes, strict=True)
            for index, (piece, home) in enumerate(regions):
                parts = self._parts_of(index, piece)
                most = UNDER_WAY if parts else EMPTY_UNDER_WAY
                while len(self._placing) >= most:
                    self._placing.popleft().result()
                self._before(index)
                if piece.on_disk:
                    self._fill_on_disk(piece, parts)
                else:
                    self._make_room(sum(view.nbytes for _, view in parts))
                    self._fill(piece, parts)
                if home in piece.homes and self._away:
                    self._placing.append(pool.submit(self._place, piece, 0))
                elif home in piece.homes:
                    self._here.append(piece)
                else:
                    self._placing.append(pool.submit(self._place, piece, home))
            while self._placing:
                self._placing.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _parts_of(self, index: int, piece: RegionRecord) -> list[tuple[int, memoryview]]:
        """(offset in the piece, bytes) of what a piece has, of a parity piece too."""
        groups = self._created.whole.groups
        if not groups.is_parity(index):
            return list(self._parts(piece))
        data = [self._created.pieces[i] for i in groups.data_of(groups.group_of(index))]
        of_each = [list(self._parts(each)) for each in data]
        return of_each[0] if groups.are_copies else xor_of(of_each, piece.length_bytes)

    def _parts(self, piece: RegionRecord) -> Iterator[tuple[int, memoryview]]:
        """(offset in the piece, bytes) of what a data piece has."""
        begin = piece.base_address - self._created.whole.base_address
        end = begin + piece.length_bytes
        content = self._content(begin, end) if callable(self._content) else self._content
        for offset, view in content:
            low, high = max(begin, offset), min(end, offset + view.nbytes)
            if low < high:
                yield low - begin, view[low - offset : high - offset]

    def _make_room(self, content_bytes: int) -> None:
        """For a piece, and for the layers in which others are on their way. Where this node has
        no room, what was to stay here goes elsewhere, and then other homes of this node do.

        Raises:
            OutOfMemoryError: No node has any.
        """
        needed_bytes = content_bytes + min(content_bytes, LAYERS_BYTES)
        ensure_room(needed_bytes, "A piece of the variable", self._gives(needed_bytes))

    def _gives(self, needed_bytes: int) -> Iterator[None]:
        yield from self._leave()
        yield from homes_give_room(self._rpc, self._node_id, needed_bytes)

    def _leave(self) -> Iterator[None]:
        """Pieces of this variable leave this node, one with each step."""
        while self._placing or self._here:
            if self._placing:
                self._placing.popleft().result()
            else:
                self._place(self._here.pop(), 0)
            yield

    def _fill_on_disk(self, piece: RegionRecord, parts: Content) -> None:
        """Whether this node's disk has room for a piece, its page server finds out.

        Raises:
            NoSpaceError: It has none, also after all that could go elsewhere did.
        """
        leave = self._leave()
        while True:
            try:
                self._fill(piece, parts)
                return
            except errors.NoSpaceError:
                if next(leave, _NO_MORE) is _NO_MORE:
                    raise

    def _fill(self, piece: RegionRecord, parts: Content) -> None:
        region, connect_s = piece.region, self._config.connect_timeout_s
        where = (region, piece.base_address, piece.length_bytes)
        fd = self._client.create(*where, on_disk=piece.on_disk, timeout_s=connect_s)
        try:
            for offset, view in parts:
                copy_in(fd, offset, view)
        except BaseException:
            with contextlib.suppress(errors.ClamorError):
                self._client.abandon(region, timeout_s=connect_s)
            raise
        finally:
            os.close(fd)
        self._client.seal(region, timeout_s=max(SEAL_S, connect_s))
        self._until_answered(lambda: self._rpc.seal(region))

    def _place(self, piece: RegionRecord, home: int) -> None:
        place_s = PLACE_S + piece.length_bytes / LEAST_RATE
        timeout_s = place_s + self._config.control_timeout_s
        deadline = time.monotonic() + self._config.reattach_s
        while True:
            try:
                self._rpc.place(piece.region, home, place_s, timeout_s=timeout_s)
                return
            except errors.ServerUnavailableError:  # the registry is being restarted
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.1)
