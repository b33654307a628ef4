"""Every process of Trunkline under its own supervisor, on this session's servers: what `trunkline up` starts."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from seeds import MODEL

from service.ports import free_port
from service.settings import Settings
from service.supervisor import Supervisor

GROUPS = 6
MARKER = "marker-of-a-prompt-that-no-log-may-show"


class Stack:
    """Started processes and a client of their API. `turn` must be called while waiting: the supervisor lives on it."""

    def __init__(self, settings: Settings, model: str = MODEL) -> None:
        self._model = model
        self.settings = dataclasses.replace(settings, port=free_port(), flower_port=free_port())
        self.supervisor = Supervisor(self.settings)
        self.url = f"http://127.0.0.1:{self.settings.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self._seen: dict[int, psutil.Process] = {}

    def start(self, instances: int, seconds: float = 90) -> None:
        self.supervisor.start_servers()
        self.supervisor.wait_servers()
        self.supervisor.start_rest()
        self.wait(lambda: self.ready_instances() == instances, seconds)

    def stop(self) -> list[psutil.Process]:
        """Everything down; what is left of the processes that were ever seen."""
        self._note()
        self.supervisor.stop()
        return [process for process in self._seen.values() if process.is_running()]

    def sdk(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none is configured")

    def ready_instances(self) -> int:
        try:
            models = self.http.get("/v1/models")
        except httpx.TransportError:
            return 0
        served = [model for model in models.json()["data"] if model["id"] == self._model]
        return sum(int(model["instances"]) for model in served)

    def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            self.supervisor.turn()
            self._note()
            time.sleep(0.1)

    def completed(self, batch_id: str) -> int:
        """Lines of the batch that are answered."""
        counts = self.sdk().batches.retrieve(batch_id).request_counts
        return counts.completed if counts else 0

    def kill(self, name: str) -> None:
        psutil.Process(self.supervisor.pids()[name]).send_signal(signal.SIGKILL)

    def logs(self) -> str:
        folder = self.settings.state_folder / "logs"
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))

    def _note(self) -> None:
        for pid in self.supervisor.pids().values():
            try:
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    self._seen[each.pid] = each
            except psutil.NoSuchProcess:
                continue


def write_requests(path: Path, lines: int) -> list[str]:
    """A batch file of requests in `GROUPS` groups that share a long system prompt; the custom ids."""
    ids = []
    with path.open("w", encoding="utf-8") as file:
        for line in range(lines):
            system = f"Group {line % GROUPS}. " + f"Rule {line % GROUPS} of the house, {MARKER}. " * 40
            messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {line}?"}]
            body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 16}
            row = {"custom_id": f"c-{line}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")
            ids.append(f"c-{line}")
    return ids
