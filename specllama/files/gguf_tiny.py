"""A GGUF model of some hundred kilobytes, made of noise, for the probe to send each kind of weight through a decode.

Written by hand, because the `gguf` package is not there at run time.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

N_VOCAB = 64
N_CTX = 128
_WIDTH = 256  # the size of a K-quant block: the narrowest row every kernel path (AMX, repacking) takes
_N_HEADS = 4
_ALIGNMENT = 32
_TEXT, _U32, _F32 = 8, 4, 6  # GGUF's value types


@dataclass(frozen=True, slots=True)
class _Kind:
    """One ggml tensor type. A block is scales, then noise, then scales (Q6_K has its scale at the end)."""

    number: int
    n_values: int  # weights in a block
    n_scales: int  # 16-bit floats before the noise
    n_noise: int  # bytes
    n_scales_behind: int = 0

    def block(self, noise: random.Random) -> bytes:
        """Any bytes are weights; only the scales must be small, or the logits overflow."""
        scale = struct.pack("<e", 0.0005)
        return scale * self.n_scales + noise.randbytes(self.n_noise) + scale * self.n_scales_behind


_Q4_0 = _Kind(2, 32, 1, 16)
_Q4_1 = _Kind(3, 32, 2, 16)
_Q8_0 = _Kind(8, 32, 1, 32)
_Q4_K = _Kind(12, 256, 2, 140)
_Q5_K = _Kind(13, 256, 2, 172)
_Q6_K = _Kind(14, 256, 0, 208, n_scales_behind=1)

_MATRICES = {  # name -> type and rows; between them, the types that the usual model files hold
    "token_embd": (_Q4_K, N_VOCAB),
    "blk.0.attn_q": (_Q4_K, _WIDTH),
    "blk.0.attn_k": (_Q4_0, _WIDTH),
    "blk.0.attn_v": (_Q8_0, _WIDTH),
    "blk.0.attn_output": (_Q6_K, _WIDTH),
    "blk.0.ffn_gate": (_Q5_K, _WIDTH),
    "blk.0.ffn_up": (_Q4_1, _WIDTH),
    "blk.0.ffn_down": (_Q4_K, _WIDTH),
    "output": (_Q6_K, N_VOCAB),
}
_Tensor: TypeAlias = tuple[str, int, tuple[int, ...], bytes]  # name, type, shape (row length first), data
_NORMS = ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")


def tiny_gguf() -> bytes:
    """The whole file: architecture `llama`, one layer, no tokenizer, a vocabulary of N_VOCAB bare ids."""
    facts: dict[str, str | int | float] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "none",
        "llama.vocab_size": N_VOCAB,
        "llama.context_length": N_CTX,
        "llama.embedding_length": _WIDTH,
        "llama.feed_forward_length": _WIDTH,
        "llama.block_count": 1,
        "llama.attention.head_count": _N_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    noise = random.Random(1)
    tensors: list[_Tensor] = [(name, 0, (_WIDTH,), struct.pack("<f", 1.0) * _WIDTH) for name in _NORMS]
    for name, (kind, n_rows) in _MATRICES.items():
        n_blocks = n_rows * _WIDTH // kind.n_values
        tensors.append((name, kind.number, (_WIDTH, n_rows), b"".join(kind.block(noise) for _ in range(n_blocks))))
    return _pack(facts, tensors)


def _pack(facts: Mapping[str, str | int | float], tensors: Sequence[_Tensor]) -> bytes:
    infos, data = b"", b""
    for name, kind, shape, body in tensors:
        infos += _text(f"{name}.weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += _padded(body)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    return _padded(head + b"".join(map(_fact, facts, facts.values())) + infos) + data


def _fact(key: str, value: str | int | float) -> bytes:
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", _TEXT) + _text(value)
    if isinstance(value, int):
        return _text(key) + struct.pack("<II", _U32, value)
    return _text(key) + struct.pack("<If", _F32, value)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode("ascii")


def _padded(body: bytes) -> bytes:
    return body + bytes(-len(body) % _ALIGNMENT)
