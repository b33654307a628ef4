"""Backlogs to measure on: BIG-Bench-Hard tokenised, and made-up ones with the prefix trees that production shows.

Nothing of the data sets is part of this repository: bbh is read from a folder of its own, and what the tokenizer made
of it is kept under .trunkline. The made-up sets come from a seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from service.core import prefix
from service.core.plan import Backlog
from service.core.trace import keys_of_blocks
from workers.models import prepare

ROOT = Path(__file__).resolve().parents[1]
MODEL_FOLDER = ROOT / ".trunkline" / "test-model"  # where the engine tests have it
_KEPT = ROOT / ".trunkline" / "bench-bbh.npz"
_BBH_ANSWER_TOKENS = 160  # the data set has no answers of a model: assumed, of the order of its three worked examples
_BLOCK = 16
_LONGEST_ANSWER = 2000  # tokens, of the made-up sets: the limit that clients set; else one answer is the makespan


def read_bbh(folder: Path) -> Backlog:
    """The 6,511 requests of `folder` in the order of its files, task by task; answers of assumed lengths.

    A request is the task's three-shot prompt, a blank line, the question, and the words that make a model reason.
    """
    texts = [text for task in sorted((folder / "bbh").glob("*.json")) for text in _requests(folder, task)]
    if not texts:
        raise FileNotFoundError(f"{folder} holds no bbh/*.json")
    lengths, packed = _tokenised(texts)
    ends = np.cumsum([prefix.RUNG_BYTES * prefix.rungs_covered(int(length)) for length in lengths]).tolist()
    random = np.random.default_rng(6511)
    return Backlog(
        job_ids=np.arange(len(texts), dtype=np.int64),
        keys=[packed[start:end] for start, end in zip([0, *ends], ends, strict=False)],
        prompt_tokens=lengths,
        output_tokens=_lengths(random, len(texts), _BBH_ANSWER_TOKENS, 0.5),
        body_bytes=np.array([len(text.encode()) for text in texts], dtype=np.int64),
    )


def _requests(folder: Path, task: Path) -> list[str]:
    prompt = (folder / "cot-prompts" / f"{task.stem}.txt").read_text(encoding="utf-8").split("-----\n", 1)[1].strip()
    questions = json.loads(task.read_text(encoding="utf-8"))["examples"]
    return [f"{prompt}\n\nQ: {question['input']}\nA: Let's think step by step." for question in questions]


def _tokenised(texts: list[str]) -> tuple[NDArray[np.int64], bytes]:
    """Token counts, and the keys one after the other; kept for as long as the texts are as many and as long."""
    mark = np.array([len(texts), sum(map(len, texts))])
    if _KEPT.exists():
        with np.load(_KEPT) as kept:
            if np.array_equal(kept["mark"], mark):
                return kept["lengths"], kept["keys"].tobytes()
    prepare(MODEL_FOLDER)
    tokenizer = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    root = prefix.root_digest(model="bbh", revision=None, adapter=None, salt=b"")
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
    packed = b"".join(prefix.prefix_key(ids, root) for ids in encoded)
    np.savez(_KEPT, mark=mark, lengths=lengths, keys=np.frombuffer(packed, dtype=np.uint8))
    return lengths, packed


def _lengths(random: np.random.Generator, n: int, mean: float, sigma: float) -> NDArray[np.int64]:
    """Lengths with a long tail: log-normal, of this mean."""
    drawn = random.lognormal(np.log(mean) - sigma * sigma / 2, sigma, n)
    return np.maximum(drawn, 1).astype(np.int64)


class _Tree:
    """Prompts as paths of block ids: nodes are numbered as they are made, so an id stands for its whole prefix."""

    def __init__(self, longest_answer: int = _LONGEST_ANSWER) -> None:
        self._longest_answer = longest_answer
        self._nodes = 0
        self.paths: list[list[int]] = []
        self.tokens: list[int] = []

    def grow(self, stem: list[int], tokens: int, block_tokens: int) -> list[int]:
        """The path of a prompt of `tokens` that begins with the full blocks `stem`."""
        more = max(-(-tokens // block_tokens) - len(stem), 0)
        path = [*stem, *range(self._nodes, self._nodes + more)]
        self._nodes += more
        return path

    def add(self, path: list[int], tokens: int) -> None:
        """A request."""
        self.paths.append(path)
        self.tokens.append(tokens)

    def backlog(self, random: np.random.Generator, block_tokens: int, mean_output: float) -> Backlog:
        """All requests, in random order."""
        order = random.permutation(len(self.paths))
        tokens = np.array(self.tokens, dtype=np.int64)[order]
        return Backlog(
            job_ids=np.arange(len(order), dtype=np.int64),
            keys=keys_of_blocks([self.paths[index] for index in order.tolist()], tokens, block_tokens),
            prompt_tokens=tokens,
            output_tokens=np.minimum(_lengths(random, len(order), mean_output, 0.8), self._longest_answer),
            body_bytes=tokens * prefix.BYTES_PER_TOKEN,
        )


def conversations(seed: int, n_jobs: int = 12_000) -> Backlog:
    """Chats of several turns, blocks of 512: every turn repeats what was said before; some begin with a document."""
    random, tree, block = np.random.default_rng(seed), _Tree(), 512
    stems = [tree.grow([], block * int(random.integers(1, 9)), block) for _ in range(12)]
    popularity = random.zipf(1.6, 4 * n_jobs) % len(stems)
    while len(tree.paths) < n_jobs:
        stem = stems[popularity[len(tree.paths)]]
        tokens = len(stem) * block
        if random.random() < 0.3:
            tokens += int(_lengths(random, 1, 12_000, 1.0)[0])
        for _ in range(random.geometric(0.4)):
            tokens = min(tokens + int(_lengths(random, 1, 3_000, 1.2)[0]), 120_000)
            path = tree.grow(stem, tokens, block)
            tree.add(path, tokens)
            stem = path[: tokens // block]
    return tree.backlog(random, block, 350.0)


def questions(seed: int, n_jobs: int = 8_000) -> Backlog:
    """Many short questions to a few long prompts, of very unequal popularity, blocks of 16; a tenth share nothing."""
    random, tree = np.random.default_rng(seed), _Tree(longest_answer=500)
    stems = [tree.grow([], _BLOCK * int(random.integers(20, 160)), _BLOCK) for _ in range(40)]
    shares = random.dirichlet(np.full(len(stems), 0.5))
    for _ in range(n_jobs):
        stem = [] if random.random() < 0.1 else stems[int(random.choice(len(stems), p=shares))]
        tokens = len(stem) * _BLOCK + int(_lengths(random, 1, 150, 0.8)[0])
        tree.add(tree.grow(stem, tokens, _BLOCK), tokens)
    return tree.backlog(random, _BLOCK, 120.0)


def documents(seed: int, n_jobs: int = 6_000) -> Backlog:
    """A few questions to each of many long documents, blocks of 64: order is everything."""
    random, tree, block = np.random.default_rng(seed), _Tree(), 64
    while len(tree.paths) < n_jobs:
        stem = tree.grow([], block * int(random.integers(30, 400)), block)
        for _ in range(1 + int(random.poisson(6))):
            tokens = len(stem) * block + int(_lengths(random, 1, 200, 0.7)[0])
            tree.add(tree.grow(stem, tokens, block), tokens)
    return tree.backlog(random, block, 200.0)


MADE_UP: dict[str, tuple[Callable[[int], Backlog], int]] = {  # and the block size
    "conversations": (conversations, 512),
    "questions": (questions, _BLOCK),
    "documents": (documents, 64),
}
