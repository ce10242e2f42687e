"""Whether a write conflicts with what was committed since it began. Pure."""

from __future__ import annotations

from collections.abc import Callable

from pyroaring import BitMap

from clamor_ray._labels import capital, label
from clamor_ray._protocol.messages import INLINE_BASE, Write
from clamor_ray.actors.commits.committed import CommittedVariable
from clamor_ray.errors import CommitConflict


def check_conflict(
    variable: CommittedVariable,
    write: Write,
    changed: BitMap,
    label: Callable[[int], str] = label,
) -> None:
    """First committer wins, block by block: refuses a write beside which another was faster.

    Args:
        variable: What has been committed to it.
        write: What a transaction wants to make the next version.
        changed: The blocks that it changed.
        label: The variable for people.

    Raises:
        CommitConflict: A version after the one that it read changed one of its blocks, or the
            layout, or an inline variable; or what changed since is known no longer.
    """
    if write.base_version == variable.newest:
        return
    if write.region >= INLINE_BASE:
        raise CommitConflict(
            f"{capital(label(write.region))} was changed to version {variable.newest} after this "
            f"transaction had read version {write.base_version}.",
            write.region,
            write.base_version,
            variable.newest,
        )
    base = write.base_version
    if base < variable.horizon:
        raise CommitConflict(
            f"The transaction read version {base} of {label(variable.region)}; what changed "
            f"before version {variable.horizon} is known no longer.",
            variable.region,
            base,
            variable.newest,
            hint="It ran beside too many commits. Run it again on the newest version.",
        )
    for index in range(variable.after(base), len(variable.entries)):
        if changed.intersect(variable.blocks[index]):
            both = changed & variable.blocks[index]
            first = both.min()
            n_blocks = 1
            while first + n_blocks in both:
                n_blocks += 1
            version = variable.entries[index].version
            said = label(variable.region)
            what = f"Blocks {first} to {first + n_blocks - 1} of {said} were"
            if n_blocks == 1:
                what = f"Block {first} of {said} was"
            raise CommitConflict(
                f"{what} changed by version {version} after this transaction had read version "
                f"{base}.",
                variable.region,
                base,
                version,
                first,
                n_blocks,
            )
    newest_plan = variable.plan_versions[-1] if variable.plan_versions else 0
    if write.plan is not None and newest_plan > base:
        raise CommitConflict(
            f"The layout of {label(variable.region)} was changed by version {newest_plan} "
            f"after this transaction had read version {base}.",
            variable.region,
            base,
            newest_plan,
        )
