"""The header of a model: its sizes and metadata, and the kinds of models that cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specllama.base.errors import ModelFileError, UnsupportedModel
from specllama.base.text import counted, figure
from specllama.files.gguf_header import MAX_INTEGER, TOKENIZER, TOKENS, TYPES, GgufHeader, TensorInfo, damaged

# llama.cpp asserts these limits, and a failed assertion ends the process.
_MAX_LAYERS = 512
_MAX_EXPERTS = 1024
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# Beyond these, every logit is NaN or llama.cpp asserts.
_BOUNDS = {
    "attention.layer_norm_rms_epsilon": (0.0, 1.0),
    "attention.layer_norm_epsilon": (0.0, 1.0),
    "rope.freq_base": (1.0, 1e30),
    "rope.freq_base_swa": (1.0, 1e30),
}
_RWKV_STEP = 64  # numbers that ggml's kernels read at once, also beyond the end of a head
PLAIN_TYPES = ("f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64")
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
# Tokenizers whose assertions end the process for a damaged file; no usable model has one.
_NO_TOKENIZERS = ("none", "no_vocab", "test")

# Kinds of architectures; diffusion models and encoders cannot be used. llama.cpp is asked again once the model is
# loaded, but loading takes long.
_KINDS: Mapping[str, Sequence[str]] = {
    "recurrent": ("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
    "hybrid": (
        "jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen3next",
        "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next", "qwen35", "qwen35moe", "qwen4exp", "deepseek4",
        "minimax-01",
    ),
    "diffusion": ("dream", "llada", "llada-moe", "rnd1"),
    "encoder": (
        "bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
        "t5", "t5encoder", "gemma-embedding", "llama-embed",
    ),
}  # fmt: skip
# llama.cpp keeps the state after each of the last tokens of these (`llm_arch_supports_rs_rollback` in llama-arch.cpp).
_KEEPING = (
    "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "bailingmoe3", "kimi-k3", "glm5-next", "qwen35", "qwen35moe",
    "qwen4exp", "deepseek4",
)  # fmt: skip
_MOST_KEPT_BYTES = 256 * 1024 * 1024
# One layer of so many has full attention (`load_swa_pattern` in llama.cpp's models), unless the file names them.
_WINDOWS = {
    "gemma2": 2, "gpt-oss": 2, "cohere2": 4, "exaone-moe": 4, "olmo2": 4, "gemma3n": 5, "gemma3": 6, "gemma4": 6,
}  # fmt: skip
_PARTS_OF_MODELS = {
    "clip": "the image or sound encoder of a multimodal model",
    "eagle3": "a drafting head for another model",
    "dflash": "a drafting head for another model",
    "gemma4-assistant": "a drafting head for another model",
    "wavtokenizer-dec": "a sound decoder",
}


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """The header of a model, of all its files."""

    path: Path
    parts: tuple[Path, ...]  # the file itself, or all parts of a split model in order
    architecture: str
    name: str
    n_layer: int
    n_embd: int
    n_ff: int  # the widest layer
    n_head: int  # the most heads of a layer
    n_head_kv: tuple[int, ...]  # (n_layer,)
    key_length: int  # numbers per KV head
    value_length: int
    n_vocab: int
    n_ctx_train: int
    n_swa: int  # sliding window in tokens, 0 = none
    n_expert: int
    n_file_bytes: int  # all parts
    weight_bytes: Mapping[str, int]  # by ggml type, such as "q4_K"
    n_expert_used: int = 0  # for a token
    causal: bool = True  # a token sees only those before it
    tokenizer: str = ""  # as the file names it: "gpt2", "llama", ...
    chat_template: str | None = None
    basename: str = ""  # the name without size and version
    finetune: str = ""  # what the model was tuned for, such as "Instruct"
    files: tuple[GgufHeader, ...] = field(default=(), repr=False)  # the headers of the parts

    @property
    def gguf(self) -> GgufHeader:
        """The header of the (first) file, for other keys."""
        return self.files[0]

    @property
    def n_params(self) -> int:
        return sum(file.n_elements for file in self.files)

    @property
    def n_weight_bytes(self) -> int:
        return sum(self.weight_bytes.values())

    @property
    def pass_tensors(self) -> list[TensorInfo]:
        """The tensors that a pass multiplies by. A token embedding that is not tied is looked up."""
        tensors = [tensor for file in self.files for tensor in file.tensors]
        is_tied = all(tensor.name != HEAD for tensor in tensors)
        return [tensor for tensor in tensors if is_tied or tensor.name != EMBEDDING]

    @property
    def n_pass_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.pass_tensors)

    @property
    def shortest_row(self) -> int:
        """Numbers in the shortest row of a quantized matrix; 0 without any."""
        tensors = [tensor for file in self.files for tensor in file.tensors]
        quantized = [each for each in tensors if len(each.shape) > 1 and TYPES[each.kind].name not in PLAIN_TYPES]
        return min((each.shape[0] for each in quantized), default=0)


def make_header(path: Path, files: Sequence[GgufHeader], *, needs_weights: bool = True) -> Header:
    """Combine the headers of all parts. Raises ModelFileError if they are not those of a language model."""
    first = files[0]
    architecture = first.text("general.architecture")
    of = f"{architecture}.".__add__
    n_layer = first.integer(of("block_count"), 1, _MAX_LAYERS)
    n_embd = first.integer(of("embedding_length"), 1)
    n_head = max(first.per_layer(of("attention.head_count"), n_layer), default=0)
    head_length = n_embd // n_head if n_head else 0
    n_expert = first.integer(of("expert_count"), 0, _MAX_EXPERTS)
    header = Header(
        path=path,
        parts=tuple(file.path for file in files),
        architecture=architecture,
        name=first.text("general.name"),
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=max(first.per_layer(of("feed_forward_length"), n_layer), default=0),
        n_head=n_head,
        n_head_kv=tuple(first.per_layer(of("attention.head_count_kv"), n_layer, default=n_head)),
        key_length=first.integer(of("attention.key_length"), 1, default=head_length),
        value_length=first.integer(of("attention.value_length"), 1, default=head_length),
        n_vocab=first.count(TOKENS) or first.integer(of("vocab_size")),
        n_ctx_train=first.integer(of("context_length"), 1),
        n_swa=first.integer(of("attention.sliding_window")),
        n_expert=n_expert,
        n_expert_used=first.integer(of("expert_used_count"), 0, n_expert),
        n_file_bytes=sum(file.n_file_bytes for file in files),
        weight_bytes=sum((file.tensor_bytes for file in files), Counter()),
        causal=first.flag(of("attention.causal"), True),
        tokenizer=first.text(TOKENIZER),
        chat_template=first.text("tokenizer.chat_template") or None,
        basename=first.text("general.basename"),
        finetune=first.text("general.finetune"),
        files=tuple(files),
    )
    for file in files:
        if file.n_file_bytes < file.data_end:
            raise ModelFileError(
                f"{file.path} is truncated: it has {counted(file.n_file_bytes, 'byte')} "
                f"(expected {figure(file.data_end)})",
                hint="delete it and download it again",
            )
    if needs_weights and not any(file.tensors for file in files):
        raise ModelFileError(
            f"{header.path} has a vocabulary but no weights", hint="get the model file itself, not its vocabulary"
        )
    _check_kind(header)
    _check_limits(header)
    return header


def refuse_architecture(header: Header) -> None:
    """Raise UnsupportedModel for kinds that cannot be decoded exactly, before any weight is loaded."""
    name, kind = header.architecture, _kind_of(header)
    if kind == "diffusion":
        raise not_left_to_right(header.path, "a diffusion model", name)
    if kind == "encoder" or not header.causal:
        raise not_left_to_right(header.path, "an encoder, made for embeddings", name)
    if header.tokenizer in _NO_TOKENIZERS:
        raise UnsupportedModel(
            f"{header.path} has a tokenizer of type {header.tokenizer!r}, which text generation models do not have",
            hint="choose a text generation model; if this is one, its file is damaged",
        )


def _kind_of(header: Header) -> str:
    return next((kind for kind, names in _KINDS.items() if header.architecture in names), "")


def cannot_roll_back(path: Path, architecture: str) -> UnsupportedModel:
    """The error for models whose memory is wrong after a rollback."""
    return UnsupportedModel(
        f"{path} ({architecture}) cannot roll its memory back in this build of llama.cpp, which speculative decoding "
        "needs after every rejected token",
        hint="choose another model, such as Qwen2.5, Llama 3 or Gemma 3",
    )


def not_left_to_right(path: Path, what: str, architecture: str) -> UnsupportedModel:
    """The error for models that do not generate token by token."""
    return UnsupportedModel(
        f"{path} ({architecture}) is {what}: it does not generate text token by token",
        hint="choose a text generation model",
    )


def has_states(header: Header) -> bool:
    """True for a model with recurrent layers, by its name."""
    return _kind_of(header) in ("recurrent", "hybrid")


def state_bytes(header: Header) -> int:
    """Size of the state of all recurrent layers in bytes, at most; 0 for other models. As in `llama-hparams.cpp`."""
    if not has_states(header):
        return 0

    def size(key: str) -> int:
        return header.gguf.integer(f"{header.architecture}.{key}", 0, MAX_INTEGER)

    n_embd, n_head_size, n_inner = header.n_embd, size("wkv.head_size"), size("ssm.inner_size")
    n_state, n_delta = size("ssm.state_size"), size("kda.head_dim")
    numbers = (
        2 * n_embd + n_embd * n_head_size if n_head_size else 0,
        n_embd * max(size("shortconv.l_cache") - 1, 0),
        header.n_head * n_delta * (3 * size("ssm.conv_kernel") + n_delta),
        max(size("ssm.conv_kernel") - 1, 0) * (n_inner + 2 * size("ssm.group_count") * n_state) + n_inner * n_state,
    )
    return 4 * header.n_layer * max(numbers)


def keeps_states(header: Header) -> bool:
    """True if llama.cpp keeps the last states of this architecture."""
    return header.architecture in _KEEPING


def window_layers(header: Header) -> tuple[bool, ...]:
    """Which layers have a sliding window, of the architectures whose cache can be that of the window.  (n_layer,)"""
    period, key = _WINDOWS.get(header.architecture, 0), f"{header.architecture}.attention.sliding_window_pattern"
    if not (header.n_swa and period):
        return (False,) * header.n_layer
    if header.gguf.count(key) is not None:
        named = header.gguf.numbers(key)
        return tuple(named is not None and index < len(named) and bool(named[index]) for index in range(header.n_layer))
    period = header.gguf.integer(key, default=period)
    return tuple(not period or index % period < period - 1 for index in range(header.n_layer))


def n_kept_states(header: Header, max_block: int) -> int:
    """States beside the last one that llama.cpp keeps, as many as memory allows of those that a block can lose."""
    if not keeps_states(header):
        return 0
    return min(max_block - 1, _MOST_KEPT_BYTES // max(state_bytes(header), 1))


def memory_kind(header: Header) -> str:
    """The kind of memory, for reports: "recurrent", "hybrid", "window of 1024 tokens", "dense"."""
    return _kind_of(header) or (f"window of {figure(header.n_swa)} tokens" if header.n_swa else "dense")


ONE_STATE = "its recurrent layers keep one state, which holds one path"


def why_no_tree(header: Header, max_block: int) -> str:
    """Why a model that can draft cannot evaluate token trees, as far as the header tells; "" = it can."""
    if has_states(header):
        return ONE_STATE
    if max_block < 3:
        return f"a block of {max_block} tokens holds no branches"
    if 0 < header.n_swa <= max_block:  # our attention finds the place of a branch by the text before it
        return f"its window of {figure(header.n_swa)} tokens is no longer than a block of {max_block}"
    return ""


def _check_kind(header: Header) -> None:
    kind = header.gguf.text("general.type", "model")
    if header.architecture in _PARTS_OF_MODELS:
        what = _PARTS_OF_MODELS[header.architecture]
    elif kind != "model":
        what = f"of type {kind!r}"
    elif not header.architecture:
        what = "without an architecture"
    else:
        return
    raise ModelFileError(f"{header.path} is {what}, not a language model", hint="give the model's own GGUF file")


def _check_limits(header: Header) -> None:
    """Raise for values with which llama.cpp ends the process or never returns."""
    of, gguf = f"{header.architecture}.".__add__, header.gguf
    if header.n_expert and not header.n_expert_used:
        most = figure(header.n_expert)
        raise damaged(header.path, f"{of('expert_used_count')} is 0 or missing, expected 1 to {most}")
    scaling = gguf.text(of("rope.scaling.type"), "none")
    if scaling not in _ROPE_SCALINGS:
        raise damaged(header.path, f"{of('rope.scaling.type')} is {scaling!r}, expected one of {_ROPE_SCALINGS}")
    n_rotated = gguf.integer(of("rope.dimension_count"), 2, header.key_length or MAX_INTEGER, default=2)
    if n_rotated % 2:
        raise damaged(header.path, f"{of('rope.dimension_count')} is {figure(n_rotated)}, expected an even number")
    for key, (low, high) in _BOUNDS.items():
        gguf.number(of(key), low, high, default=low)
    n_head_size = gguf.integer(of("wkv.head_size"), 0, MAX_INTEGER)
    if n_head_size % _RWKV_STEP:
        raise damaged(
            header.path, f"{of('wkv.head_size')} is {figure(n_head_size)}, expected a multiple of {_RWKV_STEP}"
        )
