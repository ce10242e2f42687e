"""What a move asks of page servers (``moves.py``). ``ray_homes`` calls them by Ray."""

from __future__ import annotations

from typing import Protocol

from clamor_ray._protocol.messages import RegionRecord


class MoveServers(Protocol):
    """The page servers, by id. What an attempt's call raises ends the attempt; nobody knows then
    what of it was done."""

    def why_lost(self, server_id: int) -> str | None:
        """The reason, for one that will not come back."""

    async def examine(self, server_id: int) -> None:
        """Finds out whether a server that does not answer is lost."""

    async def home_blocks(self, giver: int, region: int, version: int) -> bytes:
        """The blocks that hold data at a version: a serialized BitMap."""

    async def stage_home(
        self, giver: int, region: int, version: int, commit_id: int, blocks: bytes
    ) -> int:
        """It makes a layer of these blocks; the bytes of that."""

    async def stage_records(
        self, giver: int, region: int, first_version: int, commit_ids: list[int], most_bytes: int
    ) -> list[int]:
        """It makes layers of records of the history; the bytes of each of the first of them. 0:
        that one, and all before it, are of no use."""

    async def drop_layers(self, giver: int, region: int, commit_ids: list[int]) -> None:
        """It drops what it has staged."""

    async def oldest_version(self, giver: int, region: int) -> int:
        """The oldest version whose blocks it keeps."""

    async def retain(self, taker: int, floors: dict[int, int | None]) -> None:
        """It is told which old versions go last."""

    async def take_begin(
        self, taker: int, record: RegionRecord, attempt: int, n_bytes: int, lost: bytes
    ) -> None:
        """It begins to get ready to be the home.

        Raises:
            OutOfMemoryError, DescriptorLimitError, NoSpaceError: It has no room.
            WaitTimeoutError: It was the home a moment ago: ask again.
        """

    async def take(
        self, taker: int, region: int, attempt: int, giver: int, layers: list[tuple[int, int]]
    ) -> None:
        """It fetches layers, (commit id, bytes), and takes the blocks in them."""

    async def take_records(
        self, taker: int, region: int, attempt: int, giver: int, layers: list[tuple[int, int]]
    ) -> None:
        """The same of records, in the order of their versions."""

    async def take_seal(self, taker: int, region: int, attempt: int, version: int) -> None:
        """All of it is there, at this version."""

    async def take_drop(self, taker: int, region: int, attempt: int) -> None:
        """The attempt is given up."""

    async def rehome(self, server_id: int, record: RegionRecord) -> None:
        """It learns of the new home.

        Raises:
            HomeLostError: It is that, and has nothing of the region; or it is lost.
        """
