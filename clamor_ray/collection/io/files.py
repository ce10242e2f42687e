"""Files of any file system: which ones a path stands for, and reading them in spite of trouble.

A `Store` says where files are; it is small, pickles, and makes the pyarrow file system where it is
used: pyarrow's own pickle of an S3 file system forgets the retry strategy, and credentials come
from the default chain of the process that reads.

Facts, and what follows:

* Arrow raises a plain OSError for a page that does not decode and for a connection that broke.
  So nothing remote is read by Arrow itself: `open_input` gives it a file whose reads are retried
  here, and which raises `StorageError`. What else comes out of a decoder is the file's fault.
* Closing an output stream of S3 completes the upload, also after an exception. So an object is
  written from memory, whole (`sinks.py`).
* The SDK retries what it knows to pass, three times. What is left (a name that does not resolve
  for a while, a body that breaks off, a throttle that lasts) is retried here, up to `retry_s`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from clamor_ray.errors import ClamorError, SourceError, StorageError

RETRY_S = 60.0
_BACKOFF_FIRST_S = 0.1
_BACKOFF_MOST_S = 5.0
_CONNECT_S = 5.0
_REQUEST_S = 10.0
_SDK_ATTEMPTS = 3
_LISTING_THREADS = 8
READ_BYTES = 8 << 20  # of one request: what is asked for again when it fails

_MAGIC = re.compile(r"[*?\[]")
# pyarrow's options of a file system in its URI; else a question mark is part of a pattern.
_OPTIONS = re.compile(r"\?((?:[a-z_]+=[^&/*]*)(?:&[a-z_]+=[^&/*]*)*)$")
# Trying again does not help.
_REFUSED = re.compile(
    r"AWS Error (?:ACCESS_DENIED|NO_SUCH_BUCKET|NO_SUCH_KEY|INVALID_ACCESS_KEY_ID|EXPIRED_TOKEN"
    r"|SIGNATURE_DOES_NOT_MATCH|MISSING_AUTHENTICATION_TOKEN|INVALID_CLIENT_TOKEN_ID"
    r"|UNRECOGNIZED_CLIENT|VALIDATION|RESOURCE_NOT_FOUND|INVALID_SIGNATURE)\b"
    r"|HTTP status (?:3\d\d|4(?!08|29)\d\d)"
)

# `PurePath`s and whatever else has `__fspath__`.
Path: TypeAlias = "str | os.PathLike[str]"
Paths: TypeAlias = "Path | Sequence[Path]"
T = TypeVar("T")
U = TypeVar("U")


@functools.lru_cache(maxsize=32)
def _s3(endpoint: str | None, region: str | None, anonymous: bool) -> Any:
    """One client per process and place: it keeps its connections."""
    return pafs.S3FileSystem(
        endpoint_override=endpoint,
        region=region,
        anonymous=anonymous,
        connect_timeout=_CONNECT_S,
        request_timeout=_REQUEST_S,
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_SDK_ATTEMPTS),
    )


@dataclass(frozen=True)
class Store:
    """A file system, as it travels to a worker.

    Args:
        kind: "local", "s3" (made anew where it is used), or "given" (pickled as it is).
        given: the file system of "given".
        endpoint: URL of an S3 that is not Amazon's.
        region: of S3; None leaves it to the SDK.
        anonymous: S3 without credentials.
        retry_s: for how long a failing request is tried again, in seconds. One request can take
            45 s more, where a server accepts it and says nothing.
        prefix: what people write before a path of this store: "s3://".
        host: the machine that listed the files.
    """

    kind: str
    given: Any = field(default=None, compare=False)
    endpoint: str | None = None
    region: str | None = None
    anonymous: bool = False
    retry_s: float = RETRY_S
    prefix: str = ""
    host: str = field(default_factory=socket.gethostname)

    def filesystem(self) -> Any:
        """The `pyarrow.fs.FileSystem`."""
        if self.kind == "s3":
            return _s3(self.endpoint, self.region, self.anonymous)
        return pafs.LocalFileSystem() if self.kind == "local" else self.given

    @property
    def is_local(self) -> bool:
        """Whether these are files of this machine."""
        return self.kind == "local"

    def name(self, path: str) -> str:
        """A path as people write it."""
        return f"{self.prefix}{path}"


def _endpoint() -> str | None:
    # The SDK in pyarrow knows these variables only for URIs: it is told.
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return named.rstrip("/") or None


def _region(bucket: str, endpoint: str | None) -> str | None:
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if named or endpoint:
        return named or None
    try:
        return str(pafs.resolve_s3_region(bucket))
    except OSError:
        return None  # the SDK's own ways are left (profile, instance metadata)


def _s3_store(rest: str, retry_s: float) -> tuple[Store, str]:
    options = _OPTIONS.search(rest)
    bare = rest[: options.start()] if options else rest
    bucket, slash, key = bare.partition("/")
    user, at, bucket = bucket.rpartition("@")
    if not bucket:
        raise SourceError(f"s3://{rest} names no bucket.", hint="Write s3://bucket/key.")
    if options or (at and user != "anonymous"):
        text = f"s3://{user}{at}{bucket}" + (f"?{options.group(1)}" if options else "")
        given, _ = pafs.FileSystem.from_uri(text)
        return Store("given", given, retry_s=retry_s, prefix="s3://"), f"{bucket}{slash}{key}"
    endpoint = _endpoint()
    store = Store(
        "s3",
        endpoint=endpoint,
        region=_region(bucket, endpoint),
        anonymous=bool(at),
        retry_s=retry_s,
        prefix="s3://",
    )
    return store, f"{bucket}{slash}{key}"


def _given_store(path: str, filesystem: Any, retry_s: float) -> tuple[Store, str]:
    scheme, marker, rest = path.partition("://")
    path = rest if marker else scheme
    prefix = f"{scheme}://" if marker else ""
    if not isinstance(filesystem, pafs.FileSystem):
        # fsspec's are wrapped, as everywhere in pyarrow.
        filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))
    if filesystem.type_name == "local":
        return Store("local", retry_s=retry_s), os.path.abspath(os.path.expanduser(path))
    if not prefix and filesystem.type_name == "s3":
        prefix = "s3://"
    return Store("given", filesystem, retry_s=retry_s, prefix=prefix), path


def locate(path: Path, filesystem: Any = None, retry_s: float = RETRY_S) -> tuple[Store, str]:
    """Where a path is, and how its file system calls it.

    Args:
        path: local (relative to the working directory, ~ allowed), `s3://bucket/key`, or another
            URI that pyarrow knows (`gs://`, `hdfs://`, `abfs://`, `file://`).
        filesystem: a `pyarrow.fs.FileSystem` or fsspec's, that the path belongs to; a `Store`
            stays what it is.
        retry_s: see `Store`.

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
        return _given_store(text, filesystem, retry_s)
    scheme, marker, rest = text.partition("://")
    if not marker:
        return Store("local", retry_s=retry_s), os.path.abspath(os.path.expanduser(text))
    if scheme == "file":
        host, slash, tail = rest.partition("/")
        if host not in ("", "localhost"):
            raise SourceError(
                f"{text} is on the machine {host!r}.", hint="Write file:///path for this one."
            )
        return Store("local", retry_s=retry_s), os.path.abspath(slash + unquote(tail))
    if scheme in ("s3", "s3a", "s3n"):
        return _s3_store(rest, retry_s)
    authority, slash, tail = rest.partition("/")
    try:
        given, root = pafs.FileSystem.from_uri(f"{scheme}://{authority}/")
    except (ValueError, NotImplementedError, OSError) as error:
        raise SourceError(
            f"{text}: {_cause(error)}.", hint="Give a local path, s3://, or filesystem=."
        ) from error
    store = Store("given", given, retry_s=retry_s, prefix=f"{scheme}://")
    return store, "/".join(part for part in (root.rstrip("/"), tail) if part) or slash


# ------------------------------------------------------------------ trouble


def _cause(error: BaseException) -> str:
    """What was said, without the end of its sentence."""
    text = str(error).strip().rstrip(".")
    return text if text else type(error).__name__


def gone(store: Store, path: str) -> SourceError:
    """The error of a file that was listed and is not there."""
    if not store.is_local:
        return SourceError(
            f"{store.name(path)} was listed, and is not there any more.",
            hint="Something else deletes or moves the input; read it again.",
        )
    here = socket.gethostname()
    return SourceError(
        f"{path} was listed on {store.host} and is not there on {here}.",
        hint="Tasks read files on the node where they run: put the file under the same path on "
        "every node, use a shared file system or s3://, or clamor.put the data on the driver.",
    )


def with_retries(store: Store, what: str, call: Callable[[], T]) -> T:
    """The result of a call to a file system, tried again while it fails for now.

    Args:
        store: whose `retry_s` is the limit.
        what: "s3://bucket/key: reading bytes 0 to 99", for the error.
        call: may run several times.

    Raises:
        StorageError: refused, or still failing after `retry_s`. Names `what` and the cause.
        FileNotFoundError: as it came; what it means is the caller's.
    """
    backoff_s, tries, started = _BACKOFF_FIRST_S, 0, time.monotonic()
    while True:
        tries += 1
        try:
            return call()
        except FileNotFoundError:
            raise
        except OSError as error:
            spent_s = time.monotonic() - started
            refused = isinstance(error, PermissionError) or _REFUSED.search(str(error))
            if refused:
                raise StorageError(
                    f"{what}: refused: {_cause(error)}.",
                    hint="Look at the credentials, the region and the name.",
                ) from error
            if store.is_local or spent_s + backoff_s > store.retry_s:
                raise StorageError(
                    f"{what}: failed {tries} times in {spent_s:.1f} s: {_cause(error)}."
                ) from error
        # Many workers are throttled together: they must not come back together.
        time.sleep(backoff_s * random.uniform(0.5, 1.0))
        backoff_s = min(2 * backoff_s, _BACKOFF_MOST_S)


class RetryingFile:
    """A file that is read in ranges, each tried again while it fails. For `pa.PythonFile`.

    Args:
        store: where it is.
        path: of the file.
        size_bytes: what it had when it was listed; None: unknown.

    Raises:
        SourceError: it is gone, or has another size than it had.
        StorageError: from each read; see `with_retries`.
    """

    def __init__(self, store: Store, path: str, size_bytes: int | None = None) -> None:
        self._store, self._path = store, path
        self._name = store.name(path)
        self._file: Any = None
        self._at = 0
        self.closed = False
        self._size = int(with_retries(store, f"{self._name}: opening it", self._open_and_measure))
        check_size(store, path, size_bytes, self._size)

    def _open_and_measure(self) -> int:
        try:
            file = self._store.filesystem().open_input_file(self._path)
            size = int(file.size())
        except FileNotFoundError as error:
            raise gone(self._store, self._path) from error
        self._file = file
        return size

    def _read_once(self, offset: int, n_bytes: int) -> Any:
        if self._file is None:
            check_size(self._store, self._path, self._size, self._open_and_measure())
        file, self._file = self._file, None  # one that failed is not asked again
        file.seek(offset)
        got = file.read_buffer(n_bytes)
        if got.size != n_bytes:
            raise OSError(f"{got.size} of {n_bytes} bytes came")
        self._file = file
        return got

    def read_at(self, offset: int, n_bytes: int) -> Any:
        """Exactly these bytes, as a `pa.Buffer`; fewer only at the end of the file."""
        n_bytes = max(0, min(n_bytes, self._size - offset))
        if n_bytes == 0:
            return pa.py_buffer(b"")
        what = f"{self._name}: reading bytes {offset} to {offset + n_bytes - 1}"
        return with_retries(self._store, what, lambda: self._read_once(offset, n_bytes))

    # What pa.PythonFile calls.

    def read_buffer(self, n_bytes: int = -1) -> Any:
        """The next bytes, without a copy."""
        got = self.read_at(self._at, self._size if n_bytes is None or n_bytes < 0 else n_bytes)
        self._at += got.size
        return got

    def read(self, n_bytes: int = -1) -> bytes:
        """The next bytes."""
        return bytes(self.read_buffer(n_bytes))

    def seek(self, offset: int, whence: int = 0) -> int:
        """Where the next read begins."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def size(self) -> int:
        """In bytes."""
        return self._size

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def writable(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Lets go of the connection."""
        self.closed = True
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RetryingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_size(store: Store, path: str, listed: int | None, now: int) -> None:
    """Raises where a file is not what the splits were made for."""
    if listed is not None and now != listed:
        raise SourceError(
            f"{store.name(path)} had {listed} bytes when it was listed and has {now} now.",
            hint="Something still writes it; read it when it is complete.",
        )


def local_error(store: Store, path: str, error: OSError) -> Exception:
    """What an OSError of a local file means. Arrow's have no number where the kernel gave none."""
    if isinstance(error, FileNotFoundError):
        return gone(store, path)
    what = f"{path} on {socket.gethostname()}: {_cause(error)}."
    if error.errno is None or isinstance(error, (PermissionError, IsADirectoryError)):
        return SourceError(what, hint="Tasks read it as the user who started Ray on that node.")
    return StorageError(what)


def open_input(store: Store, path: str, size_bytes: int | None = None) -> Any:
    """A file for Arrow's readers (`pa.NativeFile`); to be closed.

    Args:
        store: where it is.
        path: of the file.
        size_bytes: what it had when it was listed; None: unknown.

    Raises:
        SourceError: it is gone, unreadable, or has another size.
        StorageError: the store does not answer; also from reads of a remote file.
    """
    if not store.is_local:
        return pa.PythonFile(RetryingFile(store, path, size_bytes), mode="r")
    try:
        file = pa.OSFile(path, mode="r")
    except OSError as error:
        raise local_error(store, path, error) from error
    try:
        check_size(store, path, size_bytes, file.size())
    except BaseException:
        file.close()
        raise
    return file


def read_into(store: Store, path: str, file: Any, start: int, out: memoryview) -> None:
    """Fills `out` with what an open file has from a byte on, in requests of 8 MiB.

    Args:
        store: where it is.
        path: of the file, for errors.
        file: from `open_input`.
        start: first byte.
        out: as many bytes as are wanted.

    Raises:
        SourceError: the file ends before.
        StorageError: the store does not answer, or the disk does not.
    """
    for at in range(0, len(out), READ_BYTES):
        n_bytes = min(READ_BYTES, len(out) - at)
        try:
            file.seek(start + at)
            got = file.read_buffer(n_bytes)
        except StorageError:
            raise
        except OSError as error:
            raise local_error(store, path, error) from error
        if got.size != n_bytes:
            raise SourceError(
                f"{store.name(path)}: bytes {start} to {start + len(out) - 1} are wanted, and it "
                f"ends at byte {start + at + got.size}."
            )
        out[at : at + n_bytes] = memoryview(got).cast("B")


def read_bytes(store: Store, path: str, file: Any, start: int, stop: int) -> bytearray:
    """Bytes `start` to `stop` of an open file; see `read_into`."""
    got = bytearray(stop - start)
    read_into(store, path, file, start, memoryview(got))
    return got


@contextlib.contextmanager
def reading(store: Store, path: str, part: str) -> Iterator[None]:
    """Inside, what a decoder raises becomes a `SourceError` that names the file and the part.

    Args:
        store: where the file is.
        path: of the file.
        part: "row group 3"; empty for the whole file.
    """
    try:
        yield
    except (ClamorError, MemoryError):
        raise
    except OSError as error:
        if store.is_local and error.errno is not None:
            raise local_error(store, path, error) from error
        raise _undecodable(store, path, part, error) from error
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise _undecodable(store, path, part, error) from error


def _undecodable(store: Store, path: str, part: str, error: Exception) -> SourceError:
    return SourceError(f"{store.name(path)}{', ' if part else ''}{part}: {_cause(error)}.")


def in_parallel(work: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Results in order, of a few threads: what waits for a store does not hold the GIL."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_LISTING_THREADS, len(items))) as pool:
        return list(pool.map(work, items))


# ------------------------------------------------------------------ listing


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


def _infos(store: Store, directory: str, recursive: bool) -> list[Any]:
    selector = pafs.FileSelector(directory, recursive=recursive, allow_not_found=True)
    found = with_retries(
        store,
        f"{store.name(directory)}: listing it",
        lambda: store.filesystem().get_file_info(selector),
    )
    return sorted(found, key=lambda info: str(info.path))


def info(store: Store, path: str) -> Any:
    """A path's `pyarrow.fs.FileInfo`."""
    return with_retries(
        store,
        f"{store.name(path)}: looking it up",
        lambda: store.filesystem().get_file_info(path),
    )


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def in_directory(store: Store, directory: str, suffixes: tuple[str, ...] = ()) -> list[File]:
    """The files of a directory and those below, by name; without hidden ones (`.x`, `_x`).

    Args:
        store: where it is.
        directory: its path.
        suffixes: only names that end so; all where none is given.
    """
    root = directory.rstrip("/")
    found = []
    for entry in _infos(store, root or directory, recursive=True):
        below = entry.path[len(root) :].strip("/").split("/")
        wanted = not suffixes or below[-1].lower().endswith(suffixes)
        if wanted and entry.type == pafs.FileType.File and not any(map(_is_hidden, below)):
            found.append(File(store, entry.path, entry.size or 0))
    return found


def _component(pattern: str) -> re.Pattern[str]:
    """One part of a path, between two slashes, as a regular expression."""
    out, at = "", 0
    while at < len(pattern):
        letter = pattern[at]
        at += 1
        end = pattern.find("]", at + 1) if letter == "[" else -1
        if letter == "*":
            out += "[^/]*"
        elif letter == "?":
            out += "[^/]"
        elif end > 0:
            inside = pattern[at:end].replace("\\", "\\\\")
            out += "[" + ("^" + inside[1:] if inside[0] in "!^" else inside) + "]"
            at = end + 1
        else:
            out += re.escape(letter)
    return re.compile(out, re.DOTALL)


def _matching(
    store: Store, base: str, parts: Sequence[str], suffixes: tuple[str, ...]
) -> list[File]:
    """Files below `base` that the rest of a pattern matches. A directory stands for its files."""
    head, rest = parts[0], parts[1:]
    if head == "**":
        return _below(store, base, rest, suffixes)
    if not _MAGIC.search(head):
        path = f"{base.rstrip('/')}/{head}" if base else head
        return _matching(store, path, rest, suffixes) if rest else _literal(store, path, suffixes)
    wanted, found = _component(head), []
    for entry in _infos(store, base, recursive=False):
        name = entry.path.rstrip("/").rpartition("/")[2]
        if not wanted.fullmatch(name) or (_is_hidden(name) and not _is_hidden(head)):
            continue
        is_directory = entry.type == pafs.FileType.Directory
        if rest and is_directory:
            found += _matching(store, entry.path, rest, suffixes)
        elif not rest and is_directory:
            found += in_directory(store, entry.path, suffixes)
        elif not rest:
            found.append(File(store, entry.path, entry.size or 0))
    return found


def _below(store: Store, base: str, rest: Sequence[str], suffixes: tuple[str, ...]) -> list[File]:
    """`base/**/rest`: any number of directories in between, none too. One listing."""
    while rest and rest[0] == "**":
        rest = rest[1:]
    if not rest:
        return in_directory(store, base, suffixes)
    parts = [r"(?:[^/]+/)*" if part == "**" else _component(part).pattern + "/" for part in rest]
    wanted = re.compile(r"(?:[^/]+/)*" + "".join(parts).removesuffix("/"), re.DOTALL)
    shown = any(map(_is_hidden, rest))
    root, found = base.rstrip("/"), []
    for entry in _infos(store, base, recursive=True):
        below = entry.path[len(root) :].strip("/")
        hidden = any(map(_is_hidden, below.split("/")))
        if entry.type == pafs.FileType.File and wanted.fullmatch(below) and (shown or not hidden):
            found.append(File(store, entry.path, entry.size or 0))
    return found


def _literal(store: Store, path: str, suffixes: tuple[str, ...]) -> list[File]:
    entry = info(store, path)
    if entry.type == pafs.FileType.Directory:
        return in_directory(store, path, suffixes)
    if entry.type == pafs.FileType.NotFound:
        return []
    return [File(store, path, entry.size or 0)]


def _files_of(path: Path, filesystem: Any, retry_s: float, suffixes: tuple[str, ...]) -> list[File]:
    store, inside = locate(path, filesystem, retry_s)
    if not _MAGIC.search(inside):
        return _literal(store, inside.rstrip("/") or inside, suffixes)
    exact = info(store, inside) if store.is_local else None
    if exact is not None and exact.type == pafs.FileType.File:
        return [File(store, inside, exact.size or 0)]  # its name has a bracket in it
    lead = "/" if inside.startswith("/") else ""
    return _matching(store, lead, [part for part in inside.split("/") if part], suffixes)


def files(
    paths: Paths,
    filesystem: Any = None,
    retry_s: float = RETRY_S,
    suffixes: tuple[str, ...] = (),
) -> list[File]:
    """The files that paths stand for: in the order of the paths, and by name within each.

    Args:
        paths: one or several of: a file, a directory (with all below it), a pattern (`*`, `?`,
            `[a-c]`, `[!a]`, and `**` for any number of directories). Names that begin with `.`
            or `_` are only taken where the pattern says so. Local, `s3://`, or what pyarrow knows.
        filesystem: that they belong to; None: by each path.
        retry_s: see `Store`.
        suffixes: which files of a directory count; all where none is given.

    Raises:
        SourceError: one of the paths stands for no file.
        StorageError: the store does not list.
    """
    given: Iterable[Path] = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found: list[File] = []
    for path in given:
        of_path = _files_of(path, filesystem, retry_s, suffixes)
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
