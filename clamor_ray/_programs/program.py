"""`Program`: describes a computation whose tasks start each other, and runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from clamor_ray._observe.graphviz import write_graph
from clamor_ray._programs.job import Job
from clamor_ray._programs.launching import launch, n_workers
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.explaining import explain_text
from clamor_ray._recipes.program.picture import explain_picture
from clamor_ray._session import process_sessions
from clamor_ray._session.begin import starting
from clamor_ray.actors.recipes.checkpoint_files import CheckpointFiles


class Program(Builder):
    """A program: datasets, and stages, loops and branches over them (Canary, SoCC'18).

    Workers know all of it, so they start their own tasks: an iteration waits for no driver. What
    it costs is that it is described whole, before it runs. docs/recipes.md has it all.

    Example:
        >>> program = clamor.Program()
        >>> points = program.dataset([np.arange(3), np.arange(4)])
        >>> total = program.value(0)
        >>> def send_sum(t, points):
        ...     t.send(0, points.sum())
        >>> def add_up(t, total):
        ...     return int(total + sum(t.recv()))
        >>> with program.loop(max=10):
        ...     program.stage(send_sum, reads=[points])
        ...     program.stage(add_up, writes=[total])
        >>> program.run().result(total)
        90
    """

    def explain(self, picture: Any = None) -> str:
        """The stages in their order, and what each task waits for: which stage has written each
        partition last, which have read it since, and whose messages must have come (Canary, 4.3).

        Args:
            picture: A path that ends in .svg, .png or .pdf: where a picture of it goes, drawn by
                Graphviz; or in .dot.

        Returns:
            The text.

        Raises:
            ProgramError: See `run`.

        Example:
            >>> program = clamor.Program()
            >>> n = program.value(1, name="n")
            >>> program.stage(lambda t, n: n + 1, writes=[n], name="add")
            >>> print(program.explain().splitlines()[0])
            program: 1 stage, 1 dataset, 1 partition
        """
        tables = self.tables()
        if picture is not None:
            write_graph(
                explain_picture(tables),
                picture,
                call=f"explain(picture={os.fspath(picture)!r})",
                size=f"{len(tables.stages)} stages",
            )
        return explain_text(tables)

    def run(
        self,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        every_s: float | None = None,
        schedule: Sequence[Callable[..., Any]] | None = None,
        workers: int | str | None = None,
        cpus: int | None = None,
        executors: str | None = None,
        reserve: bool = True,
    ) -> Job:
        """Starts it. Returns when its partitions are at their workers.

        Args:
            checkpoint: A directory that all nodes reach, or ``s3://bucket/key``: where checkpoints
                go, and where the newest one is taken from if there is one of this program.
            every_s: Between two checkpoints, in seconds.
            schedule: Functions that move partitions; see `clamor.schedule`. Left out: none while
                the workers stay.
            workers: On so many nodes; left out: on all that have CPUs. A node that goes is
                replaced by another one, where there is one. ``"all"``: on all that have CPUs, and
                on those that come while it runs.
            cpus: So many tasks run at once on each node; left out: one for each CPU of the node.
            executors: ``threads``: tasks run in one process on each node, and see each other's
                module variables. ``processes``: each CPU has a process of its own. Left out:
                threads at first, and processes when functions have been busy for a second, where a
                node runs several tasks at once and partitions are arrays, or small.
            reserve: Ray gives the CPUs of those tasks to nobody else until the program has ended.
                False: the program runs beside what has them.

        Returns:
            The job: ask it for results.

        Raises:
            ProgramError: What is described cannot be right.
            NotInitializedError: There is no session.
            StorageError: The checkpoint cannot be read.
            WaitTimeoutError: A worker did not start in time, or others have had the CPUs for a
                minute.
            ValueError: `every_s` without `checkpoint`; `executors` is something else.

        Example:
            >>> program = clamor.Program()
            >>> n = program.value(1)
            >>> with program.loop(max=10):
            ...     program.stage(lambda t, n: n * 2, writes=[n])
            >>> job = program.run()
            >>> job.result(n)
            1024
            >>> job.stop()
        """
        tables = self.tables()
        session = process_sessions.current()
        if (every_s is not None) and checkpoint is None:
            raise ValueError("every_s needs checkpoint: where are they to go?")
        if executors not in (None, "threads", "processes"):
            raise ValueError(f"executors is 'threads' or 'processes', not {executors!r}")
        place = None if checkpoint is None else os.fspath(checkpoint)
        if place is not None and "://" not in place:
            place = os.path.abspath(place)  # workers have other working directories
        if place is not None:
            CheckpointFiles(place)  # what cannot be opened is said here
        # A session with a name outlives its drivers, also where this one has bound it to its job.
        is_detached = not session.scope.startswith(starting.job_scope_part())
        launched = launch(
            session.scope,
            is_detached,
            session.node_id,
            tables,
            self.functions,
            self.datasets,
            workers=None if workers is None else n_workers(workers),
            checkpoint=place,
            every_s=every_s,
            schedule=schedule or (),
            cpus=cpus,
            executors=executors,
            reserve=reserve,
        )
        return Job(launched, self.datasets)
