"""What can go wrong with files that variables are made of. `errors.py` has all errors."""

from __future__ import annotations

from clamor_ray._errors.base import ClamorError


class FileReadError(ClamorError, OSError):
    """The file of a variable cannot be read now: a disk, or a server, that fails or is not reached.

    What nodes have read of it already stays readable.

    Example:
        >>> isinstance(clamor.errors.FileChangedError("..."), OSError)
        True
    """

    default_hint = "Try it again when the file can be read. CLAMOR_FAULT_TIMEOUT_S bounds a read."

    __str__ = ClamorError.__str__


class FileChangedError(FileReadError):
    """The file, or object, is not the one any more that the variable was made of: it was changed,
    replaced or deleted. Nothing of the new one is ever mixed with what was read before.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "changing.npy")
        >>> np.save(path, np.zeros(100_000))
        >>> ref = clamor.from_file(path)
        >>> np.save(path, np.ones(200_000))
        >>> clamor.prefetch(ref)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.FileChangedError: ...
    """

    default_hint = (
        "Make a new variable of the file as it is now: clamor.from_file(path). Write new data to a "
        "new name, and leave a file that a variable is made of as it is."
    )


class FileAccessError(FileReadError):
    """The file may not be read: its permissions, or credentials of S3 that are missing, wrong or
    expired. What they are is in no message."""

    default_hint = (
        "Each node reads by itself. Give it credentials that are good for as long as the variable "
        "is used, in its environment (AWS_ACCESS_KEY_ID, ...), by a role, or with "
        "from_file(..., storage_options={...}), and make the variable again."
    )


class NoSuchFileError(FileReadError, FileNotFoundError):
    """There is no such file or object. Nothing was made.

    Example:
        >>> clamor.from_file("no such file.npy")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NoSuchFileError: ...
    """

    default_hint = "Look at the path, and at the bucket, region and endpoint of an s3:// address."


class FileFormatError(ClamorError, ValueError):
    """A file is not what a variable can be made of: it is too short, damaged, compressed, or of
    another dtype. Nothing was made.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "short.npy")
        >>> with open(path, "wb") as file: n_bytes = file.write(b"not an array")
        >>> clamor.from_file(path)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.FileFormatError: ...
    """

    default_hint = "Say format=, dtype= and shape= as the file has them."

    __str__ = ClamorError.__str__
