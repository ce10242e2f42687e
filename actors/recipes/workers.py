"""The worker actors of a program: where they are, and how they begin and end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._protocol import names, ray_state
from clamor_ray._protocol.cause import cause_of
from clamor_ray._recipes.placement.messages import Whereabouts
from clamor_ray.actors.recipes.peers import Address
from clamor_ray.actors.recipes.reservations import Reservations
from clamor_ray.actors.recipes.settings import ProgramSettings
from clamor_ray.actors.recipes.stats import Counters
from clamor_ray.actors.recipes.worker import CONCURRENCY, RecipeWorker

logger = logging.getLogger("clamor_ray.recipes")

START_S: Final = 60.0
ADD_S: Final = 10.0  # while one more waits for CPUs nobody else begins, and nobody leaves
ANSWER_S: Final = 10.0

Key = tuple[int, int]


@dataclass
class Started:
    """One that has started.

    Args:
        name: Of the core.
        node_id: Ray's hex id.
        n_threads: Tasks that run at once.
        handle: The actor.
        address: For other workers.
        pid: Its process.
    """

    name: str
    node_id: str
    n_threads: int
    handle: Any
    address: Address = ("", 0)
    pid: int = 0


class Workers:
    """See the file's head. Safe from any thread.

    Args:
        settings: The program.
        ended: (worker, why): it is lost.
        reservations: Of CPUs.
    """

    def __init__(
        self,
        settings: ProgramSettings,
        ended: Callable[[str, str], None],
        reservations: Reservations,
    ) -> None:
        self._settings = settings
        self._ended = ended
        self._reservations = reservations
        self._lock = threading.Lock()
        self._workers: dict[str, Started] = {}
        self._controller: Any = None
        self._given: Mapping[Key, Any] = {}

    def start(
        self, controller: Any, given: Mapping[Key, Any], nodes: Mapping[str, int]
    ) -> list[Started]:
        """One on each node.

        Args:
            controller: Its handle.
            given: References to the partitions at the program's beginning.
            nodes: Ray's ids, and the CPUs of each.

        Raises:
            WaitTimeoutError: One has not started in time.
            ProgramLostError: One has died.
        """
        self._controller, self._given = controller, given
        wanted = {node: self._n_threads(n) for node, n in nodes.items()}
        for node, n in wanted.items():
            self._reservations.ask(node, n)
        self._reservations.wait(wanted, START_S)
        made = [self._make(node, n) for node, n in nodes.items()]
        return [self._started(each) for each in made]

    def find(self, controller: Any) -> list[Started]:
        """Those that an earlier process of the controller has started, and that live."""
        self._controller = controller
        begins = f"{self._settings.name}-w"
        found = []
        for name in ray_state.actor_names():
            if not name.startswith(begins):
                continue
            worker = name.removeprefix(f"{self._settings.name}-")
            try:
                handle = ray_state.get_actor(name, namespace=names.NAMESPACE)
                about = ray_state.get(handle.about.remote(), timeout=ANSWER_S)
                made = Started(
                    name=worker,
                    node_id=about.node_id,
                    n_threads=about.n_threads,
                    handle=handle,
                )
                self._given = about.given
                found.append(self._started(made))
            except (RayError, ValueError, errors.ClamorError) as failure:
                logger.warning("worker %s does not answer: %r", worker, failure)
        return found

    def whereabouts(self) -> list[Whereabouts]:
        """Of all. Who does not answer is left out."""
        asked = [each.handle.whereabouts.remote() for each in self.all()]
        found = []
        for reference in asked:
            try:
                found.append(ray_state.get(reference, timeout=ANSWER_S))
            except RayError as failure:
                logger.warning("a worker does not say what it has: %r", failure)
        return [each for each in found if each is not None]

    def add(
        self, nodes: Sequence[tuple[str, int]]
    ) -> tuple[list[Started], errors.ClamorError | None]:
        """More of them, side by side.

        Args:
            nodes: Ray's ids, and the tasks that run there at once.

        Returns:
            Those that have started, and why another one has not.

        Raises:
            WaitTimeoutError: Others have the CPUs.
        """
        wanted = {node: self._n_threads(n) for node, n in nodes}
        for node, n in wanted.items():
            self._reservations.ask(node, n)
        self._reservations.wait(wanted, ADD_S)
        started: list[Started] = []
        first = None
        for made in [self._make(node, n) for node, n in nodes]:
            try:
                started.append(self._started(made))
            except errors.ClamorError as failure:
                first = first or failure
        return started, first

    def drop(self, name: str) -> None:
        """It is lost: it may live, and have been too slow. Its CPUs are for who comes instead."""
        with self._lock:
            lost = self._workers.pop(name, None)
        if lost is not None:
            ray.kill(lost.handle)

    def handle(self, name: str) -> Any:
        """None: it is lost."""
        with self._lock:
            found = self._workers.get(name)
        return None if found is None else found.handle

    def all(self) -> list[Started]:
        """Those that have started."""
        with self._lock:
            return list(self._workers.values())

    def nodes(self) -> dict[str, str]:
        """Worker -> Ray's id of its node."""
        return {each.name: each.node_id for each in self.all()}

    def node_of(self, name: str) -> str | None:
        """Ray's id of its node; None: it is lost, or has left."""
        with self._lock:
            found = self._workers.get(name)
        return None if found is None else found.node_id

    def at(self, node_id: str) -> str:
        """
        Raises:
            ProgramError: There is none on that node.
        """
        for name, node in self.nodes().items():
            if node == node_id:
                return name
        raise errors.ProgramError(
            f"The program has no worker on node {node_id}.", hint="job.stats() has those it has."
        )

    def counters(self) -> dict[str, Counters]:
        """What each says of itself. Who does not answer is left out."""
        with self._lock:
            asked = {each.name: each.handle.counters.remote() for each in self._workers.values()}
        found = {}
        for name, reference in asked.items():
            try:
                found[name] = ray_state.get(reference, timeout=ANSWER_S)
            except RayError as failure:
                logger.info("worker %s does not say what it does: %r", name, failure)
        return found

    def is_lost(self, name: str) -> bool:
        """Whether its process has ended, or does not answer."""
        if (handle := self.handle(name)) is None:
            return False  # that is known
        try:
            ray_state.get(handle.about.remote(), timeout=ANSWER_S)
            return False
        except RayError:
            return True

    def let_go(self, name: str) -> None:
        """It has nothing more: it ends."""
        with self._lock:
            gone = self._workers.pop(name, None)
        if gone is not None:
            ray.kill(gone.handle)
            self._reservations.give_back(gone.node_id)

    # -- inside

    def _n_threads(self, n_cpus: int) -> int:
        cpus = self._settings.cpus
        return n_cpus if cpus is None else min(n_cpus, cpus)

    def _make(self, node_id: str, n_cpus: int) -> Started:
        n_threads = self._n_threads(n_cpus)
        # No name comes twice, also where an earlier process of the controller has made workers.
        name = f"w{os.urandom(4).hex()}"
        settings = self._settings
        handle = (
            ray.remote(concurrency_groups=CONCURRENCY)(RecipeWorker)
            .options(
                namespace=names.NAMESPACE,
                name=f"{settings.name}-{name}",
                num_cpus=0,  # see `reservations.py`
                lifetime="detached",  # it ends itself: see `until_end`
                max_restarts=0,
                enable_task_events=False,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(
                name,
                settings.secret,
                settings.program,
                self._given,
                settings.readers,
                settings.place,
                self._controller,
                n_threads,
                settings.executors,
            )
        )
        return Started(name=name, node_id=node_id, n_threads=n_threads, handle=handle)

    def _started(self, made: Started) -> Started:
        try:
            about = ray_state.get(made.handle.about.remote(), timeout=START_S)
            made.address, made.pid = about.address, about.pid
        except ray.exceptions.GetTimeoutError as failure:
            ray.kill(made.handle)
            raise errors.WaitTimeoutError(
                f"The program's worker on node {made.node_id} did not start within {START_S:g} s."
            ) from failure
        except RayError as failure:
            raise errors.ProgramLostError(
                f"The program's worker on node {made.node_id} ended at its start: "
                f"{cause_of(failure)}"
            ) from failure
        with self._lock:
            self._workers[made.name] = made
        threading.Thread(
            target=self._watch, args=(made,), name=f"recipes-watch-{made.name}", daemon=True
        ).start()
        return made

    def _watch(self, made: Started) -> None:
        why = "it has ended"
        try:
            ray_state.get(made.handle.lives.remote())
        except Exception as failure:  # any of Ray's
            why = cause_of(failure).splitlines()[0]
        if self.handle(made.name) is made.handle:
            self._ended(made.name, why)
