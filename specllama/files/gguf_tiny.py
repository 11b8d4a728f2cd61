"""A random GGUF model of some hundred kilobytes with every usual tensor type, for the crash test."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from specllama.files.gguf_header import ALIGNMENT, TYPES
from specllama.files.gguf_rewrite import f32, packed_header, text, u32

N_VOCAB = 64
N_CTX = 128
_WIDTH = 256  # the size of a K-quant block: the narrowest row that every kernel path (AMX, repacking) takes
_N_HEADS = 4


@dataclass(frozen=True, slots=True)
class _Kind:
    """One ggml tensor type. A block is scales, then noise, then scales (Q6_K has its scale at the end)."""

    number: int  # in TYPES
    n_scales: int  # 16-bit floats before the noise
    n_scales_behind: int = 0

    def block(self, noise: random.Random) -> bytes:
        """Random weights; the scales must be small, or the logits overflow."""
        n_noise = TYPES[self.number].n_bytes - 2 * (self.n_scales + self.n_scales_behind)
        scale = struct.pack("<e", 0.0005)
        return scale * self.n_scales + noise.randbytes(n_noise) + scale * self.n_scales_behind


_Q4_0, _Q4_1, _Q8_0 = _Kind(2, 1), _Kind(3, 2), _Kind(8, 1)
Q4_K, _Q5_K, Q6_K = _Kind(12, 2), _Kind(13, 2), _Kind(14, 0, n_scales_behind=1)

_MATRICES = {  # name -> type and rows; together, the types of the usual model files
    "token_embd": (Q4_K, N_VOCAB),
    "blk.0.attn_q": (Q4_K, _WIDTH),
    "blk.0.attn_k": (_Q4_0, _WIDTH),
    "blk.0.attn_v": (_Q8_0, _WIDTH),
    "blk.0.attn_output": (Q6_K, _WIDTH),
    "blk.0.ffn_gate": (_Q5_K, _WIDTH),
    "blk.0.ffn_up": (_Q4_1, _WIDTH),
    "blk.0.ffn_down": (Q4_K, _WIDTH),
    "output": (Q6_K, N_VOCAB),
}
_NORMS = ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")


def tiny_gguf() -> bytes:
    """The whole file: architecture `llama`, one layer, N_VOCAB tokens without a tokenizer."""
    facts = {
        "general.architecture": text("llama"),
        "tokenizer.ggml.model": text("none"),
        "llama.vocab_size": u32(N_VOCAB),
        "llama.context_length": u32(N_CTX),
        "llama.embedding_length": u32(_WIDTH),
        "llama.feed_forward_length": u32(_WIDTH),
        "llama.block_count": u32(1),
        "llama.attention.head_count": u32(_N_HEADS),
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
    }
    noise = random.Random(1)
    tensors: list[tuple[str, int, tuple[int, ...], bytes]]  # name, type, shape, bytes
    tensors = [(name, 0, (_WIDTH,), struct.pack("<f", 1.0) * _WIDTH) for name in _NORMS]
    for name, (kind, n_rows) in _MATRICES.items():
        n_blocks = n_rows * _WIDTH // TYPES[kind.number].n_values
        tensors.append((name, kind.number, (_WIDTH, n_rows), b"".join(kind.block(noise) for _ in range(n_blocks))))
    head = packed_header(facts, [(f"{name}.weight", shape, kind, len(body)) for name, kind, shape, body in tensors])
    return head + b"".join(body + bytes(-len(body) % ALIGNMENT) for *_, body in tensors)
