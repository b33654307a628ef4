"""The ledger: which prefixes each boot's cache should hold, for jobs that arrive one by one (DESIGN.md section 6.9).

The longest-match idea is SGLang's cache-aware router; here the map counts tokens, is bounded by the capacity that
each boot reported, forgets tail first as the engine does, and weighs time rather than matches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from service.core.plan import Rates
from service.core.prefix import RUNG_BYTES, cacheable_tokens, rungs_covered, rungs_to_tokens, shared_rungs


@dataclass(frozen=True, slots=True, kw_only=True)
class BootView:
    """A boot that may take the job, as it is now."""

    boot_id: int
    block_size: int
    rates: Rates
    load_seconds: float  # of work ahead of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a job should run, what its cache should serve there, and how long until its prompt is computed."""

    boot_id: int
    predicted_cached_tokens: int
    seconds: float


# What a boot may have ahead and still be chosen: so much of the least load, and so much of the job's own time. Of the
# least, since a share of the mean never binds once most boots are warm: the last ones would stay cold and idle. With
# half the own time, streams of conversations hit 1 point less; chosen on seeds 1 to 4 of bench.stream.
_LEAST_SLACK, _OWN_SLACK = 1.25, 4.0


@dataclass(frozen=True, slots=True)
class _Price:
    """What a job would find and cost on a boot."""

    boot: BootView
    cached_tokens: int
    prefill_seconds: float  # of what is not cached
    cold_seconds: float  # of the job with nothing cached, decoding too
    decode_seconds: float

    @classmethod
    def of(cls, boot: BootView, cached_tokens: int, prompt_tokens: int, output_tokens: int) -> _Price:
        per_second = boot.rates.prefill_tokens_per_second
        decode_seconds = output_tokens / boot.rates.decode_tokens_per_second
        cold_seconds = prompt_tokens / per_second + decode_seconds
        return cls(boot, cached_tokens, (prompt_tokens - cached_tokens) / per_second, cold_seconds, decode_seconds)

    def cost(self, own_seconds: float) -> tuple[float, float]:
        """What `Ledger.choose` looks for the least of."""
        work_seconds = self.boot.load_seconds + own_seconds
        return self.prefill_seconds**3 * work_seconds, self.boot.load_seconds


class _Node:
    """Rungs that some prompts have in common, or (without rungs) the end of one prompt below its last rung."""

    __slots__ = ("children", "edge", "parent", "start", "tokens")

    def __init__(self, parent: _Node | None, start: int, edge: bytes, tokens: int) -> None:
        self.parent, self.edge, self.tokens = parent, edge, tokens
        self.start = start  # rungs above this node
        self.children: dict[bytes, _Node] = {}  # by their first rung


class _Map:
    """One boot's prefixes: a radix tree of rungs in an LRU in which no node is older than its children.

    So the oldest node is always a leaf, and what is evicted is the tail of the prefix that was used least recently.
    A node is split where a prompt leaves it, so all its rungs were used last by the same prompt, and the map forgets
    exactly what one with a node for every rung would (tests hold it against that), at two nodes or so a prompt.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.held_tokens = 0
        self._root = _Node(None, 0, b"", 0)
        self._lru: OrderedDict[_Node, None] = OrderedDict()  # oldest first

    def rungs_held(self, key: bytes) -> int:
        """Rungs of the longest prefix of `key` that is held."""
        return self._walk(key)[1]

    def add(self, key: bytes, prompt_tokens: int, output_tokens: int) -> None:
        """Hold all of a prompt and its output, as its engine will. A prompt beyond the capacity leaves no trace."""
        if prompt_tokens > self.capacity_tokens:
            return
        path, held = self._walk(key)
        if path and held < path[-1].start + len(path[-1].edge) // RUNG_BYTES:
            path[-1] = self._split(path[-1], held)
        end, parent = len(key) // RUNG_BYTES, path[-1] if path else self._root
        if held < end:
            path.append(self._grow(parent, held, key[held * RUNG_BYTES :], _tokens_between(held, end)))
        rest = max(prompt_tokens - rungs_to_tokens(end), 0) + output_tokens
        if rest:
            self._lru[self._grow(parent, end, b"", rest)] = None
        for node in reversed(path):  # the root's end is used last, hence evicted last
            self._lru[node] = None
            self._lru.move_to_end(node)
        while self.held_tokens > self.capacity_tokens:
            self._trim(next(iter(self._lru)), self.held_tokens - self.capacity_tokens)

    def drop_below(self, key: bytes, depth_rungs: int) -> None:
        """Forget all that lies below the first `depth_rungs` rungs of `key`."""
        path, held = self._walk(key)
        if held <= depth_rungs:
            return
        first = next(node for node in path if node.start + len(node.edge) // RUNG_BYTES > depth_rungs)
        subtree = list(first.children.values())
        for node in subtree:
            subtree.extend(node.children.values())
        for node in reversed(subtree):
            self._drop(node)
        self._shorten(first, depth_rungs)

    def _walk(self, key: bytes) -> tuple[list[_Node], int]:
        """The nodes along `key`, of which the last may be held in part only, and the number of rungs held."""
        node, path, at = self._root, [], 0
        while at < len(key):
            child = node.children.get(key[at : at + RUNG_BYTES])
            if child is None:
                break
            path.append(child)
            if not key.startswith(child.edge, at):
                at += RUNG_BYTES * shared_rungs(child.edge, key[at : at + len(child.edge)])
                break
            at += len(child.edge)
            node = child
        return path, at // RUNG_BYTES

    def _grow(self, parent: _Node, start: int, edge: bytes, tokens: int) -> _Node:
        child = _Node(parent, start, edge, tokens)
        if edge:
            parent.children[edge[:RUNG_BYTES]] = child
        self.held_tokens += tokens
        return child

    def _split(self, node: _Node, end: int) -> _Node:
        """A new node above `node` that takes its rungs up to `end`; it has yet to get its place in the LRU."""
        parent, n_bytes = node.parent, (end - node.start) * RUNG_BYTES
        assert parent is not None  # the root has no rungs
        upper = _Node(parent, node.start, node.edge[:n_bytes], _tokens_between(node.start, end))
        parent.children[upper.edge[:RUNG_BYTES]] = upper
        node.parent, node.start, node.edge = upper, end, node.edge[n_bytes:]
        node.tokens -= upper.tokens
        upper.children[node.edge[:RUNG_BYTES]] = node
        return upper

    def _trim(self, leaf: _Node, tokens: int) -> None:
        """Forget so many tokens of a leaf's tail, in whole rungs, or all of it."""
        kept = rungs_covered(rungs_to_tokens(leaf.start) + leaf.tokens - tokens) if leaf.edge else 0
        self._shorten(leaf, kept)

    def _shorten(self, leaf: _Node, end: int) -> None:
        """Keep only the rungs of a leaf that lie above `end`."""
        if end <= leaf.start:
            self._drop(leaf)
            return
        leaf.edge = leaf.edge[: (end - leaf.start) * RUNG_BYTES]
        kept = _tokens_between(leaf.start, end)
        self.held_tokens -= leaf.tokens - kept
        leaf.tokens = kept

    def _drop(self, node: _Node) -> None:
        del self._lru[node]
        self.held_tokens -= node.tokens
        if node.edge and node.parent is not None:
            del node.parent.children[node.edge[:RUNG_BYTES]]

    def check(self) -> None:
        """Raise AssertionError unless the tree, the LRU and the count agree."""
        places = {node: place for place, node in enumerate(self._lru)}
        linked = [self._root]
        for node in linked:
            end = node.start + len(node.edge) // RUNG_BYTES
            for rung, child in node.children.items():
                assert child.parent is node, "a child does not know its parent"
                assert child.edge.startswith(rung), "a child is under another's rung"
                assert child.start == end, "a rung is missing between two nodes"
                assert node is self._root or places[child] < places[node], "a node is older than its child"
            linked.extend(node.children.values())
        assert set(linked[1:]) == {node for node in places if node.edge}, "the LRU has not the nodes of the tree"
        assert self.held_tokens == sum(node.tokens for node in places), "the tokens held are miscounted"
        assert self.held_tokens <= self.capacity_tokens, "more is held than fits"


def _tokens_between(start_rungs: int, end_rungs: int) -> int:
    return rungs_to_tokens(end_rungs) - rungs_to_tokens(start_rungs)


class Ledger:
    """The maps of all boots. A boot that was never opened, or is forgotten, holds nothing."""

    def __init__(self) -> None:
        self._maps: dict[int, _Map] = {}

    def open(self, boot_id: int, kv_capacity_tokens: int) -> None:
        """A boot with an empty cache; one that is open already keeps what it holds."""
        self._maps.setdefault(boot_id, _Map(kv_capacity_tokens))

    def forget(self, boot_id: int) -> None:
        """The boot is gone, and its cache with it. Idempotent."""
        self._maps.pop(boot_id, None)

    def record(self, boot_id: int, key: bytes, prompt_tokens: int, output_tokens: int = 0) -> None:
        """A job was placed on the boot, which will also hold its output. Without effect for a boot that is not open."""
        if boot_id in self._maps:
            self._maps[boot_id].add(key, prompt_tokens, output_tokens)

    def correct(self, boot_id: int, key: bytes, measured_cached_tokens: int, prompt_tokens: int) -> None:
        """The engine served only so much of a job that it then computed in full.

        What the map held below that depth had been evicted, other prompts' continuations of it too; the job's own
        prompt is there now.
        """
        if boot_id not in self._maps:
            return
        held = self._maps[boot_id]
        held.drop_below(key, rungs_covered(measured_cached_tokens))
        held.add(key, prompt_tokens, 0)

    def held_tokens(self, boot_id: int) -> int:
        """Tokens that the map thinks the boot's cache holds; at most its capacity."""
        return self._maps[boot_id].held_tokens if boot_id in self._maps else 0

    def predict(self, boot_id: int, key: bytes, prompt_tokens: int, block_size: int) -> int:
        """Tokens of the prompt that the boot should serve from cache."""
        if boot_id not in self._maps:
            return 0
        shared = rungs_to_tokens(self._maps[boot_id].rungs_held(key))
        return cacheable_tokens(shared, prompt_tokens, block_size)

    def choose(
        self, key: bytes, prompt_tokens: int, boots: Sequence[BootView], output_tokens: int = 0
    ) -> Choice | None:
        """The boot with the least prefill cubed x work; None for no boot. `output_tokens` are predicted.

        Prefill: seconds for what its cache would not serve. Work: seconds of what is ahead there, and of the job itself
        where it is cheapest, so that idle boots can be told apart. Of equal products the one with least ahead, then
        the first given. Boots that are too far above the least loaded, measured by the job's own time with nothing
        cached there, are left out: a product alone would keep a prefix that all jobs share on one boot. The limit: of
        jobs that share only a common beginning, on a fleet mostly idle, boots get unequal shares. Records nothing.

        After LMetric (Zhang et al., "Multiplication May Be All You Need for LLM Request Scheduling", 2026, arXiv
        2603.15202), which multiplies tokens and requests; seconds let boots of different speed be compared. Cubed,
        since a conversation that moves computes its whole past again, and everybody on that boot waits; squared, long
        texts of one's own left a short common beginning too readily. The sum of prefill and work is the least wait for
        this job, but moves it for every small difference in load: over streams of conversations, simulated, its hit
        rate was 5 to 17 points lower than that of prefill squared x work.
        """
        cached = [self.predict(boot.boot_id, key, prompt_tokens, boot.block_size) for boot in boots]
        priced = [
            _Price.of(boot, tokens, prompt_tokens, output_tokens) for boot, tokens in zip(boots, cached, strict=True)
        ]
        if not priced:
            return None
        own_seconds = min(price.prefill_seconds + price.decode_seconds for price in priced)
        most = _LEAST_SLACK * min(boot.load_seconds for boot in boots)
        near = [price for price in priced if price.boot.load_seconds <= most + _OWN_SLACK * price.cold_seconds]
        best = min(near, key=lambda price: price.cost(own_seconds))
        return Choice(
            boot_id=best.boot.boot_id,
            predicted_cached_tokens=best.cached_tokens,
            seconds=best.boot.load_seconds + best.prefill_seconds,
        )

    def check(self) -> None:
        """Raise AssertionError unless every map is sound."""
        for held in self._maps.values():
            held.check()
