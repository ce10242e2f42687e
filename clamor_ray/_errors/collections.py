"""What can go wrong with collections and their files. `errors.py` has all errors."""

from __future__ import annotations

from clamor_ray._errors.base import ClamorError


class FunctionFailedError(ClamorError):
    """A function that a collection was given has raised. It is not tried again.

    Args:
        message: stage, partition, input and the function's own traceback.
        stage: name of the stage.
        partition: its number.
        input: what the partition was made of, for people.
        cause: the exception's type, module and all.
        code, hint: as `ClamorError`'s.

    Example:
        >>> clamor.from_items([0]).map(lambda x: 1 / x).collect()
        Traceback (most recent call last):
            ...
        clamor_ray.errors.FunctionFailedError: ...
    """

    default_hint = "The traceback above is your function's; the same input raises again."

    def __init__(
        self,
        message: str,
        *,
        stage: str = "",
        partition: int = -1,
        input: str = "",
        cause: str = "",
        code: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.stage = stage
        self.partition = partition
        self.input = input
        self.cause = cause


class ReadOnlyError(FunctionFailedError):
    """A function has tried to write to a batch, or to a global variable, that it got to read.

    Example:
        >>> clamor.from_items([0]).map_batches(lambda x: x.sort() or x).collect()
        Traceback (most recent call last):
            ...
        clamor_ray.errors.ReadOnlyError: ...
    """

    default_hint = (
        "Batches and global variables are read-only in tasks: copy first (x.copy()); a variable is "
        "changed with `with clamor.update(ref) as x:`."
    )


class NondeterministicError(ClamorError):
    """A task that was run again returned something else than before."""

    default_hint = (
        "Recovery and speculation run tasks again: take random numbers from a seed made of the "
        "partition, do not depend on time, on the order of sets, or on the machine."
    )


class LengthMismatchError(ClamorError, ValueError):
    """Two collections that are zipped do not have the same partitions.

    Example:
        >>> col = clamor.from_items(range(4), partitions=2)
        >>> col.zip(col.repartition(1))
        Traceback (most recent call last):
            ...
        clamor_ray.errors.LengthMismatchError: ...
    """

    default_hint = "Zip what was mapped from one collection, or repartition both alike first."


class MissingColumnError(ClamorError, KeyError):
    """A table has no column of that name.

    Example:
        >>> clamor.from_items([{"x": 1}]).sum("y")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.MissingColumnError: ...
    """

    default_hint = "Names are matched exactly; see the collection's schema()."

    __str__ = ClamorError.__str__  # KeyError's puts quotes around it


class EmptyCollectionError(ClamorError, ValueError):
    """Nothing can be said of no elements: min, max, mean or reduce of an empty collection.

    Example:
        >>> clamor.from_items([]).min()
        Traceback (most recent call last):
            ...
        clamor_ray.errors.EmptyCollectionError: ...
    """

    default_hint = "Give aggregate() a zero, or look at count() first."


class SourceError(ClamorError):
    """An input file is not what it should be: truncated, half-written, another format.

    Example:
        >>> clamor.read_text("/no/such/file.txt")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.SourceError: ...
    """

    default_hint = "Write the file again, or leave it out."


class StorageError(ClamorError, OSError):
    """A file system or object store did not do what it was asked, after bounded retries.

    Example:
        >>> clamor.from_items([{"x": 1}]).write_parquet("/dev/null/table")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.StorageError: ...
    """

    default_hint = "Look at the cause; what was not written is not there."

    __str__ = ClamorError.__str__
