"""What can go wrong with persistent stores. `errors.py` has all errors."""

from __future__ import annotations

from clamor_ray._errors.base import ClamorError


class StoreError(ClamorError):
    """A persistent store cannot be opened, read or written. Its subclasses say why; this one says
    that a disk failed.

    Example:
        >>> issubclass(clamor.errors.StoreInUseError, clamor.errors.StoreError)
        True
    """

    default_hint = (
        "What was committed before is in the store. Look at the disk (dmesg), then open it again."
    )


class StoreInUseError(StoreError):
    """Another process has the store open, maybe one of another cluster. Nothing was changed.

    Example:
        >>> try:
        ...     raise clamor.errors.StoreInUseError("/data/clamor/kept: as an example.")
        ... except clamor.errors.StoreError as error:
        ...     print(error.message)
        /data/clamor/kept: as an example.
    """

    default_hint = (
        "End that session (clamor.shutdown(session=...)), or wait until its processes are gone."
    )


class StoreIncompleteError(StoreError):
    """Parts of the store are not here, or are of another store. Nothing was changed.

    Example:
        >>> try:
        ...     raise clamor.errors.StoreIncompleteError("/data/clamor/kept: as an example.")
        ... except clamor.errors.StoreError as error:
        ...     print(error.message)
        /data/clamor/kept: as an example.
    """

    default_hint = (
        "Open it where all nodes are that had parts of it, and bring their directories back."
    )


class StoreDamagedError(StoreError):
    """Something in the store is missing, or is not what was written.

    Args:
        message: which file, and which variable and blocks.
        region: id of the variable; 0 for none.
        version: of the variable that cannot be had; 0 for none.
        block: number of its first block that is wrong; None for none.
        file: that is damaged or missing.
        code, hint: as `ClamorError`'s.

    Example:
        >>> try:
        ...     raise clamor.errors.StoreDamagedError("/data/clamor/kept: as an example.")
        ... except clamor.errors.StoreError as error:
        ...     print(error.message)
        /data/clamor/kept: as an example.
    """

    default_hint = (
        "Run clamor-fsck on the store: it says what is lost, and with --repair mends what other "
        "nodes have, too. Or bring the file back from a copy of the store."
    )

    def __init__(
        self,
        message: str,
        *,
        region: int = 0,
        version: int = 0,
        block: int | None = None,
        file: str = "",
        code: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.region = region
        self.version = version
        self.block = block
        self.file = file


class StoreAccessError(StoreError):
    """The store may not be used: it is another user's, others may read or write it, or this user
    may not. Stores have pickles, which are code, so nobody else may have written them.

    Example:
        >>> try:
        ...     raise clamor.errors.StoreAccessError("/data/clamor/kept: as an example.")
        ... except clamor.errors.StoreError as error:
        ...     print(error.message)
        /data/clamor/kept: as an example.
    """

    default_hint = (
        "Give the directory to the user who runs Ray, on a file system that can be written, and "
        "take it from all others: chmod -R go= DIRECTORY."
    )


class StoreFormatError(StoreError):
    """A newer version of the library has written the store. Nothing was changed.

    Example:
        >>> try:
        ...     raise clamor.errors.StoreFormatError("/data/clamor/kept: as an example.")
        ... except clamor.errors.StoreError as error:
        ...     print(error.message)
        /data/clamor/kept: as an example.
    """

    default_hint = "Open it with that version of clamor-ray, or a later one."
