"""What can go wrong with backups. `errors.py` has all errors."""

from __future__ import annotations

from clamor_ray._errors.base import ClamorError


class NoBackupError(ClamorError, LookupError):
    """There is no backup at the path, or no checkpoint of that number in it.

    Example:
        >>> clamor.restore("/no/such/backup")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NoBackupError: ...
    """

    default_hint = "Look at the path; clamor.checkpoint(path) makes a backup there."

    __str__ = ClamorError.__str__


class BackupFormatError(ClamorError):
    """A newer version of the library has written the backup.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp())
        >>> n = (path / "checkpoint-00000001.json").write_text('{"clamor-backup": 99}')
        >>> clamor.restore(path)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.BackupFormatError: ...
    """

    default_hint = "Restore it with that version of clamor-ray, or a later one."


class DamagedBackupError(ClamorError):
    """Something of the backup is missing, or is not what was written. Nothing was restored.

    Args:
        message: which file, and which variable and blocks.
        variable: name of the variable, or what it is called without one; "" for none.
        block: number of its first block that is wrong, counted from its first byte; None for none.
        file: that is damaged or missing.
        code, hint: as `ClamorError`'s.

    Example:
        >>> import pathlib, tempfile
        >>> path, ref = tempfile.mkdtemp(), clamor.put(np.ones(1000), name="torn")
        >>> number = clamor.checkpoint(path).number
        >>> for file in pathlib.Path(path, "data").iterdir():
        ...     file.unlink()
        >>> for info in clamor.variables():
        ...     if info.name:
        ...         clamor.drop(info.name)
        >>> clamor.restore(path)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.DamagedBackupError: ...
    """

    default_hint = (
        "Bring the file back from a copy of the backup, or restore an older checkpoint: "
        "clamor.restore(path, number=...). Checkpoint into an empty directory from now on."
    )

    def __init__(
        self,
        message: str,
        *,
        variable: str = "",
        block: int | None = None,
        file: str = "",
        code: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.variable = variable
        self.block = block
        self.file = file


class BackupInUseError(ClamorError):
    """Another process writes a checkpoint into the same backup. Nothing was written.

    Example:
        >>> import builtins, fcntl, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp())
        >>> with builtins.open(path / "writer.lock", "w") as other:
        ...     fcntl.flock(other, fcntl.LOCK_EX)
        ...     clamor.checkpoint(path)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.BackupInUseError: ...
    """

    default_hint = "Wait until it is done, or give each session a backup of its own."


class DanglingReferenceError(ClamorError):
    """A variable holds a reference to one that is not there any more. The last checkpoint in the
    backup is as it was.

    Example:
        >>> inner = clamor.put(np.zeros(1000))
        >>> outer = clamor.put({"inner": inner}, name="outer")
        >>> clamor.free(inner)
        >>> import tempfile
        >>> clamor.checkpoint(tempfile.mkdtemp(), leave_out=["outer"]).variables >= 0
        True
        >>> clamor.checkpoint(tempfile.mkdtemp())
        Traceback (most recent call last):
            ...
        clamor_ray.errors.DanglingReferenceError: ...
        >>> clamor.free(outer)
    """

    default_hint = (
        "Put the object again without that reference, or leave it out: "
        "clamor.checkpoint(path, leave_out=[name])."
    )


class FixedAddressError(ClamorError):
    """A variable holds pointers into itself, so it means nothing at another address.

    Example:
        >>> import tempfile
        >>> with clamor.build(1 << 20) as r:
        ...     a = r.zeros(1000)
        ...     ref = r.publish(r.pointer(a.ctypes.data))
        >>> clamor.checkpoint(tempfile.mkdtemp(), refs={"pointer": ref})
        Traceback (most recent call last):
            ...
        clamor_ray.errors.FixedAddressError: ...
    """

    default_hint = (
        "What a library allocated in clamor.build(...).malloc() can be restored at no other "
        "address: build it again, and leave it out: clamor.checkpoint(path, leave_out=[name])."
    )
