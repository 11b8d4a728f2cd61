"""The header of a real model, for tests that open no file."""

from __future__ import annotations

from pathlib import Path

from specllama.llama.header import Header

# Qwen2.5-Coder-1.5B-Instruct Q4_K_M
QWEN = Header(
    path=Path("qwen.gguf"),
    parts=(Path("qwen.gguf"),),
    architecture="qwen2",
    name="Qwen",
    n_layer=28,
    n_embd=1536,
    n_ff=8960,
    n_head=12,
    n_head_kv=(2,) * 28,
    key_length=128,
    value_length=128,
    n_vocab=151936,
    n_ctx_train=32768,
    n_swa=0,
    n_expert=0,
    n_file_bytes=1_117_320_768,
    weight_bytes={"q4_K": 625_508_352, "q6_K": 485_000_000, "f32": 861_888},
)
