"""Files of any file system: which ones a path stands for, and what it means where one is not read.

A `Store` says where files are; it is small, pickles, and makes the pyarrow file system where it is
used: pyarrow's own pickle of an S3 file system forgets the retry strategy. Credentials that nobody
gave come from the default chain of the process that reads.

Requests are retried by Arrow: the SDK's standard strategy for S3, also of a body that breaks off.
Other file systems that a caller gives retry as they do themselves.

Facts, and what follows:

* Arrow raises a plain OSError for a page that does not decode and for a request that failed. The
  latter has a number, or says whose error it is: `_OF_STORE` tells them apart.
* Arrow reads a range into a buffer of its size. Where S3 refuses one of some hundred bytes for now,
  what it says of that finds no room, and the SDK takes it for final: `persistent` tries again.
* Closing an output stream of S3 completes the upload, also after an exception. So an object is
  written from memory, whole (`sinks.py`).
* `pyarrow.dataset` knows no patterns and not what size a file had when it was listed, gives the
  column "s.x" without its "s", and types all CSV files by the first one. So files are listed by
  `FileSelector` here, and read by `pyarrow.parquet` and `pyarrow.csv` (`pieces.py`).
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import pickle
import random
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar, cast
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from clamor_ray.errors import ClamorError, SourceError, StorageError

_CONNECT_S = 5.0
_REQUEST_S = 10.0
_SDK_ATTEMPTS = 9  # of a request: with its growing pauses about 45 s, where it fails at once
_LISTING_THREADS = 8
READ_BYTES = 8 << 20  # of one request: what is asked for again when it fails

_MAGIC = re.compile(r"[*?\[]")
# pyarrow's options of a file system in its URI; else a question mark is part of a pattern.
_OPTIONS = re.compile(r"\?((?:[a-z_]+=[^&/*]*)(?:&[a-z_]+=[^&/*]*)*)$")
_NO_ROOM = "Failed to flush response stream"
_OF_STORE = re.compile(r"AWS Error|google::cloud::|Azure Error")
_REFUSED = re.compile(
    r"AWS Error (?:ACCESS_DENIED|NO_SUCH_|INVALID_|EXPIRED_TOKEN|SIGNATURE_|UNRECOGNIZED_"
    r"|MISSING_AUTHENTICATION_TOKEN|VALIDATION|RESOURCE_NOT_FOUND)"
    r"|HTTP status (?:3\d\d|4(?!08|29)\d\d)"
)

# `PurePath`s and whatever else has `__fspath__`.
Path: TypeAlias = "str | os.PathLike[str]"
Paths: TypeAlias = "Path | Sequence[Path]"
T = TypeVar("T")
U = TypeVar("U")
F = TypeVar("F", bound=Callable[..., Any])


@functools.lru_cache(maxsize=32)
def _s3(options: bytes) -> Any:
    """One client per process and place: it keeps its connections."""
    given = pickle.loads(options)
    for name, timeout_s in (("connect_timeout", _CONNECT_S), ("request_timeout", _REQUEST_S)):
        if given.get(name, -1) < 0:  # unset
            given[name] = timeout_s
    retries = pafs.AwsStandardS3RetryStrategy(max_attempts=_SDK_ATTEMPTS)
    return pafs.S3FileSystem(**given, retry_strategy=retries)


@dataclass(frozen=True)
class Store:
    """A file system, as it travels to a worker.

    Args:
        kind: "local", "s3" (made anew where it is used), or "given" (pickled as it is).
        given: the file system of "given".
        options: of `pyarrow.fs.S3FileSystem`, pickled.
        prefix: what people write before a path of this store: "s3://".
        host: the machine that listed the files.
    """

    kind: str
    given: Any = field(default=None, compare=False)
    options: bytes = field(default=b"", repr=False)  # may hold a secret
    prefix: str = ""
    host: str = field(default_factory=socket.gethostname)

    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem`."""
        if self.kind == "s3":
            return _s3(self.options)
        return pafs.LocalFileSystem() if self.kind == "local" else self.given

    @property
    def is_local(self) -> bool:
        """Whether these are files of this machine."""
        return self.kind == "local"

    def name(self, path: str) -> str:
        """A path as people write it."""
        return f"{self.prefix}{path}"


@dataclass(frozen=True)
class File:
    """A file that a path stands for.

    Args:
        store: where it is.
        path: for the store's file system.
        size_bytes: when it was listed.
    """

    store: Store
    path: str
    size_bytes: int

    @property
    def name(self) -> str:
        """As people write it."""
        return self.store.name(self.path)


def _region(bucket: str, endpoint: str | None) -> str | None:
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if named or endpoint:
        return named or None
    try:
        return str(pafs.resolve_s3_region(bucket))
    except OSError:
        return None  # the SDK's own ways are left (profile, instance metadata)


def _s3_store(rest: str) -> tuple[Store, str]:
    options = _OPTIONS.search(rest)
    bare = rest[: options.start()] if options else rest
    bucket, slash, key = bare.partition("/")
    user, at, bucket = bucket.rpartition("@")
    if not bucket:
        raise SourceError(f"s3://{rest} names no bucket.", hint="Write s3://bucket/key.")
    if options or (at and user != "anonymous"):
        text = f"s3://{user}{at}{bucket}" + (f"?{options.group(1)}" if options else "")
        given, _ = pafs.FileSystem.from_uri(text)
        return _store_of(given, "s3://"), f"{bucket}{slash}{key}"
    # The SDK in pyarrow knows these variables only for URIs: it is told.
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    endpoint = url.rstrip("/") or None
    named = {"region": _region(bucket, endpoint), "anonymous": bool(at)}
    chosen = pickle.dumps({"endpoint_override": endpoint, **named})
    return Store("s3", options=chosen, prefix="s3://"), f"{bucket}{slash}{key}"


def _store_of(filesystem: Any, prefix: str) -> Store:
    if not isinstance(filesystem, pafs.S3FileSystem):
        return Store("given", filesystem, prefix=prefix)
    _, (options,) = filesystem.__reduce__()  # all but the retry strategy
    return Store("s3", options=pickle.dumps(options), prefix=prefix or "s3://")


def _local(path: str) -> tuple[Store, str]:
    return Store("local"), os.path.abspath(os.path.expanduser(path))


def _given_store(path: str, filesystem: Any) -> tuple[Store, str]:
    scheme, marker, rest = path.partition("://")
    path = rest if marker else scheme
    prefix = f"{scheme}://" if marker else ""
    if not isinstance(filesystem, pafs.FileSystem):
        # fsspec's are wrapped, as everywhere in pyarrow.
        filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
    if filesystem.type_name == "local":
        return _local(path)
    return _store_of(filesystem, prefix), path


def locate(path: Path, filesystem: Any = None) -> tuple[Store, str]:
    """Where a path is, and how its file system calls it.

    Args:
        path: local (relative to the working directory, ~ allowed), `s3://bucket/key`, or another
            URI that pyarrow knows (`gs://`, `hdfs://`, `abfs://`, `file://`).
        filesystem: a `pyarrow.fs.FileSystem` or fsspec's, that the path belongs to; a `Store`
            stays what it is.

    Raises:
        SourceError: a scheme that pyarrow does not know.
        TypeError: no path.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a path is a str, not {type(text).__name__}")
    if isinstance(filesystem, Store):
        return filesystem, text.removeprefix(filesystem.prefix)
    if filesystem is not None:
        return _given_store(text, filesystem)
    scheme, marker, rest = text.partition("://")
    if not marker:
        return _local(text)
    if scheme in ("s3", "s3a", "s3n"):
        return _s3_store(rest)
    authority, slash, tail = rest.partition("/")
    if scheme == "file":
        if authority not in ("", "localhost"):
            raise SourceError(
                f"{text} is on the machine {authority!r}.", hint="Write file:///path for this one."
            )
        return Store("local"), os.path.abspath(slash + unquote(tail))
    try:
        given, root = pafs.FileSystem.from_uri(f"{scheme}://{authority}/")
    except (ValueError, NotImplementedError, OSError) as error:
        raise SourceError(
            f"{text}: {_cause(error)}.", hint="Give a local path, s3://, or filesystem=."
        ) from error
    store = Store("given", given, prefix=f"{scheme}://")
    return store, "/".join(part for part in (root.rstrip("/"), tail) if part) or slash


# ------------------------------------------------------------------ trouble


def _cause(error: BaseException) -> str:
    """What was said, without the end of its sentence."""
    text = str(error).strip().rstrip(".")
    return text if text else type(error).__name__


def _gone(file: File) -> SourceError:
    if not file.store.is_local:
        return SourceError(
            f"{file.name} was listed, and is not there any more.",
            hint="Something else deletes or moves the input; read it again.",
        )
    return SourceError(
        f"{file.path} was listed on {file.store.host} and is not there on {socket.gethostname()}.",
        hint="Tasks read files on the node where they run: put the file under the same path on "
        "every node, use a shared file system or s3://, or clamor.put the data on the driver.",
    )


def _failed(what: str, error: OSError) -> StorageError:
    if isinstance(error, PermissionError) or _REFUSED.search(str(error)):
        return StorageError(
            f"{what}: refused: {_cause(error)}.",
            hint="Look at the credentials, the region and the name.",
        )
    return StorageError(f"{what}: failed: {_cause(error)}.")


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Inside, a request to a file system that fails becomes a `StorageError`.

    Args:
        what: "s3://bucket/key: listing it".

    Raises:
        StorageError: refused, or still failing after Arrow's retries. Names `what` and the cause.
        FileNotFoundError: as it came; what it means is the caller's.
    """
    try:
        yield
    except (ClamorError, FileNotFoundError):
        raise
    except OSError as error:
        raise _failed(what, error) from error


def _trouble(file: File, part: str, error: OSError) -> ClamorError:
    """What an OSError of a file system means, of a file that was listed."""
    if isinstance(error, FileNotFoundError):
        return _gone(file)
    if not file.store.is_local:
        return _failed(f"{file.name}: {part}", error)
    what = f"{file.path} on {socket.gethostname()}: {_cause(error)}."
    # Arrow's errors have no number where the kernel gave none.
    if error.errno is None or isinstance(error, (PermissionError, IsADirectoryError)):
        return SourceError(what, hint="Tasks read it as the user who started Ray on that node.")
    return StorageError(what)


def persistent(read: F) -> F:
    """Decorates what may read short ranges; see the top of this file. It is called again, with
    pauses as the SDK makes them."""

    @functools.wraps(read)
    def call(*args: Any, **kwargs: Any) -> Any:
        for tries in range(1, _SDK_ATTEMPTS):
            try:
                return read(*args, **kwargs)
            except StorageError as error:
                if _NO_ROOM not in str(error):
                    raise
            time.sleep(min(2.0 ** (tries - 1), 20.0) * random.random())
        return read(*args, **kwargs)

    return cast(F, call)


def open_input(file: File) -> Any:
    """A file for Arrow's readers (`pa.NativeFile`); to be closed.

    Raises:
        SourceError: it is gone, unreadable, or has another size than it had when it was listed.
        StorageError: the store does not answer.
    """
    try:
        source = file.store.filesystem().open_input_file(file.path)
        now = source.size()
    except OSError as error:
        raise _trouble(file, "opening it", error) from error
    if now != file.size_bytes:
        source.close()
        raise SourceError(
            f"{file.name} had {file.size_bytes} bytes when it was listed and has {now} now.",
            hint="Something still writes it; read it when it is complete.",
        )
    return source


@persistent
def read_into(file: File, source: Any, start: int, out: memoryview) -> None:
    """Fills `out` with what an open file has from a byte on, in requests of 8 MiB.

    Args:
        file: which one, for errors.
        source: from `open_input`.
        start: first byte.
        out: as many bytes as are wanted.

    Raises:
        SourceError: the file ends before.
        StorageError: the store does not answer, or the disk does not.
    """
    at = 0
    while at < len(out):
        stop = min(at + READ_BYTES, len(out))
        try:
            source.seek(start + at)
            got = source.readinto(out[at:stop])
        except OSError as error:
            what = f"reading bytes {start + at} to {start + stop - 1}"
            raise _trouble(file, what, error) from error
        if not got:
            raise SourceError(
                f"{file.name}: bytes {start} to {start + len(out) - 1} are wanted, and it ends at "
                f"byte {start + at}."
            )
        at += got


def read_bytes(file: File, source: Any, start: int, stop: int) -> bytearray:
    """Bytes `start` to `stop` of an open file; see `read_into`."""
    got = bytearray(stop - start)
    read_into(file, source, start, memoryview(got))
    return got


@contextlib.contextmanager
def reading(file: File, part: str) -> Iterator[None]:
    """Inside, what a decoder raises becomes a `SourceError` that names the file and the part, and
    what its file system raises a `StorageError`.

    Args:
        file: which one.
        part: "row group 3"; empty for the whole file.
    """
    try:
        yield
    except (ClamorError, MemoryError):
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and (error.errno or _OF_STORE.search(str(error))):
            raise _trouble(file, f"reading {part or 'it'}", error) from error
        comma = ", " if part else ""
        raise SourceError(f"{file.name}{comma}{part}: {_cause(error)}.") from error


def in_parallel(work: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Results in order, of a few threads: what waits for a store does not hold the GIL."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_LISTING_THREADS, len(items))) as pool:
        return list(pool.map(work, items))


# ------------------------------------------------------------------ listing


def entries(store: Store, directory: str, recursive: bool = False) -> list[Any]:
    """The `pyarrow.fs.FileInfo`s of a directory, hidden or not, by path."""
    selector = pafs.FileSelector(directory, recursive=recursive, allow_not_found=True)
    with asking(f"{store.name(directory)}: listing it"):
        found = store.filesystem().get_file_info(selector)
    return sorted(found, key=lambda entry: str(entry.path))


def info(store: Store, path: str) -> Any:
    """A path's `pyarrow.fs.FileInfo`."""
    with asking(f"{store.name(path)}: looking it up"):
        return store.filesystem().get_file_info(path)


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _is_like(name: str, pattern: str) -> bool:
    """Whether a name fits one part of a pattern, between two slashes."""
    return fnmatch.fnmatchcase(name, pattern) and (_is_hidden(pattern) or not _is_hidden(name))


def _fits(names: Sequence[str], parts: Sequence[str], suffixes: tuple[str, ...]) -> bool:
    """Whether a pattern's parts match a file, or a directory that it is in."""
    if not parts:
        ends_well = not names or not suffixes or names[-1].lower().endswith(suffixes)
        return ends_well and not any(map(_is_hidden, names))
    if parts[0] == "**":
        deeper = len(names) > 1 and not _is_hidden(names[0])
        return _fits(names, parts[1:], suffixes) or (deeper and _fits(names[1:], parts, suffixes))
    return bool(names) and _is_like(names[0], parts[0]) and _fits(names[1:], parts[1:], suffixes)


def _matching(
    store: Store, base: str, parts: Sequence[str], suffixes: tuple[str, ...]
) -> list[File]:
    """Files below `base` that the rest of a pattern matches. A directory stands for its files."""
    if not parts or parts[0] == "**":
        root = base.rstrip("/")
        return [
            File(store, entry.path, entry.size or 0)
            for entry in entries(store, root or base, recursive=True)
            if entry.type == pafs.FileType.File
            and _fits(entry.path[len(root) :].strip("/").split("/"), parts, suffixes)
        ]
    head, rest = parts[0], parts[1:]
    if not _MAGIC.search(head):
        path = f"{base.rstrip('/')}/{head}" if base else head
        return _matching(store, path, rest, suffixes) if rest else _literal(store, path, suffixes)
    found = []
    for entry in entries(store, base):
        if not _is_like(entry.path.rstrip("/").rpartition("/")[2], head):
            continue
        if entry.type == pafs.FileType.Directory:
            found += _matching(store, entry.path, rest, suffixes)
        elif not rest:
            found.append(File(store, entry.path, entry.size or 0))
    return found


def in_directory(store: Store, directory: str, suffixes: tuple[str, ...] = ()) -> list[File]:
    """The files of a directory and those below, by name; without hidden ones (`.x`, `_x`).

    Args:
        store: where it is.
        directory: its path.
        suffixes: only names that end so; all where none is given.
    """
    return _matching(store, directory, (), suffixes)


def _literal(store: Store, path: str, suffixes: tuple[str, ...]) -> list[File]:
    entry = info(store, path)
    if entry.type == pafs.FileType.Directory:
        return in_directory(store, path, suffixes)
    if entry.type == pafs.FileType.NotFound:
        return []
    return [File(store, path, entry.size or 0)]


def _files_of(path: Path, filesystem: Any, suffixes: tuple[str, ...]) -> list[File]:
    store, inside = locate(path, filesystem)
    if not _MAGIC.search(inside):
        return _literal(store, inside.rstrip("/") or inside, suffixes)
    if store.is_local and os.path.isfile(inside):  # its name has a bracket in it
        return _literal(store, inside, suffixes)
    lead = "/" if inside.startswith("/") else ""
    return _matching(store, lead, [part for part in inside.split("/") if part], suffixes)


def files(paths: Paths, filesystem: Any = None, suffixes: tuple[str, ...] = ()) -> list[File]:
    """The files that paths stand for: in the order of the paths, and by name within each.

    Args:
        paths: one or several of: a file, a directory (with all below it), a pattern (`*`, `?`,
            `[a-c]`, `[!a]`, and `**` for any number of directories). Names that begin with `.`
            or `_` are only taken where the pattern says so. Local, `s3://`, or what pyarrow knows.
        filesystem: that they belong to; None: by each path.
        suffixes: which files of a directory count; all where none is given.

    Raises:
        SourceError: one of the paths stands for no file.
        StorageError: the store does not list.
    """
    given: Iterable[Path] = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found: list[File] = []
    for path in given:
        of_path = _files_of(path, filesystem, suffixes)
        if not of_path:
            only = f", nor what does not end in {' or '.join(suffixes)}" if suffixes else ""
            raise SourceError(
                f"no file matches {os.fspath(path)!r} as seen from {socket.gethostname()}.",
                hint="Look at the path; local paths are those of the driver's machine, and hidden "
                f"files (.x, _x) of a directory do not count{only}.",
            )
        found += of_path
    if not found:
        raise SourceError("No paths were given.", hint="Name at least one file.")
    return found
