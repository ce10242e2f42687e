"""What requests and answers look like on the wire, as JSON or as bytes. Pure: no Ray.

As bytes a request is its ids, each an int64, little-endian. An answer has a head of four int64
(update, version, rows, columns) and then the rows, float32, little-endian.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any, Final

import numpy as np

from .table import Int64, Rows

BYTES_TYPE: Final = "application/octet-stream"
JSON_TYPE: Final = "application/json"
MOST_IDS: Final = 1 << 16  # of a request: an answer of 16 MiB where rows have 64 columns

_HEAD: Final = struct.Struct("<qqqq")


class BadRequest(ValueError):
    """The request cannot be answered as it is; the text says what to send instead."""


class BadAnswer(ValueError):
    """These bytes are no answer of the service."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """Rows of one version.

    Args:
        update: the number of the last update in that version.
        version: of the variable.
        rows: in the order of the ids that were asked for.
    """

    update: int
    version: int
    rows: Rows


def encode_ids(ids: Int64) -> bytes:
    """A request's body, as bytes."""
    return ids.astype("<i8").tobytes()


def decode_ids(body: bytes, content_type: str) -> Int64:
    """The ids of a request.

    Raises:
        BadRequest: It has none, or too many, or they are no integers from 0 on.
    """
    if content_type.startswith(JSON_TYPE):
        ids = _ids_of_json(body)
    elif len(body) % 8:
        raise BadRequest(f"a body of bytes has 8 for each id, and this has {len(body)}")
    else:
        ids = np.frombuffer(body, "<i8").astype(np.int64)
    if not 1 <= len(ids) <= MOST_IDS:
        raise BadRequest(f"ask for 1 to {MOST_IDS} ids at a time, not for {len(ids)}")
    if ids.min() < 0:  # numpy counts those from the end
        raise BadRequest(f"ids count from 0, and one of these is {ids.min()}")
    return ids


def _ids_of_json(body: bytes) -> Int64:
    what = 'send {"ids": [...]} with integers'
    try:
        found = json.loads(body)["ids"]
        ids = np.asarray(found)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadRequest(f"{what}: {error!r}") from None
    if not isinstance(found, list) or ids.ndim != 1 or (len(ids) and ids.dtype.kind != "i"):
        raise BadRequest(what)
    return ids.astype(np.int64)


def encode_answer(answer: Answer, content_type: str) -> bytes:
    """An answer's body, of the type that the request had."""
    if content_type.startswith(JSON_TYPE):
        fields: dict[str, Any] = {"update": answer.update, "version": answer.version}
        return json.dumps({**fields, "rows": answer.rows.tolist()}).encode()
    head = _HEAD.pack(answer.update, answer.version, *answer.rows.shape)
    return head + answer.rows.astype("<f4", copy=False).tobytes()


def decode_answer(body: bytes) -> Answer:
    """An answer that was asked for as bytes.

    Raises:
        BadAnswer: It is none.
    """
    if len(body) < _HEAD.size:
        raise BadAnswer(f"an answer has {_HEAD.size} bytes at least, and this has {len(body)}")
    update, version, n_rows, dim = _HEAD.unpack_from(body)
    what = f"{len(body)} bytes are not {n_rows} rows of {dim} columns"
    if n_rows < 0 or dim < 0 or len(body) != _HEAD.size + 4 * n_rows * dim:
        raise BadAnswer(what)
    try:
        rows = np.frombuffer(body, "<f4", offset=_HEAD.size).reshape(n_rows, dim)
    except ValueError:  # none of more columns than an array may have
        raise BadAnswer(what) from None
    return Answer(update, version, rows)
