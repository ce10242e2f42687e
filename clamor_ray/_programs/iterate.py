"""The program of a loop that most iterative algorithms are: map, reduce, update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from clamor_ray import errors
from clamor_ray._programs.program import Program


def iterate(
    source: Any,
    initial: Any,
    map: Callable[[Any, Any], Any],
    reduce: str | Callable[[Any, Any], Any],
    update: Callable[[Any, Any], Any],
    until: Callable[[Any, Any], bool] | None,
    max: int | None,
    progress: bool | None = None,
    **options: Any,
) -> Any:
    """See `DataCollection.iterate`.

    Args:
        source: What `Program.dataset` takes.
    """
    if isinstance(reduce, str) and reduce != "sum":
        raise errors.ProgramError(f"reduce is 'sum' or a function, not {reduce!r}.")
    reducer = _add if isinstance(reduce, str) else reduce
    program = Program()
    rows = program.dataset(source, name="rows")
    value, reduced = program.value(initial, name="value"), program.value(None, name="reduced")

    def send_value(t: Any, value: Any) -> None:
        t.broadcast(value)

    def map_rows(t: Any, part: Any) -> None:
        t.send(0, map(part, t.recv()[0]))

    def reduce_and_update(t: Any, value: Any, reduced: Any) -> tuple[Any, Any]:
        total = functools.reduce(reducer, t.recv())
        return update(value, total), total

    with program.loop(max=max) as loop:
        program.stage(send_value, reads=[value])
        program.stage(map_rows, reads=[rows])
        program.stage(reduce_and_update, writes=[value, reduced])
        if until is not None:

            def is_last(t: Any, value: Any, reduced: Any) -> bool:
                return bool(until(value, reduced))

            loop.until(is_last, reads=[value, reduced])
    job = program.run(**options)
    try:
        return job.result(value, progress=progress)
    finally:
        job.stop()


def _add(a: Any, b: Any) -> Any:
    return a + b
