"""A table whose every value is known: of a row and the last update that changed it. Pure: no Ray.

Update u (1, 2, ...) changes each row r with r = u modulo CYCLE: one row of a hundred, all over the
table. Whoever knows the number of an answer's update can say whether each of its rows is right.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.float32]

CYCLE: Final = 100

_ROW: Final = np.uint64(0x9E3779B97F4A7C15)
_UPDATE: Final = np.uint64(0xD6E8FEB86659FD93)
_COLUMN: Final = np.uint64(0xBF58476D1CE4E5B9)
_PIECE: Final = 1 << 14  # rows that are made at a time: temporaries are twice as large


def last_update(ids: Int64, update: int) -> Int64:
    """The last update, up to this one, that changed each row; 0 where none has.

    Example:
        >>> last_update(np.array([0, 1, 2, 99]), 101).tolist()
        [100, 101, 2, 99]
    """
    last = update - (update - ids) % CYCLE
    return np.maximum(last, 0)


def changed_rows(n_rows: int, update: int) -> Int64:
    """The rows that an update changes, in order.

    Example:
        >>> changed_rows(300, 102).tolist()
        [2, 102, 202]
    """
    return np.arange(update % CYCLE, n_rows, CYCLE, dtype=np.int64)


def rows_at(ids: Int64, update: int, dim: int) -> Rows:
    """What the rows with these ids hold after an update: numbers from 0 to 1, exact in float32."""
    of_row = ids.astype(np.uint64) * _ROW
    of_row += last_update(ids, update).astype(np.uint64) * _UPDATE
    bits = of_row[:, None] + np.arange(1, dim + 1, dtype=np.uint64) * _COLUMN
    bits ^= bits >> np.uint64(31)
    bits *= _UPDATE
    rows: Rows = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return rows


def fill(out: Rows, update: int) -> None:
    """Writes all rows of a table, in pieces."""
    for first in range(0, len(out), _PIECE):
        ids = np.arange(first, min(first + _PIECE, len(out)), dtype=np.int64)
        out[first : first + len(ids)] = rows_at(ids, update, out.shape[1])


def wrong_rows(rows: Rows, ids: Int64, update: int) -> list[int]:
    """Ids of the rows that do not hold what they must after this update."""
    right = rows_at(ids, update, rows.shape[1])
    wrong: list[int] = ids[(rows != right).any(axis=1)].tolist()
    return wrong
