"""Which layers of a region make a newer version of an older one, and the newest of each block.

Nothing here reads or writes blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.checksums import Sums
from clamor_ray._store.layer_files import Indices, Layer, Runs
from clamor_ray._store.layout import LAYERS, LayerName, layer_path

_MOST_LAYERS: Final = 200
_MOST_BLOCKS: Final = 1 << 20


class LayerVersions:
    """The layers of a region, by the versions that they make.

    Args:
        directory: the page server's.
        region: whose they are.
        names: of its layers' files.
        committed: versions of commits, for names that do not say them.
    """

    def __init__(
        self,
        directory: Path,
        region: int,
        names: Iterable[LayerName],
        committed: Mapping[int, int] | None = None,
    ) -> None:
        self.directory = directory
        self.region = region
        self._files: dict[int, list[tuple[int, LayerName]]] = {}
        self.merged: list[LayerName] = []
        for name in names:
            version = name.version or (committed or {}).get(name.commit_id, 0)
            if not version:
                continue
            if name.oldest not in (0, version):
                self.merged.append(name)
            else:
                self._files.setdefault(version, []).append((version, name))

    def open(self, above: int, up_to: int) -> Iterator[Layer]:
        """Opens those that make one version of the other, in order; each is its caller's to close.

        Args:
            above: the version that there is.
            up_to: the version that is to be made.

        Raises:
            StoreDamagedError: One is missing, torn or damaged, and no other file has it.
            StoreFormatError, StoreError.
        """
        version = above + 1
        while version <= up_to:
            layer, last = self._open_one(version, up_to)
            yield layer
            version = last + 1

    def _open_one(self, version: int, up_to: int) -> tuple[Layer, int]:
        wide = [name for name in self.merged if name.oldest <= version <= name.version <= up_to]
        found = [(name.version, name) for name in sorted(wide, key=_last, reverse=True)]
        # A name with a version was given later: it may be of a delta that was made whole.
        found += sorted(self._files.get(version, ()), key=_has_no_version)
        failure: errors.StoreDamagedError | None = None
        for last, name in found:
            try:
                layer = Layer.open(layer_path(self.directory, name))
            except errors.StoreDamagedError as error:
                failure = error
                continue
            layer.version = last
            return layer, last
        if failure is not None:
            raise failure
        raise errors.StoreDamagedError(
            f"Version {version} of variable {self.region} is missing: it was committed, and no "
            f"layer in {self.directory / LAYERS} has it.",
            region=self.region,
            version=version,
            file=str(layer_path(self.directory, LayerName(self.region, 0, version)).parent),
        )


def _last(name: LayerName) -> int:
    return name.version


def _has_no_version(each: tuple[int, LayerName]) -> bool:
    return not each[1].version


def batches(layers: Iterable[Layer], single: int = 0) -> Iterator[list[Layer]]:
    """Some layers at a time, in their order; they are closed after their turn.

    Args:
        layers: opened one after the other.
        single: flags of layers that come alone, when what was before them is done.
    """
    batch: list[Layer] = []
    n_blocks = 0
    try:
        for layer in layers:
            alone = bool(layer.flags & single)
            is_full = len(batch) == _MOST_LAYERS or n_blocks + layer.head.n_blocks > _MOST_BLOCKS
            if batch and (alone or is_full):
                yield batch
                close_all(batch)
                batch, n_blocks = [], 0
            batch.append(layer)
            n_blocks += layer.head.n_blocks
            if alone:
                yield batch
                close_all(batch)
                batch, n_blocks = [], 0
        if batch:
            yield batch
    finally:
        close_all(batch)


def close_all(layers: Iterable[Layer]) -> None:
    for layer in layers:
        layer.close()


class Newest(NamedTuple):
    """The blocks that layers have, ascending, each once.

    Args:
        blocks: their numbers.
        layer: index of the newest layer that has it.
        position: where in that layer.
        first: index of the oldest layer that has it.
    """

    blocks: Runs
    layer: Indices
    position: Indices
    first: Indices

    def sums(self, layers: Sequence[Layer]) -> Sums:
        """Of the newest of each."""
        out = np.empty(len(self.blocks), np.uint32)
        for index, mine in self.by_layer():
            out[mine] = layers[index].sums[self.position[mine]]
        return out

    def by_layer(self) -> Iterator[tuple[int, Indices]]:
        """Indices of the blocks whose newest is in a layer, for each layer that has such."""
        order = np.argsort(self.layer, kind="stable")
        cuts = np.flatnonzero(np.diff(self.layer[order])) + 1
        for mine in np.split(order, cuts) if len(order) else ():
            yield int(self.layer[mine[0]]), mine


def newest_of(layers: Sequence[Layer]) -> Newest:
    """
    Args:
        layers: in the order of their versions.
    """
    counts = [layer.head.n_blocks for layer in layers]
    blocks = np.concatenate([layer.blocks for layer in layers])
    which = np.repeat(np.arange(len(layers)), counts)
    position = np.concatenate([np.arange(n) for n in counts])
    order = np.argsort(blocks, kind="stable")
    blocks = blocks[order]
    if not len(order):
        return Newest(blocks, which, position, which)
    differs = blocks[1:] != blocks[:-1]
    last, first = order[np.append(differs, True)], order[np.append(True, differs)]
    return Newest(blocks[np.append(differs, True)], which[last], position[last], which[first])


def pieces_of(*ascending: npt.NDArray[np.integer]) -> Iterator[tuple[int, int]]:
    """Where all of these go up by one, from index to index: what one read or write can have.

    Example:
        >>> list(pieces_of(np.array([3, 4, 5, 9]), np.array([0, 1, 7, 8])))
        [(0, 2), (2, 3), (3, 4)]
    """
    n = len(ascending[0])
    if not n:
        return
    is_cut = np.zeros(n - 1, bool)
    for each in ascending:
        is_cut |= np.diff(each.astype(np.int64)) != 1
    bounds = [0, *(np.flatnonzero(is_cut) + 1).tolist(), n]
    yield from itertools.pairwise(bounds)
