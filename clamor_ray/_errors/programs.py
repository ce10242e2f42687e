"""Errors of programs that run without their driver."""

from __future__ import annotations

from clamor_ray._errors.base import ClamorError


class ProgramError(ClamorError, ValueError):
    """A program cannot be right as it is described. The message begins with the line.

    Example:
        >>> program = clamor.Program()
        >>> points, sums = program.dataset([[1], [2], [3]]), program.dataset([0, 0])
        >>> program.stage(lambda t, points, sums: None, reads=[points], writes=[sums])
        Traceback (most recent call last):
            ...
        clamor_ray.errors.ProgramError: ...
    """

    default_hint = "Change the line that the message begins with."


class StageFailedError(ClamorError):
    """A function of a program has raised. The program has ended; its last checkpoint is there.

    Args:
        message: stage, line, task, and the function's own traceback.
        stage: name of the stage.
        index: of the task.
        number: of the stage in the order of all that have run, from 1.
        cause: the exception's type.
        code, hint: as `ClamorError`'s.

    Example:
        >>> program = clamor.Program()
        >>> n = program.value(0)
        >>> program.stage(lambda t, n: 1 // n, writes=[n])
        >>> program.run().result(n)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.StageFailedError: ...
    """

    default_hint = "The traceback above is your function's; the same input raises again."

    def __init__(
        self,
        message: str,
        *,
        stage: str = "",
        index: int = -1,
        number: int = 0,
        cause: str = "",
        code: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.stage = stage
        self.index = index
        self.number = number
        self.cause = cause


class ProgramLostError(ClamorError):
    """A program has ended before its end: a worker was lost and there is no checkpoint, or it was
    stopped, or its driver has ended.

    Example:
        >>> program = clamor.Program()
        >>> n = program.value(0)
        >>> with program.loop(max=10**12):
        ...     program.stage(lambda t, n: n + 1, writes=[n])
        >>> job = program.run()
        >>> job.stop()
        >>> job.result(n)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.ProgramLostError: ...
    """

    default_hint = "Run it again, with checkpoint=DIRECTORY: then it goes on from there by itself."
