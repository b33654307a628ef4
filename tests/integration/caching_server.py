"""A server like vLLM where it matters for keys: it renders and tokenises by its own files, and caches blocks by salt.

What is wrong with it, a test sets: another folder of files, another block size than it says, a salt for each request.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from service.fleet import Model, Models
from service.tokenizing import Tokenizing

MODEL = "tiny"
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> Path:
    """A tokenizer of one token for each byte, and a chat template."""
    folder.mkdir(parents=True)
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


class CachingServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, *, block_size: int = 32, capacity_tokens: int = 10**6) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokenizing = Tokenizing(Models({MODEL: Model(name=MODEL, tokenizer=folder)}))
        self.block_size = block_size
        self.capacity_blocks = capacity_tokens // block_size
        self.told_block_size: int | None = None  # in its metrics; None: it has none
        self.salts_each = False
        self.answers_tokenize = True
        self._held: OrderedDict[tuple[str, tuple[int, ...]], None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def ids(self, path: str, body: dict[str, Any]) -> list[int]:
        ids = self.tokenizing.token_ids(MODEL, path, body)
        assert ids is not None
        return ids

    def serve(self, ids: list[int], salt: str) -> int:
        """Tokens of a prompt that were cached; then it is, and what was used least recently goes."""
        with self._lock:
            ends = range(self.block_size, len(ids) + 1, self.block_size)
            blocks = [(salt, tuple(ids[:end])) for end in ends]
            most = (len(ids) - 1) // self.block_size
            hits = next((n for n, block in enumerate(blocks[:most]) if block not in self._held), most)
            for block in reversed(blocks):
                self._held[block] = None
                self._held.move_to_end(block)
            while len(self._held) > self.capacity_blocks:
                self._held.popitem(last=False)
            return hits * self.block_size


class _Handler(BaseHTTPRequestHandler):
    server: CachingServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]})
        elif self.path == "/metrics" and self.server.told_block_size:
            size = self.server.told_block_size
            self._send_bytes(200, f'vllm:cache_config_info{{block_size="{size}"}} 1.0\n'.encode())
        else:
            self._send(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            known = self.server.answers_tokenize
            self._send(200 if known else 404, {"tokens": self.server.ids(path, body)} if known else {})
            return
        ids = self.server.ids(self.path, body)
        salt = str(body.get("cache_salt", ""))
        if self.server.salts_each and "probe" not in json.dumps(body):
            salt = secrets.token_hex(8)
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": self.server.serve(ids, salt)},
        }
        message = {"role": "assistant", "content": "ok"}
        self._send(200, {"choices": [{"index": 0, "message": message}], "usage": usage})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._send_bytes(status, json.dumps(body).encode())

    def _send_bytes(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def serving(server: CachingServer) -> Iterator[CachingServer]:
    """In a thread of this process."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
