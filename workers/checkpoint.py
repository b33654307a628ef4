"""A folder that vLLM and transformers load, made from a GGUF file of the Llama family with a GPT-2 style tokenizer."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers.gguf import F32Array, GgufFile, GgufUnreadable

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type


def write_checkpoint(source: GgufFile, folder: Path, *, progress: Callable[[int, int], None]) -> None:
    """config.json, weights in float32, tokenizer and chat template. `progress(done, total)` counts tensors."""
    if source.metadata.get("general.architecture") != "llama" or source.metadata.get("tokenizer.ggml.model") != "gpt2":
        raise GgufUnreadable("only the Llama architecture with a GPT-2 style tokenizer is converted.")
    _write_json(folder / "config.json", model_config(source))
    _write_json(folder / "generation_config.json", _special_ids(source.metadata))
    _write_json(folder / "tokenizer.json", tokenizer(source.metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(source.metadata))
    (folder / "chat_template.jinja").write_text(source.metadata["tokenizer.chat_template"], encoding="utf-8")
    _write_weights(source, folder / "model.safetensors", progress)


def model_config(source: GgufFile) -> dict[str, Any]:
    """transformers' LlamaConfig."""
    fields = {name.removeprefix("llama."): value for name, value in source.metadata.items()}
    heads = fields["attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["embedding_length"],
        "intermediate_size": fields["feed_forward_length"],
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["attention.head_count_kv"],
        "head_dim": fields["embedding_length"] // heads,
        "max_position_embeddings": fields["context_length"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in source.names(),
        "torch_dtype": "float32",
        **_special_ids(source.metadata),
    }


def tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json of the `tokenizers` library. Digits are split one by one for the pre-tokenizer "smollm", as the
    model was trained."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps = [{"type": "Digits", "individual_digits": True}] if metadata.get("tokenizer.ggml.pre") == "smollm" else []
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **flags}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    special = {name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **special,
    }


def _special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_weights(source: GgufFile, path: Path, progress: Callable[[int, int], None]) -> None:
    """safetensors: the length of a JSON header, the header, then the raw tensors in its order."""
    names = source.names()
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = source.tensor(name)
        header[_name(name)] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for done, name in enumerate(names, start=1):
            file.write(_weights(source, name).tobytes())
            progress(done, len(names))


def _weights(source: GgufFile, name: str) -> F32Array:
    """Queries and keys are stored with their rotary halves interleaved; transformers wants one after the other."""
    tensor = source.tensor(name)
    heads = {
        "attn_q": source.metadata["llama.attention.head_count"],
        "attn_k": source.metadata["llama.attention.head_count_kv"],
    }.get(name.split(".")[-2])
    if heads is None:
        return tensor
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, tensor.shape[1])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=1), encoding="utf-8")
