"""What every program promises: its options, its exit status, and a small run that is checked.

What is special to a program is in a file of its own.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from matplotlib.image import imread
from rich.console import Console

import clamor_ray as clamor
from clamor_ray._observe import progress
from clamor_ray.workloads.cli import linear_job, program
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.data import clusters, words
from clamor_ray.workloads.data.adjacency import WrongLists
from clamor_ray.workloads.data.clusters import WrongCentroids
from clamor_ray.workloads.data.errors import InputError, WrongResult, WrongWeights
from clamor_ray.workloads.data.graphs import WrongRanks
from clamor_ray.workloads.data.records import WrongOrder
from clamor_ray.workloads.data.stream import WrongValue
from clamor_ray.workloads.data.words import WrongCounts
from clamor_ray.workloads.models import particles
from clamor_ray.workloads.models.kdtree import WrongDistances
from clamor_ray.workloads.models.nearest import WrongAnswer
from clamor_ray.workloads.models.particles import ParticleBox, WrongParticles
from clamor_ray.workloads.models.topics import WrongTopics

CURVE = (675, 1200)


def nothing_more(folder: Path) -> None:
    """What the program prints is all that it makes."""


def counts_are_those_of_the_text(folder: Path) -> None:
    table = pq.read_table(folder / "counts.parquet").to_pydict()
    found = dict(zip(table["word"], table["count"], strict=True))
    assert found == words.reference(sorted((folder / "text").glob("*.txt")))
    assert table["count"] == sorted(table["count"], reverse=True)


def lists_have_all_edges(folder: Path) -> None:
    for name in ("forward", "reverse"):
        table = pq.read_table(folder / "lists" / name)
        assert sum(map(len, table["neighbours"].to_pylist())) == 20_000


def centroids_are_those_of_the_points(folder: Path) -> None:
    parts = [np.load(path) for path in sorted((folder / "points").glob("*.npy"))]
    assert sum(map(len, parts)) == 20_000
    table = pq.read_table(folder / "centroids.parquet")
    found = np.stack([table[f"x{axis}"].to_numpy() for axis in range(10)], axis=1)
    clusters.check(found, clusters.reference(parts, parts[0][:10], 3))


def particles_are_those_of_one_process(folder: Path) -> None:
    table = pq.read_table(folder / "particles.parquet")
    box = ParticleBox(width=32.0)
    expected = particles.reference(particles.generate(400, box, 3.0, 1), box, 5)
    assert table["number"].to_numpy().tolist() == list(range(400))
    assert table["x"].to_numpy().tolist() == expected.at[:, 0].tolist()
    assert table["speed_y"].to_numpy().tolist() == expected.speed[:, 1].tolist()


def the_curve_is_drawn(folder: Path) -> None:
    assert imread(folder / "loss.png").shape[:2] == CURVE


def the_result_is_of_all_queries(folder: Path) -> None:
    assert pq.read_table(folder / "result.parquet").num_rows == 300
    assert imread(folder / "result.png").shape[1] == 2000


@dataclass(frozen=True)
class Case:
    """A program.

    Args:
        name: of its module.
        wrong: what it raises where its result is wrong.
        given: what it cannot do without, but for --demo; "{}" is a folder.
        small: a demo that takes seconds; "{}" is a folder.
        says: what that prints.
        refused: options that it cannot use, and a part of what it says of them.
        look: at the files that the demo has made.
        ran_by: the module whose `run` it calls; None for its own.
    """

    name: str
    wrong: type[WrongResult]
    given: tuple[str, ...]
    small: str
    says: tuple[str, ...]
    refused: dict[str, str]
    look: Callable[[Path], None] = nothing_more
    ran_by: Any = None


def below(*options: str) -> dict[str, str]:
    """Values out of an option's range."""
    return {each: f"'{each.split()[0]}'" for each in options}


CASES = [
    Case(
        "adjacency_list",
        WrongLists,
        ("x.parquet",),
        "--edges 20000 --vertices 1000 --out {}/lists",
        ("20,000 edges. All lists equal those of one process.", "lists  "),
        {
            "": "give EDGES, or --demo",
            "x.parquet --demo": "--demo and --edges are of generated edges: give no file",
            "x.parquet --edges 5": "give no file",
            **below("--edges 0", "--exponent 1", f"--vertices {1 << 31}", "--partitions 0"),
        },
        lists_have_all_edges,
    ),
    Case(
        "kmeans",
        WrongCentroids,
        ("x.npy",),
        "--points 20000 --iterations 3 --save {}/points --out {}/centroids.parquet",
        ("10 clusters of 20,000 points after 3 iterations", "All centroids equal those of one"),
        {
            "x.npy --demo": "--demo, --points and --save are of generated points: give no file",
            "x.npy --points 5": "give no file",
            "x.npy --save y": "give no file",
            "s3://bucket/x.npy --check": "give it local files",
            "x.npy --progress-picture x.png": "--progress-picture is of a program: add --recipes",
            **below("-k 0", "--iterations 0", "--tolerance -1"),
        },
        centroids_are_those_of_the_points,
    ),
    Case(
        "knn",
        WrongAnswer,
        ("--demo", "--places", "1000", "--queries", "20", "--dir", "{}"),
        "--places 4000 --queries 300 --check 50 --tasks 4 --dir {}",
        ("50 answers equal brute force, and all 300 metadata checksums are right", "result   "),
        {
            "": "give PLACES and QUERIES, or --demo",
            "x.parquet": "give PLACES and QUERIES",
            "--demo x.parquet y.parquet": "leave out PLACES",
            **below("-k 0", "--places 5", "--check -1"),
        },
        the_result_is_of_all_queries,
    ),
    Case(
        "knn_update",
        WrongDistances,
        (),
        "--places 5000 --queries 2000 --moved 3",
        ("answers equal brute force. The move changed", "have a nearer place since"),
        {
            "--places 5 --moved 6": "--moved 6: there are only 5 places",
            "--kill --nodes 1": "--kill needs a node that is not the driver's",
            **below("--queries 0", "--moved 0"),
        },
    ),
    Case(
        "lda",
        WrongTopics,
        ("x.txt",),
        "--documents 200 --words 300 -k 4 --iterations 3 --picture {}/loss.png",
        ("after 3 iterations over 200 documents", "All topics equal those of one process"),
        {
            "x.txt --demo": "--demo, --documents and --words are of generated documents",
            "x.txt --words 5": "give no file",
            "--vocabulary v.txt": "--vocabulary belongs to a file of documents",
            **below("-k 0", "--share 0", "--share 1.5", "--alpha 0"),
        },
        the_curve_is_drawn,
    ),
    Case(
        "lr",
        WrongWeights,
        ("x.svm",),
        "--rows 3000 --features 500 --iterations 5 --picture {}/loss.png",
        ("after 5 iterations over 3,000 rows with 500", "All weights equal those of one process"),
        {
            "x.svm --demo": "--demo and --rows are of generated rows: give no file",
            "x.svm --rows 5": "give no file",
            **below("--iterations 0", "--tolerance -1", "--penalty -1", "--step 0", "--features 0"),
            **below("--solver newton", "--aggregate ring"),
            "--demo --recipes --solver lbfgs": "--recipes goes by --solver gd",
            "--demo --recipes --aggregate split": "with --recipes one task does it",
        },
        the_curve_is_drawn,
        linear_job,
    ),
    Case(
        "pagerank",
        WrongRanks,
        (),
        "--vertices 20000 --iterations 3 --tolerance 0",
        ("stopped after 3 iterations", "All ranks equal SciPy's"),
        below("--vertices 5", "--degree 0", "--exponent 1", "--damping 2"),
    ),
    Case(
        "particles",
        WrongParticles,
        (),
        "--particles 400 --steps 5 --slabs 8 --width 32 --out {}/particles.parquet",
        (
            "5 steps of 400 particles in 8 slabs",
            "All particles are where one process finds them.",
            "5 rounds, ",
            "slabs ",
        ),
        {
            "--slabs 33": "--slabs 33: take up to 32, half of --width",
            "--width 4 --slabs 3": "take up to 2",
            "--progress-picture x.txt": "--progress-picture ends with .png, .svg, .pdf",
            **below("--particles 0", "--steps 0", "--slabs 0", "--skew 0.5", "--width 1"),
        },
        particles_are_those_of_one_process,
    ),
    Case(
        "sort",
        WrongOrder,
        (),
        "--records 20000 --partition-mib 0.5",
        ("20,000 records, 1.9 MiB, in order in 4 partitions, and the same that went in.",),
        below("--records 5", "--partition-mib 0"),
    ),
    Case(
        "sparse_lr",
        WrongWeights,
        ("x.tsv",),
        "--rows 3000 --iterations 3 --picture {}/loss.png",
        ("3,000 rows, ", "All weights equal those of one process"),
        {
            "x.tsv --demo": "--demo, --rows and --save are of generated rows: give no file",
            "x.tsv --rows 5": "give no file",
            "x.tsv --save y": "give no file",
            "x.tsv --ids hash --out z": "it needs --ids dictionary",
            **below("--rate 0", "--parameters 3", "--iterations 0", "--batches 0", "--ids none"),
        },
        the_curve_is_drawn,
    ),
    Case(
        "streaming_updates",
        WrongValue,
        ("--tasks", "2"),
        "--keys 100000 --rounds 3 --lookups 6000",
        ("24,000 look-ups found what a plain dict holds, in 4 versions", "node 2", "dirty"),
        below("--rounds 0", "--keys 5", "--skew -1"),
    ),
    Case(
        "svm",
        WrongWeights,
        ("x.svm",),
        "--rows 3000 --features 500 --iterations 5 --picture {}/loss.png",
        ("after 5 iterations over 3,000 rows with 500", "All weights equal those of one process"),
        {
            "x.svm --demo": "--demo and --rows are of generated rows: give no file",
            "--solver gd": "No such option",
            **below("--penalty -1"),
        },
        the_curve_is_drawn,
        linear_job,
    ),
    Case(
        "wordcount",
        WrongCounts,
        ("x.txt",),
        "--words 20000 --save {}/text --out {}/counts.parquet",
        ("20,000 words", "All counts equal collections.Counter's.", "most frequent: "),
        {
            "": "give TEXT, or --demo",
            "x.txt --demo": "--demo, --words and --save are of generated text: give no file",
            "x.txt --words 5": "give no file",
            "x.txt --save y": "give no file",
            "s3://bucket/x.txt --check": "give it local files",
            **below("--words 0", "--partitions 0"),
        },
        counts_are_those_of_the_text,
    ),
]

OF_ALL = below("--nodes 0", "--cache-bytes much", "--cache-bytes 5", "--cache-policy belady")
REFUSED = [(case, *each) for case in CASES for each in {**case.refused, **OF_ALL}.items()]

every_program = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def module_of(case: Case) -> Any:
    return importlib.import_module(f"clamor_ray.workloads.{case.name}")


def main_of(case: Case) -> Any:
    return module_of(case).main


def called(case: Case, folder: Path, *more: str) -> Any:
    """With what it cannot do without."""
    arguments = [each.format(folder) for each in case.given]
    return CliRunner().invoke(main_of(case), [*arguments, *more])


def test_these_are_all_programs() -> None:
    folder = Path(program.__file__).parents[1]
    assert {case.name for case in CASES} == {path.stem for path in folder.glob("[a-z]*.py")}


@every_program
def test_help_says_what_it_does_and_how_it_ends(case: Case) -> None:
    result = CliRunner().invoke(main_of(case), ["-h"])
    assert result.exit_code == 0, result.output
    for part in ("--demo", "--nodes", "--cache-bytes", "--cache-policy", "Exit status: 0; 1 where"):
        assert part in result.output, result.output


@pytest.mark.parametrize(
    ("case", "arguments", "message"), REFUSED, ids=lambda part: getattr(part, "name", part)
)
def test_bad_options_are_refused_before_a_cluster_starts(
    no_cluster: None, case: Case, arguments: str, message: str
) -> None:
    result = CliRunner().invoke(main_of(case), arguments.split())
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split()), result.output


@every_program
@pytest.mark.parametrize("demo", [False, True])
def test_what_is_asked_of_the_cluster_reaches_it(
    case: Case, demo: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def attached(nodes: int | None, stages: Any, **settings: Any) -> Any:
        asked.append((nodes, settings))
        raise clamor.errors.ClamorError("that is enough")

    monkeypatch.setattr(program, "attached", attached)
    options = ["--nodes", "5", "--cache-bytes", "64MiB", "--cache-policy", "lru"]
    named = [] if demo else [each.format(tmp_path) for each in case.given]
    if demo:
        named = ["--demo", *(case.small.format(*[tmp_path] * case.small.count("{}")).split())]
    for more in ([], options):
        result = CliRunner().invoke(main_of(case), [*named, *more])
        assert result.exit_code == 3, result.output
        assert "error: that is enough" in result.output
    by_default = 3 if "--demo" in named else None
    assert asked == [
        (by_default, {"cache_bytes": None, "cache_policy": None}),
        (5, {"cache_bytes": "64MiB", "cache_policy": "lru"}),
    ]


@every_program
@pytest.mark.parametrize("status", [1, 2, 3])
def test_exit_status(
    attached: None, case: Case, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = case.wrong.__name__.removeprefix("Wrong").upper()
    errors: list[tuple[Exception, str]] = {
        1: [(case.wrong("3 of [10] differ"), f"WRONG {what}: 3 of [10] differ")],
        2: [
            (InputError("[x] has no rows"), "error: [x] has no rows"),
            (clamor.errors.SourceError("x: bad"), "error: x: bad"),
            (clamor.errors.MissingColumnError("no y"), "error: no y"),
        ],
        3: [(clamor.errors.HomeLostError("A node died."), "error: A node died.")],
    }[status]
    for error, message in errors:

        def run(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(case.ran_by or module_of(case), "run", run)
        result = called(case, tmp_path)
        assert result.exit_code == status, result.output
        assert message in result.output


@every_program
def test_a_small_demo_is_checked(
    case: Case, run_program: Callable[..., str], tmp_path: Path
) -> None:
    """As `python -m` runs it; what it puts it frees."""
    small = case.small.format(*[tmp_path] * case.small.count("{}")).split()
    said = run_program(case.name, "--demo", *small)
    for part in case.says:
        assert part in said, said
    case.look(tmp_path)


@pytest.mark.parametrize("name", ["kmeans", "lr", "pagerank"])
def test_a_small_demo_without_the_driver_is_checked(
    name: str, run_program: Callable[..., str], tmp_path: Path
) -> None:
    """The same report of the same numbers, and what the program did."""
    (case,) = (case for case in CASES if case.name == name)
    small = case.small.format(*[tmp_path] * case.small.count("{}")).split()
    said = run_program(
        name, "--demo", *small, "--recipes", "--progress-picture", f"{tmp_path}/progress.svg"
    )
    for part in case.says:
        assert part in said, said
    n = 5 if name == "lr" else 3
    assert re.search(rf"^ *{n} +\S+ +\S+ +\S+.*$", said, re.M), said
    assert re.search(rf"^{n} rounds, \S+ a second$", said, re.M), said
    assert re.search(r"^node +partitions +busy s +cores +of mean$", said, re.M), said
    assert ElementTree.parse(tmp_path / "progress.svg").getroot().tag.endswith("svg")
    case.look(tmp_path)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_stage_says_more(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
    with Stages(console).stage("iterate", "10 steps in 24 slabs", 10) as done:
        done(4, "8,120 tasks/s, busiest node 1.30, partition 2.10 of mean")
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "8,120 tasks/s, busiest node 1.30, partition 2.10 of mean" in said
    assert ("4/10" if terminal else "10 steps in 24 slabs: 4 of 10 (0 s), 8,120") in said


@pytest.mark.parametrize("terminal", [False, True])
def test_a_stage_names_files_as_they_are_called(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets are no marks of the console's."""
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None)
    with Stages(console).stage("write", "writing [x] and y", 4) as done:
        done(2)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "✓ writing [x] and y" in said
    assert terminal or "writing [x] and y: 2 of 4" in said
