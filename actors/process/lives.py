"""Which page server is where: the ids of those that were at a place, and of the one that is. Pure.

A **place** is what a page server holds on to when it is started again: its node, or, in a session
with a store, the directory that it has locked. A page server that is lost never comes back under
its own id, but its place does, under another one: each of these is a **life** of the place, and its
id follows from both.

A node has one page server at a time. In a session with a store it is not known which place that
has, before it says so: until then the node itself stands for it, with an id that nobody registers
under.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator

from clamor_ray._protocol.messages import ServerInfo
from clamor_ray._protocol.names import server_id_of


class Lives:
    """See the file's head.

    Args:
        lost: Ids of page servers that are lost, kept up to date by who has made it.

    Example:
        >>> lost = set()
        >>> lives = Lives(lost)
        >>> first = lives.at("a node")
        >>> lives.take("a node", "12ab")
        >>> home = lives.at("a node")
        >>> home == server_id_of("12ab") != first, lives.directory_of(home)
        (True, '12ab')
        >>> lost.add(home)
        >>> lives.at("a node") == server_id_of("12ab", 1)
        True
        >>> lives.now(first) == lives.at("a node")  # for who knows the node only
        True
    """

    def __init__(self, lost: Collection[int]) -> None:
        self._lost = lost
        self._nodes: dict[int, str] = {}  # by the id that stands for the node itself
        self._place_of: dict[str, str] = {}  # of nodes with a directory
        self._directories: dict[int, str] = {}  # of each page server that ever had one

    def note(self, info: ServerInfo) -> None:
        """It is there."""
        self._nodes[server_id_of(info.node_id)] = info.node_id
        if info.directory:
            self.take(info.node_id, info.directory)
            self._directories[info.server_id] = info.directory

    def take(self, node_id: str, directory: str) -> None:
        """The node's page server has locked this directory: nobody else has it."""
        self._nodes[server_id_of(node_id)] = node_id
        for other in [node for node, place in self._place_of.items() if place == directory]:
            del self._place_of[other]
        self._place_of[node_id] = directory
        self._directories[self.at(node_id)] = directory

    def know(self, server_id: int, directory: str, node_id: str) -> None:
        """What was written down of one that may be lost: where its directory was seen last."""
        self._directories[server_id] = directory
        if node_id and directory not in self._place_of.values():
            self._place_of.setdefault(node_id, directory)

    def at(self, node_id: str) -> int:
        """The id of the node's page server now."""
        self._nodes[server_id_of(node_id)] = node_id
        return self._now(self._place_of.get(node_id, node_id))

    def now(self, first_id: int) -> int:
        """The same, for who knows the id that stands for the node only."""
        node_id = self._nodes.get(first_id)
        return first_id if node_id is None else self.at(node_id)

    def has_lost_one(self, node_id: str) -> bool:
        """Whether a page server that was at the node's place is lost, or has left."""
        return server_id_of(self._place_of.get(node_id, node_id)) in self._lost

    def directory_at(self, node_id: str) -> str:
        """What the node's page server has locked, as far as is known; "" where it has none."""
        return self._place_of.get(node_id, "")

    def directory_of(self, server_id: int) -> str:
        """The directory of a page server that is or was; "": it has none, or never was."""
        return self._directories.get(server_id, "")

    def of_directory(self, directory: str) -> set[int]:
        """All lives of a directory until now, and the one that is or will be. Also one of which the
        loss of those before it was not written down."""
        known = {each for each, where in self._directories.items() if where == directory}
        return {*known, *self._until_now(directory), self._now(directory)}

    def heirs(self, homes: Iterable[int], here: Collection[int]) -> set[int]:
        """Servers that have joined again in place of lost homes: who had asked for a region before
        may have gone on there.

        Args:
            homes: Of the region.
            here: Servers that are registered.
        """
        lost = {home for home in homes if home in self._lost}
        heirs = set()
        for place in (*self._nodes.values(), *self._place_of.values()) if lost else ():
            now = self._now(place)
            if now in here and not lost.isdisjoint(self._until_now(place)):
                heirs.add(now)
        return heirs

    def _until_now(self, place: str) -> list[int]:
        return list(itertools.takewhile(self._lost.__contains__, _ids(place)))

    def _now(self, place: str) -> int:
        return next(each for each in _ids(place) if each not in self._lost)


def _ids(place: str) -> Iterator[int]:
    return (server_id_of(place, life) for life in itertools.count())
