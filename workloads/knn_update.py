"""A k-d tree that is changed between two look-ups of the same queries (Clamor listing 3).

    python -m clamor_ray.workloads.knn_update --demo
    python -m clamor_ray.workloads.knn_update --demo --kill

The driver builds the tree and puts it once. Queries are looked up in it; some places then move, in
place, so that only the blocks of their leaves change; the same queries are looked up again, and for
each it is said which of the two trees had the nearer place. The last step needs both answers. With
``--kill`` a node dies after the change, with its part of both: what it had looked up before is
looked up again in the tree as it was, and what it had looked up since in the tree as it is.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import ray

import clamor_ray as clamor

from .cli import killing, options
from .cli.program import DEMO_NODES, CommandRun, program
from .cli.report import human_bytes
from .cli.stages import Stages
from .cli.waiting import default_partitions, start_workers
from .data import places
from .data.errors import InputError
from .models import kdtree, nearest
from .models.kdtree import Float64, WrongDistances

# Results of fewer queries travel with Ray's answer to the driver: no node has them to lose.
LEAST_QUERIES = 20_000


@dataclasses.dataclass(frozen=True)
class TreeUpdateJob:
    """What the command line asked for.

    Args:
        n_places: in the tree.
        n_queries: that are looked up in both trees.
        n_moved: places that move; each to a place near a query.
        n_partitions: of the queries; None for `default_partitions()`, but of no fewer
            than LEAST_QUERIES.
        sample: queries to answer by brute force too.
        seed: of all that is drawn.
    """

    n_places: int
    n_queries: int
    n_moved: int = 1
    n_partitions: int | None = None
    sample: int = 64
    seed: int = 1


@dataclasses.dataclass(frozen=True)
class World:
    """What is generated: degrees, (latitudes, longitudes).

    Args:
        old: the places.
        new: the same after some have moved.
        moved: which ones.
        queries: near some of which they are then.
    """

    old: tuple[Float64, Float64]
    new: tuple[Float64, Float64]
    moved: npt.NDArray[np.int64]
    queries: tuple[Float64, Float64]


@dataclasses.dataclass(frozen=True)
class TreeUpdateOutcome:
    """Of a run.

    Args:
        preferences: for each query 0 where the old tree had the nearer place or an equally near
            one, 1 where the new one has.
        tree_bytes: of the variable.
        changed_blocks: of it, that differ between the two versions.
        compared: answers compared with brute force.
        killed: Ray's id of the node that died; None where none did.
        again: partitions that were looked up again after that, in the old tree and in the new one.
        seconds: of the last step, with what it had to do again.
    """

    preferences: npt.NDArray[np.int64]
    tree_bytes: int
    changed_blocks: int
    compared: int
    killed: str | None
    again: tuple[int, int]
    seconds: float


def generate(job: TreeUpdateJob) -> World:
    """Places, queries, and where the places that move go."""
    old = places.generate_coordinates(job.n_places, job.seed)
    queries = places.generate_queries(job.n_queries, job.seed)
    rng = np.random.default_rng([job.seed, 3])
    moved = rng.choice(job.n_places, job.n_moved, replace=False)
    target = rng.choice(job.n_queries, job.n_moved)
    new = (old[0].copy(), old[1].copy())
    for coordinates, of_queries in zip(new, queries, strict=True):
        # Some ten metres beside a query.
        coordinates[moved] = of_queries[target] + rng.normal(0, 1e-4, job.n_moved)
    return World(old, new, moved, queries)


def move(ref: clamor.GlobalRef[kdtree.Tree], world: World) -> None:
    """Lines 6 and 7 of the listing, for each place that moves, in one commit.

    Raises:
        kdtree.LeafFull: Too many places move to where one leaf is.
    """
    old, new = (
        nearest.unit_vectors(lat[world.moved], lon[world.moved])
        for lat, lon in (world.old, world.new)
    )
    with clamor.update(ref) as tree:
        for number, before, after in zip(world.moved.tolist(), old, new, strict=True):
            kdtree.erase(tree, before, number)
            kdtree.insert(tree, after, number)


def lookup(queries: Float64, tree: kdtree.Tree, name: str, tally: killing.Tally | None) -> Float64:
    """The task: metres to the nearest place of each query."""
    if tally is not None:
        tally.note(name)
    return kdtree.lookup(queries, tree)


def run(job: TreeUpdateJob, cluster: Any, stages: Stages) -> TreeUpdateOutcome:
    """The listing, on the cluster that this process is attached to.

    Args:
        cluster: a node of it is killed after the change; None for none.

    Raises:
        WrongDistances: The answers differ from brute force.
    """
    if cluster is None:
        return _run(job, None, None, stages)
    with tempfile.TemporaryDirectory(prefix="clamor-knn-update-") as folder:
        return _run(job, cluster, killing.Tally(folder), stages)


def _run(
    job: TreeUpdateJob, cluster: Any, tally: killing.Tally | None, stages: Stages
) -> TreeUpdateOutcome:
    with stages.stage("build", f"building a k-d tree over {job.n_places:,} places"):
        world = generate(job)
        tree = kdtree.build(nearest.unit_vectors(*world.old))
    n_partitions = job.n_partitions or min(
        default_partitions(),
        max(1, job.n_queries // LEAST_QUERIES),
    )
    with stages.stage("workers", "starting workers"):
        start_workers(collections=True)
    ref = clamor.put(tree)
    try:
        text = f"{job.n_queries:,} queries in {n_partitions:,} partitions"
        points = nearest.unit_vectors(*world.queries)
        queries = clamor.from_numpy(points, partitions=n_partitions)
        if tally is not None:  # every node has its part, and some of it is lost
            queries = queries.options(scheduling="deterministic", speculation=False)
        with stages.stage("lookup", f"looking up {text}"):
            distances = queries.map_batches(lookup, ref, "old", tally).cache()
            distances.execute()
        with stages.stage("move", f"moving {job.n_moved:,} places"):
            move(ref, world)
            changed_blocks = changed(tree, ref.get())
        with stages.stage("lookup again", f"looking up {text} again"):
            new_distances = queries.map_batches(lookup, ref, "new", tally).cache()
            new_distances.execute()
        killed = None
        if tally is not None:
            killed = victim(tally)
            with stages.stage("kill", f"killing node {killed[:8]}"):
                killing.kill_node(cluster, killed)
        with stages.stage("prefer", "comparing the two answers to each query"):
            start = time.perf_counter()
            both = distances.zip(new_distances)
            preferences = np.asarray(both.map_batches(kdtree.nearer).collect())
            seconds = time.perf_counter() - start
        with stages.stage("check", "checking against brute force"):
            answers = [np.asarray(each.collect()) for each in (distances, new_distances)]
            compared = check(world, answers[0], answers[1], preferences, job)
        again = (0, 0)
        if tally is not None:
            old, new = (tally.count(name).total() - n_partitions for name in ("old", "new"))
            again = (old, new)
        return TreeUpdateOutcome(
            preferences, ref.nbytes, changed_blocks, compared, killed, again, seconds
        )
    finally:
        clamor.free(ref)


def victim(tally: killing.Tally) -> str:
    """The node that made most of what is there, but for the driver's."""
    by_node = tally.count("old") + tally.count("new")
    own = ray.get_runtime_context().get_node_id()
    others = {
        str(node["NodeID"]): by_node[node["NodeID"]]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != own
    }
    return str(max(others, key=lambda node_id: others[node_id]))


def changed(before: kdtree.Tree, after: kdtree.Tree) -> int:
    """Leaves that differ; each is a block."""
    return int((before.leaves != after.leaves).any(axis=(1, 2)).sum())


def check(
    world: World,
    old_m: Float64,
    new_m: Float64,
    preferences: npt.NDArray[np.int64],
    job: TreeUpdateJob,
) -> int:
    """Both distances of a sample by brute force, and every preference by the distances.

    Returns:
        The number of distances compared.

    Raises:
        WrongDistances: naming the first query that is wrong.
    """
    rng = np.random.default_rng(job.seed)
    sample = rng.permutation(job.n_queries)[: job.sample]
    # Those who gain by the move are few, and what this is about.
    gained = np.flatnonzero(preferences == 1)[: job.sample]
    chosen = np.union1d(sample, gained).tolist()
    compared = kdtree.check("before the move", old_m, world.old, world.queries, chosen)
    compared += kdtree.check("after the move", new_m, world.new, world.queries, chosen)
    expected = (new_m < old_m).astype(np.int64)
    if len(preferences) != len(expected):
        raise WrongDistances(f"{len(preferences):,} preferences, {len(expected):,} queries")
    wrong = np.flatnonzero(preferences != expected)
    if len(wrong):
        i = int(wrong[0])
        raise WrongDistances(
            f"query {i:,} prefers tree {preferences[i]}, but is {old_m[i]:,.4f} m from the old "
            f"and {new_m[i]:,.4f} m from the new one's nearest place"
        )
    return compared


@program("131,072 places on a local cluster.")
@options.count("--places", "n_places", "In the tree. Default: 1,048,576; 131,072 for the demo.")
@click.option("--queries", "n_queries", default=300_000, show_default=True, type=click.IntRange(1))
@click.option(
    "--moved",
    "n_moved",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Places that move, each to near a query.",
)
@click.option("--kill", is_flag=True, help="A node dies after the move; local clusters only.")
@options.partitions(f", of {LEAST_QUERIES:,} queries or more")
@options.seed("Of the generator and of the check.")
@options.sample()
def main(
    asked: CommandRun,
    n_places: int | None,
    n_moved: int,
    kill: bool,
    **of_job: Any,
) -> None:
    """Looks queries up in a k-d tree, moves places in it, looks them up again, and compares.

    Exit status: 0; 1 where an answer is wrong; 2 where an option makes no sense; 3 where the
    library cannot work here.
    """
    n_places = n_places or (1 << 17 if asked.demo else 1 << 20)
    if n_moved > n_places:
        raise click.UsageError(f"--moved {n_moved}: there are only {n_places:,} places")
    if kill:
        asked = dataclasses.replace(asked, nodes=asked.nodes or DEMO_NODES)
        if asked.nodes == 1:
            raise click.UsageError("--kill needs a node that is not the driver's: --nodes 2")
    job = TreeUpdateJob(n_places, n_moved=n_moved, **of_job)
    with asked.attached() as cluster:
        if kill and cluster is None:
            raise click.UsageError("--kill is for a cluster that this program starts itself")
        try:
            outcome = run(job, cluster if kill else None, asked.stages)
        except kdtree.LeafFull as error:
            raise InputError(f"{error}; or take fewer --moved") from None
    print_outcome(asked, outcome)


def print_outcome(asked: CommandRun, outcome: TreeUpdateOutcome) -> None:
    """What a run found, and what it took."""
    n, gained = len(outcome.preferences), int(outcome.preferences.sum())
    asked.say(
        f"\n{outcome.compared:,} answers equal brute force. The move changed "
        f"{outcome.changed_blocks:,} blocks of {human_bytes(outcome.tree_bytes)}; "
        f"{gained:,} of {n:,} queries have a nearer place since."
    )
    if outcome.killed is not None:
        old, new = outcome.again
        text = (
            f"{old:,} partitions were looked up again in the tree as it was and {new:,} in the "
            f"tree as it is, within {outcome.seconds:.1f} s, most of which Ray takes to be sure "
            "that the node is dead."
            if old or new
            else "nothing was lost with it: its results are so small that the driver has them."
        )
        asked.say(f"Node {outcome.killed[:8]} was killed after the move: {text}")


if __name__ == "__main__":
    main()
