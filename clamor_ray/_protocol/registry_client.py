"""The registry's calls, typed: one method for each, named as the registry's own.

In: arguments. Out: what `actors/registry/registry.py` answers; there each call says what it does.
`tests/actors/test_registry_client.py` holds both to the same parameters.
"""

# What the carrier brings is Any: that it is what the registry says it returns, the test checks.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from clamor_ray import errors
from clamor_ray._objects.layout import Plan
from clamor_ray._protocol.messages import (
    CheckpointVariable,
    CommitRequest,
    Committed,
    Counted,
    Created,
    CreatedPieces,
    DrainResult,
    FreeAnswer,
    Latest,
    LookupAnswer,
    Pinned,
    RegionRecord,
    RegistryReport,
    ServerInfo,
    StoreState,
    VariableRecord,
)
from clamor_ray._protocol.rendezvous import Guest, Meeting, Waiting
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray._protocol.source import Source
from clamor_ray._redundancy.groups import PieceLayout

if TYPE_CHECKING:
    from clamor_ray.actors.lost_homes.lost_blocks import LostBlocks
    from clamor_ray.actors.lost_homes.task_end_log import TaskEnd


class Carrier(Protocol):
    """Calls a method of the registry by its name, and waits for the answer."""

    def __call__(self, method: str, *args: object, timeout_s: float | None = None) -> Any: ...


class RegistryClient:
    """Calls the registry. How long it waits, and what a failure means, is the carrier's.

    Args:
        carrier: gets no `timeout_s` where that is left to it.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def _ask(
        self, method: str, *args: object, timeout_s: float | None = None, packed: bool = False
    ) -> Any:
        """Each call goes through here. What every update, put or free calls goes packed."""
        if not packed:
            return self._carrier(method, *args, timeout_s=timeout_s)
        (answer,) = unpack(self._carrier("ask", pack(method, *args), timeout_s=timeout_s))
        return answer

    # -- the actor

    def ping(self, *, timeout_s: float | None = None) -> int:
        return self._ask("ping", timeout_s=timeout_s)

    def secret(self) -> bytes:
        return self._ask("secret")

    def shutdown(self, *, timeout_s: float | None = None) -> None:
        self._ask("shutdown", timeout_s=timeout_s)

    # -- page servers

    def ensure_server(self, node_id: str, *, timeout_s: float | None = None) -> ServerInfo:
        return self._ask("ensure_server", node_id, timeout_s=timeout_s)

    def begin_server(self, node_id: str, directory: str = "") -> tuple[int, bool]:
        return self._ask("begin_server", node_id, *([directory] if directory else ()))

    def store_state(self, server_id: int) -> StoreState:
        return self._ask("store_state", server_id)

    def store_damaged(self, server_id: int, regions: dict[int, str]) -> None:
        self._ask("store_damaged", server_id, regions)

    def renew_server(self, node_id: str, server_id: int, reason: str, n_old: int = 0) -> int:
        return self._ask("renew_server", node_id, server_id, reason, n_old)

    def register_server(self, info: ServerInfo) -> ServerInfo:
        return self._ask("register_server", info)

    def servers(self) -> tuple[ServerInfo, ...]:
        return self._ask("servers")

    def histogram(self, region: int, which: int, n_buckets: int) -> dict[str, list[int]]:
        return self._ask("histogram", region, which, n_buckets)

    def stats(self) -> RegistryReport:
        return self._ask("stats")

    def spans(self) -> bytes:
        return self._ask("spans")

    # -- regions

    def create_region(
        self, length_bytes: int, node_id: str, request_id: int = 0, on_disk: bool = False
    ) -> RegionRecord:
        return self._ask("create_region", length_bytes, node_id, request_id, on_disk)

    def create_counted(
        self,
        length_bytes: int,
        node_id: str,
        request_id: int,
        n_anchors: int,
        on_disk: bool,
    ) -> Created:
        return self._ask("create_counted", length_bytes, node_id, request_id, n_anchors, on_disk)

    def spread_over(self, node_id: str, for_groups: bool = False) -> int:
        return self._ask("spread_over", node_id, for_groups)

    def create_pieces(
        self,
        length_bytes: int,
        layout: PieceLayout,
        node_id: str,
        request_id: int,
        n_anchors: int,
    ) -> CreatedPieces:
        arguments = (length_bytes, layout, node_id, request_id, n_anchors)
        return self._ask("create_pieces", *arguments)

    def follow_writers(self, region: int) -> None:
        self._ask("follow_writers", region)

    def place(
        self, region: int, server_id: int, place_s: float, *, timeout_s: float | None = None
    ) -> None:
        self._ask("place", region, server_id, place_s, timeout_s=timeout_s)

    def seal(
        self, region: int, source: Source | None = None, counted: Counted | None = None
    ) -> RegionRecord:
        return self._ask("seal", region, source, counted)

    def seal_and_create(
        self,
        region: int,
        source: Source | None,
        length_bytes: int,
        node_id: str,
        request_id: int,
        counted: Counted | None = None,
    ) -> RegionRecord | None:
        created = (length_bytes, node_id, request_id)
        return self._ask("seal_and_create", region, source, *created, counted, packed=True)

    def anchors(self, n_anchors: int) -> list[Any]:
        return self._ask("anchors", n_anchors)

    def abandon(self, region: int, leased: bool = False) -> None:
        self._ask("abandon", region, leased)

    def free(self, region: int, here: int = 0) -> FreeAnswer:
        return self._ask("free", region, here, packed=True)

    def lookup(self, region: int, server_id: int = 0) -> LookupAnswer:
        return self._ask("lookup", region, server_id)

    def share(
        self,
        object_refs: list[Any],
        node_id: str,
        request_id: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> tuple[RegionRecord, Plan, Any]:
        return self._ask("share", object_refs, node_id, request_id, timeout_s=timeout_s)

    def give_up_share(self, request_id: int, *, timeout_s: float | None = None) -> None:
        self._ask("give_up_share", request_id, timeout_s=timeout_s)

    def shared_at(self, server_id: int) -> list[tuple[Pinned, list[Any]]]:
        return self._ask("shared_at", server_id)

    # -- a store

    def store(self) -> str:
        return self._ask("store")

    def opened_at(self, region: int) -> int:
        return self._ask("opened_at", region)

    # -- names

    def give_name(self, name: str, region: int, packed: bytes) -> None:
        self._ask("give_name", name, region, packed)

    def find_name(self, name: str) -> tuple[bytes, Latest, Any] | None:
        return self._ask("find_name", name)

    def drop_name(self, name: str) -> None:
        self._ask("drop_name", name)

    def variables(self) -> list[VariableRecord]:
        return self._ask("variables")

    # -- versions

    def latest(self, regions: list[int]) -> list[Latest]:
        return self._ask("latest", regions, packed=True)

    def at(self, region: int, version: int) -> Latest:
        return self._ask("at", region, version)

    def may_commit(self, request: CommitRequest) -> None:
        self._ask("may_commit", request)

    def commit(self, request: CommitRequest, *, timeout_s: float | None = None) -> Committed:
        return self._ask("commit", request, timeout_s=timeout_s, packed=True)

    def bring(self, request: CommitRequest, *, timeout_s: float | None = None) -> int:
        return self._ask("bring", request, timeout_s=timeout_s)

    def outcome(self, commit_id: int, by_writer: bool = False) -> dict[int, int]:
        return self._ask("outcome", commit_id, by_writer)

    def drop_keys(self, tokens: list[bytes]) -> int:
        return self._ask("drop_keys", tokens)

    def changes(self, region: int, from_version: int, to_version: int) -> bytes | None:
        return self._ask("changes", region, from_version, to_version)

    # -- checkpoints

    def begin_checkpoint(self, number: int) -> tuple[CheckpointVariable, ...]:
        return self._ask("begin_checkpoint", number)

    def keep_checkpoint(self, number: int, keep_s: float) -> None:
        self._ask("keep_checkpoint", number, keep_s)

    def data_blocks(self, region: int, version: int) -> bytes:
        return self._ask("data_blocks", region, version)

    # -- homes that are lost

    def why_lost(self, region: int) -> errors.HomeLostError | None:
        return self._ask("why_lost", region)

    def lost_blocks(self, region: int) -> LostBlocks | None:
        return self._ask("lost_blocks", region)

    def end_of_task(self, task: str, wait_s: float) -> TaskEnd | None:
        return self._ask("end_of_task", task, wait_s)

    # -- homes that move

    def drain(self, node_id: str, drain_s: float, *, timeout_s: float | None = None) -> DrainResult:
        return self._ask("drain", node_id, drain_s, timeout_s=timeout_s)

    def cancel_drain(self, node_id: str) -> bool:
        return self._ask("cancel_drain", node_id)

    def make_room(self, node_id: str, needed_bytes: int) -> bool:
        return self._ask("make_room", node_id, needed_bytes)

    # -- what tasks read

    def note_reads(self, packed: bytes) -> None:
        self._ask("note_reads", packed)

    def note_attempt(self, packed: bytes) -> None:
        self._ask("note_attempt", packed)

    def floors_at(self, server_id: int) -> dict[int, int]:
        return self._ask("floors_at", server_id)

    def check_output(self, packed: bytes) -> bytes | None:
        return self._ask("check_output", packed)

    def reads_of(self, region: int) -> list[bytes]:
        return self._ask("reads_of", region)

    def attempts_of(self, run_id: int) -> list[bytes]:
        return self._ask("attempts_of", run_id)

    # -- groups

    def meet(
        self, group: str, size: int, guest: Guest, *, timeout_s: float | None = None
    ) -> Meeting | Waiting:
        return self._ask("meet", group, size, guest, timeout_s=timeout_s)
