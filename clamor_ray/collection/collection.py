"""`DataCollection`: a distributed collection, its operators and its actions."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn

from clamor_ray import errors
from clamor_ray._read.hashmap import HashMap
from clamor_ray._session import session as _session
from clamor_ray.collection.data import aggregates, blocks, combine, folds
from clamor_ray.collection.explain import show, shown
from clamor_ray.collection.io import sinks
from clamor_ray.collection.options import Options
from clamor_ray.collection.plan import staleness
from clamor_ray.collection.plan.functions import capture, name_of
from clamor_ray.collection.plan.pins import Pins
from clamor_ray.collection.plan.plan import (
    Narrow,
    NarrowKind,
    Node,
    Wide,
    WideKind,
    Zip,
    node,
    upstream,
)
from clamor_ray.collection.run import split
from clamor_ray.collection.run.evaluate import Evaluation, cluster_of

logger = logging.getLogger("clamor_ray")

SETTLE_S: Final = 30.0  # for cancelled tasks to end
TREE_BYTES: Final = 64 << 20  # of all results, from which on tasks combine them before the driver
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


def _key(key: Any) -> Any:
    """A column's name, a field's number, or a function that is captured."""
    if key is None or isinstance(key, (str, int)):
        return key
    if isinstance(key, (list, tuple)) and key and all(isinstance(name, str) for name in key):
        return tuple(key)
    if callable(key):
        return capture(key)
    raise TypeError(f"a key is a column's name, names, or a function, not {key!r}")


class DataCollection:
    """Items in partitions on a cluster. Nothing runs until an action asks for it.

    Made by `clamor.from_items`, `from_numpy`, `from_arrow`, `from_ray_dataset`, `read_parquet`,
    `read_csv`, `read_text` and `read_npy`. Items are numbers and other objects, rows of arrays,
    dicts (the rows of tables) or tuples; a partition is a NumPy array or an Arrow table, or several
    side by side, in Ray's object store.

    A function may be given global variables after itself (`col.map(f, ref)`), or close over them.
    It reads each at the version that it had when the operator was written down; only `refresh`
    moves that. Names and meanings are those of Ray Data and Spark.

    Safe from any thread; actions of one session run one after the other.
    """

    def __init__(self, plan: Node, options: Options) -> None:
        self._node = plan
        self._options = options
        self._refreshed = 0  # tasks that the last `refresh` has run

    # ---------------------------------------------------------------- about it

    @property
    def num_partitions(self) -> int:
        """Number of partitions."""
        return self._node.n_partitions

    def __repr__(self) -> str:
        kept = ", kept" if self._node.keep else ""
        return f"DataCollection({self._node.name}, {self.num_partitions} partitions{kept})"

    def __reduce__(self) -> NoReturn:
        raise errors.UnpicklableError(
            "A DataCollection cannot go into a task or a file.",
            hint="It is a plan of the driver: zip or join it, or pass what collect() returns.",
        )

    def __iter__(self) -> NoReturn:
        raise TypeError("a DataCollection is not iterated: collect() it, or take(n)")

    def options(self, **changes: Any) -> DataCollection:
        """The same collection; what is made from it runs with these options.

        Args:
            changes: `scheduling`, `locality_wait_s`, `speculation`, `speculation_multiplier`,
                `num_cpus`, `max_retries`, `check`, `progress`: see docs/stages.md.

        Raises:
            TypeError, ValueError: No such option, or value.
        """
        return DataCollection(self._node, self._options.with_(**changes))

    def explain(self) -> None:
        """Prints the stages that an action would run: what is fused in each, which variables it
        reads at which versions, where its tasks go, and what is kept."""
        print(show.explain(self._stages(), repr(self)))

    def lineage(self, picture: Any = None) -> None:
        """Prints the graph that this collection is made by.

        Args:
            picture: a file to draw it into as well (PNG, SVG, PDF; needs matplotlib).
        """
        stages = self._stages()
        if picture is not None:
            show.draw(stages, picture, repr(self))
        print(show.lineage(stages, repr(self)))

    def _stages(self) -> list[show.ShownStage]:
        session, nodes = _session.current(), list(upstream(self._node))
        targets = staleness.targets(session, nodes, staleness.newest_of(session, nodes))
        return shown.stages_of(self._node, self._options, targets)

    # ---------------------------------------------------------------- narrow operators

    def _with(
        self, operator: Any, parents: tuple[Node, ...] | None = None, n: int | None = None
    ) -> DataCollection:
        parents = (self._node,) if parents is None else parents
        made = node(operator, parents, self.num_partitions if n is None else n)
        if made.variables:
            Pins.of(made).update()
        return DataCollection(made, self._options)

    def _narrow(
        self,
        kind: NarrowKind,
        function: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batch_format: str = "numpy",
        label: str = "",
    ) -> DataCollection:
        return self._with(Narrow(kind, capture(function, args, kwargs), batch_format, label))

    def map(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> DataCollection:
        """Each item becomes what `function(item, *args, **kwargs)` returns.

        References among the arguments arrive as the objects they stand for.

        Raises:
            UnpicklableError: The function, or an argument, cannot be pickled; it says which.
        """
        return self._narrow("map", function, args, kwargs)

    def map_batches(
        self,
        function: Callable[..., Any],
        *args: Any,
        batch_format: str = "numpy",
        **kwargs: Any,
    ) -> DataCollection:
        """Each partition becomes what `function(batch, *args, **kwargs)` returns.

        Args:
            function: gets and returns a batch: an array, a dict of arrays or a table, a tuple of
                those for tuples; or a list of items. It may have another length.
            batch_format: of tables: "numpy" (a dict of arrays), "pyarrow" or "pandas".

        Raises:
            ValueError: No such format.
            UnpicklableError: As `map`'s.
        """
        if batch_format not in BATCH_FORMATS:
            raise ValueError(f"batch_format is one of {BATCH_FORMATS}, not {batch_format!r}")
        return self._narrow("map_batches", function, args, kwargs, batch_format)

    def filter(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> DataCollection:
        """The items of which `function(item, *args, **kwargs)` is true."""
        return self._narrow("filter", function, args, kwargs)

    def flat_map(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> DataCollection:
        """All items that `function(item, *args, **kwargs)` gives, one after the other."""
        return self._narrow("flat_map", function, args, kwargs)

    def lookup(
        self, table: HashMap, default: Any = None, *, on: str | None = None, into: str = "value"
    ) -> DataCollection:
        """The values of keys in a hash map, a batch at a time.

        Args:
            table: where they are looked up.
            default: of keys that are not there; None: every key must be.
            on: a table's column that has the keys; the others stay, and values are a new column.
            into: its name.

        Raises:
            TypeError: It is no HashMap.
        """
        if not isinstance(table, HashMap):
            raise TypeError(f"lookup takes a HashMap, not a {type(table).__qualname__}")
        args = (table, default, on, into)
        return self._narrow("map_batches", folds.look_up, args, {}, label="lookup")

    def zip(self, *others: DataCollection) -> DataCollection:
        """Tuples of the items in the same places.

        Raises:
            LengthMismatchError: Other numbers of partitions; or, when it runs, of items.
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
        other: DataCollection | None = None,
    ) -> DataCollection:
        parents = (self._node,) if other is None else (self._node, other._node)
        default = max(parent.n_partitions for parent in parents)
        wide = Wide(kind, key, how, descending)
        return self._with(wide, parents, _checked_partitions(partitions, default))

    def reduce_by_key(
        self, how: str | Callable[[Any, Any], Any], *, partitions: int | None = None
    ) -> DataCollection:
        """Of pairs (key, value): one pair for each key, its values made one.

        Args:
            how: "sum", "min", "max", or a function of two values; associative and commutative.
            partitions: of the result; None: as many as here.
        """
        if isinstance(how, str):
            if how not in BY_KEY:
                raise ValueError(f"how is one of {BY_KEY} or a function, not {how!r}")
            return self._wide("reduce_by_key", how=how, partitions=partitions)
        name = combine.name_of(how)  # numbers are then put together without calling it
        return self._wide("reduce_by_key", how=name or capture(how), partitions=partitions)

    def join(
        self,
        other: DataCollection,
        on: str | Sequence[str] | None = None,
        how: str = "inner",
        *,
        partitions: int | None = None,
    ) -> DataCollection:
        """Pairs (k, v) and (k, w) become (k, (v, w)); tables are joined on columns.

        Args:
            on: the columns' names; None: both sides are pairs.
            how: "inner", "left_outer", "right_outer" or "full_outer".
            partitions: of the result; None: the larger number of the two.
        """
        if not isinstance(other, DataCollection):
            raise TypeError(f"join takes a DataCollection, not a {type(other).__qualname__}")
        if how not in JOINS:
            raise ValueError(f"how is one of {', '.join(JOINS)}, not {how!r}")
        return self._wide("join", _key(on), JOINS[how], partitions=partitions, other=other)

    def sort(
        self, key: Any = None, *, descending: bool = False, partitions: int | None = None
    ) -> DataCollection:
        """All items in order: within partitions, and from one to the next.

        Args:
            key: a column's name (or several), a function of an item, or None: the item itself.
            descending: the largest first.
            partitions: of the result; None: as many as here.
        """
        return self._wide("sort", _key(key), descending=descending, partitions=partitions)

    def repartition(self, partitions: int) -> DataCollection:
        """The same items in the same order, in so many partitions of as equal sizes as can be."""
        return self._wide("repartition", partitions=_checked_partitions(partitions, 1))

    def distinct(self, *, partitions: int | None = None) -> DataCollection:
        """Every item once."""
        return self._wide("distinct", partitions=partitions)

    # ---------------------------------------------------------------- keeping

    def cache(self) -> DataCollection:
        """Its partitions are kept in Ray's object store when they are computed. Returns itself."""
        self._node.keep = True
        return self

    def unpersist(self) -> DataCollection:
        """Lets go of what `cache`, `execute` or `refresh` kept. Returns itself."""
        with cluster_of(_session.current()).lock:
            self._node.keep = False
            self._node.results.clear()
            Pins.of(self._node).update()
        return self

    def execute(self) -> DataCollection:
        """Computes all partitions now, and keeps them. Returns itself.

        Raises:
            FunctionFailedError: A function raised.
            SourceError, StorageError, ...: An input could not be read.
        """
        self._node.keep = True
        with self._evaluation() as evaluation:
            evaluation.parts()
        return self

    def refresh(self) -> DataCollection:
        """Brings itself, and all that it is made of, to the newest versions of its variables.

        Only partitions are computed again that read a block that has changed since, or that are
        made of such ones. What is computed is kept. Frozen references (`ref.snapshot()`,
        `ref.at(v)`) stay where they are, and so do plain values, the result of an action among
        them. Returns itself.

        Raises:
            FreedError: A variable was freed.
            FunctionFailedError, ...: As `execute`.
        """
        self._node.keep = True
        with self._evaluation() as evaluation:
            evaluation.refresh()
        self._refreshed = evaluation.n_run
        return self

    # ---------------------------------------------------------------- actions

    @contextlib.contextmanager
    def _evaluation(self) -> Iterator[Evaluation]:
        with cluster_of(_session.current()).lock:
            evaluation = Evaluation(self._node, self._options)
            try:
                yield evaluation
            finally:
                evaluation.close()

    def _fold(self, function: Any, *args: Any, name: str = "") -> list[Any]:
        captured = capture(function, args)
        if name:
            captured = dataclasses.replace(captured, name=name)
        with self._evaluation() as evaluation:
            return folds.fetch(evaluation.folded(captured))

    def _fetched(self) -> list[Any]:
        """All partitions, here."""
        with self._evaluation() as evaluation:
            return folds.fetch(evaluation.parts())

    def count(self) -> int:
        """Number of items."""
        return sum(self._fold(folds.count, name="count"))

    def _aggregate(self, what: str, on: Any) -> Any:
        found = self._fold(folds.partial, what, _key(on), name=what)
        # An empty partition may not know what the others' items are.
        partials = [each for each in found if not folds.is_of_nothing(each)] or found
        return aggregates.finish(aggregates.merge(partials))

    def sum(self, on: Any = None) -> Any:
        """The sum of all items; of arrays element by element. Of no items: 0.

        Args:
            on: a column's name, or several (then a dict); None: the items, or a table's columns.

        Raises:
            MissingColumnError, TypeError: No such column, or nothing that can be summed.
        """
        return self._aggregate("sum", on)

    def min(self, on: Any = None) -> Any:
        """The least item.

        Raises:
            EmptyCollectionError: There is none.
        """
        return self._aggregate("min", on)

    def max(self, on: Any = None) -> Any:
        """The largest item.

        Raises:
            EmptyCollectionError: There is none.
        """
        return self._aggregate("max", on)

    def mean(self, on: Any = None) -> Any:
        """The mean of all items.

        Raises:
            EmptyCollectionError: There is none.
        """
        return self._aggregate("mean", on)

    def reduce(self, function: Callable[[Any, Any], Any]) -> Any:
        """All items made one by an associative, commutative function.

        Raises:
            EmptyCollectionError: There is none.
        """
        partials = [value for value in self._fold(folds.reduced, function, name="reduce") if value]
        if not partials:
            raise errors.EmptyCollectionError("reduce() of an empty collection has no value.")
        return folds.combined("reduce", function, (value for (value,) in partials))

    def aggregate(
        self,
        zero: Any,
        seq_op: Callable[[Any, Any], Any],
        comb_op: Callable[[Any, Any], Any] | None = None,
    ) -> Any:
        """Folds each partition's items into `zero`, and the results into one.

        Where partitions make large NumPy arrays of one shape and dtype, and `comb_op` is np.add,
        np.multiply, np.minimum, np.maximum, or operator.add, iadd, mul or imul, these are added up
        on their nodes, and then around a ring of nodes (docs/aggregation.md). All else is combined
        in the order of partitions: large results by tasks, in a tree, others by the driver.

        Args:
            zero: where each partition begins; every one gets a copy of its own, and it counts once
                more at the end: adding it should change nothing.
            seq_op: (so far, item) -> so far.
            comb_op: (one result, another) -> result, associative and commutative; None: seq_op.

        Raises:
            FunctionFailedError: A function raised.
            MemberLostError: Nodes were lost again and again.
        """
        combine = comb_op or seq_op
        fold = dataclasses.replace(
            capture(folds.folded, (folds.packed_zero(zero), seq_op)), name="aggregate"
        )
        op = split.op_of(combine)
        with self._evaluation() as evaluation:
            if op is None:
                partials = evaluation.folded(fold)
            else:
                recipe = split.Recipe(op)
                with self._merging(recipe, split.DEFAULT_LANES, split.LEAST_BYTES) as merging:
                    partials = evaluation.folded(fold, merging.took)
                    if merging.is_on:
                        layout, shares = merging.segments()
                        return split.whole(layout, shares, op, copy.deepcopy(zero), combine)
            if folds.n_bytes(partials) >= TREE_BYTES:
                partials = self._in_tree(evaluation, partials, combine, depth=2)
            return folds.combined("comb_op", combine, folds.fetch(partials), zero)

    @staticmethod
    def _in_tree(
        evaluation: Evaluation, partials: list[Any], combine: Callable[[Any, Any], Any], depth: int
    ) -> list[Any]:
        """References to few results in place of many, combined by tasks."""
        captured = capture(combine)
        fan_in = max(2, math.ceil(len(partials) ** (1 / depth)))
        while len(partials) > fan_in:
            groups = [partials[i : i + fan_in] for i in range(0, len(partials), fan_in)]
            partials = [evaluation.combined(captured, group) for group in groups]
        return partials

    def _merging(
        self, recipe: split.Recipe, lanes: int, least_bytes: int | None = None
    ) -> contextlib.closing[split.Merging]:
        session = _session.current()
        return contextlib.closing(
            split.Merging(
                session,
                cluster_of(session).slots(self._options.num_cpus).total,
                recipe,
                lanes,
                fixed=self._options.scheduling == "deterministic",
                least_bytes=least_bytes,
                n_partitions=self.num_partitions,
                number=Pins.of(self._node).number,
            )
        )

    def split_aggregate(
        self,
        zero: Any,
        seq_op: Callable[[Any, Any], Any],
        split_op: Callable[[Any, int, int], Any],
        reduce_op: str | Callable[[Any, Any], Any],
        concat_op: Callable[[list[Any]], Any],
        *,
        parallelism: int = split.DEFAULT_LANES,
    ) -> Any:
        """Folds each partition's items into `zero`, cuts the results into segments, and reduces
        those in parallel: on their nodes, then around a ring of nodes (Sparker, section 3).

        Where segments are NumPy arrays of float16, bfloat16, float32, float64, int32 or int64, and
        `reduce_op` is "sum", "prod", "min", "max", np.add, np.multiply, np.minimum, np.maximum, or
        operator.add, iadd, mul or imul, C reduces them; all else goes pickled from node to node.

        Args:
            zero: where each partition begins; every one gets a copy of its own.
            seq_op: (so far, item) -> so far, of any type U.
            split_op: (U, i, n) -> segment i of n, of any type V; n is `parallelism` times the
                number of nodes.
            reduce_op: (V, V) -> V, associative and commutative; it may change its first argument
                and return it.
            concat_op: list of all V, in order -> the result. Arrays in the list may be read-only.
            parallelism: connections between neighbours in the ring; more than 16 only make more
                segments.

        Returns:
            What `concat_op` returns.

        Raises:
            FunctionFailedError: A function raised; the message says which.
            CollectiveMismatchError: Partitions' arrays are not of one shape and dtype: which.
            MemberLostError: Nodes were lost again and again.
            UnpicklableError: A function cannot go to tasks.
            TypeError, ValueError: An argument is none.

        Example:
            >>> def part(total, i, n):
            ...     return np.array_split(total, n)[i]
            >>> total = col.split_aggregate(                                # doctest: +SKIP
            ...     np.zeros(10**6), add_row, part, np.add, np.concatenate)
        """
        try:
            parallelism = 0 if isinstance(parallelism, bool) else operator.index(parallelism)
        except TypeError:
            parallelism = 0
        if parallelism < 1:
            raise ValueError(f"parallelism is a number from 1 on, not {parallelism!r}")
        if not callable(concat_op):
            raise TypeError(f"concat_op is a function, not {type(concat_op).__qualname__}")
        recipe = split.recipe_of(split_op, reduce_op)
        arguments = (folds.packed_zero(zero), seq_op, name_of(seq_op))
        fold = dataclasses.replace(
            capture(folds.folded_for_split, arguments), name="split_aggregate"
        )
        with self._evaluation() as evaluation, self._merging(recipe, parallelism) as merging:
            evaluation.folded(fold, merging.took)
            layout, shares = merging.segments()
        return split.concatenated(concat_op, split.cut(layout, shares))

    def tree_aggregate(
        self,
        zero: Any,
        seq_op: Callable[[Any, Any], Any],
        comb_op: Callable[[Any, Any], Any] | None = None,
        *,
        depth: int = 2,
    ) -> Any:
        """As `aggregate`, but results are combined by tasks, in a tree of this depth, so that the
        driver gets few of them (Spark's treeAggregate)."""
        if not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth is a number from 1 on, not {depth!r}")
        combine = comb_op or seq_op
        with self._evaluation() as evaluation:
            zeros = folds.packed_zero(zero)
            partials = evaluation.folded(capture(folds.folded, (zeros, seq_op)))
            partials = self._in_tree(evaluation, partials, combine, depth)
            return folds.combined("comb_op", combine, folds.fetch(partials), zero)

    def collect(self) -> list[Any]:
        """All items, in order, on the driver."""
        found: list[Any] = []
        for part in self._fetched():
            found.extend(blocks.items(part))
        return found

    def take(self, n: int) -> list[Any]:
        """The first n items, or all where there are fewer. Computes no more partitions than that
        takes, first one and then four times as many again."""
        if n < 0:
            raise ValueError(f"n is 0 or more, not {n!r}")
        found: list[Any] = []
        first, many = 0, 1
        with self._evaluation() as evaluation:
            while len(found) < n and first < self.num_partitions:
                only = range(first, min(first + many, self.num_partitions))
                for part in folds.fetch(evaluation.parts(only)):
                    found.extend(itertools.islice(blocks.items(part), n - len(found)))
                first, many = only.stop, 4 * many
        return found

    def schema(self) -> str:
        """What items are, for people: of the first partition that has any."""
        with self._evaluation() as evaluation:
            for index in range(self.num_partitions):
                (part,) = folds.fetch(evaluation.parts([index]))
                if blocks.n_items(part):
                    return blocks.schema_of(part)
        return "empty"

    def to_arrow(self) -> Any:
        """All items as one `pyarrow.Table`; what is no table has one column, "item"."""
        return blocks.to_arrow(blocks.concat(self._fetched()))

    def to_numpy(self) -> Any:
        """All items as one batch: an array; a dict of arrays for tables, a tuple for tuples."""
        return blocks.to_batch(blocks.concat(self._fetched()), "numpy")

    def to_ray_dataset(self) -> Any:
        """A `ray.data.Dataset` of the partitions, as Arrow tables where they are."""
        tables = self._narrow("map_batches", folds.as_table, (), {}, "pyarrow", "to_arrow")
        with tables._evaluation() as evaluation:
            return sinks.to_ray_dataset(evaluation.parts())

    def write_parquet(
        self, path: Any, *, mode: str = "error", filesystem: Any = None, **options: Any
    ) -> list[str]:
        """Writes a Parquet file for each partition.

        Args:
            path: a directory; local, `s3://bucket/prefix`, or what pyarrow knows.
            mode: where it holds files already: "error", "append", "overwrite" or "ignore".
            filesystem: a `pyarrow.fs.FileSystem` that the path belongs to.
            options: of `pyarrow.parquet.write_table`.

        Returns:
            The files' paths.

        Raises:
            StorageError: The file system refused, after retries. No file is there in part.
        """
        run = sinks.begin(path, mode, filesystem)
        if run.skip:
            return []
        try:
            return list(
                sinks.finish(run, self._fold(folds.write, run, options, name="write_parquet"))
            )
        except BaseException:
            # What was cancelled may be writing still, and would write after the abort.
            cluster_of(_session.current()).settle(SETTLE_S)
            try:
                sinks.abort(run)
            except errors.StorageError as error:  # the first error says more
                logger.warning("parts of the failed write are left in %s: %s", path, error)
            raise
