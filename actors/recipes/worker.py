"""The worker of a program on a node: an actor that holds slices, and runs their tasks.

It starts tasks from what it knows itself. The controller tells it where slices belong, and nothing
else while the program runs; the driver may sleep.

Threads: Ray calls orders one after the other, and the rest on others; one reports, and one waits
for the controller's end, which is its own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import cloudpickle
import ray
from ray.exceptions import ActorUnavailableError

from clamor_ray import errors
from clamor_ray._protocol import ray_state
from clamor_ray._protocol.cause import cause_of
from clamor_ray._recipes.matching.executing import StageFailure
from clamor_ray._recipes.placement.messages import (
    Begin,
    Envelope,
    Heartbeat,
    Order,
    Report,
    Whereabouts,
)
from clamor_ray.actors.recipes.peers import Address, Peers
from clamor_ray.actors.recipes.run import Key, Owner, Run
from clamor_ray.actors.recipes.settings import CONTROLLER
from clamor_ray.actors.recipes.stats import Counters

logger = logging.getLogger("clamor_ray.recipes")

HEARTBEAT_S: Final = 1.0
ANSWER_S: Final = 10.0
PAUSE_S: Final = 0.5
KILLED_S: Final = 5.0
CONCURRENCY: Final = {"orders": 1, "rest": 8, "lives": 1}


@dataclass(frozen=True)
class About:
    """What a worker says of itself.

    Args:
        address: For other workers.
        pid: Its process.
        node_id: Ray's hex id of its node.
        n_threads: Tasks that run at once.
        given: As it was given.
    """

    address: Address
    pid: int
    node_id: str
    n_threads: int
    given: Mapping[Key, Any]


class RecipeWorker:
    """See the file's head.

    Args:
        me: Its name, of the controller.
        secret: Of the program's connections.
        program: Pickled tables and functions.
        given: References to the partitions at the program's beginning, by dataset and index.
        readers: See `ProgramSettings`.
        place: Where checkpoints go; None: there are none.
        controller: Its handle.
        n_threads: Tasks that run at once.
        executors: See `Program.run`.
    """

    def __init__(
        self,
        me: str,
        secret: bytes,
        program: bytes,
        given: Mapping[Key, Any],
        readers: bytes,
        place: str | None,
        controller: Any,
        n_threads: int,
        executors: str | None,
    ) -> None:
        self._me = me
        self._given = given
        self._readers: dict[int, Callable[[Any], Any]] = cloudpickle.loads(readers)
        self._place = place
        self._controller = controller
        self._n_threads = n_threads
        self._executors = executors
        self._program = program
        self._tables, self._functions = cloudpickle.loads(program)
        self._run: Run | None = None
        self._lock = threading.Lock()  # of what came before its run
        self._early: list[tuple[str, Envelope]] = []
        self._begins: Begin | None = None  # it loads its partitions
        self._failure: StageFailure | None = None
        self._why_broken = self._why_not = ""
        self._ends = threading.Event()
        self._self = ray_state.runtime_context().current_actor
        self._peers = Peers(
            me,
            ray.util.get_node_ip_address(),
            secret,
            self._on_message,
            self._on_lost,
            self._cannot_go_on,
        )
        self._owner = Owner(
            report=self._report,
            failed=self._failed,
            broken=self._broken,
            cannot_go_on=self._cannot_go_on,
        )
        for run in (self._beat, self._until_end):
            threading.Thread(target=run, name=f"recipes{run.__name__}", daemon=True).start()

    @ray.method(concurrency_group="rest")
    def about(self) -> About:
        """What it says of itself."""
        node_id = ray_state.runtime_context().get_node_id()
        return About(
            address=self._peers.address,
            pid=os.getpid(),
            node_id=node_id,
            n_threads=self._n_threads,
            given=self._given,
        )

    @ray.method(concurrency_group="orders")
    def order(self, order: Order | Begin) -> None:
        """The controller says something.

        Raises:
            StorageError: A checkpoint cannot be read.
        """
        if isinstance(order, Begin):
            if self._run is not None:
                self._run.end()
            self._begins = order
            try:
                run = Run(
                    self._me,
                    self._tables,
                    self._functions,
                    self._program,
                    order,
                    self._partitions_given,
                    self._place,
                    self._peers,
                    self._owner,
                    self._n_threads,
                    self._executors,
                )
            except Exception as failure:  # any of files, of Ray's, or of the user's objects
                why = f"worker {self._me} cannot load its partitions: {cause_of(failure)}"
                self._cannot_go_on(why)
                raise
            finally:
                self._begins = None
            with self._lock:
                self._run = run
                early, self._early = self._early, []
            for worker, envelope in early:
                self._on_message(worker, envelope)
        elif self._run is not None:
            self._run.on_order(order)

    @ray.method(concurrency_group="lives")
    def lives(self) -> None:
        """Returns when it ends: who waits for that learns of its death at once."""
        self._ends.wait()

    @ray.method(concurrency_group="rest")
    def partition(self, dataset: int, index: int) -> Any:
        """One that is here.

        Raises:
            ProgramError: It is not.
        """
        if self._run is None:
            raise errors.ProgramError("This worker has no partition yet.")
        return self._run.partition(dataset, index)

    @ray.method(concurrency_group="rest")
    def whereabouts(self) -> Whereabouts | None:
        """For a new controller; None: it has not begun."""
        return None if self._run is None else self._run.whereabouts()

    @ray.method(concurrency_group="rest")
    def counters(self) -> Counters:
        """See `Run.counters`."""
        return Counters() if self._run is None else self._run.counters()

    # -- inside

    def _partitions_given(self, keys: Sequence[Key]) -> dict[Key, Any]:
        references = {key: self._given[key] for key in keys}
        wanted = [each for each in references.values() if each is not None]
        values = iter(ray_state.get(wanted))
        return {
            key: None if each is None else self._readers.get(key[0], _as_it_is)(next(values))
            for key, each in references.items()
        }

    def _on_message(self, worker: str, envelope: Envelope) -> None:
        with self._lock:
            run = self._run
            if run is None or envelope.run > run.number:  # others have begun before this one
                self._early.append((worker, envelope))
                return
        run.on_message(worker, envelope)

    def _on_lost(self, worker: str, why: str) -> None:
        if worker != CONTROLLER and not self._ends.is_set():
            logger.info("worker %s: %s", worker, why)  # also at the program's end: one is first
            self._controller.suspect.remote(worker, why)

    def _report(self, reports: list[Report]) -> None:
        self._controller.reports.remote(reports)

    def _failed(self, failure: StageFailure) -> None:
        self._failure = failure
        self._controller.failed.remote(failure)

    def _broken(self, why: str) -> None:
        self._why_broken = why
        self._controller.broken.remote(self._me, why)

    def _cannot_go_on(self, why: str) -> None:
        self._why_not = why
        self._controller.cannot_go_on.remote(why)

    def _beat(self) -> None:
        while not self._ends.wait(HEARTBEAT_S):
            # The controller may have been restarting when it was told.
            if self._failure is not None:
                self._controller.failed.remote(self._failure)
            if self._why_not:
                self._controller.cannot_go_on.remote(self._why_not)
            if self._why_broken:
                self._controller.broken.remote(self._me, self._why_broken)
            if (begins := self._begins) is not None:
                self._controller.heartbeat.remote(_loading(self._me, begins))
                continue
            if (run := self._run) is None:
                continue
            cpu = min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
            try:
                asked = self._controller.heartbeat.remote(run.heartbeat(cpu))
                run.on_floor(ray_state.get(asked, timeout=ANSWER_S))
            except Exception as failure:  # any of Ray's: the controller may be restarting
                logger.info("the controller has not answered a heartbeat: %r", failure)

    def _until_end(self) -> None:
        """The process ends with the controller: nobody else would end it."""
        while True:
            try:
                ray_state.get(self._controller.until_end.remote())
                break
            except ActorUnavailableError:  # its process was killed, and another one comes
                time.sleep(PAUSE_S)
            except Exception as failure:  # any of Ray's: it is gone for good
                logger.info("the program's controller is gone: %r", failure)
                break
        self._ends.set()
        if self._run is not None:
            self._run.end()
        self._peers.close()
        try:
            ray.kill(self._self)  # Ray does not say on the driver's console that it has died
            time.sleep(KILLED_S)
        finally:
            os._exit(0)


def _loading(me: str, begin: Begin) -> Heartbeat:
    """It lives, and has nothing yet."""
    return Heartbeat(
        run=begin.run,
        worker=me,
        version=begin.update.version,
        is_settled=False,
        is_complete=False,
        floor=0,
    )


def _as_it_is(value: Any) -> Any:
    return value
