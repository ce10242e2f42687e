"""Sides that do the same iterations in turn, of which some may be peers that are not there."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from bench.support import common
from bench.support.common import emit, note

# Does so many iterations: seconds of each, and the answer after them.
Iterate = Callable[[int], tuple[list[float], Any]]


def of_peer(peer: Any) -> Iterate:
    """The iterations of a peer, by the clock of its first process."""

    def iterate(n: int) -> tuple[list[float], Any]:
        answer = peer.ask(iterate=n)[0]
        return answer["seconds"], np.array(answer["answer"])

    return iterate


def rounds(sides: dict[str, Iterate], n_rounds: int, n_iterations: int) -> dict[str, list[float]]:
    """Seconds of all iterations of each side, but for those of the first round.

    Raises:
        WrongData: A side's answer is not that of another.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    names = list(sides)
    for number in range(n_rounds + 1):
        order = names[number % len(names) :] + names[: number % len(names)]
        found = {}
        for name in order:
            took, found[name] = sides[name](n_iterations)
            emit({"side": name, "round": number, "seconds": took})
            if number:
                seconds[name] += took
        first, *others = order
        for name in others:
            if not np.allclose(found[name], found[first], rtol=0, atol=1e-7):
                raise common.WrongData(f"the answer of {name} is not that of {first}")
    return seconds


def why_not(
    name: str, unavailable: Callable[[], str | None], without: Collection[str]
) -> str | None:
    """Why a peer is left out, or None."""
    return "not asked for" if name in without else unavailable()


def entered(
    stack: contextlib.ExitStack,
    name: str,
    reason: str | None,
    start: Callable[[], contextlib.AbstractContextManager[Any]],
    n_items: int,
) -> Any | None:
    """A peer that has started, or None: what is missing is said.

    Args:
        stack: ends it.
        name: of the peer.
        reason: why it is left out; None: it is not.
        start: starts it.
        n_items: that its processes must have, all together.

    Raises:
        WrongData: They have another number.
    """
    if reason is not None:
        note(f"no figure against {name}: {reason}")
        emit({"missing": {name: reason}})
        return None
    note(f"starting {name}")
    peer = stack.enter_context(start())
    answers = peer.ask(about=0)
    if (n := sum(answer["n"] for answer in answers)) != n_items:
        raise common.WrongData(f"{name} has {n:,} items of {n_items:,}")
    emit({"peer": {"name": name, "library": answers[0]["library"], "n": len(answers)}})
    return peer
