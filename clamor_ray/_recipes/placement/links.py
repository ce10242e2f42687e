"""From each worker to each other one: everything comes once, or the other one is lost. Pure.

Each hop is acknowledged, whatever becomes of what has come. What is not acknowledged goes again;
after a time its receiver counts as lost (Canary, section 5.4). Nothing here keeps an order: what is
sent first may come last. A call costs as much as there is to do, however many workers there are.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from clamor_ray._recipes.placement.messages import (
    Ack,
    Decision,
    Decisions,
    Envelope,
    MapUpdate,
    Packet,
    SliceCame,
)


@dataclass
class _Sent:
    """An envelope that is not acknowledged."""

    envelope: Envelope
    first_s: float | None = None  # of the first tick behind it: before, nobody knows the time
    last_s: float = 0.0


@dataclass
class _Out:
    """To one worker."""

    n: int = 0
    unacknowledged: dict[int, _Sent] = field(default_factory=dict)
    fresh: dict[int, Envelope] = field(default_factory=dict)  # to go out


@dataclass
class _In:
    """From one worker: which numbers have come."""

    up_to: int = 0
    beyond: set[int] = field(default_factory=set)
    to_acknowledge: list[int] = field(default_factory=list)

    def is_new(self, number: int) -> bool:
        if number <= self.up_to or number in self.beyond:
            return False
        self.beyond.add(number)
        while self.up_to + 1 in self.beyond:
            self.up_to += 1
            self.beyond.discard(self.up_to)
        return True


class Links:
    """See the file's head. Not thread-safe: one caller at a time.

    Args:
        run: What comes of another run of the job is dropped.
        resend_s: After so long without an acknowledgement an envelope goes again.
        lost_after_s: After so long its receiver counts as lost.
    """

    def __init__(self, run: int, resend_s: float, lost_after_s: float) -> None:
        self._run = run
        self._resend_s = resend_s
        self._lost_after_s = lost_after_s
        self._out: dict[str, _Out] = {}
        self._in: dict[str, _In] = {}
        # Of those, the ones with something to go out, or to be acknowledged by the other one. Dicts
        # keep an order.
        self._to_send: dict[str, _Out] = {}
        self._to_acknowledge: dict[str, _In] = {}
        self._unacknowledged: dict[str, _Out] = {}

    def send(self, to: str, content: Packet | Decision | Decisions | SliceCame) -> None:
        """It goes with the next `take`."""
        out = self._out.setdefault(to, _Out())
        out.n += 1
        out.fresh[out.n] = Envelope(self._run, out.n, content)
        out.unacknowledged[out.n] = _Sent(out.fresh[out.n])
        self._to_send[to] = self._unacknowledged[to] = out

    def accept(
        self, sender: str, envelope: Envelope
    ) -> Packet | Decision | Decisions | SliceCame | None:
        """What has come, where it is news."""
        if envelope.run != self._run:
            return (
                None  # not acknowledged: one of a later run comes again, when this worker is there
            )
        content = envelope.content
        assert not isinstance(content, MapUpdate), "no worker sends one"
        if isinstance(content, Ack):
            out = self._out.setdefault(sender, _Out())
            for number in content.numbers:
                out.unacknowledged.pop(number, None)
                out.fresh.pop(number, None)
            if not out.unacknowledged:
                self._unacknowledged.pop(sender, None)
            return None
        here = self._in.setdefault(sender, _In())
        here.to_acknowledge.append(envelope.number)
        self._to_acknowledge[sender] = here
        return content if here.is_new(envelope.number) else None

    def take(self, known: Container[str]) -> list[tuple[str, Envelope]]:
        """What goes out now.

        Args:
            known: Workers whose addresses are known. What goes to others waits.
        """
        going: list[tuple[str, Envelope]] = []
        for worker in [each for each in self._to_send if each in known]:
            out = self._to_send.pop(worker)
            going += [(worker, envelope) for envelope in out.fresh.values()]
            out.fresh = {}
        for worker in [each for each in self._to_acknowledge if each in known]:
            here = self._to_acknowledge.pop(worker)
            going.append((worker, Envelope(self._run, 0, Ack(tuple(here.to_acknowledge)))))
            here.to_acknowledge = []
        return going

    def tick(self, now_s: float) -> set[str]:
        """Time goes on. Who counts as lost."""
        lost = set()
        for worker, out in self._unacknowledged.items():
            for number, sent in out.unacknowledged.items():
                if sent.first_s is None:
                    sent.first_s = sent.last_s = now_s
                if now_s - sent.first_s >= self._lost_after_s:
                    lost.add(worker)
                if now_s - sent.last_s >= self._resend_s:
                    sent.last_s = now_s
                    out.fresh[number] = sent.envelope
                    self._to_send[worker] = out
        return lost

    def is_quiet(self, worker: str | None = None) -> bool:
        """Whether all that was sent, to one worker or to all, was acknowledged."""
        if worker is not None:
            return worker not in self._unacknowledged
        return not self._unacknowledged
