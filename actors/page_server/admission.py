"""Which connections may stay on the data port before they have passed the handshake.

Anybody who reaches the port can open connections and say nothing. They must not keep peers out, so
a newcomer is always taken, and somebody else goes:

* where one address has its share already, one of that address;
* where all shares together are taken, one of all.

Who has sent a hello that names this server goes after those who have not: its id is 64 bits that a
stranger must have seen. Among equals the oldest goes. Nobody goes within his first moments: a
peer passes in them, and who comes too fast waits in the kernel's queue, where all get their turn.
Moments in which this process had no time for anybody do not count (``Attended``).

Pure: no I/O but the end of a victim's socket. Everything belongs to one loop.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket

IPV6_SHARE_BITS = 64  # who has one address of such a network has all of them


ATTENDED_PARTS = 8  # of the first moments: a handshake takes the loop half as many passes


class Attended:
    """A clock that runs only while the loop attends to its connections.

    A long gap between two looks at it (the machine does much else) counts as a short one.

    Args:
        most_s: What a gap counts at most.
    """

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._now_s = 0.0
        self._seen_s: float | None = None

    def now_s(self, loop_s: float) -> float:
        """Its time, never less than before.

        Args:
            loop_s: The loop's time.
        """
        if self._seen_s is not None:
            self._now_s += min(self.most_s, loop_s - self._seen_s)
        self._seen_s = loop_s
        return self._now_s


class Stranger:
    """One connection that has not passed yet."""

    def __init__(self, sock: socket.socket, origin: str, since_s: float) -> None:
        self.sock = sock
        self.origin = origin
        self.since_s = since_s
        self.named_us = False
        self.had_to_go = False


class Strangers:
    """All of them, within bounds.

    Args:
        most: Together.
        most_of_origin: Of one address (IPv6: of one network of 64 bits).
        undisturbed_s: So long everybody may stay.
    """

    def __init__(self, most: int, most_of_origin: int, undisturbed_s: float) -> None:
        self._most = most
        self._most_of_origin = most_of_origin
        self._undisturbed_s = undisturbed_s
        self._all: dict[Stranger, None] = {}  # the oldest first
        self._by_origin: dict[str, dict[Stranger, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def wait_s(self, host: str, now_s: float) -> float:
        """How long a newcomer has to wait before somebody may go for it.

        Args:
            host: Where it comes from.
            now_s: Of one clock for all.
        """
        victim = self._victim(origin_of(host), now_s)
        return victim.since_s + self._undisturbed_s - now_s if victim is not None else 0.0

    def take(self, sock: socket.socket, host: str, now_s: float) -> Stranger:
        """A newcomer. At most one other has to go for it.

        Args:
            sock: Its connection.
            host: Where it comes from.
            now_s: Of that clock.
        """
        stranger = Stranger(sock, origin_of(host), now_s)
        if (victim := self._victim(stranger.origin, now_s)) is not None:
            self._send_off(victim)
        self._by_origin.setdefault(stranger.origin, {})[stranger] = None
        self._all[stranger] = None
        return stranger

    def make_room(self) -> bool:
        """Sends one off, for this process has no descriptor left. False: there is none."""
        if not self._all:
            return False
        self._send_off(next(iter(self._all)))
        return True

    def leave(self, stranger: Stranger) -> None:
        """It has passed, or failed, or had to go. Idempotent."""
        self._all.pop(stranger, None)
        mates = self._by_origin.get(stranger.origin)
        if mates is not None:
            mates.pop(stranger, None)
            if not mates:
                del self._by_origin[stranger.origin]

    def close(self) -> None:
        """Closes whoever is here."""
        for stranger in list(self._all):
            self.leave(stranger)
            stranger.sock.close()

    def _victim(self, origin: str, now_s: float) -> Stranger | None:
        mates = self._by_origin.get(origin, {})
        if len(mates) >= self._most_of_origin:
            among = mates
        elif len(self._all) >= self._most:
            among = self._all
        else:
            return None
        for stranger in among:
            if now_s - stranger.since_s < self._undisturbed_s:
                break  # so are all that come after it
            if not stranger.named_us:
                return stranger
        return next(iter(among))

    def _send_off(self, victim: Stranger) -> None:
        self.leave(victim)
        victim.had_to_go = True
        with contextlib.suppress(OSError):  # it has hung up itself
            victim.sock.shutdown(socket.SHUT_RDWR)  # its task sees the end, and closes it


def origin_of(host: str) -> str:
    """What counts as one address."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), IPV6_SHARE_BITS), strict=False))
