"""Two blocks joined by key: tables as `pyarrow.Table.join`, pairs as Spark. Pure.

Arrow's hash join finds which items belong together, on numbers that stand for the keys. Rows are
then taken by their places, so that columns of every type can be joined (Arrow's join has no
lists, structs or tensors), and the result has one order: that of the left items, and for each
of them that of the right ones; what only the right has comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from clamor_ray.collection.data import arrow, blocks, keys
from clamor_ray.collection.data.arrow import objects
from clamor_ray.collection.data.blocks import Columns, Items
from clamor_ray.collection.data.combine import pairs
from clamor_ray.collection.data.keys import Places

KINDS: Final = {
    "inner": "inner",
    "left_outer": "left outer",
    "right_outer": "right outer",
    "full_outer": "full outer",
    "left_semi": "left semi",
    "right_semi": "right semi",
    "left_anti": "left anti",
    "right_anti": "right anti",
}
_SPARK: Final = {
    "left": "left_outer",
    "leftouter": "left_outer",
    "right": "right_outer",
    "rightouter": "right_outer",
    "outer": "full_outer",
    "full": "full_outer",
    "fullouter": "full_outer",
    "semi": "left_semi",
    "leftsemi": "left_semi",
    "anti": "left_anti",
    "leftanti": "left_anti",
}


def join_items(
    left: Items,
    right: Items,
    on: str | Sequence[str] | None,
    how: str = "inner",
    *,
    right_on: str | Sequence[str] | None = None,
    left_suffix: str | None = None,
    right_suffix: str | None = None,
) -> Items:
    """What of two blocks has the same key.

    Tables give rows of the left columns (the keys among them) and the right ones without its
    keys; null is where a side has nothing, and a null key meets no other, as in SQL. Pairs (k, v)
    and (k, w) give pairs (k, (v, w)) with None for what is missing, and None is a key like others.
    Semi and anti joins give the items of one side.

    Args:
        left: a table, or pairs.
        right: the same.
        on: for tables, the name or names of the key columns; None for pairs.
        how: inner, left_outer, right_outer, full_outer, left_semi, right_semi, left_anti,
            right_anti (as Ray Data), or Spark's left, right, outer, semi, anti.
        right_on: what the key columns are called on the right, if otherwise.
        left_suffix: added to the names of columns that both have and that are no keys.
        right_suffix: the same for the right.

    Raises:
        ValueError: Another `how`, names that both sides have and no suffix, unequal numbers of
            keys, or pairs with `on`.
        TypeError: A table and pairs, key columns of types that cannot be compared, or items that
            are no pairs.
        MissingColumnError: No such key column.
    """
    kind = _kind(how)
    if isinstance(left, pa.Table) or isinstance(right, pa.Table):
        if on is None:
            raise ValueError("Tables are joined on columns: give their names (on=...).")
        names, right_names = _names(on), _names(on if right_on is None else right_on)
        if len(names) != len(right_names) or not names:
            raise ValueError(f"Keys {names} on the left, {right_names} on the right: no pairs.")
        left, right = _table(left, names, right), _table(right, right_names, left)
        return _Tables(left, right, names, right_names, left_suffix, right_suffix).join(kind)
    if (on is not None or right_on is not None) and blocks.n_items(left) + blocks.n_items(right):
        raise ValueError("Pairs (key, value) are joined by their first field: leave `on` out.")
    if on is not None:
        return blocks.EMPTY  # empty sides of tables whose columns nobody knows
    return _join_pairs(pairs(left, "A join"), pairs(right, "A join"), kind)


def _kind(how: str) -> str:
    name = _SPARK.get(how.replace("_", ""), how) if isinstance(how, str) else how
    if name not in KINDS:
        raise ValueError(f"how is one of {', '.join(KINDS)}, not {how!r}.")
    return name


def _names(on: str | Sequence[str]) -> list[str]:
    return [on] if isinstance(on, str) else list(on)


def _table(b: Items, names: list[str], other: Items) -> pa.Table:
    """A side as a table; an empty one of no known columns gets the keys of the other side."""
    if isinstance(b, pa.Table):
        return arrow.movable(b)
    if blocks.n_items(b):
        raise TypeError(f"One side of the join is a table, the other one of {blocks.schema_of(b)}.")
    return pa.table({name: pa.nulls(0) for name in names})


def _matches(left: Any, right: Any, kind: str) -> tuple[Places, Places]:
    """Places of the left and of the right that belong together; -1 where there is none."""
    sides = [
        pa.table({"key": ids, name: np.arange(len(ids))})
        for name, ids in (("left", left), ("right", right))
    ]
    found = sides[0].join(sides[1], "key", join_type=KINDS[kind])
    order = [(name, "ascending") for name in ("left", "right") if name in found.column_names]
    found = found.take(pc.sort_indices(found, sort_keys=order))
    places = [
        found.column(name).fill_null(-1).to_numpy()
        if name in found.column_names
        else np.full(found.num_rows, -1)
        for name in ("left", "right")
    ]
    return places[0], places[1]


# -- pairs


def _join_pairs(left: Columns, right: Columns, kind: str) -> Items:
    joined = blocks.concat([left.fields[0], right.fields[0]])
    ids = keys.group(keys.as_key(joined)).ids
    at, other = _matches(ids[: len(left)], ids[len(left) :], kind)
    if kind.endswith(("semi", "anti")):
        return blocks.take(left, at) if kind.startswith("left") else blocks.take(right, other)
    if (at >= 0).all():
        of = blocks.take(left.fields[0], at)
    elif (other >= 0).all():
        of = blocks.take(right.fields[0], other)
    else:
        of = blocks.take(joined, np.where(at >= 0, at, other + len(left)))
    values = (_or_none(left.fields[1], at), _or_none(right.fields[1], other))
    return Columns((of, Columns(values)))


def _or_none(b: Items, places: Places) -> Items:
    missing = places < 0
    if not missing.any():
        return blocks.take(b, places)
    found = np.full(len(places), None, object)
    taken = list(blocks.items(blocks.take(b, places[~missing])))
    found[~missing] = objects(taken)
    return found


# -- tables


class _Tables:
    """Two tables, and what their join is made of."""

    def __init__(
        self,
        left: pa.Table,
        right: pa.Table,
        names: list[str],
        right_names: list[str],
        left_suffix: str | None,
        right_suffix: str | None,
    ) -> None:
        self._left, self._right = left, right
        self._names, self._right_names = names, right_names
        self._suffixes = (left_suffix or "", right_suffix or "")
        columns = zip(names, right_names, strict=True)
        self._keys = [_one_column(left, name, right, other) for name, other in columns]

    def join(self, kind: str) -> pa.Table:
        rows = self._left.num_rows
        ids = keys.group(tuple(self._keys)).ids
        nulls = np.zeros(len(ids), bool)
        for key in self._keys:
            nulls |= key.is_null().to_numpy(zero_copy_only=False)
        column = pa.array(ids, mask=nulls)
        left, right = _matches(column[:rows], column[rows:], kind)
        if kind.endswith(("semi", "anti")):
            of, places = (self._left, left) if kind.startswith("left") else (self._right, right)
            return arrow.take(of, places)
        return self._joined(left, right)

    def _joined(self, left: Places, right: Places) -> pa.Table:
        renamed = self._renamed()
        columns = []
        only_right = (left < 0).any()
        of_key = np.where(left >= 0, left, right + self._left.num_rows)
        for name in self._left.column_names:
            if name in self._names and only_right:
                columns.append(self._keys[self._names.index(name)].take(pa.array(of_key)))
            else:
                columns.append(_or_null(self._left.column(name), left))
        for name in self._right.column_names:
            if name not in self._right_names:
                columns.append(_or_null(self._right.column(name), right))
        return pa.table(columns, renamed)

    def _renamed(self) -> list[str]:
        left = arrow.unique_names(self._left)
        right = [n for n in arrow.unique_names(self._right) if n not in self._right_names]
        both = set(left) & set(right)
        ours, theirs = self._suffixes
        names = [n + ours if n in both and n not in self._names else n for n in left]
        names += [n + theirs if n in both else n for n in right]
        if len(set(names)) < len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ValueError(
                f"Both sides of the join have columns {', '.join(map(repr, sorted(both)))} and the "
                f"result would have {', '.join(map(repr, twice))} twice: give left_suffix or "
                f"right_suffix, or drop one of them."
            )
        return names


def _or_null(column: pa.ChunkedArray, places: Places) -> pa.ChunkedArray:
    return column.take(pa.array(places, mask=places < 0))


def _one_column(left: pa.Table, name: str, right: pa.Table, other: str) -> pa.ChunkedArray:
    """The key column of both tables, one after the other, as one type."""
    one, two = arrow.decoded(arrow.column(left, name)), arrow.decoded(arrow.column(right, other))
    joined = arrow.concat_tables([pa.table({"key": one}), pa.table({"key": two})])
    if joined is None:
        raise TypeError(
            f"Key {name!r} of the left is {one.type}, {other!r} of the right {two.type}: cast one "
            f"of them to the other's type first."
        )
    return joined.column(0)
