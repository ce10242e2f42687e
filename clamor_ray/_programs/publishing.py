"""What a program has made, as a variable or a collection that outlives it.

Each partition is fetched by a Ray task on its node, so it is copied there, past the driver. Where
that node is lost, Ray runs the task again: it runs the program again, from what its partitions were
at first, once for all partitions that are lost. That program ends by itself some time after nobody
has fetched of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._programs import collections
from clamor_ray._programs.launching import begin
from clamor_ray._protocol import names, ray_state
from clamor_ray._protocol.cause import cause_of
from clamor_ray._session import api

if TYPE_CHECKING:
    from clamor_ray.actors.recipes.settings import ProgramSettings

FETCH_S: Final = 60.0  # a partition may move meanwhile
PAUSE_S: Final = 0.2
ANSWER_S: Final = 60.0
WAIT_S: Final = 60.0  # of each question whether it has ended
RETRIES: Final = 8
EXPIRES_S: Final = 120.0


@dataclass(frozen=True)
class Origin:
    """Where partitions come from.

    Args:
        settings: The program.
        given: References to its partitions at its beginning, by dataset.
        dataset: Its number.
        name: For people.
    """

    settings: ProgramSettings
    given: list[list[Any]]
    dataset: int
    name: str


def publish_partitions(origin: Origin, nodes: list[str]) -> Any:
    """
    Args:
        origin: Of a program that has ended.
        nodes: Where each partition is.

    Returns:
        A `DataCollection`.

    Raises:
        ProgramError: A partition is nothing that a collection has.
        ProgramLostError: One is lost.
    """
    made = [_on(node, 2).remote(origin, index, _as_block) for index, node in enumerate(nodes)]
    _answers([done for done, _ in made])
    return collections.module().from_references("program", [part for _, part in made], nodes)


def publish_value(origin: Origin, node: str, options: dict[str, Any]) -> Any:
    """
    Args:
        origin: Of a program that has ended.
        node: Where it is.
        options: Of `clamor.put`.

    Returns:
        A `GlobalRef`.
    """
    (ref,) = _answers([_on(node, 1).remote(origin, 0, _Put(options))])
    return ref


def _on(node: str, n_returns: int) -> Any:
    return ray.remote(_fetch if n_returns == 1 else _fetch_two).options(
        name="publish",
        num_cpus=0,  # it carries, and computes nothing
        num_returns=n_returns,
        max_retries=RETRIES if n_returns == 2 else 0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
    )


def _answers(references: list[Any]) -> list[Any]:
    try:
        return list(ray_state.get(references))  # they may be large: no deadline
    except RayTaskError as failure:
        raise failure.cause from None
    except RayError as failure:
        raise errors.ProgramLostError(
            f"What the program has made could not be published: {cause_of(failure)}"
        ) from None


@dataclass(frozen=True)
class _Put:
    options: dict[str, Any]

    def __call__(self, value: Any, origin: Origin, index: int) -> Any:
        return api.put(value, **self.options)


def _as_block(value: Any, origin: Origin, index: int) -> Any:
    try:
        return collections.module().from_batch(value)
    except (TypeError, ValueError) as failure:
        raise errors.ProgramError(
            f"Partition {index} of {origin.name} cannot be one of a collection: {failure}",
            hint="Let a last stage make arrays, tables, dicts of arrays or lists of them, or fetch "
            "it by job.result().",
        ) from None


# -- in a task


def _fetch(origin: Origin, index: int, through: Callable[[Any, Origin, int], Any]) -> Any:
    return through(_value(origin, index), origin, index)


def _fetch_two(
    origin: Origin, index: int, through: Callable[[Any, Origin, int], Any]
) -> tuple[None, Any]:
    """The first is small: who gets it knows that all went well."""
    return None, _fetch(origin, index, through)


def _value(origin: Origin, index: int) -> Any:
    until_s = time.monotonic() + FETCH_S
    is_lost = False
    while True:
        try:
            if is_lost:
                controller = _run_again(origin)
                until_s = time.monotonic() + FETCH_S
            else:
                controller = ray_state.get_actor(origin.settings.name, namespace=names.NAMESPACE)
            return _fetched(controller, origin.dataset, index)
        except RayTaskError as failure:
            if is_lost or not isinstance(failure.cause, errors.ProgramError):
                raise failure.cause from None
            why: Exception = failure  # it moves
        except errors.ProgramLostError:
            if is_lost:
                raise
            is_lost = True
            continue
        except ValueError as failure:  # no such actor
            is_lost = True
            why = failure
        except RayError as failure:
            why = failure
        if time.monotonic() >= until_s:
            raise errors.ProgramLostError(
                f"Partition {index} of {origin.name} could not be fetched within {FETCH_S:g} s: "
                f"{cause_of(why)}"
            ) from why
        time.sleep(PAUSE_S)


def _fetched(controller: Any, dataset: int, index: int) -> Any:
    """
    Raises:
        ProgramLostError: The program, or something of it, is lost.
        ValueError: The worker is gone.
        RayError: It may be there a moment later.
    """
    try:
        ray_state.get(controller.wait.remote(0.0), timeout=ANSWER_S)
    except RayTaskError as failure:
        raise errors.ProgramLostError(cause_of(failure)) from None
    where = ray_state.get(controller.where.remote(dataset), timeout=ANSWER_S)
    worker = ray_state.get_actor(where[index][0], namespace=names.NAMESPACE)
    return ray_state.get(worker.partition.remote(dataset, index))  # no deadline: it may be large


def _run_again(origin: Origin) -> Any:
    """The program, from its beginning; or the one that another task has begun. When it has ended.

    Raises:
        StageFailedError, ProgramLostError: It has not.
    """
    settings = replace(
        origin.settings,
        name=f"{origin.settings.name}again",
        workers=None,
        place=None,
        every_s=None,
        is_detached=True,  # it is of no task
        reserves=False,  # who waits for this may have them
        expires_s=EXPIRES_S,
    )
    here = ray_state.runtime_context().get_node_id()
    controller = begin(settings, origin.given, here)
    try:
        while not ray_state.get(controller.wait.remote(WAIT_S)):
            pass
    except RayTaskError as failure:
        raise failure.cause from None
    return controller
