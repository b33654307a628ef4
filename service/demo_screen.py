"""What the demo shows while it runs: one changing line on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn

from trunkline import Batch

_PLAIN_SECONDS = 10.0


class Screen:
    """`step` names what is waited for; `lines` shows a batch. Use in a `with` block."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_plain = 0.0
        self._first_line_at: float | None = None
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def step(self, text: str) -> None:
        """Call as often as you like: a terminal redraws, a log gets a line when the text changed, every 10 s."""
        if not self.console.is_terminal:
            self._plain(text)
            return
        if self._progress is None or self._task is None:
            self._begin(SpinnerColumn(), TextColumn("{task.description}"))
        assert self._progress is not None
        assert self._task is not None
        self._progress.update(self._task, description=text)

    def done(self, text: str) -> None:
        """End the changing line, and leave this one."""
        self._end()
        self._last_plain = 0.0
        self._shown = ""
        self.console.print(text, highlight=False)

    def lines(self, batch: Batch) -> None:
        """Lines done, rate, time left, and what share of the prompt tokens came from cache."""
        total, ended = batch.request_counts.total, batch.lines_ended
        text = f"{ended}/{total} lines  {self._pace(ended, total)}  token hit rate {_rate(batch)}"
        if not self.console.is_terminal:
            self._plain(text)
            return
        if self._progress is None or self._task is None:
            self._begin(BarColumn(bar_width=30), TextColumn("{task.description}"))
        assert self._progress is not None
        assert self._task is not None
        self._progress.update(self._task, description=text, total=total or None, completed=ended)

    def _pace(self, ended: int, total: int) -> str:
        """Rate and time left since the first line ended."""
        if not ended:
            return "starting"
        if self._first_line_at is None:
            self._first_line_at = time.monotonic()
        seconds = time.monotonic() - self._first_line_at
        if seconds < 1:
            return "starting"
        rate = ended / seconds
        return f"{rate:.1f} lines/s  {(total - ended) / rate:.0f} s left"

    def _plain(self, text: str) -> None:
        now = time.monotonic()
        if text != self._shown and now - self._last_plain >= _PLAIN_SECONDS:
            self._last_plain, self._shown = now, text
            self.console.print(text, highlight=False)

    def _begin(self, *columns: ProgressColumn) -> None:
        self._end()
        self._progress = Progress(*columns, console=self.console, transient=True)
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def _end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None


def _rate(batch: Batch) -> str:
    rate = batch.queue.cache.hit_rate
    return "unknown" if rate is None else f"{rate:.1%}"
