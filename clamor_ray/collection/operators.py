"""`Operators`: what a collection is made from another by. Nothing runs here: a node is added to the
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from clamor_ray import errors
from clamor_ray._read.hashmap import HashMap
from clamor_ray.collection.data import combine, folds
from clamor_ray.collection.options import Options
from clamor_ray.collection.plan.functions import capture
from clamor_ray.collection.plan.pins import Pins
from clamor_ray.collection.plan.plan import (
    Narrow,
    NarrowKind,
    Node,
    Wide,
    WideKind,
    Zip,
    node,
)

if TYPE_CHECKING:
    from typing_extensions import Self

BY_KEY: Final = ("sum", "min", "max")
BATCH_FORMATS: Final = ("numpy", "pyarrow", "pandas")
JOINS: Final = {
    "inner": "inner",
    "left": "left_outer",
    "left_outer": "left_outer",
    "right": "right_outer",
    "right_outer": "right_outer",
    "outer": "full_outer",
    "full": "full_outer",
    "full_outer": "full_outer",
}


def _checked_partitions(partitions: int | None, default: int) -> int:
    if partitions is None:
        return default
    if not isinstance(partitions, int) or isinstance(partitions, bool) or partitions < 1:
        raise ValueError(f"partitions is a number from 1 on, not {partitions!r}")
    return partitions


def key_of(key: Any) -> Any:
    """A column's name, a field's number, or a function that is captured."""
    if key is None or isinstance(key, (str, int)):
        return key
    if isinstance(key, (list, tuple)) and key and all(isinstance(name, str) for name in key):
        return tuple(key)
    if callable(key):
        return capture(key)
    raise TypeError(f"a key is a column's name, names, or a function, not {key!r}")


class Operators:
    """The operators of a `DataCollection`; each returns a new collection of the same class.

    Args:
        plan: the operator that makes the partitions.
        options: how the stages run.
    """

    def __init__(self, plan: Node, options: Options) -> None:
        self._node = plan
        self._options = options

    @property
    def num_partitions(self) -> int:
        """Number of partitions."""
        return self._node.n_partitions

    # ---------------------------------------------------------------- narrow operators

    def _with(
        self, operator: Any, parents: tuple[Node, ...] | None = None, n: int | None = None
    ) -> Self:
        parents = (self._node,) if parents is None else parents
        made = node(operator, parents, self.num_partitions if n is None else n)
        if made.variables:
            Pins.of(made).update()
        return type(self)(made, self._options)

    def _narrow(
        self,
        kind: NarrowKind,
        function: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batch_format: str = "numpy",
        label: str = "",
    ) -> Self:
        return self._with(Narrow(kind, capture(function, args, kwargs), batch_format, label))

    def map(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Self:
        """Each item becomes what `function(item, *args, **kwargs)` returns.

        Args:
            function: gets an item, then `args` and `kwargs`.
            args, kwargs: for `function`; references arrive as the objects they stand for.

        Returns:
            A new collection.

        Raises:
            UnpicklableError: The function, or an argument, cannot be pickled; it says which.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.map(lambda i, x: float(x[i]), clamor.put(np.ones(1000))).sum()
            4.0
        """
        return self._narrow("map", function, args, kwargs)

    def map_batches(
        self,
        function: Callable[..., Any],
        *args: Any,
        batch_format: str = "numpy",
        **kwargs: Any,
    ) -> Self:
        """Each partition becomes what `function(batch, *args, **kwargs)` returns.

        Args:
            function: gets and returns a batch: an array, a dict of arrays or a table, a tuple of
                those for tuples; or a list of items. It may return another number of items.
            args, kwargs: for `function`, as `map`'s.
            batch_format: of tables: "numpy" (a dict of arrays), "pyarrow" or "pandas".

        Returns:
            A new collection.

        Raises:
            ValueError: No such format.
            UnpicklableError: As `map`'s.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.map_batches(np.sqrt).max() ** 2 < 3.1
            True
        """
        if batch_format not in BATCH_FORMATS:
            raise ValueError(f"batch_format is one of {BATCH_FORMATS}, not {batch_format!r}")
        return self._narrow("map_batches", function, args, kwargs, batch_format)

    def filter(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Self:
        """Keeps the items of which `function(item, *args, **kwargs)` is true.

        Args:
            function: gets an item, then `args` and `kwargs`.
            args, kwargs: for `function`; references arrive as the objects they stand for.

        Returns:
            A new collection.

        Raises:
            UnpicklableError: The function, or an argument, cannot be pickled; it says which.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.filter(lambda x: x % 2).collect()
            [1, 3]
        """
        return self._narrow("filter", function, args, kwargs)

    def flat_map(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Self:
        """Each item becomes the items that `function(item, *args, **kwargs)` yields, in order.

        Args:
            function: gets an item, then `args` and `kwargs`.
            args, kwargs: for `function`; references arrive as the objects they stand for.

        Returns:
            A new collection.

        Raises:
            UnpicklableError: The function, or an argument, cannot be pickled; it says which.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.flat_map(range).collect()
            [0, 0, 1, 0, 1, 2]
        """
        return self._narrow("flat_map", function, args, kwargs)

    def lookup(
        self, table: HashMap, default: Any = None, *, on: str | None = None, into: str = "value"
    ) -> Self:
        """Looks keys up in a hash map, a batch at a time.

        Args:
            table: the map.
            default: of keys that are not there; None: every key must be.
            on: a table's column that has the keys; the others stay, and values are a new column.
            into: name of that column.

        Returns:
            A collection of values, or of rows with one more column.

        Raises:
            TypeError: It is no HashMap.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> table = clamor.HashMap.build([0, 1, 2], [0.0, 0.1, 0.2])
            >>> col.lookup(table, default=9.0).collect()
            [0.0, 0.1, 0.2, 9.0]
        """
        if not isinstance(table, HashMap):
            raise TypeError(f"lookup takes a HashMap, not a {type(table).__qualname__}")
        args = (table, default, on, into)
        return self._narrow("map_batches", folds.look_up, args, {}, label="lookup")

    def zip(self, *others: Operators) -> Self:
        """Puts the items in the same places together, as tuples.

        Args:
            others: collections with the same numbers of partitions and of items.

        Returns:
            A new collection.

        Raises:
            LengthMismatchError: Other numbers of partitions; or, when it runs, of items.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.zip(col.map(lambda x: -x)).take(2)
            [(0, 0), (1, -1)]
        """
        parents = (self._node, *(other._node for other in others))
        counts = [parent.n_partitions for parent in parents]
        if len(set(counts)) > 1:
            raise errors.LengthMismatchError(
                f"Collections of {' and '.join(map(str, counts))} partitions cannot be zipped."
            )
        return self._with(Zip(), parents)

    # ---------------------------------------------------------------- wide operators

    def _wide(
        self,
        kind: WideKind,
        key: Any = None,
        how: Any = None,
        descending: bool = False,
        partitions: int | None = None,
        other: Operators | None = None,
    ) -> Self:
        parents = (self._node,) if other is None else (self._node, other._node)
        default = max(parent.n_partitions for parent in parents)
        wide = Wide(kind, key, how, descending)
        return self._with(wide, parents, _checked_partitions(partitions, default))

    def reduce_by_key(
        self, how: str | Callable[[Any, Any], Any], *, partitions: int | None = None
    ) -> Self:
        """Reduces the values of each key of pairs (key, value) to one.

        Args:
            how: "sum", "min", "max", or a function of two values; associative and commutative.
            partitions: of the result; None: as many as here.

        Returns:
            A collection of pairs, one for each key.

        Raises:
            ValueError: `how` is another word, or `partitions` no number from 1 on.

        Example:
            >>> pairs = clamor.from_items([(1, 2), (3, 4), (1, 5)], partitions=2)
            >>> sorted(pairs.reduce_by_key("sum").collect())
            [(1, 7), (3, 4)]
        """
        if isinstance(how, str):
            if how not in BY_KEY:
                raise ValueError(f"how is one of {BY_KEY} or a function, not {how!r}")
            return self._wide("reduce_by_key", how=how, partitions=partitions)
        name = combine.name_of(how)  # numbers are then put together without calling it
        return self._wide("reduce_by_key", how=name or capture(how), partitions=partitions)

    def join(
        self,
        other: Operators,
        on: str | Sequence[str] | None = None,
        how: str = "inner",
        *,
        partitions: int | None = None,
    ) -> Self:
        """Pairs (k, v) and (k, w) become (k, (v, w)); tables are joined on columns.

        Args:
            other: the collection that this one is joined with.
            on: the columns' names; None: both sides are pairs.
            how: "inner", "left_outer", "right_outer" or "full_outer".
            partitions: of the result; None: the larger number of the two.

        Returns:
            A new collection.

        Raises:
            TypeError, ValueError: `other` is no collection; or no such `how`.

        Example:
            >>> pairs = clamor.from_items([(1, 2), (3, 4), (1, 5)], partitions=2)
            >>> pairs.join(clamor.from_items([(3, 7)])).collect()
            [(3, (4, 7))]
        """
        if not isinstance(other, Operators):
            raise TypeError(f"join takes a DataCollection, not a {type(other).__qualname__}")
        if how not in JOINS:
            raise ValueError(f"how is one of {', '.join(JOINS)}, not {how!r}")
        return self._wide("join", key_of(on), JOINS[how], partitions=partitions, other=other)

    def sort(
        self, key: Any = None, *, descending: bool = False, partitions: int | None = None
    ) -> Self:
        """Sorts all items: within partitions, and from one to the next.

        Args:
            key: a column's name (or several), a function of an item, or None: the item itself.
            descending: the largest first.
            partitions: of the result; None: as many as here.

        Returns:
            A new collection.

        Raises:
            TypeError, ValueError: No such kind of key; or `partitions` is no number from 1 on.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.sort(descending=True).collect()
            [3, 2, 1, 0]
        """
        return self._wide("sort", key_of(key), descending=descending, partitions=partitions)

    def repartition(self, partitions: int) -> Self:
        """Moves the items, in their order, to partitions of equal sizes, as far as possible.

        Args:
            partitions: how many.

        Returns:
            A new collection.

        Raises:
            ValueError: No number from 1 on.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.repartition(3).num_partitions
            3
        """
        return self._wide("repartition", partitions=_checked_partitions(partitions, 1))

    def distinct(self, *, partitions: int | None = None) -> Self:
        """Keeps one of all equal items.

        Args:
            partitions: of the result; None: as many as here.

        Returns:
            A new collection.

        Raises:
            ValueError: `partitions` is no number from 1 on.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> sorted(col.map(lambda x: x // 2).distinct().collect())
            [0, 1]
        """
        return self._wide("distinct", partitions=partitions)
