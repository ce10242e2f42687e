"""The site: it builds without a warning, asks no other host, and leaves nothing out."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from clamor_ray import errors
from clamor_ray._protocol.metrics import NODE_METRICS, SESSION_METRICS
from clamor_ray.cli.main import COMMANDS
from tests.library.test_docstrings import MODULES, PUBLIC
from tests.project.test_failure_doc import rows_of
from tests.support import fences

ROOT = Path(__file__).resolve().parents[2]
FAILURE = (ROOT / "docs" / "failure.md").read_text()
EXTENSIONS = ("docstrings", "failure_links", "metrics_table", "names", "navigation")
BUILD_S = 280.0
# What a browser fetches without being asked to: tag -> attribute.
FETCHED = {"object": "data"}
FETCHED |= dict.fromkeys(("script", "img", "iframe", "source", "embed"), "src")
FETCHED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "manifest"}
IN_CSS = re.compile(r"@import\s+['\"]?([^'\";]+)|url\(\s*['\"]?([^'\")]+)")


@pytest.fixture(scope="module")
def extensions() -> Iterator[dict[str, ModuleType]]:
    """The modules of docs/site."""
    folder = str(ROOT / "docs" / "site")
    sys.path.insert(0, folder)
    yield {name: importlib.import_module(name) for name in EXTENSIONS}
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make site` does. Whoever asks another host while it is built, fails."""
    out = tmp_path_factory.mktemp("site")
    nobody = "http://127.0.0.1:9"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html"]
    done = subprocess.run(
        [*command, "-c", "docs/site", "-d", str(out / "doctrees"), ".", str(out / "html")],
        cwd=ROOT,
        env={**os.environ, "http_proxy": nobody, "https_proxy": nobody, "no_proxy": ""},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert not done.stderr, done.stderr[-4000:]
    return out / "html"


class _Fetched(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = FETCHED.get(tag, "")
        if tag == "link" and FETCHED_LINKS & set((given.get("rel") or "").split()):
            name = "href"
        if address := given.get(name):
            self.found.append(address)


def fetched(page: Path) -> list[str]:
    parser = _Fetched()
    parser.feed(page.read_text())
    return parser.found


def test_it_needs_no_other_host(site: Path) -> None:
    pages = [*site.glob("*.html"), *site.glob("docs/**/*.html")]  # _static has templates
    addresses = [(page, address) for page in pages for address in fetched(page)]
    for sheet in site.rglob("*.css"):
        found = [one or other for one, other in IN_CSS.findall(sheet.read_text())]
        addresses += [(sheet, each) for each in found if not each.startswith(("data:", "#"))]
    assert len(addresses) > 100
    for place, address in addresses:
        assert not re.match(r"(\w+:)?//", address), f"{place}: {address}"
        path = re.split(r"[?#]", address)[0]
        assert (place.parent / path).is_file(), f"{place}: {address}"


def test_each_page_is_in_it(site: Path) -> None:
    for page in fences.pages(ROOT):
        assert (site / page.relative_to(ROOT)).with_suffix(".html").is_file(), page


def test_each_page_is_under_one(extensions: dict[str, ModuleType]) -> None:
    """Without a build: what conf.py includes is in the navigation, once."""
    conf = (ROOT / "docs" / "site" / "conf.py").read_text()
    patterns = [
        pattern
        for listed in re.findall(r"^include_patterns \+?= (\[.*\])$", conf, re.MULTILINE)
        for pattern in ast.literal_eval(listed)
    ]
    included = {
        str(path.relative_to(ROOT).with_suffix("")) for each in patterns for path in ROOT.glob(each)
    }
    navigation = extensions["navigation"]
    under = [
        navigation._entry(each).partition("</")[2].rstrip(">") or each
        for listed in navigation.UNDER.values()
        for each in listed
    ]
    assert sorted(under) == sorted(included - {"docs/index"})
    assert {"CHANGELOG", "SECURITY", "k8s/README", "docs/serving"} <= included


def test_each_public_name_is_in_the_reference(
    site: Path, extensions: dict[str, ModuleType]
) -> None:
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    there = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    names = [name for name in PUBLIC if name not in MODULES]
    assert len(names) > 200
    resolve = extensions["names"].resolve
    assert [name for name in names if (resolve(name) or name) not in there] == []


def test_commands_and_metrics_are_in_the_reference(site: Path) -> None:
    reference = site / "docs" / "reference"
    shown = (reference / "command-line.html").read_text()
    assert [each for each in COMMANDS if f'id="clamor-{each}"' not in shown] == []
    shown = (reference / "metrics.html").read_text()
    metrics = (*NODE_METRICS, *SESSION_METRICS)
    assert [each.exported for each in metrics if f">{each.exported}<" not in shown] == []


def test_each_error_leads_to_its_how_to(site: Path, extensions: dict[str, ModuleType]) -> None:
    headings = extensions["failure_links"].headings()
    assert [name for name in errors.__all__ if name not in headings] == []
    shown = (site / "docs" / "reference" / "errors.html").read_text()
    for name in errors.__all__:
        entry = shown.split(f'id="clamor_ray.errors.{name}"')[1].split('id="clamor_ray.errors.')[0]
        page = headings[name].partition(".md")[0]
        assert f"how-to/{page}.html" in entry, name


def test_each_row_of_failures_has_a_how_to(site: Path, extensions: dict[str, ModuleType]) -> None:
    links = extensions["failure_links"]
    rows = links.rows(FAILURE)
    assert [row for _, _, row in rows] == rows_of(FAILURE)
    lost = [row[:100] for _, section, row in rows if not links.how_to(section, row)]
    assert lost == [], "give docs/how-to a heading for its error, or SIGNS what it says"
    named = {name for _, _, row in rows for name in re.findall(r"`(\w+)`", row)}
    assert [each for each in named & set(errors.__all__) if each not in links.headings()] == []
    shown = (site / "docs" / "failure.html").read_text()
    assert shown.count("How-to: <a") == len(rows)


def test_names_in_docstrings_are_links(site: Path) -> None:
    shown = (site / "docs" / "reference" / "changes.html").read_text()
    update = shown.split('id="clamor_ray.update"')[1].split('id="clamor_ray.transaction"')[0]
    for name in ("HashMap", "GlobalRef.get", "errors.CommitConflict"):
        assert f'.html#clamor_ray.{name}"' in update, name


def test_the_pictures_are_drawn(site: Path) -> None:
    page = site / "docs" / "concepts.html"
    drawn = [(page.parent / each).read_text() for each in fetched(page) if each.endswith(".svg")]
    assert len(drawn) == 3
    for picture, word in zip(drawn, ("userfaultfd", "journal", "partial results"), strict=True):
        assert word in picture


@pytest.mark.parametrize("name", EXTENSIONS)
def test_examples_of_its_modules_run(extensions: dict[str, ModuleType], name: str) -> None:
    assert doctest.testmod(extensions[name]).failed == 0


def test_examples_of_the_parser_of_pages_run() -> None:
    outcome = doctest.testmod(fences)
    assert outcome.attempted
    assert not outcome.failed
