"""A program that runs: its result, what it does, and where its partitions are."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from typing import Any, Final

from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
)

from clamor_ray import errors
from clamor_ray._programs.launching import Launched, n_workers
from clamor_ray._programs.progress_picture import draw_progress
from clamor_ray._programs.publishing import Origin, publish_partitions, publish_value
from clamor_ray._programs.showing import Showing
from clamor_ray._protocol import ray_state
from clamor_ray._protocol.cause import cause_of
from clamor_ray._read.ref import GlobalRef
from clamor_ray._recipes.program.builder import Dataset

LOOK_S: Final = 1.0  # a wait is asked again so often: its caller may be interrupted
CALL_S: Final = 60.0
PAUSE_S: Final = 0.2


class Job:
    """See the file's head. `Program.run` makes one. Safe from any thread.

    Args:
        launched: The program; a detached one goes on when nobody has this any more.
        datasets: Of the program.

    Example:
        >>> program = clamor.Program()
        >>> n = program.value(1)
        >>> with program.loop(max=10):
        ...     program.stage(lambda t, n: n * 2, writes=[n])
        >>> job = program.run()
        >>> job.result(n)
        1024
    """

    def __init__(self, launched: Launched, datasets: tuple[Dataset, ...]) -> None:
        self._launched = launched
        self._controller = launched.controller
        self._datasets = datasets
        if not launched.settings.is_detached:  # who can ask for its result is gone: it ends
            weakref.finalize(self, _stop, self._controller).atexit = False

    def scale(self, workers: int | str) -> None:
        """The program runs on so many nodes from now on, while it goes on. Returns when workers
        have begun on new ones; those that leave end when their partitions have moved.

        Args:
            workers: At least 1, and at most as many as nodes have CPUs and are not drained; or
                ``"all"``: on all that have CPUs, and on those that come.

        Raises:
            ProgramError: There are not so many nodes.
            WaitTimeoutError: A worker did not start in time, or others have the CPUs of its node;
                that is tried again by itself.

        Example:
            >>> program = clamor.Program()
            >>> parts = program.dataset([1, 2])
            >>> program.stage(lambda t, x: x + 1, writes=[parts])
            >>> job = program.run(workers=1)
            >>> job.scale(1)
            >>> len(job.stats().workers)
            1
        """
        self._call("scale", n_workers(workers))

    def checkpoint(self) -> bool:
        """Begins a checkpoint. `stats` says when it is done.

        Returns:
            False: One runs already.

        Raises:
            ProgramError: The program was given no place for checkpoints.

        Example:
            >>> import tempfile
            >>> program = clamor.Program()
            >>> n = program.value(1)
            >>> with program.loop(max=10**12):
            ...     program.stage(lambda t, n: n + 1, writes=[n])
            >>> job = program.run(checkpoint=tempfile.mkdtemp())
            >>> job.checkpoint()
            True
            >>> job.stop()
        """
        return bool(self._call("checkpoint"))

    def wait(self, timeout_s: float | None = None, progress: bool | None = None) -> None:
        """Returns when the program has ended.

        Args:
            timeout_s: Left out: as long as it runs.
            progress: How far it is: a bar; where stderr is no terminal, a line every few seconds.
                False: neither.

        Raises:
            WaitTimeoutError: It runs still.
            StageFailedError: A function has raised, or returned what it must not.
            ProgramLostError: A worker is lost, and there is no checkpoint to begin again at.

        Example:
            >>> program = clamor.Program()
            >>> n = program.value(1)
            >>> program.stage(lambda t, n: n + 1, writes=[n])
            >>> program.run().wait(timeout_s=60)
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        showing = Showing(progress is not False, lambda: self._call("progress"))
        try:
            while True:
                left_s = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
                if self._call("wait", max(0.0, left_s)):
                    showing.ended()
                    return
                if deadline is not None and time.monotonic() >= deadline:
                    raise errors.WaitTimeoutError(
                        f"The program runs still, after {timeout_s:g} s.",
                        hint="job.stats() says what it does; wait longer, or call job.stop().",
                    )
                showing.look()
        finally:
            showing.close()

    def result(
        self, dataset: Dataset, timeout_s: float | None = None, progress: bool | None = None
    ) -> Any:
        """What a dataset has when the program has ended.

        Args:
            dataset: Of the program.
            timeout_s, progress: As of `wait`.

        Returns:
            Its partitions, by index; of a value just that.

        Raises:
            ProgramError: It is of another program.
            WaitTimeoutError, StageFailedError, ProgramLostError: As `wait`.

        Example:
            >>> program = clamor.Program()
            >>> squares = program.dataset([1, 2, 3])
            >>> program.stage(lambda t, x: x * x, writes=[squares])
            >>> program.run().result(squares)
            [1, 4, 9]
        """
        self._check(dataset)
        self.wait(timeout_s, progress)
        parts = self._fetched(dataset)
        return parts[0] if dataset.is_value else parts

    def publish(
        self, dataset: Dataset, timeout_s: float | None = None, **options: Any
    ) -> GlobalRef[Any] | Any:
        """Keeps what a dataset has when the program has ended: also after `stop`, and without a
        copy at the driver.

        A value becomes a global variable, homed on the node where it is. Other datasets become a
        collection: each partition stays on its node, and the first tasks on it go there. What a
        stage has left in a partition is what a function of `map_batches` may return: an array, a
        table, a dict of arrays, a tuple of those, or a list of items.

        Partitions that are lost with a node are made again when they are needed: the program runs
        again from its beginning, on the nodes that there are. It makes the same if its functions
        do, and if what its partitions were at first, and the versions of variables that it reads,
        are there still. A value is not made again: pass `redundancy`.

        Args:
            dataset: Of the program.
            timeout_s: As of `wait`.
            options: Of `clamor.put`, for a value: name, redundancy, and others.

        Returns:
            A `GlobalRef` of a value, else a `DataCollection`.

        Raises:
            ProgramError: It is of another program; a partition is nothing that a collection has;
                it is no value, and has options.
            WaitTimeoutError, StageFailedError, ProgramLostError: As `wait`.
            NameTakenError, TooFewNodesError, ...: As `clamor.put`.

        Example:
            >>> program = clamor.Program()
            >>> parts, best = program.dataset([np.arange(3), np.arange(4)]), program.value(0)
            >>> program.stage(lambda t, part: part * part, writes=[parts])
            >>> program.stage(lambda t, best: np.ones(1000), writes=[best])
            >>> job = program.run()
            >>> squares, ones = job.publish(parts), job.publish(best)
            >>> job.stop()
            >>> squares.sum(), float(ones.get().sum())
            (19, 1000.0)
        """
        self._check(dataset)
        if options and not dataset.is_value:
            raise errors.ProgramError(
                f"{', '.join(options)}: {dataset.name} becomes a collection, and options are for "
                "values."
            )
        self.wait(timeout_s)
        _, settings, given = self._launched
        origin = Origin(settings, given, dataset.number, dataset.name)
        nodes = [node for _, node in self._call("where", dataset.number)]
        if dataset.is_value:
            return publish_value(origin, nodes[0], options)
        return publish_partitions(origin, nodes)

    def stats(self) -> Any:
        """What the program does, and where.

        Returns:
            A `ProgramStats`: its state, a row for each worker, restarts, checkpoints and moves.

        Raises:
            ProgramLostError: It was stopped.

        Example:
            >>> program = clamor.Program()
            >>> n = program.value(1)
            >>> program.stage(lambda t, n: n + 1, writes=[n])
            >>> job = program.run()
            >>> job.wait()
            >>> job.stats().state, job.stats().restarts
            ('ended', 0)
        """
        return self._call("stats")

    def progress(self, picture: str | os.PathLike[str] | None = None) -> Any:
        """How far the program is, and how even its work is on nodes and partitions. It is about a
        second old, and costs the workers nothing.

        Args:
            picture: A path that ends in .svg, .png or .pdf: where a picture goes, of rounds, tasks
                a second and cores of each node by time, and of the seconds of partitions.

        Returns:
            A `ProgramProgress`. As text it is a table.

        Raises:
            ProgramLostError: It was stopped.
            ImportError: There is no matplotlib to draw the picture.

        Example:
            >>> program = clamor.Program()
            >>> n = program.value(1)
            >>> with program.loop(max=10):
            ...     program.stage(lambda t, n: n * 2, writes=[n])
            >>> job = program.run()
            >>> job.wait()
            >>> job.progress().rounds, job.progress().tasks
            (10, 10)
        """
        found = self._call("progress")
        if picture is not None:
            draw_progress(found, picture, f"progress(picture={os.fspath(picture)!r})")
        return found

    def move(self, dataset: Dataset, index: int, node_id: str) -> None:
        """Moves a partition to another node, with all that is accessed together with it.

        Args:
            dataset: Of the program.
            index: Of the partition, from 0.
            node_id: Ray's hex id; `stats` has those that have a worker.

        Raises:
            ProgramError: There is no such partition, or the node has no worker of the program.

        Example:
            >>> program = clamor.Program()
            >>> parts = program.dataset([1, 2])
            >>> program.stage(lambda t, x: x + 1, writes=[parts])
            >>> job = program.run()
            >>> job.move(parts, 0, job.stats().workers[0].node_id)
            >>> job.result(parts)
            [2, 3]
        """
        self._check(dataset)
        self._call("move", dataset.number, index, node_id)

    def stop(self) -> None:
        """Ends the program where it is, and its workers. Idempotent; also after its end.

        Example:
            >>> program = clamor.Program()
            >>> n = program.value(1)
            >>> with program.loop(max=10**12):
            ...     program.stage(lambda t, n: n + 1, writes=[n])
            >>> job = program.run()
            >>> job.stop()
        """
        try:
            self._call("stop")
        except errors.ProgramLostError:
            return  # it is gone already

    # -- how

    def _check(self, dataset: Dataset) -> None:
        if dataset not in self._datasets:
            raise errors.ProgramError(f"{dataset!r} is of another program.")

    def _fetched(self, dataset: Dataset) -> list[Any]:
        """All partitions. They may be large: no deadline, while their workers live. One that has
        moved meanwhile, off a node that is drained, is asked for again."""
        deadline = time.monotonic() + CALL_S
        while True:
            try:
                return list(ray_state.get(self._call("partitions", dataset.number)))
            except errors.ProgramError as moves:
                failure: Exception = moves
            except RayTaskError as raised:
                failure = raised.cause
                if not isinstance(failure, errors.ProgramError):
                    raise failure from None
            except RayError as lost:
                failure = errors.ProgramLostError(
                    f"A worker was lost before the result was fetched: {cause_of(lost)}"
                )
            self._call("wait", 0.0)  # raises, where that has ended the program
            if time.monotonic() >= deadline:
                raise failure
            time.sleep(PAUSE_S)

    def _call(self, name: str, *args: Any) -> Any:
        deadline = time.monotonic() + CALL_S
        while True:
            try:
                call = getattr(self._controller, name).remote(*args)
                return ray_state.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except (GetTimeoutError, ActorUnavailableError) as failure:
                # Where its process was killed another one comes, and learns from the workers.
                if time.monotonic() >= deadline:
                    raise errors.WaitTimeoutError(
                        f"The program's controller has not answered for {CALL_S:g} s."
                    ) from failure
                time.sleep(PAUSE_S)
            except RayTaskError as failure:
                raise failure.cause from None
            except RayError as failure:
                raise errors.ProgramLostError(
                    f"The program's controller is lost: {cause_of(failure)}"
                ) from None


def _stop(controller: Any) -> None:
    with contextlib.suppress(Exception):  # any of Ray's: it is gone, or Ray is
        controller.stop.remote()
