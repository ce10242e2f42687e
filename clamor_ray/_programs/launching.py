"""Starts the controller of a program, with what the partitions are at first."""

from __future__ import annotations

import io
import operator
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import cloudpickle
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._protocol import names, ray_state
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.handshake import SECRET_BYTES
from clamor_ray._read.ref import GlobalRef
from clamor_ray._recipes.program.builder import Dataset
from clamor_ray._recipes.program.tables import Tables
from clamor_ray._tasks.function_pickler import FunctionPickler
from clamor_ray.actors.recipes.controller import CONCURRENCY, RecipeController
from clamor_ray.actors.recipes.settings import ProgramSettings

START_S: Final = 3600.0  # partitions may be large


class Launched(NamedTuple):
    """A program that has begun.

    Args:
        controller: The actor that places its partitions; workers have them.
        settings: What it was told.
        given: References to its partitions at first, by dataset.
    """

    controller: Any
    settings: ProgramSettings
    given: list[list[Any]]


def launch(
    scope: str,
    is_detached: bool,
    node_id: str,
    tables: Tables,
    functions: Sequence[Callable[..., Any]],
    datasets: Sequence[Dataset],
    *,
    workers: int | str | None,
    checkpoint: str | None,
    every_s: float | None,
    schedule: Sequence[Callable[..., Any]],
    cpus: int | None,
    executors: str | None,
    reserve: bool,
) -> Launched:
    """
    Args:
        scope: Of the session.
        is_detached: The session outlives this driver, and so does the program.
        node_id: Where the controller runs.
        tables, functions, datasets: The program.
        workers: See `n_workers`; None: as many as there are nodes.
        checkpoint, every_s, schedule, cpus, executors, reserve: As of `Program.run`.

    Returns:
        What has begun.

    Raises:
        ProgramError: A function cannot be pickled; there are not so many nodes.
        StorageError: The checkpoint cannot be read.
        WaitTimeoutError: It has not started in time.
    """
    given = [_references(dataset) for dataset in datasets]
    # Of collections, which have partitions of their own kind.
    readers = {
        dataset.number: dataset.source.read_partition
        for dataset in datasets
        if hasattr(dataset.source, "read_partition")
    }
    settings = ProgramSettings(
        name=names.program_name(scope, os.urandom(4).hex()),
        scope=scope,
        secret=os.urandom(SECRET_BYTES),
        program=_pickled(tables, functions),
        workers=workers,
        cpus=cpus,
        executors=executors,
        place=checkpoint,
        every_s=every_s,
        schedule=cloudpickle.dumps(tuple(schedule)),
        readers=cloudpickle.dumps(readers),
        is_detached=is_detached,
        reserves=reserve,
    )
    return Launched(begin(settings, given, node_id), settings, given)


def begin(settings: ProgramSettings, given: list[list[Any]], node_id: str) -> Any:
    """Starts a program, or finds the one of that name.

    Args:
        settings: The program.
        given: References to its partitions at first, by dataset.
        node_id: Where the controller runs.

    Returns:
        The controller, whose workers have their partitions.

    Raises:
        ProgramError, StorageError, WaitTimeoutError, ProgramLostError: As `launch`.
    """
    controller = (
        ray.remote(concurrency_groups=CONCURRENCY)(RecipeController)
        .options(
            namespace=names.NAMESPACE,
            name=settings.name,
            get_if_exists=True,
            lifetime="detached" if settings.is_detached else None,
            num_cpus=0,
            max_restarts=-1,  # it learns from its workers where everything is
            enable_task_events=False,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=settings.is_detached),
        )
        .remote(settings)
    )
    try:
        ray_state.get(controller.start.remote(given, _places(given)), timeout=START_S)
    except BaseException as failure:  # also Ctrl-C: nobody could end it later
        controller.stop.remote()
        if isinstance(failure, ray.exceptions.RayTaskError):
            raise failure.cause from None
        if isinstance(failure, ray.exceptions.GetTimeoutError):
            raise errors.WaitTimeoutError(
                f"The program's partitions were not loaded within {START_S:g} s."
            ) from failure
        if isinstance(failure, ray.exceptions.RayError):
            raise errors.ProgramLostError(
                f"The program's controller was lost at its start: {cause_of(failure)}"
            ) from failure
        raise
    return controller


def _places(given: list[list[Any]]) -> dict[tuple[int, int], tuple[list[str], int]]:
    """Where partitions are, by dataset and index: small ones, and those that nobody has, are left
    out."""
    known = {
        (dataset, index): part
        for dataset, parts in enumerate(given)
        for index, part in enumerate(parts)
        if part is not None
    }
    if not known:
        return {}
    references = list(set(known.values()))
    ray_state.wait(references, num_returns=len(references), timeout=START_S, fetch_local=False)
    at = dict(zip(references, ray_state.locations_of(references), strict=True))
    return {key: at[part] for key, part in known.items() if at[part][0]}


def n_workers(workers: Any) -> int | str:
    """What a user says of workers.

    Raises:
        ProgramError: It is neither a number of nodes nor ``"all"``.
    """
    if workers == "all":
        return "all"
    try:
        return operator.index(workers)
    except TypeError:
        raise errors.ProgramError(
            f'workers is {workers!r}, and must be a number of nodes, or "all".'
        ) from None


class _Saver(FunctionPickler):
    """Functions read each global variable at the version that it has now."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, GlobalRef):
            return obj.snapshot().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _save(value: Any) -> bytes:
    file = io.BytesIO()
    _Saver(file, protocol=5).dump(value)
    return file.getvalue()


def _pickled(tables: Tables, functions: Sequence[Callable[..., Any]]) -> bytes:
    for number, function in enumerate(functions):
        try:
            _save(function)
        except Exception as failure:  # any of the user's objects'
            stage = tables.stages[number]
            raise errors.ProgramError(
                f"{stage.line}: the function of stage {stage.name} cannot be pickled: {failure!r}"
            ) from failure
    return _save((tables, tuple(functions)))


def _references(dataset: Dataset) -> list[Any]:
    """Its partitions, in Ray's object store: each goes to its worker, and past this process."""
    if dataset.source is None:
        return [None] * dataset.n_partitions
    if hasattr(dataset.source, "partition_references"):
        return list(dataset.source.partition_references())
    parts = list(dataset.source)
    if len(parts) != dataset.n_partitions:
        raise errors.ProgramError(
            f"{dataset.line}: {dataset.name} has {dataset.n_partitions} partitions, and "
            f"{len(parts)} were given."
        )
    return [part if isinstance(part, ray.ObjectRef) else ray.put(part) for part in parts]
