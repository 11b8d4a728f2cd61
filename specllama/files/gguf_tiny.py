"""A GGUF model of some hundred kilobytes, made of noise, for the probe to send each kind of weight through a decode."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from specllama.files.gguf_header import ALIGNMENT
from specllama.files.gguf_rewrite import f32, packed_header, text, u32

N_VOCAB = 64
N_CTX = 128
_WIDTH = 256  # the size of a K-quant block: the narrowest row every kernel path (AMX, repacking) takes
_N_HEADS = 4


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
_NORMS = ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")


def tiny_gguf() -> bytes:
    """The whole file: architecture `llama`, one layer, no tokenizer, a vocabulary of N_VOCAB bare ids."""
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
        n_blocks = n_rows * _WIDTH // kind.n_values
        tensors.append((name, kind.number, (_WIDTH, n_rows), b"".join(kind.block(noise) for _ in range(n_blocks))))
    head = packed_header(facts, [(f"{name}.weight", shape, kind, len(body)) for name, kind, shape, body in tensors])
    return head + b"".join(body + bytes(-len(body) % ALIGNMENT) for *_, body in tensors)
