"""The tensors and sizes of tiny models with recurrent layers; `tiny.write_model` writes them.

Hybrid models have a recurrent layer, then one with attention, and so on. Falcon-H1 has both in each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.tiny import Shape

Rows = int | tuple[int, ...]  # 0 for a vector
Tensor = tuple[str, Rows, int, float]  # name, rows, columns, standard deviation
Part = Callable[["Shape"], Iterator[Tensor]]

N_STATE, N_RANK, N_GROUPS = 16, 2, 1
_HEAD, _LORA = 64, 8  # of RWKV; ggml's kernels read 64 numbers at once
_DT = 64  # of PLaMo 2
PURE = ("mamba", "mamba2", "rwkv6", "rwkv7")
HYBRID = ("jamba", "falcon-h1", "granitehybrid", "lfm2", "nemotron_h", "plamo2", "qwen35", "qwen3next")


def metadata(arch: str, shape: Shape) -> Mapping[str, object]:
    """The keys that no transformer has."""
    n_inner = 2 * shape.n_embd
    ssm = {"ssm.conv_kernel": 4, "ssm.inner_size": n_inner, "ssm.state_size": N_STATE, "ssm.time_step_rank": N_RANK}
    grouped = {**ssm, "ssm.group_count": N_GROUPS}
    delta = {**grouped, "ssm.inner_size": N_RANK * N_STATE, "full_attention_interval": 2}
    heads = {"attention.head_count_kv": [shape.n_head_kv * is_attention(index) for index in range(shape.n_layer)]}
    rwkv = {"wkv.head_size": _HEAD, "attention.layer_norm_epsilon": 1e-5}
    ranks = ("decay", "iclr", "value_residual_mix", "gate")
    single = {"feed_forward_length": [0] * shape.n_layer, "attention.layer_norm_epsilon": 1e-5}
    experts = {"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": shape.n_ff}
    own: Mapping[str, Mapping[str, object]] = {
        "mamba": ssm,
        "mamba2": grouped,
        "rwkv6": {**rwkv, "time_mix_extra_dim": _LORA, "time_decay_extra_dim": _LORA},
        "rwkv7": {**rwkv, **{f"attention.{of}_lora_rank": _LORA for of in ranks}},
        "jamba": {**ssm, **heads},
        "falcon-h1": grouped,
        "granitehybrid": {**grouped, **heads},
        "lfm2": {"shortconv.l_cache": 3, **heads},
        "nemotron_h": {**grouped, **heads, **single},
        "plamo2": {**ssm, "ssm.group_count": 0, **heads},
        "qwen35": {**delta, "rope.dimension_sections": [3, 3, 2, 0]},
        "qwen3next": {**delta, **experts, "expert_shared_feed_forward_length": shape.n_ff},
    }  # fmt: skip
    return {f"{arch}.{key}": value for key, value in own[arch].items()}


def least_embd(arch: str) -> int:
    """The narrowest model."""
    return _HEAD if arch.startswith("rwkv") else 1


def is_attention(index: int) -> bool:
    return index % 2 == 1


def tensors(arch: str, shape: Shape, n_vocab: int, scale: float) -> Iterator[Tensor]:
    """Every tensor."""
    n_embd = shape.n_embd
    yield "token_embd.weight", n_vocab, n_embd, 1.0
    for index in range(shape.n_layer):
        for part in _PARTS[arch](index):
            for name, rows, columns, deviation in part(shape):
                yield f"blk.{index}.{name}", rows, columns, deviation
    if arch.startswith("rwkv"):
        for name in ("token_embd_norm", "output_norm"):
            yield f"{name}.weight", 0, n_embd, 0.1
            yield f"{name}.bias", 0, n_embd, 0.1
    else:
        yield "token_embd_norm.weight" if arch == "lfm2" else "output_norm.weight", 0, n_embd, 0.1
    yield "output.weight", n_vocab, n_embd, scale / np.sqrt(n_embd)


def _norm(*names: str) -> Part:
    def tensors(shape: Shape) -> Iterator[Tensor]:
        for name in names:
            yield name, 0, shape.n_embd, 0.1

    return tensors


def _mamba(shape: Shape) -> Iterator[Tensor]:
    n_embd, n_inner = shape.n_embd, 2 * shape.n_embd
    yield "ssm_in.weight", 2 * n_inner, n_embd, 0.2
    yield "ssm_conv1d.weight", n_inner, 4, 0.2
    yield "ssm_conv1d.bias", 0, n_inner, 0.1
    yield "ssm_x.weight", N_RANK + 2 * N_STATE, n_inner, 0.1
    yield "ssm_dt.weight", n_inner, N_RANK, 0.1
    yield "ssm_dt.bias", 0, n_inner, 0.1
    yield "ssm_a", n_inner, N_STATE, 0.1
    yield "ssm_d", 0, n_inner, 0.1
    yield "ssm_out.weight", n_embd, n_inner, 0.1


def _jamba(shape: Shape) -> Iterator[Tensor]:
    yield from _mamba(shape)
    yield "ssm_dt_norm.weight", 0, N_RANK, 0.1
    yield "ssm_b_norm.weight", 0, N_STATE, 0.1
    yield "ssm_c_norm.weight", 0, N_STATE, 0.1


def _mamba2(shape: Shape) -> Iterator[Tensor]:
    n_embd, n_inner = shape.n_embd, 2 * shape.n_embd
    n_conv = n_inner + 2 * N_GROUPS * N_STATE
    yield "ssm_in.weight", n_inner + n_conv + N_RANK, n_embd, 0.3
    yield "ssm_conv1d.weight", n_conv, 4, 0.5
    yield "ssm_conv1d.bias", 0, n_conv, 0.1
    yield "ssm_dt.bias", 0, N_RANK, 0.1
    yield "ssm_a", N_RANK, 1, 0.1
    yield "ssm_d", N_RANK, 1, 0.1
    yield "ssm_norm.weight", N_GROUPS, n_inner // N_GROUPS, 0.1
    yield "ssm_out.weight", n_embd, n_inner, 0.2


def _plamo2(shape: Shape) -> Iterator[Tensor]:
    n_embd, n_inner = shape.n_embd, 2 * shape.n_embd
    yield "ssm_in.weight", 2 * n_inner, n_embd, 0.3
    yield "ssm_conv1d.weight", n_inner, 4, 0.5
    yield "ssm_x.weight", _DT + 2 * N_STATE, n_inner, 0.2
    yield "ssm_dt.weight", N_RANK, _DT, 0.1
    yield "ssm_dt.bias", 0, N_RANK, 0.1
    yield "ssm_a", 0, N_RANK, 0.1
    yield "ssm_d", 0, N_RANK, 0.1
    yield "ssm_out.weight", n_embd, n_inner, 0.2
    yield "ssm_dt_norm", 0, _DT, 0.1
    yield "ssm_b_norm", 0, N_STATE, 0.1
    yield "ssm_c_norm", 0, N_STATE, 0.1


def _plamo2_attention(shape: Shape) -> Iterator[Tensor]:
    n_kv = shape.n_head_kv * shape.head_dim
    yield "attn_qkv.weight", shape.n_embd + 2 * n_kv, shape.n_embd, 0.3
    yield "attn_q_norm.weight", shape.n_head, shape.head_dim, 0.1
    yield "attn_k_norm.weight", shape.n_head_kv, shape.head_dim, 0.1
    yield "attn_output.weight", shape.n_embd, shape.n_embd, 0.3


def _plamo2_feed_forward(shape: Shape) -> Iterator[Tensor]:
    yield "ffn_down.weight", shape.n_embd, shape.n_ff, 0.1
    yield "ffn_up.weight", 2 * shape.n_ff, shape.n_embd, 0.3


def _delta_net(shape: Shape) -> Iterator[Tensor]:
    n_embd, n_key, n_value = shape.n_embd, N_GROUPS * N_STATE, N_RANK * N_STATE
    yield "attn_qkv.weight", 2 * n_key + n_value, n_embd, 0.3
    yield "attn_gate.weight", n_value, n_embd, 0.3
    yield "ssm_conv1d.weight", 2 * n_key + n_value, 4, 0.5
    yield "ssm_dt.bias", 0, N_RANK, 0.1
    yield "ssm_a", 0, N_RANK, 0.1
    yield "ssm_norm.weight", 0, N_STATE, 0.1
    yield "ssm_out.weight", n_embd, n_value, 0.3


def _qwen35(shape: Shape) -> Iterator[Tensor]:
    yield from _delta_net(shape)
    yield "ssm_beta.weight", N_RANK, shape.n_embd, 0.3
    yield "ssm_alpha.weight", N_RANK, shape.n_embd, 0.3


def _qwen3next(shape: Shape) -> Iterator[Tensor]:
    yield from _delta_net(shape)
    yield "ssm_ba.weight", 2 * N_RANK, shape.n_embd, 0.3


def _short_convolution(shape: Shape) -> Iterator[Tensor]:
    yield "shortconv.conv.weight", shape.n_embd, 3, 0.5
    yield "shortconv.in_proj.weight", 3 * shape.n_embd, shape.n_embd, 0.3
    yield "shortconv.out_proj.weight", shape.n_embd, shape.n_embd, 0.3


def _attention(shape: Shape) -> Iterator[Tensor]:
    n_kv = shape.n_head_kv * shape.head_dim
    for name, rows in (("attn_q", shape.n_embd), ("attn_k", n_kv), ("attn_v", n_kv), ("attn_output", shape.n_embd)):
        yield f"{name}.weight", rows, shape.n_embd, 0.3


def _normed_attention(shape: Shape) -> Iterator[Tensor]:
    yield from _attention(shape)
    yield "attn_q_norm.weight", 0, shape.head_dim, 0.1
    yield "attn_k_norm.weight", 0, shape.head_dim, 0.1


def _gated_attention(shape: Shape) -> Iterator[Tensor]:
    for name, rows, columns, deviation in _normed_attention(shape):
        yield name, 2 * shape.n_embd if name == "attn_q.weight" else rows, columns, deviation


def _feed_forward(shape: Shape) -> Iterator[Tensor]:
    yield "ffn_gate.weight", shape.n_ff, shape.n_embd, 0.3
    yield "ffn_up.weight", shape.n_ff, shape.n_embd, 0.3
    yield "ffn_down.weight", shape.n_embd, shape.n_ff, 0.1


def _experts(shape: Shape) -> Iterator[Tensor]:
    n_embd, n_ff = shape.n_embd, shape.n_ff
    yield "ffn_gate_inp.weight", 2, n_embd, 0.3
    yield "ffn_gate_inp_shexp.weight", 0, n_embd, 0.3
    for of, few in (("exps", (2,)), ("shexp", ())):
        yield f"ffn_gate_{of}.weight", (*few, n_ff), n_embd, 0.3
        yield f"ffn_up_{of}.weight", (*few, n_ff), n_embd, 0.3
        yield f"ffn_down_{of}.weight", (*few, n_embd), n_ff, 0.1


def _rwkv(shape: Shape) -> Iterator[Tensor]:
    n_embd = shape.n_embd
    for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
        yield f"{name}.weight", 0, n_embd, 0.1
        yield f"{name}.bias", 0, n_embd, 0.1
    for name in ("key", "value", "receptance", "output"):
        yield f"time_mix_{name}.weight", n_embd, n_embd, 0.3
    yield "channel_mix_lerp_k.weight", (1, 1), n_embd, 0.3
    yield "channel_mix_key.weight", shape.n_ff, n_embd, 0.3
    yield "channel_mix_value.weight", n_embd, shape.n_ff, 0.1


def _rwkv6(shape: Shape) -> Iterator[Tensor]:
    n_embd = shape.n_embd
    yield from _rwkv(shape)
    yield "time_mix_w1.weight", 5 * _LORA, n_embd, 0.1
    yield "time_mix_w2.weight", (5, n_embd), _LORA, 0.1
    yield "time_mix_lerp_x.weight", (1, 1), n_embd, 0.3
    yield "time_mix_lerp_fused.weight", (5, 1, 1), n_embd, 0.3
    yield "time_mix_first.weight", n_embd // _HEAD, _HEAD, 0.3
    yield "time_mix_decay.weight", 0, n_embd, 0.3
    yield "time_mix_decay_w1.weight", _LORA, n_embd, 0.1
    yield "time_mix_decay_w2.weight", n_embd, _LORA, 0.1
    yield "time_mix_gate.weight", n_embd, n_embd, 0.3
    yield "channel_mix_lerp_r.weight", (1, 1), n_embd, 0.3
    yield "channel_mix_receptance.weight", n_embd, n_embd, 0.3


def _rwkv7(shape: Shape) -> Iterator[Tensor]:
    n_embd = shape.n_embd
    yield from _rwkv(shape)
    for of in "wav":
        yield f"time_mix_{of}0.weight", 0, n_embd, 0.3
    for of in "wavg":
        yield f"time_mix_{of}1.weight", _LORA, n_embd, 0.1
        yield f"time_mix_{of}2.weight", n_embd, _LORA, 0.1
    yield "time_mix_lerp_fused.weight", (6, 1, 1), n_embd, 0.3
    for of in ("k_k", "k_a", "r_k"):
        yield f"time_mix_{of}.weight", 0, n_embd, 0.3


def _either(recurrent: Part, attention: Part, *others: Part) -> Callable[[int], list[Part]]:
    return lambda index: [attention if is_attention(index) else recurrent, *others]


_BOTH = _norm("attn_norm.weight", "ffn_norm.weight")
_POST = _norm("attn_norm.weight", "post_attention_norm.weight")
_PARTS: Mapping[str, Callable[[int], list[Part]]] = {
    "mamba": lambda _: [_norm("attn_norm.weight"), _mamba],
    "mamba2": lambda _: [_norm("attn_norm.weight"), _mamba2],
    "rwkv6": lambda _: [_rwkv6],
    "rwkv7": lambda _: [_rwkv7],
    "jamba": _either(_jamba, _attention, _BOTH, _feed_forward),
    "falcon-h1": lambda _: [_norm("attn_norm.weight", "ffn_norm"), _mamba2, _attention, _feed_forward],
    "granitehybrid": _either(_mamba2, _attention, _BOTH, _feed_forward),
    "lfm2": _either(_short_convolution, _normed_attention, _BOTH, _feed_forward),
    "nemotron_h": _either(_mamba2, _attention, _norm("attn_norm.weight")),
    "plamo2": _either(
        _plamo2, _plamo2_attention, _BOTH, _norm("post_attention_norm", "post_ffw_norm"), _plamo2_feed_forward
    ),
    "qwen35": _either(_qwen35, _gated_attention, _POST, _feed_forward),
    "qwen3next": _either(_qwen3next, _gated_attention, _POST, _experts),
}  # fmt: skip
