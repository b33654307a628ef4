"""How fast files go in and out, and what the API's memory does meanwhile.

`python -m bench.transfer [--bytes 1e9] [--runs 3] [--validated-bytes 2e8] [--json]` starts Trunkline's own processes,
uploads a batch file of that size with the `openai` SDK from an open file, downloads it again, and uploads a smaller one
with `?validate=true`. Client and server share the machine. Memory is the kernel's own peak of the API's resident set
over each transfer, less what the API held idle before it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import openai

from bench.stack import Stack, running_stack

_MODEL = "tiny"
_INSTANCES = f'[instances.one]\nengine = "simulated"\nmodel = "{_MODEL}"\n'  # nothing is run
_TEXT = "Summarise the following complaint in one sentence, politely. " * 15
_MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One file in one direction."""

    what: str
    bytes: int
    seconds: float
    idle_bytes: int  # the API's resident set before
    peak_bytes: int  # and its most meanwhile

    @property
    def mb_per_second(self) -> float:
        return self.bytes / self.seconds / _MB

    @property
    def grown_mb(self) -> float:
        return (self.peak_bytes - self.idle_bytes) / _MB


def write_lines(stream: BinaryIO, size: int) -> str:
    """A batch file of valid lines of about 1 kB, filled up with spaces to `size`; its SHA-256."""
    digest, written = hashlib.sha256(), 0
    for data in _lines(size):
        stream.write(data)
        digest.update(data)
        written += len(data)
    stream.flush()
    return digest.hexdigest()


def _lines(size: int) -> Iterator[bytes]:
    left, number = size, 0
    while left > 0:
        messages = [{"role": "user", "content": f"{number}: {_TEXT}"}]
        body = {"model": _MODEL, "messages": messages, "max_tokens": 64}
        row = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        data = json.dumps(row).encode() + b"\n"
        data = data if len(data) <= left else b" " * left
        yield data
        left, number = left - len(data), number + 1


def measure(stack: Stack, what: str, size: int, move: Callable[[], None]) -> Transfer:
    """Run `move` with the API's peak set back to where it stands."""
    process = Path(f"/proc/{stack.supervisor.pids()['api']}")
    (process / "clear_refs").write_text("5")  # VmHWM := VmRSS
    idle_bytes = _resident(process, "VmRSS")
    began = time.monotonic()
    move()
    seconds = time.monotonic() - began
    peak_bytes = _resident(process, "VmHWM")
    return Transfer(what=what, bytes=size, seconds=seconds, idle_bytes=idle_bytes, peak_bytes=peak_bytes)


def _resident(process: Path, field: str) -> int:
    lines = (process / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def run(stack: Stack, size: int, validated_size: int) -> Iterator[Transfer]:
    """Up, down, and up with validation; what was stored is taken away again."""
    sdk = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none is configured", timeout=3600, max_retries=0)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as source:
        sha256 = write_lines(source, size)  # type: ignore[arg-type]
        made: list[Any] = []
        yield measure(stack, "upload", size, lambda: made.append(_upload(sdk, source.name)))
        assert made[0].bytes == size
        yield measure(stack, "download", size, lambda: _download(sdk, made[0].id, size))
        etag = stack.http.get(f"/v1/files/{made[0].id}/content", headers={"range": "bytes=0-0"}).headers["etag"]
        assert etag == f'"{sha256}"'
        sdk.files.delete(made[0].id)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as source:
        write_lines(source, validated_size)  # type: ignore[arg-type]
        yield measure(stack, "upload, validated", validated_size, lambda: made.append(_upload(sdk, source.name, True)))
        assert made[1].model_extra["validation"]["errors"] == []
        sdk.files.delete(made[1].id)


def _upload(sdk: openai.OpenAI, path: str, is_validated: bool = False) -> Any:
    query = {"validate": "true"} if is_validated else None
    with Path(path).open("rb") as stream:
        return sdk.files.create(file=("in.jsonl", stream), purpose="batch", extra_query=query)


def _download(sdk: openai.OpenAI, file_id: str, size: int) -> None:
    with sdk.files.with_streaming_response.content(file_id) as answer:
        assert sum(map(len, answer.iter_bytes(1 << 20))) == size


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__)
    parser.add_argument("--bytes", type=float, default=1e9, help="of the file that goes up and down")
    parser.add_argument("--validated-bytes", type=float, default=2e8, help="of the file that is validated")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    options = parser.parse_args()
    limits = {"max_file_bytes": int(max(options.bytes, options.validated_bytes)), "max_lines": 10**9}
    found: list[Transfer] = []
    with running_stack(f"[models.{_MODEL}]\n", _INSTANCES, 1, **limits) as stack:
        print(f"{'':18}{'MB':>8}{'seconds':>10}{'MB/s':>8}{'API idle, MB':>14}{'over idle, MB':>15}", flush=True)
        for _ in range(options.runs):
            for item in run(stack, int(options.bytes), int(options.validated_bytes)):
                found.append(item)
                print(
                    f"{item.what:18}{item.bytes / _MB:8,.0f}{item.seconds:10.2f}{item.mb_per_second:8.0f}"
                    f"{item.idle_bytes / _MB:14.0f}{item.grown_mb:15.1f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"transfers": [asdict(item) for item in found]}))


if __name__ == "__main__":
    main()
