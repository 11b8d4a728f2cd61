"""What a model file says about itself before any weight is loaded, and which kinds of models are refused at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specllama.base.errors import ModelFileError, UnsupportedModel

# llama.cpp asserts these, and a failed assertion ends the process.
_MAX_LAYERS = 512
_MAX_EXPERTS = 1024
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_PLAIN_TYPES = ("f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64")
# Tokenizers whose failed assertions end the process where a file is damaged; no model that can be served has one.
_NO_TOKENIZERS = ("rwkv", "none", "no_vocab", "test")

# Architectures that cannot be served. llama.cpp is asked again once the model is loaded (it may know more of them);
# these names spare the reader of a large file the wait.
_RECURRENT = frozenset(["mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"])
_HYBRID = frozenset(
    [
        "jamba",
        "falcon-h1",
        "plamo2",
        "granitehybrid",
        "lfm2",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen3next",
        "kimi-linear",
        "bailingmoe3",
        "kimi-k3",
        "glm5-next",
        "qwen35",
        "qwen35moe",
        "qwen4exp",
        "deepseek4",
        "minimax-01",
    ]
)
_DIFFUSION = frozenset(["dream", "llada", "llada-moe", "rnd1"])
_ENCODERS = frozenset(
    [
        "bert",
        "modern-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "eurobert",
        "t5",
        "t5encoder",
        "gemma-embedding",
        "llama-embed",
    ]
)
_PARTS_OF_MODELS = {
    "clip": "the image or sound encoder of a multimodal model",
    "eagle3": "a drafting head for another model",
    "dflash": "a drafting head for another model",
    "gemma4-assistant": "a drafting head for another model",
    "wavtokenizer-dec": "a sound decoder",
}


class Gguf(Protocol):
    """The header of one file, as `llama_ext.read_gguf` gives it."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Scalars, strings and short numeric arrays."""
        ...

    @property
    def array_lengths(self) -> Mapping[str, int]:
        """Lengths of all arrays."""
        ...

    @property
    def n_tensors(self) -> int:
        """How many tensors the file holds."""
        ...

    @property
    def tensor_bytes(self) -> Mapping[str, int]:
        """Their size by type."""
        ...

    @property
    def end(self) -> int:
        """Where the last tensor ends in the file."""
        ...


@dataclass(frozen=True, slots=True)
class Header:
    """A model file's own description; no weights are needed for it."""

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
    metadata: Mapping[str, str]  # every scalar key as text, "true" and "false" for flags
    arrays: frozenset[str] = frozenset()  # the keys of all arrays

    @property
    def n_weight_bytes(self) -> int:
        """All weights, without the metadata."""
        return sum(self.weight_bytes.values())

    @property
    def n_quantized_bytes(self) -> int:
        """Weights that are stored in blocks of a few bits."""
        return sum(size for kind, size in self.weight_bytes.items() if kind not in _PLAIN_TYPES)


def make_header(path: Path, parts: Sequence[Path], files: Sequence[Gguf], *, needs_weights: bool = True) -> Header:
    """Gather the headers of all parts into one. Raises ModelFileError where they are not those of a language model."""
    first = files[0]
    architecture = str(first.values.get("general.architecture", ""))
    sizes = _Sizes(path, architecture, first.values)
    n_layer = sizes.integer("block_count")
    n_embd = sizes.integer("embedding_length")
    n_head = max(sizes.per_layer("attention.head_count", n_layer), default=0)
    head_length = n_embd // n_head if n_head else 0
    header = Header(
        path=path,
        parts=tuple(parts),
        architecture=architecture,
        name=str(first.values.get("general.name", "")),
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=max(sizes.per_layer("feed_forward_length", n_layer), default=0),
        n_head=n_head,
        n_head_kv=sizes.per_layer("attention.head_count_kv", n_layer, default=n_head),
        key_length=sizes.integer("attention.key_length", head_length),
        value_length=sizes.integer("attention.value_length", head_length),
        n_vocab=first.array_lengths.get("tokenizer.ggml.tokens") or sizes.integer("vocab_size"),
        n_ctx_train=sizes.integer("context_length"),
        n_swa=sizes.integer("attention.sliding_window"),
        n_expert=sizes.integer("expert_count"),
        n_file_bytes=sum(part.stat().st_size for part in parts),
        weight_bytes=_sum_by_type(files),
        metadata={key: _as_text(value) for key, value in first.values.items() if not isinstance(value, tuple)},
        arrays=frozenset(first.array_lengths),
    )
    _check_complete(header, files)
    if needs_weights and sum(file.n_tensors for file in files) == 0:
        raise ModelFileError(
            f"{header.path} holds a vocabulary but no weights", hint="get the model file itself, not its vocabulary"
        )
    _check_kind(header)
    _check_limits(header, first.values)
    return header


def refuse_architecture(header: Header) -> None:
    """Raise UnsupportedModel for kinds that cannot be served exactly, before any weight is loaded."""
    name = header.architecture
    if name in _RECURRENT:
        raise cannot_roll_back(header.path, "a recurrent model", name)
    if name in _HYBRID:
        raise cannot_roll_back(header.path, "a model with recurrent layers", name)
    if name in _DIFFUSION:
        raise not_left_to_right(header.path, "a diffusion model", name)
    if name in _ENCODERS or header.metadata.get(f"{name}.attention.causal") == "false":
        raise not_left_to_right(header.path, "an encoder, made for embeddings", name)
    tokenizer = header.metadata.get("tokenizer.ggml.model", "")
    if tokenizer in _NO_TOKENIZERS:
        raise UnsupportedModel(
            f"{header.path} has a tokenizer of the kind {tokenizer!r}, which no text generation model here has",
            hint="choose another model; if this is one, its file is damaged",
        )


def cannot_roll_back(path: Path, what: str, architecture: str) -> UnsupportedModel:
    """The error for models whose memory cannot forget single tokens."""
    return UnsupportedModel(
        f"{path} ({architecture}) is {what}: it cannot roll its memory back, and speculation needs that after every "
        "rejected token",
        hint="choose a transformer model, such as Qwen2.5, Llama 3 or Gemma 3",
    )


def not_left_to_right(path: Path, what: str, architecture: str) -> UnsupportedModel:
    """The error for models that do not write one token after the other."""
    return UnsupportedModel(
        f"{path} ({architecture}) is {what}: it does not generate text token by token",
        hint="choose a text generation model",
    )


def memory_kind(header: Header) -> str:
    """How the model remembers, in a word or two: whether it can forget again is what speculation asks."""
    if header.architecture in _RECURRENT:
        return "recurrent"
    if header.architecture in _HYBRID:
        return "hybrid"
    if header.architecture in _DIFFUSION:
        return "diffusion"
    if header.architecture in _ENCODERS:
        return "encoder"
    return f"window of {header.n_swa:,} tokens" if header.n_swa else "dense"


class _Sizes:
    """Typed access to the keys of one architecture."""

    def __init__(self, path: Path, architecture: str, values: Mapping[str, Any]) -> None:
        self._path = path
        self._prefix = architecture
        self._values = values

    def integer(self, key: str, default: int = 0) -> int:
        """A number that is 0 or more."""
        return self._count(key, self._values.get(f"{self._prefix}.{key}", default))

    def per_layer(self, key: str, n_layer: int, default: int = 0) -> tuple[int, ...]:
        """One number for each layer, from a scalar or an array."""
        value = self._values.get(f"{self._prefix}.{key}", default)
        if not isinstance(value, tuple):
            return (self._count(key, value),) * min(n_layer, _MAX_LAYERS)
        return tuple(self._count(key, item) for item in value[:n_layer])

    def _count(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise _damaged(self._path, f"{self._prefix}.{key} is {value!r}")
        return value


def _check_complete(header: Header, files: Sequence[Gguf]) -> None:
    for part, file in zip(header.parts, files, strict=True):
        size = part.stat().st_size
        if size < file.end:
            raise ModelFileError(
                f"{part} is truncated: it has {size} of {file.end} bytes", hint="delete it and download it again"
            )


def _check_kind(header: Header) -> None:
    kind = header.metadata.get("general.type", "model")
    if header.architecture in _PARTS_OF_MODELS:
        what = _PARTS_OF_MODELS[header.architecture]
    elif kind != "model":
        what = f"of type {kind!r}"
    elif not header.architecture:
        what = "without an architecture"
    else:
        return
    raise ModelFileError(f"{header.path} is {what}, not a language model", hint="give the model's own GGUF file")


def _check_limits(header: Header, values: Mapping[str, Any]) -> None:
    """Refuse what would trip an assertion in llama.cpp, for keys that the architecture has at all."""
    name = header.architecture
    if f"{name}.block_count" not in values:
        return  # an architecture nobody knows: llama.cpp says so better
    n_used = values.get(f"{name}.expert_used_count", 0)
    scaling = values.get(f"{name}.rope.scaling.type", "none")
    if not 1 <= header.n_layer <= _MAX_LAYERS:
        raise _damaged(header.path, f"{name}.block_count is {header.n_layer}")
    if header.n_expert > _MAX_EXPERTS:
        raise _damaged(header.path, f"{name}.expert_count is {header.n_expert}")
    if isinstance(n_used, int) and (n_used > header.n_expert or (header.n_expert > 0 and n_used == 0)):
        raise _damaged(header.path, f"{name}.expert_used_count is {n_used} of {header.n_expert}")
    if scaling not in _ROPE_SCALINGS:
        raise _damaged(header.path, f"{name}.rope.scaling.type is {scaling!r}")


def _damaged(path: Path, what: str) -> ModelFileError:
    return ModelFileError(f"{path} is damaged or newer than this llama.cpp: {what}", hint="download it again")


def _sum_by_type(files: Sequence[Gguf]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for file in files:
        total.update(file.tensor_bytes)
    return dict(total)


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
