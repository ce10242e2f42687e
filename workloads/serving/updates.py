"""The table as a global variable of a named session: made where there is none, and updated."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import ray

import clamor_ray as clamor
from clamor_ray import errors

from . import table

HEAD: Final = "node:__internal_head__"  # a resource that Ray gives to the head node alone
MAKES_S: Final = 120.0  # with the start of a worker and of a page server there


def new_table(n_rows: int, dim: int) -> dict[str, Any]:
    """A table before its first update.

    The number of the last update is in the same variable: what a reader sees of both is of one
    version, and of two updates at a time only one commits.
    """
    rows = np.empty((n_rows, dim), np.float32)
    table.fill(rows, 0)
    return {"rows": rows, "update": np.zeros(1, np.int64)}


def open_table(
    session: str, name: str, shape: tuple[int, int] | None
) -> clamor.GlobalRef[dict[str, Any]]:
    """Attaches this process to the session, and opens its table.

    Args:
        session: by its name.
        name: of the variable.
        shape: rows and columns of the session's table where there is none; None where there must
            be one.

    Raises:
        NoSuchSessionError, NoSuchNameError: There is none.
    """
    if shape is None:
        clamor.init(session=session)
        return clamor.open(name)
    try:
        clamor.init(session=session)
    except errors.NoSuchSessionError:
        _make_session(session)
        clamor.init(session=session)
    return clamor.get_or_create(name, lambda: new_table(*shape))


def _make_session(session: str) -> None:
    """On the head node, where this cluster has one that may run a task.

    A session ends with the node where it was made. A replica is on a worker, which an autoscaler
    or an upgrade may take away; without its head, the cluster is none.
    """
    if HEAD not in ray.cluster_resources():
        clamor.init(session=session, lifetime="detached")
        return

    @ray.remote(num_cpus=0, resources={HEAD: 0.001})
    def make() -> None:
        clamor.init(session=session, lifetime="detached")

    ray.get(make.remote(), timeout=MAKES_S)


@clamor.retry()
def update_rows(ref: clamor.GlobalRef[dict[str, Any]]) -> int:
    """One more update, of a row in `table.CYCLE`: a commit, which replicas follow.

    Returns:
        Its number.
    """
    with clamor.update(ref) as value:
        rows = value["rows"]
        number = int(value["update"][0]) + 1
        changed = table.changed_rows(len(rows), number)
        rows[changed] = table.rows_at(changed, number, rows.shape[1])
        value["update"][0] = number
    return number
