"""Places: a seeded generator of OpenStreetMap-like data, and tables that users bring.

A table of places has the columns ``lat`` and ``lon`` (degrees), ``rating``, and optionally
``metadata`` (bytes or text) and ``id``. A table of queries has ``lat`` and ``lon``, and
optionally ``id``. Tables are Parquet (a file or a folder of files) or CSV.

Everything here is bounded by a chunk of rows, except the numeric columns: metadata may be far
larger than memory would like twice.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from .errors import InputError

__all__ = [
    "BAY",
    "CONTIGUOUS_US",
    "METADATA_BYTES",
    "Box",
    "PlacesTable",
    "generate_coordinates",
    "generate_queries",
    "generate_ratings",
    "metadata_chunk",
    "write_places",
    "write_queries",
]

METADATA_BYTES = 2048  # what a business of the Yelp data set carries, after Clamor 7.1.1
METADATA_MAX_BYTES = 64 << 10  # rows are padded to the longest, so one huge row costs n of them
CHUNK_ROWS = 16384

Float64 = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]


class Box(NamedTuple):
    """A range of latitude and longitude, in degrees."""

    south: float
    north: float
    west: float
    east: float

    def holds(self, lat: Float64, lon: Float64) -> npt.NDArray[np.bool_]:
        """Which points lie inside."""
        inside: npt.NDArray[np.bool_] = (
            (lat >= self.south) & (lat <= self.north) & (lon >= self.west) & (lon <= self.east)
        )
        return inside


CONTIGUOUS_US = Box(24.0, 49.0, -125.0, -67.0)
BAY = Box(36.0, 39.0, -123.0, -120.0)


# ---------------------------------------------------------------- generator
#
# Where people are, places are: metropolitan areas by population, towns whose sizes follow a power
# law, and a thin rural spread. The bay box gets its share of the population (about 12.5 of 330
# million), because queries go there.


class _Metro(NamedTuple):
    lat: float
    lon: float
    millions: float


_BAY_SHARE = 0.04
_METRO_SHARE, _TOWN_SHARE = 0.62, 0.33  # of the places outside the bay box; the rest is rural
_TOWNS = 4000
_TOWN_PARETO = 1.1  # Zipf's law for cities has exponent about 1

_BAY_METROS = (
    _Metro(37.77, -122.42, 1.9), _Metro(37.80, -122.27, 1.6), _Metro(37.55, -122.05, 1.0),
    _Metro(37.34, -121.89, 1.9), _Metro(37.97, -122.03, 0.9), _Metro(38.58, -121.49, 2.1),
    _Metro(37.96, -121.29, 0.75), _Metro(37.64, -120.99, 0.55), _Metro(38.44, -122.71, 0.45),
    _Metro(38.25, -122.04, 0.4), _Metro(36.67, -121.65, 0.4), _Metro(36.97, -122.03, 0.25),
    _Metro(37.30, -120.48, 0.25),
)  # fmt: skip
_METROS = (
    _Metro(40.71, -74.01, 19.5), _Metro(34.05, -118.24, 12.8), _Metro(41.88, -87.63, 9.3),
    _Metro(32.78, -96.80, 8.1), _Metro(29.76, -95.37, 7.5), _Metro(38.91, -77.04, 6.3),
    _Metro(39.95, -75.17, 6.2), _Metro(33.75, -84.39, 6.3), _Metro(25.76, -80.19, 6.2),
    _Metro(33.45, -112.07, 5.1), _Metro(42.36, -71.06, 4.9), _Metro(33.95, -117.40, 4.7),
    _Metro(42.33, -83.05, 4.3), _Metro(47.61, -122.33, 4.0), _Metro(44.98, -93.27, 3.7),
    _Metro(27.95, -82.46, 3.3), _Metro(32.72, -117.16, 3.3), _Metro(39.74, -104.99, 3.0),
    _Metro(39.29, -76.61, 2.8), _Metro(38.63, -90.20, 2.8), _Metro(28.54, -81.38, 2.8),
    _Metro(35.23, -80.84, 2.8), _Metro(29.42, -98.49, 2.7), _Metro(45.52, -122.68, 2.5),
    _Metro(30.27, -97.74, 2.5), _Metro(40.44, -80.00, 2.4), _Metro(36.17, -115.14, 2.3),
    _Metro(39.10, -84.51, 2.3), _Metro(39.10, -94.58, 2.2), _Metro(39.96, -83.00, 2.2),
    _Metro(39.77, -86.16, 2.1), _Metro(41.50, -81.69, 2.1), _Metro(36.16, -86.78, 2.1),
    _Metro(36.85, -75.98, 1.8), _Metro(41.82, -71.41, 1.7), _Metro(43.04, -87.91, 1.6),
    _Metro(30.33, -81.66, 1.7), _Metro(35.47, -97.52, 1.5), _Metro(35.78, -78.64, 1.5),
    _Metro(35.15, -90.05, 1.3), _Metro(37.54, -77.44, 1.3), _Metro(38.25, -85.76, 1.3),
    _Metro(29.95, -90.07, 1.0), _Metro(40.76, -111.89, 1.3), _Metro(33.52, -86.80, 1.1),
    _Metro(36.75, -119.77, 1.0), _Metro(43.16, -77.61, 1.1), _Metro(36.15, -95.99, 1.0),
    _Metro(35.08, -106.65, 0.9), _Metro(41.26, -95.93, 1.0), _Metro(43.62, -116.20, 0.8),
)  # fmt: skip


def _rng(seed: int, *stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64([seed, *stream]))


def _around(
    rng: np.random.Generator, n: int, metros: Sequence[_Metro], weights: Float64
) -> tuple[Float64, Float64]:
    """n points around centres: dense at the middle, with a long suburban tail."""
    centre = rng.choice(len(metros), size=n, p=weights / weights.sum())
    lat, lon, millions = (np.array(column)[centre] for column in zip(*metros, strict=True))
    reach_km = 3.0 + 7.0 * np.sqrt(millions)
    distance_km = reach_km * rng.gamma(1.4, 0.7, n)
    bearing = rng.uniform(0.0, 2.0 * math.pi, n)
    km_per_degree = 111.2
    return (
        lat + distance_km * np.cos(bearing) / km_per_degree,
        lon + distance_km * np.sin(bearing) / (km_per_degree * np.cos(np.radians(lat))),
    )


def _fill(
    rng: np.random.Generator, n: int, inside: Box, outside: Box | None, draw: Any
) -> tuple[Float64, Float64]:
    """Exactly n points of ``draw(n)`` that lie inside one box and outside another."""
    lats: list[Float64] = [np.empty(0)]
    lons: list[Float64] = [np.empty(0)]
    missing = n
    while missing > 0:
        lat, lon = draw(rng, max(64, missing + missing // 4))
        keep = inside.holds(lat, lon)
        if outside is not None:
            keep &= ~outside.holds(lat, lon)
        lats.append(lat[keep][:missing])
        lons.append(lon[keep][:missing])
        missing -= len(lats[-1])
    return np.concatenate(lats), np.concatenate(lons)


def _bay_points(rng: np.random.Generator, n: int) -> tuple[Float64, Float64]:
    weights = np.array([metro.millions for metro in _BAY_METROS])
    return _around(rng, n, _BAY_METROS, weights)


def generate_coordinates(n: int, seed: int) -> tuple[Float64, Float64]:
    """Latitudes and longitudes of n places, in no order, the same for the same (n, seed)."""
    rng = _rng(seed, 1)
    towns = [
        _Metro(float(lat), float(lon), 0.02 * float(size))
        for lat, lon, size in zip(
            rng.uniform(CONTIGUOUS_US.south, CONTIGUOUS_US.north, _TOWNS),
            # The east is denser: two draws of three fall east of the hundredth meridian.
            np.where(
                rng.random(_TOWNS) < 0.67,
                rng.uniform(-100.0, CONTIGUOUS_US.east, _TOWNS),
                rng.uniform(CONTIGUOUS_US.west, -100.0, _TOWNS),
            ),
            np.minimum(1.0 + rng.pareto(_TOWN_PARETO, _TOWNS), 50.0),
            strict=True,
        )
    ]
    metro_weights = np.array([metro.millions for metro in _METROS])
    town_weights = np.array([town.millions for town in towns])

    n_bay = round(n * _BAY_SHARE)
    n_metro = round((n - n_bay) * _METRO_SHARE)
    n_town = round((n - n_bay) * _TOWN_SHARE)
    n_rural = n - n_bay - n_metro - n_town
    parts = (
        _fill(rng, n_bay, BAY, None, _bay_points),
        _fill(rng, n_metro, CONTIGUOUS_US, BAY, lambda r, m: _around(r, m, _METROS, metro_weights)),
        _fill(rng, n_town, CONTIGUOUS_US, BAY, lambda r, m: _around(r, m, towns, town_weights)),
        _fill(
            rng,
            n_rural,
            CONTIGUOUS_US,
            BAY,
            lambda r, m: (
                r.uniform(CONTIGUOUS_US.south, CONTIGUOUS_US.north, m),
                r.uniform(CONTIGUOUS_US.west, CONTIGUOUS_US.east, m),
            ),
        ),
    )
    order = rng.permutation(n)
    lat = np.concatenate([part[0] for part in parts])[order]
    lon = np.concatenate([part[1] for part in parts])[order]
    return lat, lon


def generate_ratings(n: int, seed: int) -> npt.NDArray[np.float32]:
    """Ratings of 1 to 5 stars, most of them 4, as reviews have it."""
    stars = _rng(seed, 2).choice(5, size=n, p=[0.06, 0.09, 0.20, 0.38, 0.27]) + 1
    return stars.astype(np.float32)


def metadata_chunk(seed: int, chunk: int, rows: int, width: int = METADATA_BYTES) -> Bytes:
    """Metadata of rows ``chunk * CHUNK_ROWS`` and on: a line of JSON, then incompressible bytes."""
    words = -(-width // 8)
    data = _rng(seed, 3, chunk).integers(0, 2**64, (rows, words), dtype=np.uint64)
    out = data.view(np.uint8)[:, :width]
    first = chunk * CHUNK_ROWS
    for row in range(rows):
        line = json.dumps({"place": first + row}).encode() + b"\n"
        out[row, : min(len(line), width)] = np.frombuffer(line[:width], np.uint8)
    return out


def generate_queries(n: int, seed: int, box: Box = BAY) -> tuple[Float64, Float64]:
    """Query points, local to the bay: most where people live, some anywhere in the box."""
    rng = _rng(seed, 4)
    n_anywhere = n // 10
    lat, lon = _fill(rng, n - n_anywhere, box, None, _bay_points)
    anywhere = rng.uniform((box.south, box.west), (box.north, box.east), (n_anywhere, 2))
    order = rng.permutation(n)
    return (
        np.concatenate([lat, anywhere[:, 0]])[order],
        np.concatenate([lon, anywhere[:, 1]])[order],
    )


def write_places(
    path: Path, n: int, seed: int, metadata_bytes: int = METADATA_BYTES
) -> Iterator[int]:
    """Writes n generated places to a Parquet file; yields the number of rows written so far."""
    lat, lon = generate_coordinates(n, seed)
    rating = generate_ratings(n, seed)
    schema = pa.schema(
        [
            ("lat", pa.float64()),
            ("lon", pa.float64()),
            ("rating", pa.float32()),
            ("metadata", pa.binary(metadata_bytes)),
        ]
    )
    # Random bytes neither compress nor repeat, and statistics over them would be 2 KiB each.
    with pq.ParquetWriter(
        path,
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=["lat", "lon", "rating"],
    ) as writer:
        for chunk, first in enumerate(range(0, n, CHUNK_ROWS)):
            rows = slice(first, min(first + CHUNK_ROWS, n))
            data = np.ascontiguousarray(
                metadata_chunk(seed, chunk, rows.stop - rows.start, metadata_bytes)
            )
            metadata = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(metadata_bytes), len(data), [None, pa.py_buffer(data)]
            )
            writer.write_table(
                pa.table([lat[rows], lon[rows], rating[rows], metadata], schema=schema),
                row_group_size=CHUNK_ROWS,
            )
            yield rows.stop


def write_queries(path: Path, n: int, seed: int) -> None:
    """Writes n generated queries to a Parquet file."""
    lat, lon = generate_queries(n, seed)
    pq.write_table(pa.table({"lat": lat, "lon": lon}), path)


# ------------------------------------------------------------------ reading


@dataclasses.dataclass(frozen=True)
class PlacesTable:
    """A table on disk, opened and its columns checked, nothing read yet."""

    path: str
    dataset: ds.Dataset
    rows: int

    @classmethod
    def open(cls, path: str | Path, columns: Sequence[str]) -> PlacesTable:
        """Opens Parquet or CSV by its suffix.

        Raises:
            InputError: there is no such file, it cannot be read, it has no rows, or it lacks one
                of the columns.
        """
        where = str(path)
        if "://" not in where and not Path(where).exists():
            raise InputError(f"{where}: no such file")
        plain = where.lower().removesuffix(".gz")
        if plain.endswith((".csv", ".tsv")):
            delimiter = "\t" if plain.endswith(".tsv") else ","
            csv = ds.CsvFileFormat(parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter))
            kind, file_format = "CSV", csv
        else:
            kind, file_format = "Parquet", ds.ParquetFileFormat()
        try:
            dataset = ds.dataset(where, format=file_format)
            names = dataset.schema.names
            missing = [column for column in columns if column not in names]
            if missing:
                raise InputError(
                    f"{where}: no column {_list(missing)}; it has {_list(names)}. "
                    "Rename columns to lat, lon, rating, and optionally metadata and id."
                )
            rows = dataset.count_rows()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{where}: cannot be read as {kind}: {error}") from error
        if rows == 0:
            raise InputError(f"{where}: the table has no rows")
        return cls(where, dataset, rows)

    def has(self, column: str) -> bool:
        """Whether the table has that column."""
        return column in self.dataset.schema.names

    def numbers(self, column: str) -> Float64:
        """A numeric column, finite throughout."""
        array = self.column(column)
        try:
            values: Float64 = np.asarray(pc.cast(array, pa.float64()).to_numpy(), dtype=np.float64)
        except pa.ArrowException as error:
            raise InputError(
                f"{self.path}: column {column!r} holds {array.type}, not numbers: {error}"
            ) from error
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise InputError(
                f"{self.path}: column {column!r} has {len(bad):,} empty or non-finite values, "
                f"the first in row {int(bad[0]):,}"
            )
        return values

    def coordinates(self) -> tuple[Float64, Float64]:
        """Latitudes and longitudes, checked to be on the globe."""
        lat, lon = self.numbers("lat"), self.numbers("lon")
        for name, values, limit in (("lat", lat, 90.0), ("lon", lon, 360.0)):
            bad = np.flatnonzero(np.abs(values) > limit)
            if len(bad):
                row = int(bad[0])
                raise InputError(
                    f"{self.path}: column {name!r} must be degrees between {-limit:g} and "
                    f"{limit:g}; row {row:,} has {values[row]:g}"
                    + (" (are lat and lon swapped?)" if name == "lat" else "")
                )
        return lat, lon

    def column(self, name: str) -> pa.ChunkedArray:
        """A whole column."""
        return self._read([name]).column(name)

    def ids(self) -> pa.ChunkedArray | npt.NDArray[np.int64]:
        """The id column, or row numbers where there is none."""
        return self.column("id") if self.has("id") else np.arange(self.rows, dtype=np.int64)

    def metadata_width(self) -> int:
        """Bytes of the longest metadata, 0 where the table has none."""
        if not self.has("metadata"):
            return 0
        kind = self.dataset.schema.field("metadata").type
        if pa.types.is_fixed_size_binary(kind):
            return int(kind.byte_width)
        longest = 0
        for batch in self._batches("metadata"):
            lengths = pc.binary_length(self._as_binary(batch))
            longest = max(longest, pc.max(lengths).as_py() or 0)
        if longest > METADATA_MAX_BYTES:
            raise InputError(
                f"{self.path}: metadata of up to {longest:,} bytes; every row is padded to the "
                f"longest, so at most {METADATA_MAX_BYTES:,} are taken"
            )
        return longest

    def metadata(self, width: int) -> Iterator[Bytes]:
        """Metadata in the order of the rows, a chunk at a time, each row padded with zeros."""
        for batch in self._batches("metadata"):
            if pa.types.is_fixed_size_binary(batch.type) and not batch.null_count:
                data = np.frombuffer(batch.buffers()[1], np.uint8)
                first = batch.offset * width
                yield data[first : first + len(batch) * width].reshape(len(batch), width)
                continue
            out = np.zeros((len(batch), width), np.uint8)
            for row, value in enumerate(self._as_binary(batch)):
                if value.is_valid:
                    view = np.frombuffer(value.as_buffer(), np.uint8)
                    out[row, : len(view)] = view
            yield out

    def _as_binary(self, array: pa.Array) -> pa.Array:
        if pa.types.is_fixed_size_binary(array.type):
            return array
        try:
            text = pc.cast(array, pa.string()) if not pa.types.is_binary(array.type) else array
            return pc.cast(text, pa.binary())
        except pa.ArrowException as error:
            raise InputError(
                f"{self.path}: column 'metadata' holds {array.type}, not bytes or text"
            ) from error

    def _batches(self, column: str) -> Iterator[pa.Array]:
        batches = self.dataset.to_batches(
            columns=[column], batch_size=CHUNK_ROWS, batch_readahead=2, fragment_readahead=1
        )
        try:
            for batch in batches:
                if batch.num_rows:
                    yield batch.column(0)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.path}: cannot read column {column!r}: {error}") from error

    def _read(self, columns: list[str]) -> pa.Table:
        try:
            return self.dataset.to_table(columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{self.path}: cannot read {_list(columns)}: {error}") from error


def _list(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names) if names else "none"
