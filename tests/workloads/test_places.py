"""The generator is what it says, and tables that users bring are read or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from clamor_ray.workloads.data import places
from clamor_ray.workloads.data.places import BAY, CONTIGUOUS_US, InputError, PlacesTable


def written(path: Path, n: int = 20_000, seed: int = 3, width: int = 64) -> Path:
    assert list(places.write_places(path, n, seed, width))[-1] == n
    return path


# ---------------------------------------------------------------- generator


def test_same_seed_same_places_other_seed_other_places() -> None:
    first, again, other = (places.generate_coordinates(5000, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(places.generate_ratings(50, 1), places.generate_ratings(50, 1))
    np.testing.assert_array_equal(places.generate_queries(50, 1), places.generate_queries(50, 1))


@pytest.mark.parametrize("n", [1, 7, 1000, 20_001])
def test_as_many_places_as_asked_all_in_the_country(n: int) -> None:
    lat, lon = places.generate_coordinates(n, seed=1)
    assert len(lat) == len(lon) == n
    assert CONTIGUOUS_US.holds(lat, lon).all()


def test_the_bay_has_its_share_of_places() -> None:
    lat, lon = places.generate_coordinates(50_000, seed=1)
    assert BAY.holds(lat, lon).mean() == pytest.approx(0.04)


def test_places_cluster() -> None:
    """A tenth of a tenth of the box holds most places; uniform ones would need all of it."""
    lat, lon = places.generate_coordinates(50_000, seed=1)
    cells, _, _ = np.histogram2d(
        lat, lon, bins=(100, 200), range=(CONTIGUOUS_US[:2], CONTIGUOUS_US[2:])
    )
    largest = np.sort(cells.reshape(-1))[::-1]
    assert largest[: len(largest) // 50].sum() > 0.5 * len(lat)
    assert (cells > 0).mean() > 0.1  # and there is somebody in the country


def test_places_lie_in_no_order() -> None:
    lat, _ = places.generate_coordinates(20_000, seed=1)
    assert abs(np.corrcoef(lat[:-1], lat[1:])[0, 1]) < 0.05


def test_ratings_are_stars() -> None:
    ratings = places.generate_ratings(10_000, seed=1)
    assert set(np.unique(ratings)) == {1, 2, 3, 4, 5}
    assert ratings.dtype == np.float32


def test_queries_are_local_to_the_bay() -> None:
    lat, lon = places.generate_queries(1000, seed=1)
    assert BAY.holds(lat, lon).all()
    assert len(np.unique(lat)) == 1000


def test_metadata_differs_from_row_to_row() -> None:
    rows = places.metadata_chunk(1, 2, 100)
    assert rows.shape == (100, places.METADATA_BYTES)
    assert len(np.unique(rows, axis=0)) == 100
    assert rows[5].tobytes().startswith(b'{"place": %d}\n' % (2 * places.CHUNK_ROWS + 5))


def test_metadata_narrower_than_its_head() -> None:
    assert places.metadata_chunk(1, 0, 3, width=5).shape == (3, 5)


# ------------------------------------------------------------------ reading


def test_what_was_written_is_read(tmp_path: Path) -> None:
    table = PlacesTable.open(written(tmp_path / "p.parquet"), ["lat", "lon", "rating"])
    assert table.rows == 20_000
    lat, lon = places.generate_coordinates(20_000, 3)
    np.testing.assert_array_equal(table.coordinates(), (lat, lon))
    np.testing.assert_array_equal(table.numbers("rating"), places.generate_ratings(20_000, 3))
    assert table.metadata_width() == 64
    read = np.concatenate(list(table.metadata(64)))
    chunks = [places.metadata_chunk(3, 0, 16384, 64), places.metadata_chunk(3, 1, 3616, 64)]
    np.testing.assert_array_equal(read, np.concatenate(chunks))
    np.testing.assert_array_equal(table.ids(), np.arange(20_000))


def test_two_files_of_one_seed_are_equal(tmp_path: Path) -> None:
    one, two = (written(tmp_path / name, n=3000) for name in ("a.parquet", "b.parquet"))
    assert one.read_bytes() == two.read_bytes()


def test_csv_with_text_and_ids(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text(
        "id,lat,lon,rating,metadata\nx1,37.5,-122,4,hello\nx2,37,-121,5,\nx3,38,-122.5,1,Grüße\n"
    )
    table = PlacesTable.open(path, ["lat", "lon", "rating"])
    assert table.rows == 3
    assert table.ids().to_pylist() == ["x1", "x2", "x3"]
    np.testing.assert_array_equal(table.numbers("rating"), [4, 5, 1])
    width = table.metadata_width()
    assert width == len("Grüße".encode())
    rows = np.concatenate(list(table.metadata(width)))
    assert [row.tobytes().rstrip(b"\0").decode() for row in rows] == ["hello", "", "Grüße"]


def test_parquet_metadata_of_any_length_and_none(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    values = [b"a", None, b"\0bc"]
    pq.write_table(pa.table({"lat": [1.0] * 3, "lon": [2.0] * 3, "metadata": values}), path)
    table = PlacesTable.open(path, ["lat", "lon"])
    assert table.metadata_width() == 3
    rows = np.concatenate(list(table.metadata(3)))
    assert [row.tobytes() for row in rows] == [b"a\0\0", b"\0\0\0", b"\0bc"]


def test_no_metadata_is_no_bytes(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"lat": [1.0], "lon": [2.0]}), path)
    assert PlacesTable.open(path, ["lat"]).metadata_width() == 0


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    for name in ("0.parquet", "1.parquet"):
        written(tmp_path / name, n=100)
    assert PlacesTable.open(tmp_path, ["lat"]).rows == 200


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"latitude": [1.0], "lon": [2.0]}, r"no column 'lat', 'rating'; it has 'latitude', 'lon'"),
        ({"lat": [], "lon": [], "rating": []}, "no rows"),
    ],
)
def test_refused_when_opened(tmp_path: Path, columns: dict[str, list[float]], message: str) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(InputError, match=message):
        PlacesTable.open(path, ["lat", "lon", "rating"])


@pytest.mark.parametrize(
    ("lat", "lon", "message"),
    [
        (
            [1.0, float("nan")],
            [1.0, 1.0],
            "'lat' has 1 empty or non-finite values, the first in row 1",
        ),
        ([1.0, 2.0], [None, 1.0], "'lon' has 1 empty or non-finite values, the first in row 0"),
        ([1.0, 2.0], [float("inf"), 1.0], "'lon' has 1 empty"),
        ([-122.0, 1.0], [37.0, 1.0], "swapped"),
        ([1.0, 2.0], [1.0, 361.0], "between -360 and 360; row 1 has 361"),
        (["1", "north"], [1.0, 2.0], "'lat' holds string, not numbers"),
    ],
)
def test_bad_coordinates_are_named(
    tmp_path: Path, lat: list[object], lon: list[object], message: str
) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"lat": lat, "lon": lon}), path)
    with pytest.raises(InputError, match=message):
        PlacesTable.open(path, ["lat", "lon"]).coordinates()


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        PlacesTable.open(tmp_path / "none.parquet", ["lat"])


def test_garbage_is_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    path.write_bytes(b"lat,lon\n1,2\n")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        PlacesTable.open(path, ["lat"])


def test_an_empty_csv(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("")
    with pytest.raises(InputError, match="cannot be read as CSV"):
        PlacesTable.open(path, ["lat"])


def test_metadata_that_is_neither_bytes_nor_text(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"lat": [1.0], "lon": [2.0], "metadata": [[1, 2]]}), path)
    with pytest.raises(InputError, match="not bytes or text"):
        PlacesTable.open(path, ["lat"]).metadata_width()


def test_one_huge_metadata_row(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"lat": [1.0], "metadata": [b"x" * 70_000]}), path)
    with pytest.raises(InputError, match="padded to the longest"):
        PlacesTable.open(path, ["lat"]).metadata_width()
