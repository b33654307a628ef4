"""The ledger: which prefixes each boot's cache should hold, for jobs that arrive one by one (DESIGN.md section 6.9).

The longest-match idea is SGLang's cache-aware router; here the map counts tokens, is bounded by the capacity that
each boot reported, forgets tail first as the engine does, and costs time rather than matches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from service.core.plan import Rates
from service.core.prefix import RUNG_BYTES, cacheable_tokens, rung_span, rungs_covered, rungs_to_tokens


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


class _Node:
    """One rung of some prompts' common prefix, or (edge None) the end of one prompt below its last rung."""

    __slots__ = ("children", "edge", "parent", "tokens")

    def __init__(self, parent: _Node | None, edge: bytes | None, tokens: int) -> None:
        self.parent, self.edge, self.tokens = parent, edge, tokens
        self.children: dict[bytes, _Node] = {}


class _Map:
    """One boot's prefixes: a trie of rungs in an LRU in which no node is older than its children.

    So the oldest node is always a leaf, and what is evicted is the tail of the prefix that was used least recently.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.held_tokens = 0
        self._root = _Node(None, None, 0)
        self._lru: OrderedDict[_Node, None] = OrderedDict()  # oldest first

    def path(self, key: bytes) -> list[_Node]:
        """The nodes of the longest prefix of `key` that is held, from the root on."""
        node, found = self._root, []
        for start in range(0, len(key), RUNG_BYTES):
            child = node.children.get(key[start : start + RUNG_BYTES])
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def add(self, key: bytes, prompt_tokens: int) -> None:
        """Hold all of a prompt, as its engine will. One beyond the capacity never runs, and leaves no trace."""
        if prompt_tokens > self.capacity_tokens:
            return
        path = self.path(key)
        for start in range(len(path) * RUNG_BYTES, len(key), RUNG_BYTES):
            edge = key[start : start + RUNG_BYTES]
            parent = path[-1] if path else self._root
            child = _Node(parent, edge, rung_span(rungs_to_tokens(start // RUNG_BYTES)))
            parent.children[edge] = child
            self.held_tokens += child.tokens
            path.append(child)
        rest = max(prompt_tokens - rungs_to_tokens(len(path)), 0)
        if rest:
            self._lru[_Node(path[-1] if path else self._root, None, rest)] = None
            self.held_tokens += rest
        for node in reversed(path):  # the root's end is used last, hence evicted last
            self._lru[node] = None
            self._lru.move_to_end(node)
        while self.held_tokens > self.capacity_tokens:
            self._drop(next(iter(self._lru)))

    def drop_below(self, key: bytes, depth_rungs: int) -> None:
        """Forget all that lies below the first `depth_rungs` rungs of `key`."""
        path = self.path(key)
        if len(path) <= depth_rungs:
            return
        subtree = [path[depth_rungs]]
        for node in subtree:
            subtree.extend(node.children.values())
        for node in reversed(subtree):
            self._drop(node)

    def _drop(self, node: _Node) -> None:
        del self._lru[node]
        self.held_tokens -= node.tokens
        if node.edge is not None and node.parent is not None:
            del node.parent.children[node.edge]


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

    def record(self, boot_id: int, key: bytes, prompt_tokens: int) -> None:
        """A job was placed on the boot. Without effect for a boot that is not open."""
        if boot_id in self._maps:
            self._maps[boot_id].add(key, prompt_tokens)

    def correct(self, boot_id: int, key: bytes, measured_cached_tokens: int, prompt_tokens: int) -> None:
        """The engine served only so much of a job that it then computed in full.

        What the map held below that depth had been evicted, other prompts' continuations of it too; the job's own
        prompt is there now.
        """
        if boot_id not in self._maps:
            return
        held = self._maps[boot_id]
        held.drop_below(key, rungs_covered(measured_cached_tokens))
        held.add(key, prompt_tokens)

    def held_tokens(self, boot_id: int) -> int:
        """Tokens that the map thinks the boot's cache holds; at most its capacity."""
        return self._maps[boot_id].held_tokens if boot_id in self._maps else 0

    def predict(self, boot_id: int, key: bytes, prompt_tokens: int, block_size: int) -> int:
        """Tokens of the prompt that the boot should serve from cache."""
        if boot_id not in self._maps:
            return 0
        shared = rungs_to_tokens(len(self._maps[boot_id].path(key)))
        return cacheable_tokens(shared, prompt_tokens, block_size)

    def choose(self, key: bytes, prompt_tokens: int, boots: Sequence[BootView]) -> Choice | None:
        """The boot with the least remaining cost, work ahead + prefill of what is not cached; None for no boot.

        Of equal costs the one that holds more, then the first given. Does not record the job.
        """
        best: Choice | None = None
        for boot in boots:
            cached = self.predict(boot.boot_id, key, prompt_tokens, boot.block_size)
            seconds = boot.load_seconds + (prompt_tokens - cached) / boot.rates.prefill_tokens_per_second
            choice = Choice(boot_id=boot.boot_id, predicted_cached_tokens=cached, seconds=seconds)
            if best is None or (seconds, -cached) < (best.seconds, -best.predicted_cached_tokens):
                best = choice
        return best
