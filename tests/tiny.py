"""Tiny random GGUF files, with which the real llama.cpp takes milliseconds.

The weights give distributions that are neither flat nor one-hot (`scale` is about the standard deviation of the logits)
and depend on the whole history. Equal arguments give equal files, byte for byte.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType
from gguf.quants import quantize

from tests import tiny_recurrent

if TYPE_CHECKING:
    from specllama.llama import LlamaModel

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TENSORS_PER_LAYER_NORMS = {
    "llama": ("attn_norm", "ffn_norm"),
    "qwen2": ("attn_norm", "ffn_norm"),
    "gemma2": ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"),
    "gemma3": ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"),
}


@dataclass(frozen=True)
class TinyVocabulary:
    """The tokenizer metadata of a GGUF file."""

    model: str  # "gpt2" or "llama"
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    add_bos: bool = False


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model."""

    n_layer: int = 2
    n_embd: int = 32
    n_head: int = 2
    n_head_kv: int = 1
    n_ff: int = 64
    n_ctx: int = 512
    sliding_window: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    n_expert: int = 0  # in each layer; two are used for a token

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def _byte_characters() -> list[str]:
    """The 256 printable characters for bytes in GPT-2 vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


_ENDS = ("<|im_end|>", "<|endoftext|>")
_UNUSED_MERGE = ("ÿ ÿ",)  # the format requires one; this one never occurs


def _gpt2(
    normal: Sequence[str], special: Sequence[str], merges: Sequence[str] = _UNUSED_MERGE, *, add_bos: bool = False
) -> TinyVocabulary:
    tokens = (*normal, *special)
    return TinyVocabulary(
        model="gpt2",
        tokens=tokens,
        types=(int(TokenType.NORMAL),) * len(normal) + (int(TokenType.CONTROL),) * len(special),
        merges=tuple(merges),
        bos=tokens.index("<|bos|>"),
        eot=tokens.index("<|im_end|>"),
        eos=tokens.index("<|endoftext|>"),
        add_bos=add_bos,
    )


def letters(n_vocab: int = 12, *, add_bos: bool = False) -> TinyVocabulary:
    """A vocabulary small enough to enumerate: a, b, c, ... and three special tokens at the end."""
    if not 4 <= n_vocab <= 97:
        raise ValueError(f"n_vocab must be 4 to 97, not {n_vocab}")
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&()*+,-./:;<=>?@[]^_`{|}~\"'\\"
    return _gpt2(alphabet[: n_vocab - 3], ("<|bos|>", *_ENDS), add_bos=add_bos)


def byte_level(*, add_bos: bool = False, extra_tokens: Sequence[str] = (), words: Sequence[str] = ()) -> TinyVocabulary:
    """A vocabulary for any bytes, with a few merges; `extra_tokens` are appended as control tokens."""
    space = _byte_characters()[0x20]
    normal = (*_byte_characters(), "th", "the", f"{space}the", *words)
    merges = ("t h", "th e", f"{space} the", *(f"{word[0]} {word[1]}" for word in words))
    return _gpt2(normal, ("<|bos|>", "<|im_start|>", *_ENDS, *extra_tokens), merges, add_bos=add_bos)


def ascii_level() -> TinyVocabulary:
    """A vocabulary for ASCII text; other characters are lost."""
    characters = _byte_characters()
    return _gpt2([characters[byte] for byte in (0x0A, *range(0x20, 0x7F))], ("<|bos|>", "<|im_start|>", *_ENDS))


def word_level() -> TinyVocabulary:
    """`byte_level` with 675 words of two letters: large enough for tests that reduce it."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return byte_level(words=[a + b for a in alphabet for b in alphabet if a + b != "th"])


def sentencepiece(*, add_bos: bool = True) -> TinyVocabulary:
    """A SentencePiece vocabulary with byte fallback."""
    pieces = ("▁", "a", "e", "h", "t", "▁t", "he", "▁the", "▁a")
    tokens = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces)
    types = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL)
    types += (TokenType.BYTE,) * 256 + (TokenType.NORMAL,) * len(pieces)
    scores = (0.0,) * 259 + tuple(-1.0 - index for index in range(len(pieces)))
    return TinyVocabulary(
        model="llama",
        tokens=tokens,
        types=tuple(int(kind) for kind in types),
        scores=scores,
        bos=1,
        eos=2,
        add_bos=add_bos,
    )


def token_id(vocabulary: TinyVocabulary, text: str) -> int:
    """The id of the token whose raw vocabulary text is `text`."""
    return vocabulary.tokens.index(text)


def write_model(
    path: Path,
    *,
    arch: str = "llama",
    vocabulary: TinyVocabulary | None = None,
    n_vocab: int = 12,
    n_layer: int = 2,
    n_embd: int = 32,
    n_head: int = 2,
    n_head_kv: int = 1,
    n_ff: int = 64,
    n_ctx: int = 512,
    seed: int = 1,
    noise: float = 0.0,
    scale: float = 1.5,
    chat_template: str | None = None,
    sliding_window: int | None = None,
    extra: Mapping[str, object] | None = None,
    kinds: Mapping[str, str] | None = None,
    n_expert: int = 0,
) -> Path:
    """Write one model and return `path`.

    `vocabulary` defaults to `letters(n_vocab)`. `noise` mixes weights of another seed into those of `seed`: 0.0 is the
    model itself, 1.0 an unrelated one. `n_ctx` is the context the model claims to be trained for. `extra` adds or
    overrides metadata keys (int, float, bool, str or a list of them). `kinds` quantizes matrices: "Q4_0", "Q8_0" or
    "IQ4_NL" by the last word of their names, such as "ffn_down"; their rows must be multiples of 32. With `n_expert`
    (arch "llama"), a layer is a mixture of so many experts, two for a token. An unknown
    architecture gets the tensors of "llama".
    """
    vocab = vocabulary or letters(n_vocab)
    n_embd = max(n_embd, tiny_recurrent.least_embd(arch))
    shape = Shape(
        n_layer,
        n_embd,
        n_head,
        n_head_kv,
        n_ff,
        n_ctx,
        sliding_window,
        extra or {},
        n_expert,
    )
    writer = GGUFWriter(path, arch)
    _add_sizes(writer, arch, shape, len(vocab.tokens))
    _add_tokenizer(writer, vocab, chat_template)
    is_recurrent = arch in (*tiny_recurrent.PURE, *tiny_recurrent.HYBRID)
    _add_extra(writer, {**(tiny_recurrent.metadata(arch, shape) if is_recurrent else {}), **shape.extra})
    tensors = tiny_recurrent.tensors if is_recurrent else _transformer_tensors
    base, other = np.random.default_rng(seed), np.random.default_rng(seed + 1_000_003)
    mix = np.hypot(1.0 - noise, noise)  # keeps the variance of the weights
    for name, rows, columns, deviation in tensors(arch, shape, len(vocab.tokens), scale):
        size = (columns,) if rows == 0 else (rows, columns) if isinstance(rows, int) else (*rows, columns)
        size = (n_expert, rows // n_expert, columns) if n_expert and "_exps" in name else size
        values = ((1.0 - noise) * base.standard_normal(size) + noise * other.standard_normal(size)) / mix
        centre = 1.0 if "norm" in name and not name.endswith("bias") else -1.0 if name.endswith("ssm_a") else 0.0
        weights = (centre + deviation * values).astype(np.float32)
        kind = (kinds or {}).get(name.removesuffix(".weight").rpartition(".")[2])
        if kind is None:
            writer.add_tensor(name, weights)
        else:
            packed = _iq4_nl(weights) if kind == "IQ4_NL" else quantize(weights, GGMLQuantizationType[kind])
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType[kind])
    _finish(writer)
    trust(path)
    return path


def _iq4_nl(weights: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Blocks of 32 numbers: a scale, then indices into a fixed table, two in a byte."""
    table = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
    blocks = weights.reshape(weights.shape[0], -1, 32)
    scale = (np.abs(blocks).max(axis=-1, keepdims=True) / 113).astype(np.float16)
    nearest = np.abs(blocks[..., None] / scale[..., None] - table).argmin(axis=-1).astype(np.uint8)
    packed = nearest[..., :16] | nearest[..., 16:] << 4
    return np.concatenate([scale.view(np.uint8), packed], axis=-1).reshape(weights.shape[0], -1)


def write_pair(folder: Path, *, noise: float = 0.05, seed: int = 1, **options: object) -> tuple[Path, Path]:
    """A target and a draft of one vocabulary; the larger `noise` (0 to 1), the worse they agree.

    With the default sizes and temperature 1 a drafted token is accepted with probability 0.89 at noise 0.03, 0.82 at
    0.05, 0.70 at 0.1, 0.54 at 0.2 and about 0.35 from 0.5 on.
    """
    target = write_model(folder / "target.gguf", seed=seed, **options)  # type: ignore[arg-type]
    draft = write_model(folder / "draft.gguf", seed=seed, noise=noise, **options)  # type: ignore[arg-type]
    return target, draft


def write_bare(
    path: Path,
    *,
    arch: str = "llama",
    vocabulary: TinyVocabulary | None = None,
    extra: Mapping[str, object] | None = None,
) -> Path:
    """A file with metadata and no tensor at all."""
    writer = GGUFWriter(path, arch)
    if arch in _TENSORS_PER_LAYER_NORMS:
        _add_sizes(writer, arch, Shape(), len((vocabulary or letters()).tokens))
    if vocabulary:
        _add_tokenizer(writer, vocabulary, None)
    _add_extra(writer, extra or {})
    _finish(writer)
    trust(path)
    return path


def write_split(path: Path, n_parts: int = 2, **options: object) -> list[Path]:
    """A model cut into parts named as llama.cpp wants them; `path` is their common prefix, without an ending."""
    whole = path.with_name(path.name + "-whole.gguf")
    write_model(whole, **options)  # type: ignore[arg-type]
    reader = GGUFReader(whole)
    tensors = list(reader.tensors)
    bounds = np.linspace(0, len(tensors), n_parts + 1).astype(int)
    parts = [path.with_name(f"{path.name}-{index + 1:05d}-of-{n_parts:05d}.gguf") for index in range(n_parts)]
    vocab = options.get("vocabulary") or letters(int(options.get("n_vocab", 12)))  # type: ignore[call-overload]
    sizes = {
        key: options[key] for key in ("n_layer", "n_embd", "n_head", "n_head_kv", "n_ff", "n_ctx") if key in options
    }
    for index, part in enumerate(parts):
        writer = GGUFWriter(part, "llama")
        if index == 0:
            _add_sizes(writer, "llama", Shape(**sizes), len(vocab.tokens))  # type: ignore[arg-type, attr-defined]
            _add_tokenizer(writer, vocab, None)  # type: ignore[arg-type]
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", n_parts)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors[bounds[index] : bounds[index + 1]]:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        _finish(writer)
    del reader, tensors
    whole.unlink()
    trust(*parts)
    return parts


def trust(*parts: Path) -> None:
    """Record that the first load of a model needs no child process, which takes half a second."""
    from specllama.base import disk
    from specllama.llama import crash_test

    disk.FileRecord(crash_test.SOUND, *parts, by=_build()).keep(True)


def requantized(model: Path, kind: str) -> Path:
    """The model in another quantization, beside it; see `trust`."""
    from specllama import llama

    path = model.with_name(f"{model.stem}-{kind}.gguf")
    llama.requantize(model, path, kind)
    trust(path)
    return path


@functools.cache
def _build() -> str:
    from specllama.llama import crash_test, library_hash

    return library_hash.of(crash_test.library_folder() or Path())


def load(path: Path, **options: object) -> LlamaModel:
    """Open a tiny file for a test; `options` are those of LoadOptions."""
    from specllama.llama import LoadOptions
    from specllama.llama import load as load_model

    return load_model(path, LoadOptions(**{"n_ctx": 256, "n_threads": 1, **options}))  # type: ignore[arg-type]


def cut(path: Path, n_bytes: int) -> Path:
    """Drop the last `n_bytes` of the file."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - n_bytes)
    return path


def overwrite(path: Path, offset: int, data: bytes) -> Path:
    """Replace the bytes at `offset`."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    return path


def _add_sizes(writer: GGUFWriter, arch: str, shape: Shape, n_vocab: int) -> None:
    writer.add_name(f"tiny {arch}")
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_vocab_size(n_vocab)
    writer.add_layer_norm_rms_eps(1e-6)
    if arch in tiny_recurrent.PURE:
        writer.add_head_count(0)
        return
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(2)
    if shape.sliding_window is not None:
        writer.add_sliding_window(shape.sliding_window)
        writer.add_array(f"{arch}.attention.sliding_window_pattern", [index % 2 == 0 for index in range(shape.n_layer)])


def _add_tokenizer(writer: GGUFWriter, vocab: TinyVocabulary, chat_template: str | None) -> None:
    writer.add_tokenizer_model(vocab.model)
    if vocab.model == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocab.tokens))
    writer.add_token_types(list(vocab.types))
    if vocab.merges:
        writer.add_token_merges(list(vocab.merges))
    if vocab.scores:
        writer.add_token_scores(list(vocab.scores))
    if vocab.bos is not None:
        writer.add_bos_token_id(vocab.bos)
    if vocab.eos is not None:
        writer.add_eos_token_id(vocab.eos)
    if vocab.eot is not None:
        writer.add_eot_token_id(vocab.eot)
    writer.add_add_bos_token(vocab.add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _add_extra(writer: GGUFWriter, extra: Mapping[str, object]) -> None:
    for key, value in extra.items():
        for shard in writer.kv_data:
            shard.pop(key, None)  # an extra key may override one that is already there
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))  # type: ignore[call-overload]


def _transformer_tensors(arch: str, shape: Shape, n_vocab: int, scale: float) -> Iterator[tiny_recurrent.Tensor]:
    """(name, rows or 0 for a vector, columns, standard deviation) of every tensor."""
    n_embd, n_ff = shape.n_embd, shape.n_ff
    n_kv = shape.n_head_kv * shape.head_dim
    inner = 2.0 / np.sqrt(n_embd)  # strong enough that attention and feed-forward change the distributions
    yield "token_embd.weight", n_vocab, n_embd, 1.0
    for index in range(shape.n_layer):
        block = f"blk.{index}."
        for norm in _TENSORS_PER_LAYER_NORMS.get(arch, ("attn_norm", "ffn_norm")):
            yield f"{block}{norm}.weight", 0, n_embd, 0.1
        if arch == "gemma3":
            yield f"{block}attn_q_norm.weight", 0, shape.head_dim, 0.1
            yield f"{block}attn_k_norm.weight", 0, shape.head_dim, 0.1
        for name, rows in (("attn_q", n_embd), ("attn_k", n_kv), ("attn_v", n_kv)):
            yield f"{block}{name}.weight", rows, n_embd, inner
            if arch == "qwen2":
                yield f"{block}{name}.bias", 0, rows, 0.1
        yield f"{block}attn_output.weight", n_embd, n_embd, inner
        experts, exps = (shape.n_expert, "_exps") if shape.n_expert else (1, "")
        if shape.n_expert:
            yield f"{block}ffn_gate_inp.weight", experts, n_embd, inner
        yield f"{block}ffn_gate{exps}.weight", experts * n_ff, n_embd, inner
        yield f"{block}ffn_up{exps}.weight", experts * n_ff, n_embd, inner
        yield f"{block}ffn_down{exps}.weight", experts * n_embd, n_ff, 1.0 / np.sqrt(n_ff)
    yield "output_norm.weight", 0, n_embd, 0.1
    if arch != "gemma2":  # its token embedding is the output matrix
        yield "output.weight", n_vocab, n_embd, scale / np.sqrt(n_embd)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
