"""The part of a store's registry that knows directories, around page servers that are made up. No
Ray."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyroaring import BitMap

from clamor_ray._protocol.messages import CommitRequest, ServerConfig, ServerInfo, Write
from clamor_ray._redundancy.groups import PieceLayout, Shape
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.lost_homes.rebuilds import Rebuilds
from clamor_ray.actors.lost_homes.unheard_homes import UnheardHomes
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.late_writes import LateWrites
from clamor_ray.actors.registry.liveness import Liveness
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore
from clamor_ray.actors.registry.servers import PageServers
from clamor_ray.actors.store.stored_homes import StoredHomes
from tests.support.rebuild_rig import N_BLOCKS, Servers

NODES = tuple(f"{n:056x}" for n in range(1, 5))
PIECE_BYTES = 2 << 20
DIRECTORIES = tuple(f"{n:032x}" for n in range(1, 5))


class StoreWorld:
    """A registry whose journal is in ``directory``; another one there is its next process, or the
    next opening.

    Args:
        directory: Of the journal.
        is_new_opening: Those that registered before are not known any more.
    """

    def __init__(self, directory: Path, is_new_opening: bool = False) -> None:
        self.journal = Journal(directory)
        if is_new_opening:
            with self.journal._transaction() as db:
                db.execute("DELETE FROM servers WHERE lost IS NULL")
        self.core, self.log, self.losses = RegistryCore(), CommitLog(), Losses()
        self.background = BackgroundTasks(logging.getLogger("test"))
        late = self._late = LateWrites(self.core, self.journal, self.background)
        self.handles: dict[int, Any] = {}
        self.liveness = Liveness(self.core, self.log, self.handles, late)
        self.stored = StoredHomes(*(self.core, self.log, self.journal, self.losses, UnheardHomes()))
        self.calls = Servers(self.core)
        self.rebuilds = Rebuilds(
            *(self.core, self.log, self.journal, self.calls),
            losses=self.losses,
            unheard=self.stored.unheard,
            stored=self.stored,
        )
        nothing = SimpleNamespace(carry_out=lambda orders: None, server_here=lambda server_id: None)
        self.servers = PageServers(
            config=ServerConfig("scope", "0.1.0", store="/data/clamor/features"),
            core=self.core,
            journal=self.journal,
            reserve=SimpleNamespace(),  # type: ignore[arg-type]
            handles=self.handles,
            late=late,
            liveness=self.liveness,
            ends=nothing,  # type: ignore[arg-type]
            here=self.stored.server_here,
            background=self.background,
            returned=self.stored.returned,
        )
        self.liveness.when_lost.append(lambda loss: self.rebuilds.server_lost(loss.server_id))
        saved = self.journal.load()
        self.core.restore(
            saved.next_region,
            [(each.record, RegionState(each.state), each.request_id) for each in saved.regions],
            saved.servers,
            saved.lost,
            0.0,
            directories=saved.directories,
            awaits_homes=True,
        )
        for lost in saved.lost:
            self.log.server_lost(lost.server_id)
        for region in saved.regions:
            if region.record.n_pieces:
                self.log.open_pieces(
                    region.record.region, region.record.pieces, region.record.groups
                )
            else:
                self.log.open(region.record.region, region.record.homes)
        self.log.restore(saved.entries, saved.plans, saved.acknowledged, saved.outcomes, ())
        self.losses.update(dict(saved.lacking))

    def begin(self, node: int, directory: int) -> tuple[int, bool]:
        """A page server of this node has locked this directory."""
        return self.servers.begin(NODES[node], DIRECTORIES[directory])

    def register(self, node: int, directory: int) -> int:
        """It begins, and registers; its id."""
        server_id, _ = self.begin(node, directory)
        self.handles.setdefault(server_id, SimpleNamespace())
        self.servers.register(info_of(server_id, node, directory))
        return server_id

    def lose(self, server_id: int) -> None:
        self.liveness.lose(server_id, "its node is dead", is_there=True)
        self._late.save_changed()

    def add(self, home: int) -> int:
        """A region that is sealed."""
        record = self.core.create_region(N_BLOCKS * 4096, home)
        self.journal.create_region(record, 0, record.region + 1)
        self._seal(record.region)
        return record.region

    def add_group(self, homes: list[int]) -> list[int]:
        """Pieces of a variable in one group, of which one is parity, each at its home."""
        layout = PieceLayout(PIECE_BYTES, Shape(len(homes) - 1, 1))
        n_bytes = (len(homes) - 1) * PIECE_BYTES
        whole = self.core.create_pieces(n_bytes, layout, homes[0])
        pieces = list(whole.pieces)
        records = [self.core.record_of(piece) for piece in pieces]
        self.journal.create_region(whole, 0, pieces[-1] + 1, records)  # type: ignore[arg-type]
        for piece, home in zip(pieces, homes, strict=True):
            self._seal(piece)
            self.stored.give([piece], home)
        self.core.seal(whole.region)
        self.journal.seal(whole.region)
        self.log.open_pieces(whole.region, whole.pieces, whole.groups)
        return pieces

    def _seal(self, region: int) -> None:
        record = self.core.seal(region)
        self.journal.seal(region)
        self.log.open(region, record.homes, record.length_bytes)

    def commit(self, region: int, commit_id: int) -> None:
        """One block."""
        base = self.log.newest(region)
        blocks = bytes(BitMap([4]).serialize())
        home = self.core.homes_of(region)[0]
        request = CommitRequest(commit_id, (Write(region, base, 1, blocks, 8192, home),))
        entries = self.log.prepare(request)
        self.journal.commit(commit_id, entries, 0.0)
        self.log.apply(commit_id, entries, 0.0)

    def close(self) -> None:
        """As by SIGKILL."""
        self.background.close()
        self.journal.close()


def info_of(server_id: int, node: int, directory: int) -> ServerInfo:
    return ServerInfo(
        *(server_id, NODES[node], "127.0.0.1", 1, "name", "0.1.0"),
        directory=DIRECTORIES[directory],
    )
