"""The variable that queries share, and what a task does with it. No Ray here.

Distances. The k-d tree holds points on the unit sphere, three coordinates each, not projected
latitude and longitude: the straight line between two such points grows with the great circle
between them, so the nearest by the one are the nearest by the other, anywhere on the globe and
across the date line. A flat projection is right only near its own latitude, and one tree spans a
continent. It costs a third coordinate, 8 bytes a place beside 2 KiB of metadata.

Order. Rows lie in the order of the tree's leaves, so that places which are near each other share
blocks: a query then touches a few neighbouring blocks of each array instead of one block a place.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.spatial import cKDTree

from ..data.errors import WrongResult

__all__ = [
    "EARTH_RADIUS_M",
    "WrongAnswer",
    "PlaceIndex",
    "brute_force",
    "build",
    "check",
    "fill_metadata",
    "query",
    "unit_vectors",
]

EARTH_RADIUS_M = 6_371_008.8  # the IUGG mean radius

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]


class WrongAnswer(WrongResult):
    """The tasks' answers differ from brute force; the message names the first one."""


@dataclasses.dataclass(frozen=True)
class PlaceIndex:
    """What the driver puts once. Row i of every array is the tree's point i.

    Attributes:
        tree: over unit vectors.
        rows: row of the place in the table that the user brought.
        ratings: more is better.
        metadata: one padded row of bytes a place; zero columns where there is none.
    """

    tree: cKDTree
    rows: Int64
    ratings: npt.NDArray[np.float32]
    metadata: npt.NDArray[np.uint8]


def unit_vectors(lat: Float64, lon: Float64) -> Float64:
    """Degrees to points on the unit sphere, shape (n, 3)."""
    phi, theta = np.radians(lat), np.radians(lon)
    out = np.empty((len(phi), 3))
    np.multiply(np.cos(phi), np.cos(theta), out=out[:, 0])
    np.multiply(np.cos(phi), np.sin(theta), out=out[:, 1])
    np.sin(phi, out=out[:, 2])
    return out


def _chord_to_metres(chord: Float64) -> Float64:
    metres: Float64 = 2.0 * EARTH_RADIUS_M * np.arcsin(np.clip(chord / 2.0, 0.0, 1.0))
    return metres


def build(
    lat: Float64, lon: Float64, ratings: npt.ArrayLike, metadata_width: int = 0
) -> PlaceIndex:
    """The index, with metadata yet to be filled."""
    points = unit_vectors(lat, lon)
    rows = np.asarray(cKDTree(points, copy_data=False).indices, dtype=np.int64)
    # A second build over the points in leaf order splits the same sets, so its leaves are runs of
    # neighbouring rows.
    return PlaceIndex(
        tree=cKDTree(points[rows], copy_data=False),
        rows=rows,
        ratings=np.asarray(ratings, dtype=np.float32)[rows],
        metadata=np.empty((len(rows), metadata_width), np.uint8),
    )


def fill_metadata(
    index: PlaceIndex, chunks: Iterable[npt.NDArray[np.uint8]], checksums: npt.NDArray[np.uint32]
) -> Iterator[int]:
    """Puts chunks of metadata, in the table's order, where the index wants them.

    Fills ``checksums`` (CRC-32 by row of the table) on the way; yields the rows done so far.
    """
    place = np.empty(len(index.rows), np.int64)
    place[index.rows] = np.arange(len(index.rows))
    done = 0
    for chunk in chunks:
        index.metadata[place[done : done + len(chunk)]] = chunk
        checksums[done : done + len(chunk)] = [zlib.crc32(row) for row in chunk]
        done += len(chunk)
        yield done
    if done != len(index.rows):
        raise ValueError(f"metadata for {done:,} of {len(index.rows):,} places")


def query(index: PlaceIndex, first: int, lat: Float64, lon: Float64, k: int) -> pa.Table:
    """The k nearest places of each query, best rated first, ties by distance.

    Args:
        first: number of the first query; the others follow.
        lat, lon: degrees.

    Returns:
        A row a query: query, nearest (rows of the places table), distances_m, ratings, and
        best_metadata_crc32 of the best place's metadata.
    """
    chord, position = index.tree.query(unit_vectors(lat, lon), k=np.arange(1, k + 1))
    metres = _chord_to_metres(chord)
    ratings = index.ratings[position]
    order = np.lexsort((metres, -ratings), axis=-1)
    position, metres, ratings = (
        np.take_along_axis(values, order, axis=-1) for values in (position, metres, ratings)
    )
    # Many queries share a best place: read its metadata once.
    best, where = np.unique(position[:, 0], return_inverse=True)
    checksums = np.array([zlib.crc32(index.metadata[i]) for i in best], np.uint32)
    n = len(lat)
    return pa.table(
        {
            "query": np.arange(first, first + n, dtype=np.int64),
            "nearest": _lists(index.rows[position], k),
            "distances_m": _lists(metres, k),
            "ratings": _lists(ratings, k),
            "best_metadata_crc32": checksums[where.reshape(n)],
        }
    )


def _lists(values: npt.NDArray[np.generic], k: int) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), k)


def matrix(column: pa.ChunkedArray) -> npt.NDArray[np.generic]:
    """A column of lists of one length as an array of shape (rows, length)."""
    out: npt.NDArray[np.generic] = (
        column.combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
    )
    return out


# -------------------------------------------------------------------- check


def brute_force(
    lat: Float64, lon: Float64, query_lat: float, query_lon: float, k: int
) -> tuple[Int64, Float64]:
    """Rows and distances (metres) of the k nearest, nearest first, by the haversine formula.

    It shares nothing with the tree: no unit vectors, no order, no index.
    """
    phi, phi0 = np.radians(lat), np.radians(query_lat)
    half = (
        np.sin((phi - phi0) / 2.0) ** 2
        + np.cos(phi) * np.cos(phi0) * np.sin(np.radians(lon - query_lon) / 2.0) ** 2
    )
    metres = 2.0 * EARTH_RADIUS_M * np.arcsin(np.sqrt(np.clip(half, 0.0, 1.0)))
    rows = np.argpartition(metres, k - 1)[:k] if k < len(metres) else np.arange(len(metres))
    rows = rows[np.argsort(metres[rows], kind="stable")]
    return rows.astype(np.int64), metres[rows]


def check(
    result: pa.Table,
    places: tuple[Float64, Float64],
    ratings: npt.NDArray[np.float32],
    checksums: npt.NDArray[np.uint32] | None,
    queries: tuple[Float64, Float64],
    sample: Iterable[int],
) -> int:
    """Compares a sample of answers with brute force, and every checksum with the table's own.

    Places may tie, so distances and ratings are compared, and that the rows named have them.

    Returns:
        The number of queries compared with brute force.

    Raises:
        Mismatch: naming the query and both answers.
    """
    nearest = matrix(result.column("nearest"))
    distances = matrix(result.column("distances_m"))
    reported = matrix(result.column("ratings"))
    k = nearest.shape[1]
    n_queries = len(queries[0])
    numbers = result.column("query").to_numpy()
    if len(numbers) != n_queries or not np.array_equal(numbers, np.arange(n_queries)):
        raise WrongAnswer(f"{len(numbers):,} answers to {n_queries:,} queries, or out of order")
    if not np.array_equal(ratings[nearest], reported):
        bad = int(np.flatnonzero((ratings[nearest] != reported).any(axis=1))[0])
        raise WrongAnswer(
            f"query {bad:,}: ratings read through the variable are {reported[bad].tolist()}, "
            f"those places have {ratings[nearest[bad]].tolist()}"
        )
    if checksums is not None:
        got = result.column("best_metadata_crc32").to_numpy()
        wrong = np.flatnonzero(got != checksums[nearest[:, 0]])
        if len(wrong):
            bad = int(wrong[0])
            raise WrongAnswer(
                f"query {bad:,}: metadata of place {nearest[bad, 0]:,} has CRC-32 "
                f"{got[bad]:#010x} in the task, {checksums[nearest[bad, 0]]:#010x} in the table "
                f"({len(wrong):,} such queries)"
            )
    compared = 0
    for i in sample:
        near = np.sort(distances[i])
        _, want = brute_force(*places, float(queries[0][i]), float(queries[1][i]), k)
        # The two formulas round differently: a tenth of a millimetre is far above either error.
        if not np.allclose(near, want, rtol=1e-9, atol=1e-4):
            raise WrongAnswer(
                f"query {i:,}: distances {np.round(near, 3).tolist()} m, "
                f"brute force {np.round(want, 3).tolist()} m"
            )
        named = nearest[i]
        _, own = brute_force(
            places[0][named], places[1][named], float(queries[0][i]), float(queries[1][i]), k
        )
        if len(np.unique(named)) != k or not np.allclose(own, want, rtol=1e-9, atol=1e-4):
            raise WrongAnswer(f"query {i:,}: places {named.tolist()} are not at those distances")
        order = np.lexsort((distances[i], -reported[i]))
        if not np.array_equal(order, np.arange(k)):
            raise WrongAnswer(f"query {i:,}: places are not sorted by rating, then distance")
        compared += 1
    return compared
