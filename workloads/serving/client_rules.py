"""What a client of the service does: which answers it asks for again, and what makes one wrong.

Pure: no Ray, no HTTP. The load programs follow these rules, each with an HTTP client of its own.

A look-up changes nothing, so it may be sent again whatever became of it. 500 is what Serve's proxy
says where the replica that had the request died; 503 where no replica takes it, or where the
library asks for patience.
"""

from __future__ import annotations

from typing import Final

from ..data.errors import WrongResult
from .bodies import BadAnswer, decode_answer
from .table import Int64, wrong_rows

MOST_TRIES: Final = 12
RETRIED_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
TRY_TIMEOUT_S: Final = 15.0

_FIRST_PAUSE_S: Final = 0.05
_MOST_PAUSE_S: Final = 2.0


class WrongAnswer(WrongResult):
    """Rows that are not those of the update that the answer names."""


def pause_s(n_tries: int) -> float:
    """How long to wait after so many tries: twice as long each time, some seconds at most.

    Example:
        >>> [pause_s(n) for n in (1, 2, 3, 9)]
        [0.05, 0.1, 0.2, 2.0]
    """
    return min(_FIRST_PAUSE_S * 2.0 ** (n_tries - 1), _MOST_PAUSE_S)


def check(body: bytes, ids: Int64, dim: int) -> int:
    """The update that a look-up's answer is of.

    Args:
        body: of the answer, as bytes.
        ids: that were asked for.
        dim: columns of the table, as /about says.

    Raises:
        WrongAnswer: It is not what the table holds.
    """
    try:
        answer = decode_answer(body)
    except BadAnswer as error:
        raise WrongAnswer(str(error)) from None
    if len(answer.rows) != len(ids):
        raise WrongAnswer(f"{len(answer.rows)} rows for {len(ids)} ids")
    if answer.rows.shape[1] != dim:  # of no columns all values would be right
        raise WrongAnswer(f"rows of {answer.rows.shape[1]} columns, and the table has {dim}")
    wrong = wrong_rows(answer.rows, ids, answer.update)
    if wrong:
        raise WrongAnswer(f"rows {wrong[:5]} are not those of update {answer.update}")
    return answer.update
