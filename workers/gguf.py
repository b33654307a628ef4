"""GGUF files: metadata, and tensors as float32 arrays. Only what the demo's model needs: F32, Q8_0, Q4_1.

Format: the GGUF specification in ggml's docs/gguf.md; blocks: ggml-common.h (block_q4_1, block_q8_0).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import TrunklineError

F32Array = NDArray[np.float32]

_MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK = 32  # values in one quantised block


class GgufUnreadable(TrunklineError):
    """The GGUF file cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorInfo:
    shape: tuple[int, ...]  # outermost first, as numpy has it
    kind: int
    offset: int


class GgufFile:
    """An open file: `metadata` by key, tensors by name on demand."""

    def __init__(self, path: Path) -> None:
        try:
            self._raw = memoryview(path.read_bytes())
            if bytes(self._raw[:4]) != _MAGIC:
                raise GgufUnreadable(f"{path} is no GGUF file.")
            self._at = 4
            _version, n_tensors, n_fields = self._unpack("IQQ")
            self.metadata: dict[str, Any] = {self._string(): self._value(self._unpack("I")[0]) for _ in range(n_fields)}
            self._tensors = dict(self._tensor_info() for _ in range(n_tensors))
        except (struct.error, ValueError, KeyError, OSError) as error:
            raise GgufUnreadable(f"{path}: {error}") from error
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        self._base = -(-self._at // alignment) * alignment

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> F32Array:
        """Dequantised."""
        info = self._tensors[name]
        count = int(np.prod(info.shape))
        start = self._base + info.offset
        readers: dict[int, tuple[int, Callable[[NDArray[np.uint8]], F32Array]]] = {
            _F32: (count * 4, lambda raw: raw.view(np.float32)),
            _Q4_1: (count // _BLOCK * 20, _dequantise_q4_1),
            _Q8_0: (count // _BLOCK * 34, _dequantise_q8_0),
        }
        if info.kind not in readers:
            raise GgufUnreadable(f"{name} is quantised as type {info.kind}; known are F32, Q4_1 and Q8_0.")
        n_bytes, read = readers[info.kind]
        return read(np.frombuffer(self._raw, dtype=np.uint8, count=n_bytes, offset=start)).reshape(info.shape)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._raw, self._at)
        self._at += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        self._at += length
        return str(self._raw[self._at - length : self._at], "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        item_kind, length = self._unpack("IQ")
        if item_kind in _SCALARS:
            return list(self._unpack(f"{length}{_SCALARS[item_kind]}"))
        return [self._value(item_kind) for _ in range(length)]

    def _tensor_info(self) -> tuple[str, _TensorInfo]:
        name = self._string()
        (n_dimensions,) = self._unpack("I")
        shape = self._unpack(f"{n_dimensions}Q")
        kind, offset = self._unpack("IQ")
        return name, _TensorInfo(shape=tuple(reversed(shape)), kind=kind, offset=offset)


def _dequantise_q4_1(raw: NDArray[np.uint8]) -> F32Array:
    """Blocks of 32: scale and minimum (float16), then 16 bytes: low halves are values 0 to 15, high ones 16 to 31."""
    blocks = raw.reshape(-1, 20)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    packed = blocks[:, 4:]
    values = np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)
    dequantised: F32Array = values * scale + minimum
    return dequantised


def _dequantise_q8_0(raw: NDArray[np.uint8]) -> F32Array:
    """Blocks of 32: scale (float16), then 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    values: F32Array = blocks[:, 2:].copy().view(np.int8).astype(np.float32) * scale
    return values
