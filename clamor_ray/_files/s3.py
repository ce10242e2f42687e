"""Objects in S3, by ranges. obstore has the connections, the signatures and the retries.

Each range is asked for with If-Match: the server itself refuses (412) a range of another object
than the one that is described, so no answer mixes two of them. Why obstore and not pyarrow, which
the library has anyway: `pyarrow.fs.S3FileSystem` cannot send If-Match, and its readers do not say
which ETag a range was of.
"""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any, Final
from urllib.parse import parse_qsl

from clamor_ray._files.spec import FileSpec
from clamor_ray.errors import (
    FileAccessError,
    FileChangedError,
    FileFormatError,
    FileReadError,
    NoSuchFileError,
)

REQUEST_S: Final = 15.0  # one try of one range
RETRY_S: Final = 30.0  # then none is begun; less than CLAMOR_FAULT_TIMEOUT_S, which ends the waits
RETRIES: Final = 8
CONNECT_S: Final = 5.0
BODY_TRIES: Final = 4  # of a range whose bytes break off
# pyarrow's and s3fs's names of what obstore calls otherwise.
_NAMES: Final = {
    "endpoint_override": "endpoint",
    "endpoint_url": "endpoint",
    "access_key": "access_key_id",
    "secret_key": "secret_access_key",
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "anonymous": "skip_signature",
    "anon": "skip_signature",
}
_IN_ADDRESS: Final = {"endpoint_override", "endpoint_url", "region", "scheme"}
_SECRETS: Final = ("access_key_id", "secret_access_key", "session_token")
_ACCESS: Final = re.compile(
    r"\b(40[13]\b|AccessDenied|ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch|"
    r"TokenRefreshRequired|InvalidToken|MissingCredentials|NoSuchKeyId|RequestTimeTooSkewed|"
    r"credentials?\b)",
    re.IGNORECASE,
)


def parse(address: str, storage_options: dict[str, Any] | None) -> tuple[str, dict[str, str]]:
    """The address without options, and the options.

    Args:
        address: s3://bucket/key, with `?region=...&endpoint_override=...&scheme=...` where wanted.
        storage_options: by obstore's names of an `S3Config`, pyarrow's or s3fs's; these go before
            what the address says.

    Raises:
        ValueError: It is no such address, or has something else in it, as a secret.

    Example:
        >>> parse("s3://b/k.npy?region=eu-west-1", {"secret_key": "x"})
        ('s3://b/k.npy', {'region': 'eu-west-1', 'secret_access_key': 'x'})
    """
    where, _, query = address.removeprefix("s3://").partition("?")  # a key may have a "#"
    bucket, _, key = where.partition("/")
    if "@" in bucket:
        raise ValueError(
            "an s3:// address must not have credentials in it, because it is shown in messages: "
            "give them with storage_options={'access_key_id': ..., 'secret_access_key': ...}"
        )
    if not bucket or not key.strip("/"):
        raise ValueError(f"{address!r} names no object: s3://bucket/key")
    said = dict(parse_qsl(query))
    if unknown := set(said) - _IN_ADDRESS:
        raise ValueError(
            f"the address of an S3 object has no option {min(unknown)!r}: it may have "
            f"{', '.join(sorted(_IN_ADDRESS))}; the rest goes to storage_options"
        )
    scheme = said.pop("scheme", "")
    options = {_NAMES.get(name, name): value for name, value in said.items()}
    for name, value in (storage_options or {}).items():
        if value is None:  # as s3fs says that there is none
            continue
        options[_NAMES.get(name, name)] = (
            str(value).lower() if isinstance(value, bool) else str(value)
        )
    endpoint = options.get("endpoint", "")
    if endpoint and "://" not in endpoint:
        options["endpoint"] = f"{scheme or 'https'}://{endpoint}"
    return f"s3://{bucket}/{key}", options


def _open(path: str, options: dict[str, str]) -> tuple[Any, str]:
    """The store and the key.

    Raises:
        FileReadError: obstore is not installed, or cannot be used so.
    """
    try:
        from obstore.store import S3Store
    except ImportError as failure:
        raise FileReadError(
            f"{path} cannot be read without obstore.",
            hint="Install it on every node: pip install 'clamor-ray[s3]'.",
        ) from failure
    bucket, _, key = path.removeprefix("s3://").partition("/")
    endpoint = options.get("endpoint", "")
    try:
        store = S3Store(
            bucket,
            config=options,  # type: ignore[arg-type]
            client_options={
                "allow_http": endpoint.startswith("http://") or not endpoint,
                "connect_timeout": f"{CONNECT_S:g}s",
                "timeout": f"{REQUEST_S:g}s",
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_S),
                "backoff": {
                    "init_backoff": timedelta(seconds=0.1),
                    "max_backoff": timedelta(seconds=5),
                    "base": 2,
                },
            },
        )
    except Exception as failure:  # any of obstore's; its text may have what was given
        raise FileReadError(
            f"S3 cannot be used for {path}: {type(failure).__name__}.",
            hint=f"Look at storage_options, which has {sorted(options)}, and at the environment.",
        ) from None
    return store, key


def _error(path: str, failure: Exception, options: dict[str, str]) -> FileReadError:
    """The first line alone: the rest of obstore's text repeats it. A server may say the credentials
    that it got."""
    from obstore import exceptions

    whole = str(failure)
    secrets = [options.get(name) or os.environ.get(f"AWS_{name.upper()}") for name in _SECRETS]
    for secret in filter(None, secrets):
        whole = whole.replace(secret, "...")
    said = whole.splitlines()[0][:300] if whole else type(failure).__name__
    bucket, _, key = path.removeprefix("s3://").partition("/")
    for name in filter(None, (key, bucket, options.get("endpoint"))):
        whole = whole.replace(name, "")  # which may have a word or a number of _ACCESS
    if isinstance(failure, exceptions.PreconditionError):
        return FileChangedError(f"{path} has another ETag than when the variable was made of it.")
    if isinstance(failure, FileNotFoundError | exceptions.NotFoundError):
        return NoSuchFileError(f"There is no object {path}.")
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
    if isinstance(failure, denied) or _ACCESS.search(whole):
        return FileAccessError(f"S3 refuses to give {path}: {said}.")
    return FileReadError(f"{path} cannot be read: {said}.")


def describe(path: str, options: dict[str, str]) -> tuple[int, str]:
    """Bytes and ETag of an object.

    Raises:
        NoSuchFileError, FileAccessError, FileReadError: It cannot be read.
        FileFormatError: It has no ETag, so that a change of it could not be noticed.
    """
    store, key = _open(path, options)
    import obstore

    try:
        meta = obstore.head(store, key)
    except Exception as failure:  # any of obstore's
        error = _error(path, failure, options)
        if type(error) is FileReadError:  # an answer to HEAD does not say why
            try:
                obstore.get(store, key, options={"range": (0, 1)})
            except Exception as why:  # the same
                error = _error(path, why, options)
        raise error from None
    if not meta["e_tag"]:
        raise FileFormatError(f"The server gives no ETag of {path}.", hint="Use a server of S3.")
    return int(meta["size"]), str(meta["e_tag"])


class S3File:
    """Reads ranges of an object, as long as it is the one that is described. Any thread."""

    def __init__(self, spec: FileSpec) -> None:
        self._spec = spec
        self._store, self._key = _open(spec.path, spec.options)

    def read(self, offset: int, n_bytes: int) -> Any:
        """Bytes [offset, offset + n_bytes) of the object, as a buffer.

        Raises:
            FileChangedError: It is another one, or is not there any more.
            FileAccessError, FileReadError: It cannot be read.
        """
        import obstore

        spec = self._spec
        (etag,) = spec.identity
        options: Any = {"range": (offset, offset + n_bytes), "if_match": etag}
        until_s = time.monotonic() + RETRY_S
        for left in reversed(range(BODY_TRIES)):
            try:
                got = obstore.get(self._store, self._key, options=options)
                if got.meta["e_tag"] != etag:  # a server that does not look at If-Match
                    raise FileChangedError(
                        f"{spec.path} has another ETag than when the variable was made of it."
                    )
                found = got.bytes()
            except FileReadError:
                raise
            except Exception as failure:  # any of obstore's, which has tried again itself
                error = _error(spec.path, failure, spec.options)
                if isinstance(error, NoSuchFileError):
                    raise FileChangedError(f"{spec.path} is not there any more.") from None
                is_late = time.monotonic() >= until_s
                if type(error) is not FileReadError or not left or is_late:
                    raise error from None
                continue
            if len(found) == n_bytes:
                return found
            if not left:
                raise FileReadError(
                    f"{spec.path}: {len(found)} bytes came from offset {offset}, and not {n_bytes}."
                )
        raise AssertionError("unreachable")
