"""A discrete-event simulation of pages that every node wants. No Ray, no clock, no sockets.

Who answers a miss is decided by the engine's own function, ``pc_select_peer``, called through
cffi; around it stands the protocol of the engine as messages and queues:

* A reader looks up batches. What of a batch its node lacks, and nobody on the node has asked for,
  is asked for in requests of up to ``request_pieces`` to the home, ``window`` of them at once.
* A home takes the next request of a connection when less than ``connection_bytes`` are queued on
  it, and decides for each piece: who is it to come from? ``home_bytes`` is what it has queued, a
  holder's load the larger of what the home sent to it and has not heard of, and of what the holder
  last said.
* A node is a holder of a piece from when the home queues the piece for it, or sends it to another
  for it: who is sent there before it has the piece waits there. Until it says that it got the piece
  from that other it counts as if it had ``COMING_BYTES`` more to send. At most six are remembered
  for each piece; then a random one goes.
* A detour costs a round trip more, a peer that has nothing another, and then the home must answer.
* Every node has a link out, shared by its connections in turn, piece by piece, and a link in. A
  piece has arrived when both have carried it: store and forward. Messages without blocks take the
  latency and no room.

What is left out: processors, acknowledgements, and that a full link into a node slows the
connections of its senders down (here it delays what they send). A piece is one or more
neighbouring blocks that all travel alike: coarser pieces are how 10,000 nodes become few events.
Each is chosen for by itself; the engine chooses once for up to 64 neighbours of one server.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import importlib
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 4096
HOLDERS = 6  # as these two are the engine's: directory.c
COMING_BYTES = 1 << 20
POLICIES = ("off", "random", "p2c")


@functools.cache
def chooser(policy: str) -> Callable[[int, list[int], int], int]:
    """The engine's choice for a policy: (bytes that the home has to send, those of the holders,
    64 random bits) to -1, the home, or an index of the holders."""
    module: Any = importlib.import_module("clamor_ray._pagecache")
    code = getattr(module.lib, f"PC_REPLICATION_{policy.upper()}")
    choose, loads = module.lib.pc_select_peer, module.ffi.new("uint64_t[]", HOLDERS)

    def choice(home_bytes: int, holder_bytes: list[int], bits: int) -> int:
        n = len(holder_bytes)
        loads[0:n] = holder_bytes
        return int(choose(code, home_bytes, loads, n, bits))

    return choice


@dataclasses.dataclass(frozen=True)
class World:
    """What is simulated.

    Attributes:
        nodes: all of them; the first `homes` are homes and read nothing.
        pieces: that are looked up, spread over the homes.
        piece_bytes: of each.
        rate: bytes per second of each link, in each direction.
        latency_s: of a message, one way.
        readers: of each node that is no home.
        lookups: of each reader.
        batch: look-ups that a reader asks for at once.
        keys: that lie on the pieces, at random; 0: a key is a piece.
        skew: exponent of Zipf over the keys; 0: uniform.
        ordered: a batch is asked for in the order of its pieces, as prefetch does; else each reader
            begins at a place of its own, and goes round.
        promised: as above; else, for comparison, a node is a holder when the home's reply has
            wholly left, or when it says that it has the piece.
        window, request_pieces, connection_bytes: see above.
        home_queue_bytes: a home with more to send takes no requests at all; 0: no such limit.
        slow: share of the nodes whose links have a tenth of the rate.
        dying: share of the nodes that die, at a moment in the first `dying_s` seconds.
        detect_s: until an asker knows that a server is dead.
    """

    nodes: int
    pieces: int
    piece_bytes: int
    rate: float
    latency_s: float = 0.2e-3
    homes: int = 1
    readers: int = 1
    lookups: int = 1024
    batch: int = 256
    keys: int = 0
    skew: float = 0.0
    ordered: bool = True
    promised: bool = True
    window: int = 32
    request_pieces: int = 64
    connection_bytes: int = 128 << 10
    home_queue_bytes: int = 0
    slow: float = 0.0
    dying: float = 0.0
    dying_s: float = 1.0
    detect_s: float = 0.05


@dataclasses.dataclass
class Outcome:
    """What happened.

    Attributes:
        seconds: until the last reader of a node that lives had all it wanted.
        node_seconds: until each node had; NaN: of homes and of the dead.
        sent_bytes: by each node.
        wanted: whether each node wanted each piece, shape (nodes, pieces).
        had: whether it had it in the end.
        rates: bytes per second of each node's link.
    """

    seconds: float
    node_seconds: npt.NDArray[np.float64]
    sent_bytes: npt.NDArray[np.int64]
    wanted: npt.NDArray[np.bool_]
    had: npt.NDArray[np.bool_]
    rates: npt.NDArray[np.float64]
    alive: npt.NDArray[np.bool_]
    redirected: int
    missed: int
    events: int


def _draws(world: World, rng: np.random.Generator) -> list[npt.NDArray[np.int32]]:
    """The pieces that each reader looks up, in the order of its look-ups."""
    n_keys = world.keys or world.pieces
    home_of = rng.integers(0, world.pieces, n_keys) if world.keys else rng.permutation(world.pieces)
    weights = 1.0 / np.arange(1, n_keys + 1) ** world.skew
    edges = np.cumsum(weights / weights.sum())
    n_readers = (world.nodes - world.homes) * world.readers
    out = []
    for _ in range(n_readers):
        keys = np.searchsorted(edges, rng.random(world.lookups) * edges[-1])
        out.append(home_of[np.minimum(keys, n_keys - 1)].astype(np.int32))
    return out


class _Request:
    """Pieces that one node asks one home for."""

    __slots__ = ("forced", "missed", "node", "pieces", "sent", "unanswered", "unsent")

    def __init__(self, node: int, pieces: list[int], forced: bool, missed: int) -> None:
        self.node = node
        self.pieces = pieces
        self.forced = forced  # the home must answer
        self.missed = missed  # who did not have them, or -1
        self.sent: list[int] = []
        self.unsent = 0  # pieces that the home has queued and that have not left
        self.unanswered = 0  # and those that have not arrived


class _Reader:
    __slots__ = ("at", "batches", "lacks", "node")

    def __init__(self, node: int, batches: list[list[int]]) -> None:
        self.node, self.batches = node, batches
        self.at, self.lacks = 0, 0


class Simulation:
    """One run of a world with one policy."""

    def __init__(self, world: World, policy: str, seed: int) -> None:
        self.world, self.policy = world, policy
        self._choose = chooser(policy)
        self._random = random.Random(seed)
        rng = np.random.default_rng(seed)
        n = world.nodes
        self._now = 0.0
        self._events: list[Any] = []
        self._n_events = 0
        self._rate = np.full(n, world.rate)
        self._rate[rng.random(n) < world.slow] /= 10
        self._rate[: world.homes] = world.rate
        self._byte_s = (1.0 / self._rate).tolist()
        self._in_free = [0.0] * n
        self._alive = [True] * n
        self._sending = [False] * n
        self._turns: list[deque[int]] = [deque() for _ in range(n)]  # askers, in turn
        self._queues: list[dict[int, deque[Any]]] = [{} for _ in range(n)]
        self._queued = [0] * n
        self._on_connection: dict[tuple[int, int], int] = defaultdict(int)
        self._sent = [0] * n
        self._has = [bytearray(world.pieces) for _ in range(n)]
        self._asked = [bytearray(world.pieces) for _ in range(n)]
        self._waiters: list[dict[int, list[_Reader]]] = [{} for _ in range(n)]
        self._to_ask: dict[tuple[int, int], deque[_Request]] = defaultdict(deque)
        self._asking: dict[tuple[int, int], int] = defaultdict(int)
        self._to_take: dict[tuple[int, int], deque[_Request]] = defaultdict(deque)
        self._held_up: list[deque[int]] = [deque() for _ in range(n)]
        self._holders: list[list[int]] = [[] for _ in range(world.pieces)]
        self._coming: list[set[int]] = [set() for _ in range(world.pieces)]  # holders that wait
        self._loads: list[dict[int, list[int]]] = [{} for _ in range(world.homes)]
        self._parked: list[dict[int, list[int]]] = [{} for _ in range(n)]
        self._redirected = self._missed = 0
        self._node_seconds = np.full(n, np.nan)
        self._wanted = np.zeros((n, world.pieces), bool)
        self._left = [0] * n
        for home in range(world.homes):
            for piece in range(home, world.pieces, world.homes):
                self._has[home][piece] = 1
        self._start(_draws(world, rng))
        for node in range(world.homes, n):
            if rng.random() < world.dying:
                self._at(rng.random() * world.dying_s, self._dies, node)

    # ---------------------------------------------------------------- time

    def _at(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (when, self._n_events, what, arguments))

    def _later(self, what: Callable[..., None], *arguments: Any) -> None:
        """A message: it takes the latency."""
        self._at(self._now + self.world.latency_s, what, *arguments)

    def run(self) -> Outcome:
        """Until nothing is on its way any more."""
        while self._events:
            self._now, _, what, arguments = heapq.heappop(self._events)
            what(*arguments)
        alive = np.array(self._alive)
        done = self._node_seconds[alive]
        return Outcome(
            seconds=float(np.nanmax(done)) if np.isfinite(done).any() else 0.0,
            node_seconds=np.where(alive, self._node_seconds, np.nan),
            sent_bytes=np.array(self._sent),
            wanted=self._wanted,
            had=np.frombuffer(b"".join(bytes(has) for has in self._has), np.uint8)
            .reshape(self.world.nodes, -1)
            .astype(bool),
            rates=self._rate,
            alive=alive,
            redirected=self._redirected,
            missed=self._missed,
            events=self._n_events,
        )

    # -------------------------------------------------------------- readers

    def _start(self, draws: list[npt.NDArray[np.int32]]) -> None:
        world = self.world
        for number, pieces in enumerate(draws):
            node = world.homes + number // world.readers
            self._wanted[node, pieces] = True
            batches = []
            for first in range(0, len(pieces), world.batch):
                batch = np.unique(pieces[first : first + world.batch])
                if not world.ordered:
                    batch = np.roll(batch, self._random.randrange(len(batch)))
                batches.append(batch.tolist())
            self._left[node] += 1
            self._at(0.0, self._next_batch, _Reader(node, batches))

    def _next_batch(self, reader: _Reader) -> None:
        world, node = self.world, reader.node
        has, asked, waiters = self._has[node], self._asked[node], self._waiters[node]
        while reader.at < len(reader.batches):
            lacking = [piece for piece in reader.batches[reader.at] if not has[piece]]
            reader.at += 1
            if not lacking:
                continue
            reader.lacks = len(lacking)
            to_ask: dict[int, list[int]] = {}
            for piece in lacking:
                waiters.setdefault(piece, []).append(reader)
                if not asked[piece]:
                    asked[piece] = 1
                    to_ask.setdefault(piece % world.homes, []).append(piece)
            for home, pieces in to_ask.items():
                for first in range(0, len(pieces), world.request_pieces):
                    part = pieces[first : first + world.request_pieces]
                    self._to_ask[node, home].append(_Request(node, part, False, -1))
                self._ask(node, home)
            return
        self._left[node] -= 1
        if not self._left[node]:
            self._node_seconds[node] = self._now

    def _arrived(self, node: int, piece: int) -> None:
        self._has[node][piece] = 1
        for asker in self._parked[node].pop(piece, ()):
            if self._alive[asker]:
                self._at_peer(asker, node, [piece])
        for reader in self._waiters[node].pop(piece, ()):
            reader.lacks -= 1
            if not reader.lacks:
                self._next_batch(reader)

    # ----------------------------------------------------------------- asking

    def _ask(self, node: int, home: int) -> None:
        waiting = self._to_ask[node, home]
        while waiting and self._asking[node, home] < self.world.window:
            self._asking[node, home] += 1
            self._later(self._at_home, home, waiting.popleft(), self._queued[node])

    def _ask_again(self, node: int, pieces: list[int], missed: int) -> None:
        """A peer had nothing, or is dead: the home must answer."""
        if not self._alive[node]:
            return
        self._missed += len(pieces)
        by_home: dict[int, list[int]] = {}
        for piece in pieces:
            by_home.setdefault(piece % self.world.homes, []).append(piece)
        for home, some in by_home.items():
            self._to_ask[node, home].appendleft(_Request(node, some, True, missed))
            self._ask(node, home)

    def _answered(self, request: _Request, home: int) -> None:
        self._asking[request.node, home] -= 1
        self._ask(request.node, home)

    # ------------------------------------------------------------------- home

    def _load(self, home: int, node: int) -> list[int]:
        """[sent there and not heard of, last reported], in bytes."""
        return self._loads[home].setdefault(node, [0, 0])

    def _at_home(self, home: int, request: _Request, load_bytes: int) -> None:
        self._load(home, request.node)[1] = load_bytes
        self._to_take[home, request.node].append(request)
        self._take(home, request.node)

    def _take(self, home: int, node: int) -> None:
        """Requests of one connection, as far as it is not full."""
        world, waiting = self.world, self._to_take[home, node]
        while waiting and self._on_connection[home, node] < world.connection_bytes:
            if world.home_queue_bytes and self._queued[home] >= world.home_queue_bytes:
                self._held_up[home].append(node)
                return
            request = waiting.popleft()
            if self._alive[node]:
                self._decide(home, request)

    def _decide(self, home: int, request: _Request) -> None:
        node, piece_bytes = request.node, self.world.piece_bytes
        elsewhere: dict[int, list[int]] = {}
        for piece in request.pieces:
            holders, coming = self._holders[piece], self._coming[piece]
            if request.missed in holders:
                holders.remove(request.missed)
                coming.discard(request.missed)
            chosen = -1
            if holders and not request.forced and node not in holders:
                loads = [
                    max(self._load(home, holder)) + COMING_BYTES * (holder in coming)
                    for holder in holders
                ]
                bits = self._random.getrandbits(64)
                chosen = self._choose(self._queued[home], loads, bits)
            if chosen >= 0:
                elsewhere.setdefault(holders[chosen], []).append(piece)
                self._load(home, holders[chosen])[0] += piece_bytes
                if self.world.promised and self.policy == "p2c":  # as the engine
                    self._remember(node, [piece], coming=True)
            else:
                request.sent.append(piece)
                self._queue(home, node, piece, request)
                if self.world.promised:
                    self._remember(node, [piece])
        request.unsent = request.unanswered = len(request.sent)
        for peer, pieces in elsewhere.items():
            self._redirected += len(pieces)
            self._later(self._redirected_to, node, peer, pieces)
        if not request.sent:
            self._later(self._answered, request, home)

    def _remember(self, node: int, pieces: list[int], coming: bool = False) -> None:
        if self.policy == "off":
            return
        for piece in pieces:
            holders = self._holders[piece]
            if node in holders:
                if not coming:
                    self._coming[piece].discard(node)
                continue
            if len(holders) < HOLDERS:
                holders.append(node)
            else:
                place = self._random.randrange(HOLDERS)
                self._coming[piece].discard(holders[place])
                holders[place] = node
            if coming:
                self._coming[piece].add(node)

    def _held(self, home: int, node: int, peer: int, pieces: list[int], load_bytes: int) -> None:
        """The asker has from the peer what the home sent it there for."""
        load = self._load(home, peer)
        load[0] = max(0, load[0] - len(pieces) * self.world.piece_bytes)
        self._load(home, node)[1] = load_bytes
        self._remember(node, pieces)

    # ------------------------------------------------------------------ peers

    def _redirected_to(self, node: int, peer: int, pieces: list[int]) -> None:
        if self._alive[node]:
            self._later(self._at_peer, node, peer, pieces)

    def _at_peer(self, node: int, peer: int, pieces: list[int]) -> None:
        if not self._alive[peer]:
            self._at(self._now + self.world.detect_s, self._ask_again, node, pieces, peer)
            return
        has = self._has[peer]
        if self.world.promised:
            for piece in pieces:
                if not has[piece] and self._asked[peer][piece]:
                    self._parked[peer].setdefault(piece, []).append(node)
            pieces = [piece for piece in pieces if has[piece] or not self._asked[peer][piece]]
        absent = [piece for piece in pieces if not has[piece]]
        present = [piece for piece in pieces if has[piece]]
        if absent:
            self._later(self._ask_again, node, absent, peer)
        request = _Request(node, present, False, -1)
        request.unsent = request.unanswered = len(present)
        for piece in present:
            self._queue(peer, node, piece, request)

    def _dies(self, node: int) -> None:
        self._alive[node] = False
        for piece, askers in self._parked[node].items():
            for asker in askers:
                self._at(self._now + self.world.detect_s, self._ask_again, asker, [piece], node)
        self._parked[node].clear()
        for asker, queue in self._queues[node].items():
            pieces = [piece for piece, _ in queue]
            if pieces:
                self._at(self._now + self.world.detect_s, self._ask_again, asker, pieces, node)
        self._queues[node].clear()
        self._turns[node].clear()

    # ------------------------------------------------------------------ links

    def _queue(self, sender: int, node: int, piece: int, request: _Request) -> None:
        queue = self._queues[sender].setdefault(node, deque())
        if not queue:
            self._turns[sender].append(node)
        queue.append((piece, request))
        self._queued[sender] += self.world.piece_bytes
        self._on_connection[sender, node] += self.world.piece_bytes
        self._send(sender)

    def _send(self, sender: int) -> None:
        turns = self._turns[sender]
        if self._sending[sender] or not turns:
            return
        node = turns.popleft()
        queue = self._queues[sender][node]
        piece, request = queue.popleft()
        if queue:
            turns.append(node)
        self._sending[sender] = True
        seconds = self.world.piece_bytes * self._byte_s[sender]
        self._at(self._now + seconds, self._left_link, sender, node, piece, request)

    def _left_link(self, sender: int, node: int, piece: int, request: _Request) -> None:
        world = self.world
        self._sending[sender] = False
        if not self._alive[sender]:
            self._at(self._now + world.detect_s, self._ask_again, node, [piece], sender)
            return
        self._queued[sender] -= world.piece_bytes
        self._on_connection[sender, node] -= world.piece_bytes
        self._sent[sender] += world.piece_bytes
        carried = self._in_free[node] + world.piece_bytes * self._byte_s[node]
        self._in_free[node] = max(self._now + world.latency_s, carried)
        self._at(self._in_free[node], self._delivered, sender, node, piece, request)
        request.unsent -= 1
        if sender < world.homes:
            if not request.unsent:
                self._remember(node, request.sent)
            self._take(sender, node)
            held_up = self._held_up[sender]
            while held_up and self._queued[sender] < world.home_queue_bytes:
                self._take(sender, held_up.popleft())
        self._send(sender)

    def _delivered(self, sender: int, node: int, piece: int, request: _Request) -> None:
        if not self._alive[node]:
            return
        request.unanswered -= 1
        if not request.unanswered:
            if sender < self.world.homes:
                self._answered(request, sender)
            else:
                by_home: dict[int, list[int]] = {}
                for other in request.pieces:
                    by_home.setdefault(other % self.world.homes, []).append(other)
                for home, pieces in by_home.items():
                    load_bytes = self._queued[node]
                    self._later(self._held, home, node, sender, pieces, load_bytes)
        self._arrived(node, piece)


def simulate(world: World, policy: str, seed: int = 1) -> Outcome:
    """Runs it to the end.

    Raises:
        ValueError: the policy is not one of `POLICIES`, or nobody is left to read.
    """
    if policy not in POLICIES:
        raise ValueError(f"the policy is one of {', '.join(POLICIES)}, not {policy!r}")
    if not 0 < world.homes < world.nodes:
        raise ValueError(f"{world.homes} homes of {world.nodes} nodes leave nobody to read")
    return Simulation(world, policy, seed).run()


def ideal_s(world: World, outcome: Outcome) -> float:
    """Seconds for which the busiest link is needed at the least: into each reader's node what it
    wanted, out of each home each wanted piece once, out of all links together all of it."""
    wanted, rates = outcome.wanted[outcome.alive], outcome.rates[outcome.alive]
    into = float((wanted.sum(1) / rates).max())
    out_of_home = float(np.bincount(np.flatnonzero(wanted.any(0)) % world.homes).max()) / world.rate
    return world.piece_bytes * max(into, out_of_home, float(wanted.sum() / rates.sum()))


def skew(outcome: Outcome) -> float:
    """Most bytes sent by one node / the mean of all."""
    return float(outcome.sent_bytes.max() / max(outcome.sent_bytes.mean(), 1e-9))
