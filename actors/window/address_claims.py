"""Which session has which part of the address window: a log that all sessions of a cluster share.

A process may use several sessions at once, so what two of them map must never overlap, and what one
of them calls region 7 must not be another's. The log has one entry for each part that a session
took, in the order in which they were taken. Entry n is written only where there is no entry n yet
(Ray's internal key-value store compares and sets), so whoever writes it has seen all before it, and
no two overlap but where the session of the older one has ended. A session's first n, which nobody
else ever has, begins its region ids.

A part whose session has ended is given again only when no other is left, the oldest first: by then
a process may still look at arrays of that session. It keeps their addresses
(`pagecache_c/client/mapping/ended.c`), so such a map is refused there (`AddressClashError`), and no
byte is ever shown for another.

A session with a store has the same addresses whenever its store is opened: `claim_exactly` takes
them, or says which session has them now. That two stores want the same ones is made unlikely: such
a session takes its first part at a random place of the window, and the next behind it.

Pure but for `RayTable`.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from clamor_ray import errors
from clamor_ray._objects.layout import format_bytes
from clamor_ray._protocol.refusals import NoAddresses, TooLarge
from clamor_ray.actors.window.address_space import (
    GUARD_BYTES,
    UNIT_BYTES,
    WINDOW_BEGIN,
    WINDOW_END,
)

LEAST_BYTES: Final = 4 << 30
MOST_BYTES: Final = 1 << 40  # of what is taken ahead of need
REGION_IDS: Final = 10**9  # of one session; a decimal that people can read

Range = tuple[int, int]


class ClaimsTable(Protocol):
    """A log that others append to at the same time."""

    def entries(self, start: int) -> list[bytes]:
        """Those from number `start` on, none left out."""
        ...

    def append(self, number: int, entry: bytes) -> bool:
        """Writes an entry; False where there is one of this number."""
        ...


class RayTable:
    """The log in the cluster's internal key-value store, which every process of it can reach."""

    _NAMESPACE: Final = b"clamor"
    _PREFIX: Final = b"addresses-"

    def _key(self, number: int) -> bytes:
        return self._PREFIX + b"%08d" % number

    def entries(self, start: int) -> list[bytes]:
        from ray.experimental import internal_kv

        found: list[bytes] = []
        while True:
            entry = internal_kv._internal_kv_get(
                self._key(start + len(found)), namespace=self._NAMESPACE
            )
            if entry is None:
                return found
            found.append(entry)

    def append(self, number: int, entry: bytes) -> bool:
        from ray.experimental import internal_kv

        existed = internal_kv._internal_kv_put(
            self._key(number), entry, overwrite=False, namespace=self._NAMESPACE
        )
        return not existed


@dataclass(frozen=True)
class Claim:
    """One entry of the log.

    Args:
        number: Its place in the log.
        scope: The session that took it.
        begin, end: The addresses.
    """

    number: int
    scope: str
    begin: int
    end: int

    def packed(self) -> bytes:
        return json.dumps([self.scope, self.begin, self.end]).encode()

    @staticmethod
    def unpacked(number: int, entry: bytes) -> Claim:
        scope, begin, end = json.loads(entry)
        return Claim(number, scope, begin, end)

    @property
    def region_ids(self) -> int:
        """Ids of the session whose first claim this is are above it."""
        return self.number * REGION_IDS


def _overlap(one: Range, other: Range) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def gaps(taken: Iterable[Range], begin: int, end: int) -> list[Range]:
    """What of [begin, end) is in no range of `taken`, which may overlap."""
    free = []
    for low, high in sorted(taken):
        if low > begin:
            free.append((begin, min(low, end)))
        begin = max(begin, high)
        if begin >= end:
            return free
    return [*free, (begin, end)]


class AddressClaims:
    """What one session has of the window. Safe from any thread: one that was given up on may
    still be at it when the next one comes.

    Args:
        table: The log.
        scope: The session.
        has_ended: Whether a session has, by scope. Asked only when the window is full.
        avoid: Addresses that the session's driver still uses of sessions of other clusters.
        is_lasting: The session has a store.
    """

    def __init__(
        self,
        table: ClaimsTable,
        scope: str,
        has_ended: Callable[[str], bool],
        avoid: Sequence[Range] = (),
        window: Range = (WINDOW_BEGIN, WINDOW_END),
        *,
        is_lasting: bool = False,
    ) -> None:
        self._table = table
        self._scope = scope
        self._has_ended = has_ended
        self._avoid = list(avoid)
        self._window = window
        self._is_lasting = is_lasting
        self._log: list[Claim] = []
        self._lock = threading.Lock()

    def claim(self, length_bytes: int, known: int) -> list[Claim]:
        """All that the session has, once that is more than the caller knows: where it is not,
        takes room for one region of this length, and perhaps more.

        What it took before its registry was restarted, or in a call whose answer was lost, the
        caller does not know. That may have no room for the region: ask again.

        Args:
            length_bytes: Of the region.
            known: How many claims of the session the caller knows.

        Raises:
            NoAddresses: The window has no such gap.
            TooLarge: It never has.
            What the table raises.
        """
        need_bytes = -(-length_bytes // UNIT_BYTES) * UNIT_BYTES + GUARD_BYTES
        window_bytes = self._window[1] - self._window[0]
        if need_bytes > window_bytes:
            raise TooLarge(
                f"a variable of {format_bytes(length_bytes)} is larger than all addresses that "
                f"there are, {format_bytes(window_bytes)}"
            )
        with self._lock:
            return self._claim(need_bytes, known)

    def claim_exactly(
        self, ranges: Iterable[Range], label: Callable[[str], str] = "session {}".format
    ) -> None:
        """Takes the addresses that the session had before, in this cluster or in another one.
        Taking them again changes nothing.

        Args:
            ranges: All that it had.
            label: A session for people, by scope.

        Raises:
            AddressClashError: Another session has some of them, or the driver still uses some.
            What the table raises.
        """
        with self._lock:
            for wanted in ranges:
                self._claim_exactly(wanted, label)

    def _claim_exactly(self, wanted: Range, label: Callable[[str], str]) -> None:
        while True:
            self._read_log()
            if any((claim.begin, claim.end) == wanted for claim in self._mine()):
                return
            for claim in self._log:
                is_others = claim.scope != self._scope and _overlap(
                    (claim.begin, claim.end), wanted
                )
                if is_others and not self._has_ended(claim.scope):
                    raise errors.AddressClashError(
                        f"The store's variables lie from {wanted[0]:#x} to {wanted[1]:#x}, and "
                        f"{label(claim.scope)} has addresses there in this cluster.",
                        hint="End that session first, or open the store in another cluster.",
                    )
            if any(_overlap(used, wanted) for used in self._avoid):
                raise errors.AddressClashError(
                    f"The store's variables lie from {wanted[0]:#x} to {wanted[1]:#x}, and this "
                    "process holds objects of a session that has ended there.",
                    hint="Let go of what get() returned of that session, or open the store in "
                    "another process.",
                )
            number = len(self._log)
            self._table.append(number, Claim(number, self._scope, *wanted).packed())

    def is_new(self) -> bool:
        """Whether no claim of the session is in the log: nobody ever had an address of it, or an
        id."""
        with self._lock:
            self._read_log()
            return not self._mine()

    def check_is_new(self, directory: Path) -> None:
        """For a registry without a journal: an earlier one of its session would have given out ids
        and addresses, which page servers and processes still use.

        Args:
            directory: Of the journal.

        Raises:
            InternalError: There was one.
        """
        if not self.is_new():
            raise errors.InternalError(
                f"The journal of this session, {directory}, is gone: its variables cannot be found "
                "again, and their ids and addresses must not be given twice.",
                hint="See who removed it. Call clamor.shutdown(), then clamor.init().",
            )

    def _read_log(self) -> None:
        first_new = len(self._log)
        self._log += [
            Claim.unpacked(first_new + at, entry)
            for at, entry in enumerate(self._table.entries(first_new))
        ]

    def _claim(self, need_bytes: int, known: int) -> list[Claim]:
        while True:
            self._read_log()
            if len(mine := self._mine()) > known:
                return mine
            begin, end = self._place(need_bytes)
            number = len(self._log)
            self._table.append(number, Claim(number, self._scope, begin, end).packed())

    def _place(self, need_bytes: int) -> Range:
        has_bytes = sum(claim.end - claim.begin for claim in self._mine())
        wanted_bytes = max(need_bytes, LEAST_BYTES, min(has_bytes, MOST_BYTES))
        all_taken = [(claim.begin, claim.end) for claim in self._log]
        for taken in (all_taken + self._avoid, all_taken):
            for n_bytes in (wanted_bytes, need_bytes):
                if (found := self._first_gap(taken, n_bytes)) is not None:
                    return found
        return self._place_again(need_bytes)

    def _place_again(self, need_bytes: int) -> Range:
        """Where sessions have ended, from the oldest on."""
        ended: dict[str, bool] = {self._scope: False}
        for over in range(1, len(self._log) + 1):
            last = self._log[over - 1].scope
            if last not in ended:
                ended[last] = self._has_ended(last)
            if not ended[last]:
                continue
            taken = [
                (claim.begin, claim.end)
                for claim in self._log
                if claim.number >= over or not ended[claim.scope]
            ]
            if (found := self._first_gap(taken, need_bytes)) is not None:
                return found
        used_bytes = sum(c.end - c.begin for c in self._log if not ended[c.scope])
        raise NoAddresses(
            f"a variable of {format_bytes(need_bytes - GUARD_BYTES)} finds no room: the sessions "
            f"of this cluster have {format_bytes(used_bytes)} of "
            f"{format_bytes(self._window[1] - self._window[0])} of addresses"
        )

    def _first_gap(self, taken: Iterable[Range], n_bytes: int) -> Range | None:
        low, high = self._window
        taken = list(taken)
        start = self._start() if self._is_lasting else low
        for begin, end in (*gaps(taken, start, high), *gaps(taken, low, high)):
            if end - begin >= n_bytes:
                return begin, begin + n_bytes
        return None

    def _start(self) -> int:
        """Where a session with a store looks for addresses first."""
        if mine := self._mine():
            return mine[-1].end
        low, high = self._window
        return low + LEAST_BYTES * secrets.randbelow(max((high - low) // LEAST_BYTES, 1))

    def _mine(self) -> list[Claim]:
        """Without those that another session took because this one had ended; it goes on where it
        has a store."""
        mine = [claim for claim in self._log if claim.scope == self._scope]
        if not self._is_lasting:
            return mine
        return [
            claim
            for claim in mine
            if not any(
                other.scope != self._scope
                and _overlap((other.begin, other.end), (claim.begin, claim.end))
                for other in self._log[claim.number + 1 :]
            )
        ]
