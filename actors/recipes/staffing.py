"""Keeps a program on as many nodes as its user wants, and off nodes that are to go.

Looks once a second which nodes Ray drains (a machine that its owner takes back, the autoscaler,
`ray drain-node`). `clamor.drain` says by itself which node it drains, and asks until nothing of the
program is there. A worker on such a node leaves as by `Job.scale`: its slices move while their
tasks run elsewhere. Where it is the only one, or fewer would stay than were asked for, another node
gets a worker first. Where no other node has CPUs it stays until one comes, or its node goes.

Thread safety: `turn` is held while workers begin, so that nobody begins two on one node.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

from clamor_ray import errors
from clamor_ray.actors.moves import ray_nodes
from clamor_ray.actors.recipes.nodes import able_nodes, change, check_enough

logger = logging.getLogger("clamor_ray.recipes")

LOOK_S: Final = 1.0
ALL: Final = "all"
AGAIN_S: Final = 30.0  # after a worker did not begin on a node


class Staff(NamedTuple):
    """Where the workers are.

    Args:
        has: Nodes whose worker stays.
        ending: Nodes whose worker is leaving, or lost, or is not yet part of the program.
    """

    has: frozenset[str]
    ending: frozenset[str]


class Staffing:
    """See the file's head. Safe from any thread.

    Args:
        wanted: See `ProgramSettings.workers`.
        staff: Where they are; None: the program does not run.
        add: Starts one on each node, where so many tasks run at once; says why one did not.
        leave: The one on a node is to leave.
        drained: The nodes that `clamor.drain` drains, when the program begins.
    """

    def __init__(
        self,
        wanted: int | str | None,
        staff: Callable[[], Staff | None],
        add: Callable[[Mapping[str, int]], errors.ClamorError | None],
        leave: Callable[[str], object],
        drained: Callable[[], Collection[str]],
    ) -> None:
        self._wanted = wanted
        self.turn = threading.RLock()
        self._staff = staff
        self._add = add
        self._leave = leave
        self._ask_drained = drained
        self._drained: set[str] = set()
        self._again_s: dict[str, float] = {}
        self._said: set[str] = set()  # nodes that the program cannot leave
        self._wakes = threading.Event()
        self._ends = False

    # -- when it begins

    def nodes(self) -> dict[str, int]:
        """Where a program begins, and the CPUs there.

        Raises:
            ProgramError: There are not so many nodes.
        """
        self.learn_drained()
        able, draining = able_nodes(), self._draining()
        check_enough(able, self._count, draining)
        come = change(able, (), (), draining, self._count).come
        self._keep(len(come))
        return {node: able[node] for node in come}

    def take_over(self, n_workers: int) -> None:
        """From an earlier process, whose program has so many workers; it may have been scaled."""
        self.learn_drained()
        self._keep(n_workers)

    def learn_drained(self) -> None:
        """Those that `clamor.drain` drains already."""
        self._drained.update(self._ask_drained())

    def _keep(self, n_workers: int) -> None:
        if self._wanted != ALL:
            self._wanted = n_workers

    @property
    def _count(self) -> int | None:
        return self._wanted if isinstance(self._wanted, int) else None

    def watch(self) -> None:
        """Looks after it from now on, until `end`."""
        threading.Thread(target=self._watch, name="recipes-staffing", daemon=True).start()

    def end(self) -> None:
        """Looks no more."""
        self._ends = True
        self._wakes.set()

    # -- what is asked for

    def scale(self, wanted: int | str) -> None:
        """So many from now on, or all. Returns when new ones have begun, and others are told to
        leave.

        Raises:
            ProgramError: There are not so many nodes.
            WaitTimeoutError, ProgramLostError: One has not started.
        """
        with self.turn:
            count = wanted if isinstance(wanted, int) else None
            check_enough(able_nodes(), count, self._draining())
            self._wanted = wanted
            self._again_s.clear()
            self.adjust(raises=True)

    def drain(self, node_id: str) -> None:
        """The node is to go, and its worker leaves. Returns at once."""
        self._drained.add(node_id)
        self._wakes.set()

    def stay(self, node_id: str) -> None:
        """The node does not go: it may have a worker again."""
        self._drained.discard(node_id)
        self._wakes.set()

    # -- how

    def adjust(self, raises: bool = False) -> None:
        """Workers begin, and are told to leave, as is wanted now.

        Args:
            raises: What keeps one from starting; else that is logged, and tried again later.
        """
        with self.turn:
            draining = self._draining()
            staff = self._staff()
            if staff is None:
                return
            count = self._count
            is_enough = count is not None and len(staff.has - draining) >= count
            able: Mapping[str, int] = {} if is_enough and not raises else able_nodes()
            may = [node for node in able if self._again_s.get(node, 0.0) <= time.monotonic()]
            come = change(may, *staff, draining, count).come
            if come:
                failure = self._add({node: able[node] for node in come})
                if failure is not None and raises:
                    raise failure
                if failure is not None:
                    self._again_s.update(dict.fromkeys(come, time.monotonic() + AGAIN_S))
                    logger.warning("a worker has not begun: %s", failure)
            staff = self._staff()
            if staff is None:
                return
            for node in change((*able,), *staff, draining, count).go:
                if staff.has - draining - {node}:
                    self._leave(node)
            self._say_what_cannot_leave(staff.has, draining)

    def _say_what_cannot_leave(self, has: Collection[str], draining: Collection[str]) -> None:
        stuck = set(has) if set(has) <= set(draining) else set()
        for node in sorted(stuck - self._said):
            logger.warning(
                "node %s is to go, and no other node can take what a program has there", node
            )
        self._said = stuck

    def _draining(self) -> set[str]:
        return set(ray_nodes.draining_nodes()) | self._drained

    def _watch(self) -> None:
        while not self._ends:
            self._wakes.wait(LOOK_S)
            self._wakes.clear()
            try:
                self.adjust()
            except Exception as failure:  # any of Ray's: its GCS may be restarting
                logger.warning("Ray does not say which nodes there are: %r", failure)
