"""Reading GGUF and writing the folder that vLLM loads, on a made file of two layers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from workers.checkpoint import write_checkpoint
from workers.gguf import GgufFile, GgufUnreadable

HIDDEN, HEADS, KV_HEADS, FEED, LAYERS = 64, 4, 2, 96, 2
TOKENS = ["<|end|>", "<|start|>", "a", "b", "ab", "Ġ", "1"]
F32, Q4_1, Q8_0 = 0, 3, 8
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FEED,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    items = b"".join(text(item) if isinstance(item, str) else struct.pack("<i", item) for item in value)
    return struct.pack("<IIQ", 9, 8 if isinstance(value[0], str) else 5, len(value)) + items


def shapes() -> dict[str, tuple[int, ...]]:
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN // 2, HIDDEN),
        "attn_v": (HIDDEN // 2, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (FEED, HIDDEN),
        "ffn_up": (FEED, HIDDEN),
        "ffn_down": (HIDDEN, FEED),
    }
    names = {f"blk.{index}.{name}.weight": shape for index in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,), **names}


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + field(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def plain(metadata: dict[str, Any] = METADATA, path: Path | None = None) -> dict[str, Any]:
    random = np.random.default_rng(1)
    made = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes().items()}
    assert path is not None
    write_gguf(path, metadata, {name: (F32, value.shape, value.tobytes()) for name, value in made.items()})
    return made


def read_safetensors(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    base = 8 + length
    assert base % 8 == 0
    return {
        name: np.frombuffer(raw[base + item["data_offsets"][0] : base + item["data_offsets"][1]], np.float32).reshape(
            item["shape"]
        )
        for name, item in header.items()
    }


def test_a_folder_is_made_that_names_and_orders_weights_as_transformers_does(tmp_path: Path) -> None:
    made = plain(path=tmp_path / "tiny.gguf")
    calls: list[tuple[int, int]] = []
    write_checkpoint(
        GgufFile(tmp_path / "tiny.gguf"), tmp_path, progress=lambda done, total: calls.append((done, total))
    )
    weights = read_safetensors(tmp_path / "model.safetensors")
    assert len(weights) == len(made) == len(calls)
    assert np.array_equal(weights["model.embed_tokens.weight"], made["token_embd.weight"])
    assert np.array_equal(weights["model.layers.1.mlp.down_proj.weight"], made["blk.1.ffn_down.weight"])
    interleaved = made["blk.0.attn_q.weight"].reshape(HEADS, HIDDEN // HEADS, HIDDEN)
    query = weights["model.layers.0.self_attn.q_proj.weight"].reshape(HEADS, HIDDEN // HEADS, HIDDEN)
    half = HIDDEN // HEADS // 2
    assert np.array_equal(query[:, :half], interleaved[:, 0::2])
    assert np.array_equal(query[:, half:], interleaved[:, 1::2])
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"], config["tie_word_embeddings"]) == (2, 16, True)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("ab<|start|>b11", add_special_tokens=False).ids == [4, 1, 3, 6, 6]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"


def test_blocks_are_dequantised(tmp_path: Path) -> None:
    scale, minimum = np.float16(0.5), np.float16(-2.0)
    packed = bytes(low | (15 - low) << 4 for low in range(16))
    q4 = scale.tobytes() + minimum.tobytes() + packed
    q8 = np.float16(0.25).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()
    write_gguf(
        tmp_path / "q.gguf", {}, {"four": (Q4_1, (1, 32), q4), "eight": (Q8_0, (2, 32), q8 * 2), "no": (9, (32,), b"")}
    )
    file = GgufFile(tmp_path / "q.gguf")
    low = np.arange(16) * 0.5 - 2
    assert np.array_equal(file.tensor("four"), [np.concatenate([low, low[::-1]])])
    assert np.array_equal(file.tensor("eight"), [np.arange(-16, 16) * 0.25] * 2)
    with pytest.raises(GgufUnreadable, match="quantised as type 9"):
        file.tensor("no")


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"something else")
    with pytest.raises(GgufUnreadable, match="is no GGUF file"):
        GgufFile(tmp_path / "x.gguf")
    plain(path=tmp_path / "cut.gguf")
    whole = (tmp_path / "cut.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:300])
    with pytest.raises(GgufUnreadable):
        GgufFile(tmp_path / "cut.gguf")
    plain({**METADATA, "general.architecture": "qwen3"}, tmp_path / "other.gguf")
    with pytest.raises(GgufUnreadable, match="only the Llama architecture"):
        write_checkpoint(GgufFile(tmp_path / "other.gguf"), tmp_path, progress=lambda done, total: None)
