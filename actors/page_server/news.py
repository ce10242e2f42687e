"""What processes of this node watch, and have staged.

The registry is asked once for all that watch the same variable, and each is told.

    process  -> "watch REGION VERSION\\n"   tell me of versions after this one
    process  -> "leave REGION\\n"           no more
    process <-  "at REGION VERSION\\n"      the newest version; those between are not told
    process <-  "freed REGION\\n"           the last line about it
    process  -> "keep REGION COMMIT\\n"     is this layer on the disk, for its home, which is here?
    process <-  "kept REGION COMMIT PROCESS\\n"  it is, at that process; or it is 0
    process  -> "drop REGION COMMIT\\n"     the registry has refused the commit

A process says after each connect what it knows, and so does this server to the registry with each
question. So a restart of either loses nothing. Who does not read is disconnected, connects again,
and hears of the newest version.

Thread safety: everything belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from clamor_ray._protocol.messages import NEWS_FREED

logger = logging.getLogger("clamor_ray.page_server")

WAIT_S: Final = 30.0  # of one question
ANSWER_S: Final = 30.0  # what the answer may take beyond that
LOOK_S: Final = 1.0  # for the socket's file, which somebody may remove
MARK_S: Final = 3600.0  # cleaners remove what nobody has used for days
GATHER_S: Final = 0.005  # what a crowd begins to watch is asked in one question
MOST_UNSENT_BYTES: Final = 1 << 16
LINE_BYTES: Final = 64
PAUSES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)

Newer = Callable[[dict[int, int], float], Awaitable[dict[int, int]]]
Keep = Callable[[int, int], Awaitable[int]]
Drop = Callable[[int, int], Coroutine[Any, Any, None]]


class NewsServer:
    """See the file's head.

    Args:
        newer: Asks the registry: ``News.newer``, of this server.
        spawn: Runs a coroutine in the background, until the server closes.
        keep, drop: Of a region and a commit; see the file's head.
    """

    def __init__(
        self,
        newer: Newer,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        keep: Keep | None = None,
        drop: Drop | None = None,
    ) -> None:
        self._newer = newer
        self._spawn = spawn
        self._keep = keep
        self._drop = drop
        self._watched: dict[asyncio.StreamWriter, dict[int, int]] = {}
        self._more = asyncio.Event()  # something is watched that was not asked for
        self._listener: asyncio.Server | None = None
        self._path = ""
        self._inode = 0
        self._is_closed = False

    async def start(self, path: str) -> None:
        """Listens at a path, in a directory that only this user can enter."""
        self._path = path
        await self._listen()
        self._spawn(self._ask_for_ever())
        self._spawn(self._look_for_ever())

    @property
    def n_watching(self) -> int:
        """Connections that watch something. Any thread."""
        return sum(map(bool, list(self._watched.values())))

    def close(self) -> None:
        """Disconnects all, for good."""
        self._is_closed = True
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in list(self._watched):
            writer.close()
        if self._has_file():
            os.unlink(self._path)

    async def _listen(self) -> None:
        if self._has_closed():  # what looks after the file may not have ended yet
            return
        if self._listener is not None:
            self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # a killed server's: the engine has this node's socket now
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self._path)
            self._inode = os.lstat(self._path).st_ino
            self._listener = await asyncio.start_unix_server(
                self._serve, sock=listener, limit=LINE_BYTES
            )
        except BaseException:
            listener.close()
            raise
        if self._has_closed():  # meanwhile
            self.close()

    def _has_closed(self) -> bool:
        return self._is_closed

    def _has_file(self) -> bool:
        try:
            return self._inode != 0 and os.lstat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if not self._has_file():
                    await self._listen()
                elif time.time() - os.lstat(self._path).st_mtime > MARK_S:
                    os.utime(self._path)
            except FileNotFoundError:
                pass  # the directory is gone, too: the engine makes it again
            except OSError as failure:
                logger.error("%s cannot be listened at; again soon: %r", self._path, failure)

    # -- processes

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        known = self._watched[writer] = {}
        try:
            while line := await reader.readline():
                word, *numbers = line.decode("ascii").split()
                if word == "watch":
                    region, version = map(int, numbers)
                    known[region] = version
                    self._more.set()
                elif word == "leave":
                    (region,) = map(int, numbers)
                    known.pop(region, None)
                elif word == "keep":
                    region, commit_id = map(int, numbers)
                    self._spawn(self._keep_and_say(writer, region, commit_id))
                elif word == "drop":
                    region, commit_id = map(int, numbers)
                    if self._drop is not None:
                        self._spawn(self._drop(region, commit_id))
                else:
                    raise ValueError(word)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except ValueError as failure:  # also a line that is too long, and one that is no ASCII
            logger.error("a process of this node is disconnected: it sent %r", failure)
        finally:
            self._watched.pop(writer, None)
            writer.close()

    async def _keep_and_say(
        self, writer: asyncio.StreamWriter, region: int, commit_id: int
    ) -> None:
        process = await self._keep(region, commit_id) if self._keep is not None else 0
        if not writer.is_closing():
            writer.write(f"kept {region} {commit_id} {process}\n".encode("ascii"))

    def _tell(self, news: dict[int, int]) -> None:
        for writer, known in list(self._watched.items()):
            lines = []
            for region in known.keys() & news.keys():
                if (version := news[region]) == NEWS_FREED:
                    del known[region]
                    lines.append(f"freed {region}\n")
                elif version > known[region]:
                    known[region] = version
                    lines.append(f"at {region} {version}\n")
            if lines and writer.transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
                writer.transport.abort()  # it does not read
            elif lines:
                writer.write("".join(lines).encode("ascii"))

    # -- the registry

    def _all_known(self) -> dict[int, int]:
        """The oldest version that is known of each variable that is watched."""
        least: dict[int, int] = {}
        for known in self._watched.values():
            for region, version in known.items():
                least[region] = min(version, least.get(region, version))
        return least

    async def _ask_for_ever(self) -> None:
        n_failed = 0
        while True:
            if not (known := self._all_known()):
                await self._more.wait()  # nobody watches; `close` cancels this
                await asyncio.sleep(GATHER_S)
                self._more.clear()
                continue
            self._more.clear()
            try:
                self._tell(await self._ask(known))
                n_failed = 0
            except Exception as failure:  # any: it is asked again until this server ends
                logger.warning("cannot learn of newer versions: %r", failure)
                await asyncio.sleep(PAUSES_S[min(n_failed, len(PAUSES_S) - 1)])
                n_failed += 1

    async def _ask(self, known: dict[int, int]) -> dict[int, int]:
        """What is newer; {} where more is watched than was asked for.

        Raises:
            What the registry raises, or ``asyncio.TimeoutError``: ask again.
        """
        asked = asyncio.ensure_future(self._newer(known, WAIT_S))
        more = asyncio.ensure_future(self._more.wait())
        try:
            await asyncio.wait(
                {asked, more}, timeout=WAIT_S + ANSWER_S, return_when=asyncio.FIRST_COMPLETED
            )
            if asked.done():
                return asked.result()
            if more.done():
                await asyncio.sleep(GATHER_S)
                return {}
            raise asyncio.TimeoutError
        finally:
            asked.cancel()
            more.cancel()
