"""How a vLLM server is watched: when it counts as dead though its process runs, and who may read its log."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path

from workers.engines.vllm import LOOKS_TO_DEATH, open_log, until_dead


class Looks:
    """Gives one status of /health after the other, then None."""

    def __init__(self, *statuses: int | None) -> None:
        self._statuses: Iterator[int | None] = iter(statuses)
        self.count = 0

    async def health(self) -> int | None:
        self.count += 1
        return next(self._statuses, None)


async def watch(looks: Looks, exited: asyncio.Future[int] | None = None) -> str | None:
    async def exit_status() -> int:
        return await (exited or asyncio.get_running_loop().create_future())

    task = asyncio.create_task(exit_status())
    try:
        return await asyncio.wait_for(until_dead(task, looks.health, pause_seconds=0.001), 10)
    finally:
        task.cancel()


async def test_a_server_that_hangs_is_dead_after_some_unanswered_looks() -> None:
    looks = Looks()
    assert "hangs" in (await watch(looks) or "")
    assert looks.count == LOOKS_TO_DEATH


async def test_an_answer_in_between_begins_the_count_anew() -> None:
    looks = Looks(*[None] * (LOOKS_TO_DEATH - 1), 200, *[None] * (LOOKS_TO_DEATH - 1), 500)
    assert "hangs" in (await watch(looks) or "")
    assert looks.count == 3 * LOOKS_TO_DEATH


async def test_a_server_whose_core_is_dead_says_so() -> None:
    assert await watch(Looks(200, 503)) == "its engine core is dead"


async def test_an_exit_is_seen_at_once() -> None:
    exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    exited.set_result(1)
    looks = Looks()
    assert await watch(looks, exited) is None
    assert looks.count <= 1


def test_a_log_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    for _ in range(2):
        with open(open_log(path), "ab") as file:
            file.write(b"a")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)  # as an earlier version made it
    assert path.read_bytes() == b"aa"
