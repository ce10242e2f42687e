"""`clamor fsck`: checks a persistent store that no session has open, without Ray.

docs/fsck.md says what it does. It needs click and rich (the extra `cli`).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from clamor_ray import errors
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import RegionRecord
from clamor_ray._protocol.names import server_id_of
from clamor_ray._store.directories import lock_directory, what_is_here
from clamor_ray._store.fsck import Check, Report, Stored
from clamor_ray._store.layout import JOURNAL, REGISTRY, node_name
from clamor_ray.actors.commits.journal import Journal, Saved
from clamor_ray.cli.output import FORMATS, NOT_CHECKED, WELL, WRONG, exits, say_json

_MOST_LIVES: Final = 64


def read_journal(directory: Path) -> Saved:
    """What the registry has written down. Its files are read only: a copy of them is opened.

    Raises:
        StoreDamagedError: There is none.
        JournalFullError: It cannot be read; the text says why.
    """
    if not (directory / JOURNAL).exists():
        raise errors.StoreDamagedError(
            f"{directory / JOURNAL} is missing.", file=str(directory / JOURNAL)
        )
    with tempfile.TemporaryDirectory() as copy:
        for name in (JOURNAL, f"{JOURNAL}-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(directory / name, Path(copy, name))
        journal = Journal(Path(copy))
        try:
            return journal.load()
        finally:
            journal.close()


def stored_of(saved: Saved, directory_ids: tuple[str, ...]) -> list[Stored]:
    """The regions that have homes.

    Args:
        saved: what the registry has written down.
        directory_ids: of the page servers' directories that are here.
    """
    homes = {
        server_id_of(each, life): each for each in directory_ids for life in range(_MOST_LIVES)
    }
    homes.update({server_id: each for server_id, each, *_ in getattr(saved, "directories", ())})
    commits: dict[int, dict[int, int]] = {}
    for entry in saved.entries:
        commits.setdefault(entry.region, {})[entry.commit_id] = entry.version
    names = {named.region: named.name for named in saved.names}
    records = {each.record.region: each.record for each in saved.regions if each.state == "ready"}
    found: list[Stored] = []
    for record in records.values():
        if record.n_pieces or not record.homes:
            continue
        of_region = commits.get(record.region, {})
        variable = record.piece_of or record.region
        label = f"variable {variable}" + (f" ({names[variable]!r})" if variable in names else "")
        if record.piece_of:
            label += f", piece {record.region - variable - 1}"
        found.append(
            Stored(
                region=record.region,
                label=label,
                newest=max(of_region.values(), default=0),
                commits=of_region,
                directory=homes.get(record.homes[0], ""),
                others=_others(record, records),
            )
        )
    return found


def _others(record: RegionRecord, records: dict[int, RegionRecord]) -> tuple[int, ...]:
    variable = records.get(record.piece_of)
    if variable is None or not record.has_repair:
        return ()
    others = variable.groups.others(record.region - variable.region - 1)
    regions = tuple(variable.region + 1 + index for index in others)
    return regions[:1] if variable.groups.are_copies else regions


def check(
    root: Path, *, repairs: bool = False, said: Callable[[str], None] = lambda _: None
) -> Report:
    """Checks a session's part of a store.

    Args:
        root: the directory `<store>/<session>`.
        repairs: mends what can be mended.
        said: is told each step.

    Raises:
        StoreInUseError: A session has it open.
        StoreIncompleteError: The registry's directory is not here.
        StoreError, JournalFullError: It cannot be read.
    """
    here = what_is_here(root)
    if here.registry is None:
        why = "; ".join(here.trouble) or "it is not here"
        raise errors.StoreIncompleteError(f"{root / REGISTRY}: {why}.")
    with contextlib.ExitStack() as locks:
        locks.callback(lock_directory(root / REGISTRY).close)
        mine = [each.directory for each in here.nodes if each.store == here.registry.store]
        for each in mine:
            locks.callback(lock_directory(root / node_name(each)).close)
        stored = stored_of(read_journal(root / REGISTRY), tuple(mine))
        directories = {each: root / node_name(each) for each in mine}
        checking = Check(directories, stored, repairs=repairs, said=said)
        checking.report.notes += here.trouble
        return checking.run()


@click.command("fsck", short_help="Checks a persistent store that no session has open.")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--repair", is_flag=True, help="Mend what can be mended.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@exits
def command(directory: Path, repair: bool, form: str) -> int:
    """Checks DIRECTORY, the part of a store that a session has: STORE/SESSION.

    Exit status: 0, all is well; 1, something is damaged or missing; 2, it could not be checked.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        if form == "json":
            report = check(directory.absolute(), repairs=repair)
        else:
            with console.status("reading") as status:
                report = check(directory.absolute(), repairs=repair, said=status.update)
    except errors.ClamorError as error:
        if form == "json":
            say_json({"directory": str(directory), "error": f"{cause_of(error)}."})
        else:
            click.echo(f"Not checked: {cause_of(error)}.", err=True)
        return NOT_CHECKED
    if form == "json":
        say_json(
            {
                "directory": str(directory),
                "error": "",
                "is_well": report.is_well,
                "regions": report.n_regions,
                "layers": report.n_layers,
                "bytes": report.n_bytes,
                "notes": list(report.notes),
                "problems": [
                    {"text": each.text, "is_mended": each.is_mended} for each in report.problems
                ],
            }
        )
        return WELL if report.is_well else WRONG
    for note in report.notes:
        console.print(f"Note: {note}.")
    for problem in report.problems:
        console.print(f"{'Mended' if problem.is_mended else 'Wrong'}: {problem.text}")
    console.print(
        f"{report.n_regions} regions, {report.n_layers} layers, {report.n_bytes:,} bytes: "
        f"{'all is well' if report.is_well else 'NOT well'}."
    )
    return WELL if report.is_well else WRONG


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of `clamor-fsck`, which is `clamor fsck` by itself. Ends the process.

    Args:
        arguments: of the command line; None: this process's.
    """
    command.main(None if arguments is None else list(arguments), "clamor-fsck")


if __name__ == "__main__":
    main()
