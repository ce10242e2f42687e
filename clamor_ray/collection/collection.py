"""`DataCollection`: a distributed collection and its actions; its operators are in
`operators.py`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import logging
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

from clamor_ray import errors
from clamor_ray._programs.iterate import iterate
from clamor_ray._session import process_sessions
from clamor_ray.collection.data import aggregates, blocks, folds
from clamor_ray.collection.explain import dot, show, shown
from clamor_ray.collection.explain.shown_stage import ShownStage
from clamor_ray.collection.io import sinks
from clamor_ray.collection.operators import Operators, key_of
from clamor_ray.collection.options import Options
from clamor_ray.collection.plan import staleness
from clamor_ray.collection.plan.functions import capture, name_of
from clamor_ray.collection.plan.pins import Pins
from clamor_ray.collection.plan.plan import (
    Node,
    upstream,
)
from clamor_ray.collection.run import split
from clamor_ray.collection.run.evaluate import Evaluation, cluster_of

logger = logging.getLogger("clamor_ray")

SETTLE_S: Final = 30.0  # for cancelled tasks to end
TREE_BYTES: Final = 64 << 20  # of all results, from which on tasks combine them before the driver


class DataCollection(Operators):
    """Items in partitions on a cluster. Nothing runs until an action needs it.

    Made by `clamor.from_items`, `from_numpy`, `from_arrow`, `from_ray_dataset`, `read_parquet`,
    `read_csv`, `read_text` and `read_npy`. Items are numbers and other objects, rows of arrays,
    dicts (the rows of tables) or tuples; a partition is a NumPy array or an Arrow table, or several
    side by side, in Ray's object store.

    A function may be given global variables after itself (`col.map(f, ref)`), or close over them.
    It reads each at the version that it had when the operator was written down; only `refresh`
    moves that. Names and meanings are those of Ray Data and Spark.

    Safe from any thread; actions of one session run one after the other.

    Args:
        plan: the operator that makes its partitions.
        options: how its stages run.

    Example:
        >>> col = clamor.from_items(range(4), partitions=2)
        >>> col.map(lambda x: x * x).collect()
        [0, 1, 4, 9]
    """

    def __init__(self, plan: Node, options: Options) -> None:
        super().__init__(plan, options)
        self._refreshed = 0  # tasks that the last `refresh` has run

    # ---------------------------------------------------------------- about it

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
        """Changes how the stages of what is made from this collection run.

        Args:
            changes: `scheduling`, `locality_wait_s`, `speculation`, `speculation_multiplier`,
                `num_cpus`, `max_retries`, `check`, `progress`: see docs/stages.md.

        Returns:
            The same collection, with other options.

        Raises:
            TypeError, ValueError: No such option, or value.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.options(scheduling="ray", speculation=False).count()
            4
        """
        return DataCollection(self._node, self._options.with_(**changes))

    def explain(self) -> None:
        """Prints the stages that an action would run: what is fused in each, which variables it
        reads at which versions, where its tasks go, and what is kept.

        Raises:
            NotInitializedError: There is no session in this process.
            FreedError: A variable was freed.
            ServerUnavailableError, WaitTimeoutError: The registry does not say which versions
                there are.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.map(abs).explain()
            DataCollection(map(abs), 2 partitions): 1 stage, 2 tasks
            ...
        """
        print(show.explain(self._stages(), repr(self)))

    def lineage(self, picture: Any = None) -> None:
        """Prints the graph that this collection is made by.

        Args:
            picture: a file to draw it into as well. Its ending is the format: `.dot` is text, and
                needs nothing; `.png`, `.svg` and `.pdf` are drawn by Graphviz (`dot` on PATH).

        Raises:
            FileNotFoundError: A picture, and Graphviz is not installed.
            ValueError: Graphviz does not know the format.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.map(abs).lineage()
            lineage of DataCollection(map(abs), 2 partitions)
            ...
        """
        stages = self._stages()
        if picture is not None:
            dot.draw(stages, picture, repr(self))
        print(show.lineage(stages, repr(self)))

    def _stages(self) -> list[ShownStage]:
        session, nodes = process_sessions.current(), list(upstream(self._node))
        targets = staleness.targets(session, nodes, staleness.newest_of(session, nodes))
        return shown.stages_of(self._node, self._options, targets)

    # ---------------------------------------------------------------- keeping

    def cache(self) -> DataCollection:
        """Keeps its partitions in Ray's object store when they are computed.

        Returns:
            Itself.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.cache().count()
            4
            >>> col
            DataCollection(items, 2 partitions, kept)
        """
        self._node.keep = True
        return self

    def unpersist(self) -> DataCollection:
        """Drops what `cache`, `execute` or `refresh` kept.

        Returns:
            Itself.

        Raises:
            NotInitializedError: There is no session in this process.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.execute().unpersist()
            DataCollection(items, 2 partitions)
        """
        with cluster_of(process_sessions.current()).lock:
            self._node.keep = False
            self._node.results.clear()
            Pins.of(self._node).update()
        return self

    def execute(self) -> DataCollection:
        """Computes all partitions now, and keeps them.

        Returns:
            Itself.

        Raises:
            FunctionFailedError: A function raised.
            SourceError, StorageError, ...: An input could not be read.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.execute()
            DataCollection(items, 2 partitions, kept)
        """
        self._node.keep = True
        with self._evaluation() as evaluation:
            evaluation.parts()
        return self

    def refresh(self) -> DataCollection:
        """Moves itself, and all that it is made of, to the newest versions of its variables.

        Only partitions are computed again that read a block that has changed since, or that are
        made of such ones. What is computed is kept. Frozen references (`ref.snapshot()`,
        `ref.at(v)`) stay where they are, and so do plain values, the result of an action among
        them.

        Returns:
            Itself.

        Raises:
            FreedError: A variable was freed.
            FunctionFailedError, ...: As `execute`.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> w = clamor.zeros(1000)
            >>> scores = col.map(lambda i, w: float(w[i]), w).execute()
            >>> clamor.add_at(w, [3], 1.0)
            >>> scores.refresh().collect()
            [0.0, 0.0, 0.0, 1.0]
        """
        self._node.keep = True
        with self._evaluation() as evaluation:
            evaluation.refresh()
        self._refreshed = evaluation.n_run
        return self

    # ---------------------------------------------------------------- programs

    def partition_references(self) -> list[Any]:
        """Computes the partitions, for `Program.dataset`.

        Returns:
            References to them, in a form that `read_partition` reads.

        Raises:
            FunctionFailedError, SourceError, ...: As `execute`.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> [col.read_partition(ray.get(each)) for each in col.partition_references()]
            [array([0, 1]), array([2, 3])]
        """
        with self._evaluation() as evaluation:
            return evaluation.parts()

    @staticmethod
    def read_partition(part: Any) -> Any:
        """A partition of `partition_references` as `map_batches` gives one: an array, a dict of
        arrays for a table, a tuple of those for tuples.

        Args:
            part: what a reference of `partition_references` stands for.

        Returns:
            The partition.

        Example:
            >>> col = clamor.from_items(["a", "b"], partitions=1)
            >>> col.read_partition(ray.get(col.partition_references()[0]))
            array(['a', 'b'], dtype=object)
        """
        return blocks.to_batch(part, "numpy")

    def iterate(
        self,
        initial: Any,
        *,
        map: Callable[[Any, Any], Any],
        reduce: str | Callable[[Any, Any], Any] = "sum",
        update: Callable[[Any, Any], Any],
        until: Callable[[Any, Any], bool] | None = None,
        max: int | None = None,
        **options: Any,
    ) -> Any:
        """Repeats a map, a reduction and an update of a value, without the driver: workers start
        each round themselves. See `Program` and docs/recipes.md.

        Args:
            initial: the value at first.
            map: ``map(partition, value)``; the partition as `read_partition` gives it.
            reduce: "sum", or a function of two partial results; they come in the order of the
                partitions.
            update: ``update(value, reduced)`` -> the next value.
            until: ``until(value, reduced)`` -> whether that was the last round.
            max: rounds at most.
            options: of `Program.run`: checkpoint, workers, and others; and `progress`, as of
                `options()`.

        Returns:
            The value after the last round.

        Raises:
            ProgramError: neither `until` nor `max` is given, or a function cannot be pickled.
            StageFailedError: a function has raised.
            ProgramLostError: a worker is lost, and no checkpoint was asked for.

        Example:
            >>> col = clamor.from_numpy(np.arange(100.0), partitions=4)
            >>> mean = col.iterate(
            ...     0.0, map=lambda x, w: (x - w).sum(), update=lambda w, t: w + t / 100, max=3
            ... )
            >>> float(mean)
            49.5
        """
        options.setdefault("progress", self._options.progress)
        return iterate(self, initial, map, reduce, update, until, max, **options)

    # ---------------------------------------------------------------- actions

    @contextlib.contextmanager
    def _evaluation(self) -> Iterator[Evaluation]:
        with cluster_of(process_sessions.current()).lock:
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
        """Counts the items.

        Returns:
            Their number.

        Raises:
            FunctionFailedError, SourceError, ...: As `execute`.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.count()
            4
        """
        return sum(self._fold(folds.count, name="count"))

    def _aggregate(self, what: str, on: Any) -> Any:
        found = self._fold(folds.partial, what, key_of(on), name=what)
        # An empty partition may not know what the others' items are.
        partials = [each for each in found if not folds.is_of_nothing(each)] or found
        return aggregates.finish(aggregates.merge(partials))

    def sum(self, on: Any = None) -> Any:
        """The sum of all items; of arrays element by element. Of no items: 0.

        Args:
            on: a column's name, or several (then a dict); None: the items, or a table's columns.

        Returns:
            A number, an array, or a dict of those by column.

        Raises:
            MissingColumnError, TypeError: No such column, or nothing that can be summed.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.sum()
            6
        """
        return self._aggregate("sum", on)

    def min(self, on: Any = None) -> Any:
        """The least item.

        Args:
            on: as `sum`'s.

        Returns:
            As `sum`.

        Raises:
            EmptyCollectionError: There is no item.
            MissingColumnError, TypeError: No such column, or nothing that can be compared.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.min()
            0
        """
        return self._aggregate("min", on)

    def max(self, on: Any = None) -> Any:
        """The largest item.

        Args:
            on: as `sum`'s.

        Returns:
            As `sum`.

        Raises:
            EmptyCollectionError: There is no item.
            MissingColumnError, TypeError: No such column, or nothing that can be compared.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.max()
            3
        """
        return self._aggregate("max", on)

    def mean(self, on: Any = None) -> Any:
        """The mean of all items.

        Args:
            on: as `sum`'s.

        Returns:
            As `sum`.

        Raises:
            EmptyCollectionError: There is no item.
            MissingColumnError, TypeError: No such column, or nothing that can be averaged.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.mean()
            1.5
        """
        return self._aggregate("mean", on)

    def reduce(self, function: Callable[[Any, Any], Any]) -> Any:
        """Reduces all items to one.

        Args:
            function: of two items, associative and commutative; it returns one.

        Returns:
            The result, of the items' type.

        Raises:
            EmptyCollectionError: There is none.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.reduce(lambda a, b: a + b)
            6
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

        Returns:
            The result, of `zero`'s type.

        Raises:
            FunctionFailedError: A function raised.
            MemberLostError: Nodes were lost again and again.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.aggregate(0, lambda so_far, x: so_far + x * x, lambda a, b: a + b)
            14
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
        session = process_sessions.current()
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
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> def cut(total, i, n):
            ...     return np.array_split(total, n)[i]
            >>> zero, add = np.zeros(3), lambda total, x: total + x
            >>> col.split_aggregate(zero, add, cut, np.add, np.concatenate)
            array([6., 6., 6.])
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
        driver gets few of them (Spark's treeAggregate).

        Args:
            zero, seq_op, comb_op: as `aggregate`'s.
            depth: of the tree.

        Returns:
            The result, of `zero`'s type.

        Raises:
            ValueError: `depth` is no number from 1 on.
            FunctionFailedError: A function raised.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.tree_aggregate(0, lambda a, b: a + b)
            6
        """
        if not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth is a number from 1 on, not {depth!r}")
        combine = comb_op or seq_op
        with self._evaluation() as evaluation:
            zeros = folds.packed_zero(zero)
            partials = evaluation.folded(capture(folds.folded, (zeros, seq_op)))
            partials = self._in_tree(evaluation, partials, combine, depth)
            return folds.combined("comb_op", combine, folds.fetch(partials), zero)

    def collect(self) -> list[Any]:
        """Fetches all items, in order, to the driver.

        Returns:
            A list of them.

        Raises:
            FunctionFailedError, SourceError, ...: As `execute`.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.collect()
            [0, 1, 2, 3]
        """
        found: list[Any] = []
        for part in self._fetched():
            found.extend(blocks.items(part))
        return found

    def take(self, n: int) -> list[Any]:
        """Fetches the first n items. Computes no more partitions than that takes, first one and
        then four times as many again.

        Args:
            n: how many.

        Returns:
            A list of them; of all items where there are fewer.

        Raises:
            ValueError: n is negative.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.take(3)
            [0, 1, 2]
        """
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
        """Describes the items, for people: those of the first partition that has any.

        Returns:
            A text; "empty" where there are none.

        Raises:
            FunctionFailedError, SourceError, ...: As `execute`.

        Example:
            >>> clamor.from_items([]).schema()
            'empty'
        """
        with self._evaluation() as evaluation:
            for index in range(self.num_partitions):
                (part,) = folds.fetch(evaluation.parts([index]))
                if blocks.n_items(part):
                    return blocks.schema_of(part)
        return "empty"

    def to_arrow(self) -> Any:
        """Fetches all items as one table.

        Returns:
            A `pyarrow.Table`; what is no table has one column, "item".

        Raises:
            FunctionFailedError, SourceError, ...: As `execute`.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.to_arrow().num_rows
            4
        """
        return blocks.to_arrow(blocks.concat(self._fetched()))

    def to_numpy(self) -> Any:
        """Fetches all items as one batch.

        Returns:
            An array; a dict of arrays for tables, a tuple for tuples.

        Raises:
            FunctionFailedError, SourceError, ...: As `execute`.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.to_numpy()
            array([0, 1, 2, 3])
        """
        return blocks.to_batch(blocks.concat(self._fetched()), "numpy")

    def to_ray_dataset(self) -> Any:
        """Makes a Ray Data dataset of the partitions, as Arrow tables where they are.

        Returns:
            A `ray.data.Dataset`.

        Raises:
            FunctionFailedError, SourceError, ...: As `execute`.

        Example:
            >>> col = clamor.from_items(range(4), partitions=2)
            >>> col.to_ray_dataset().count()
            4
        """
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

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "table")
            >>> table = clamor.from_items([{"x": i} for i in range(4)], partitions=2)
            >>> len(table.write_parquet(path))
            2
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
            cluster_of(process_sessions.current()).settle(SETTLE_S)
            try:
                sinks.abort(run)
            except errors.StorageError as error:  # the first error says more
                logger.warning("parts of the failed write are left in %s: %s", path, error)
            raise
