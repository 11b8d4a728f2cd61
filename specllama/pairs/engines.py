"""The engines that a pair can be exported to: their file, why they cannot run a pair, and how exact they are.

`benchmarks/engines.py` checks the names of settings against the engines themselves.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specllama.base.errors import PairError
from specllama.base.text import counted, figure
from specllama.core.sampling import SamplingParams
from specllama.files.model import HubSource

_LLAMA_CPP_SLACK = 128  # ids that the vocabularies may differ by: SPEC_VOCAB_MAX_SIZE_DIFFERENCE in speculative.cpp


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """A model of the pair, as other engines name it."""

    label: str
    original: str | None  # the repository that the GGUF file was made from; None = not known
    gguf: HubSource | Path  # a path is absolute
    n_vocab: int
    is_cut: bool = False  # its vocabulary was cut, so its ids are its own


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedPair:
    """What a file is written from."""

    title: str
    target: ExportedModel
    draft: ExportedModel
    by_text: bool  # the tokenizers differ, so drafts are translated by the texts of tokens
    n_draft: int  # tokens
    reason: str  # of that length, one sentence
    params: SamplingParams  # temperature, top-k, top-p and min-p
    n_ctx: int  # tokens; 0 = as the model was trained

    @property
    def differs(self) -> bool:
        """True if an engine that compares the sizes of the vocabularies sees two."""
        return self.by_text or self.target.n_vocab != self.draft.n_vocab

    @property
    def sizes(self) -> str:
        return f"{figure(self.target.n_vocab)} and {counted(self.draft.n_vocab, 'token')}"

    @property
    def sampling(self) -> dict[str, Any]:
        """With the names that all engines but llama.cpp use. A model's own repetition penalty must not slip in."""
        if self.params.greedy:
            return {"temperature": 0.0, "repetition_penalty": 1.0}
        params = self.params
        named = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        return {**named, "min_p": params.min_p, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEngine:
    """One engine: the settings of its file, and what to know about it."""

    title: str
    file: str  # the file's name
    start: str  # the command, with {file} and {target}
    checked: str  # the version whose source or options were read
    require: Callable[[ExportedPair], None]  # raises PairError if it cannot run the pair
    body: Callable[[ExportedPair], str]
    notes: Callable[[ExportedPair], Iterator[str]]  # what differs in exactness


def _yaml(table: Mapping[str, Any], indent: str = "") -> str:
    """A table of one or two levels. JSON's values are YAML's."""
    lines = []
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", _yaml(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}")
    return "\n".join(lines)


def _require_originals(pair: ExportedPair) -> None:
    """Raise PairError if an engine that loads the original weights cannot run the pair."""
    for role, part, option in (("target", pair.target, "--original"), ("draft", pair.draft, "--original-draft")):
        if part.is_cut:
            raise PairError(f"the vocabulary of the {role} {part.label} was cut, and only the GGUF file has it so")
        if part.original is None:
            raise PairError(f"the repository of the {role} is not known", hint=f"add {option} USER/REPO")


def _weights_note(pair: ExportedPair) -> str:
    return (
        f"It loads {pair.target.original}, not the quantized file that specllama checked: other weights give other "
        "texts and another acceptance rate."
    )


_ROUNDING = "Its kernels round with the batch, so near-ties can flip: greedy texts need not be those of plain decoding."


def _order_note(pair: ExportedPair) -> Iterator[str]:
    """Where the temperature is applied first, the same numbers keep other tokens."""
    params = pair.params
    if not pair.params.greedy and params.temperature != 1.0 and (params.top_p < 1.0 or params.min_p > 0.0):
        yield (
            "It applies the temperature before top-p and min-p, specllama after them: the same numbers give another "
            "distribution. It is the same at temperature 1."
        )


def _size_note(pair: ExportedPair, remedy: str) -> Iterator[str]:
    if not pair.differs:
        yield f"Both GGUF files have {counted(pair.target.n_vocab, 'token')}. If config.json says otherwise, {remedy}."


# vLLM


def _vllm(pair: ExportedPair) -> str:
    speculative: dict[str, Any] = {
        "method": "draft_model",
        "model": pair.draft.original,
        "num_speculative_tokens": pair.n_draft,
    }
    if pair.differs:
        speculative["use_heterogeneous_vocab"] = True
    elif not pair.params.greedy:
        speculative["draft_sample_method"] = "probabilistic"
    sampling = pair.sampling
    if pair.differs:
        sampling.pop("min_p", None)
    table: dict[str, Any] = {"model": pair.target.original}
    if pair.n_ctx:
        table["max-model-len"] = pair.n_ctx
    return _yaml({**table, "speculative-config": speculative, "override-generation-config": sampling})


def _vllm_notes(pair: ExportedPair) -> Iterator[str]:
    yield _weights_note(pair)
    yield _ROUNDING
    if pair.differs:
        yield (
            f"The vocabularies differ ({pair.sizes}), so it drafts greedily, among the tokens that both have. Exact, "
            "but at temperatures above 0 fewer tokens are accepted. min_p and logit_bias have no effect."
        )
    elif not pair.params.greedy:
        yield "It accepts by min(1, p/q) token by token: exact; specllama's block rule accepts no fewer."
    yield from _order_note(pair)
    yield from _size_note(pair, "replace draft_sample_method by use_heterogeneous_vocab: true")


# SGLang


def _require_sglang(pair: ExportedPair) -> None:
    _require_originals(pair)
    if pair.differs:
        raise PairError(f"drafts need the target's vocabulary, and these differ ({pair.sizes})")


def _sglang(pair: ExportedPair) -> str:
    table: dict[str, Any] = {"model-path": pair.target.original}
    if pair.n_ctx:
        table["context-length"] = pair.n_ctx
    return _yaml(
        {
            **table,
            "sampling-defaults": "openai",
            "speculative-algorithm": "STANDALONE",
            "speculative-draft-model-path": pair.draft.original,
            "speculative-num-steps": pair.n_draft,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": pair.n_draft + 1,
        }
    )


def _requests_note(pair: ExportedPair, *without: str) -> str:
    sampling = {key: value for key, value in pair.sampling.items() if key not in without}
    return f"Sampling is set in each request: {json.dumps(sampling)}."


def _sglang_notes(pair: ExportedPair) -> Iterator[str]:
    yield _requests_note(pair, "min_p")
    yield _weights_note(pair)
    yield _ROUNDING
    if not pair.params.greedy:
        yield (
            "It drafts greedily and accepts a token with the target's probability: exact, but fewer tokens are "
            "accepted than with min(1, p/q). min_p has no effect on drafted tokens, so leave it out."
        )
        yield "Penalties do not see the drafted tokens of a block: with them it is not exact."
        yield "On CPUs, Intel GPUs and AMD GPUs it verifies greedily at every temperature: not exact above 0."
    yield from _order_note(pair)
    yield from _size_note(pair, "it refuses the pair at the start")


# TensorRT-LLM


def _require_one_tokenizer(pair: ExportedPair) -> None:
    if pair.by_text:
        raise PairError("the tokenizers differ, and drafts are not translated there")


def _require_tensorrt(pair: ExportedPair) -> None:
    _require_originals(pair)
    _require_one_tokenizer(pair)


def _tensorrt(pair: ExportedPair) -> str:
    table = {"max_seq_len": pair.n_ctx} if pair.n_ctx else {}
    return _yaml(
        {
            **table,
            "speculative_config": {
                "decoding_type": "Draft_Target",
                "max_draft_len": pair.n_draft,
                "speculative_model": pair.draft.original,
            },
        }
    )


def _tensorrt_notes(pair: ExportedPair) -> Iterator[str]:
    yield _requests_note(pair, "min_p")
    yield _weights_note(pair)
    yield _ROUNDING
    if not pair.params.greedy:
        yield (
            "It keeps drafted tokens while they are equal to the target's own draws: exact, but fewer tokens are "
            "accepted than with min(1, p/q). use_rejection_sampling: true is a prototype there."
        )
    yield from _order_note(pair)
    if pair.differs:
        yield f"The vocabularies have {pair.sizes}: leave use_rejection_sampling off."


# transformers

_SCRIPT = """\
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGET, DRAFT = {target}, {draft}


def load(name):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(device)


def main(prompt):
    tokenizer, target, draft = AutoTokenizer.from_pretrained(TARGET), load(TARGET), load(DRAFT)
    draft.generation_config.update(
        num_assistant_tokens={n_draft}, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    inputs = tokenizer.apply_chat_template(
        [{{"role": "user", "content": prompt}}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(target.device)
    tokens = target.generate(
        **inputs,
        assistant_model=draft,{tokenizers}
        {sampling},
        max_new_tokens=512,
    )
    print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Explain tail calls.")
"""


def _require_transformers(pair: ExportedPair) -> None:
    _require_originals(pair)
    if pair.by_text and pair.target.n_vocab == pair.draft.n_vocab:
        size = counted(pair.target.n_vocab, "token")
        raise PairError(f"vocabularies of equal size ({size}) are taken for the same one")


def _transformers(pair: ExportedPair) -> str:
    sampling = pair.sampling
    if pair.params.greedy:
        del sampling["temperature"]
    settings = {"do_sample": not pair.params.greedy, **sampling}
    return _SCRIPT.format(
        target=json.dumps(pair.target.original),
        draft=json.dumps(pair.draft.original),
        n_draft=pair.n_draft,
        tokenizers=(
            "\n        tokenizer=tokenizer,\n        assistant_tokenizer=AutoTokenizer.from_pretrained(DRAFT),"
            if pair.differs
            else ""
        ),
        sampling=", ".join(f"{key}={value!r}" for key, value in settings.items()),
    )


def _transformers_notes(pair: ExportedPair) -> Iterator[str]:
    yield _weights_note(pair)
    yield _ROUNDING
    if pair.differs:
        yield f"The vocabularies differ ({pair.sizes}), so it drafts only tokens that both have."
    if not pair.params.greedy:
        yield "It accepts by min(1, p/q) token by token: exact; specllama's block rule accepts no fewer."
    yield from _order_note(pair)
    yield from _size_note(pair, "it asks for tokenizer= and assistant_tokenizer= in generate()")
    yield "One answer at a time, in Python: for tests, not for speed."


# llama-server


def _require_llama(pair: ExportedPair) -> None:
    _require_one_tokenizer(pair)
    if pair.draft.is_cut:
        raise PairError(f"the vocabulary of the draft {pair.draft.label} was cut, and ids are not translated there")
    if abs(pair.target.n_vocab - pair.draft.n_vocab) > _LLAMA_CPP_SLACK:
        raise PairError(f"the vocabularies may differ by {_LLAMA_CPP_SLACK} tokens, and these have {pair.sizes}")
    for part in (pair.target, pair.draft):
        if isinstance(part.gguf, Path) and not str(part.gguf).isprintable():
            raise PairError(f"{part.gguf} has characters that a script cannot hold")


def _llama(pair: ExportedPair) -> str:
    def files(part: ExportedModel, repo: str, file: str, path: str) -> list[str]:
        source = part.gguf
        if isinstance(source, HubSource):
            return [f"{repo} {shlex.quote(source.repo)} {file} {shlex.quote(source.file)}"]
        return [f"{path} {shlex.quote(str(source))}"]

    params = pair.params
    words = [
        "exec llama-server",
        *files(pair.target, "--hf-repo", "--hf-file", "--model"),
        *files(pair.draft, "--hf-repo-draft", "--model-draft", "--model-draft"),
        f"--spec-type draft-simple --spec-draft-n-max {pair.n_draft}",
        f"--ctx-size {pair.n_ctx}",
        "--temp 0"
        if pair.params.greedy
        else f"--temp {params.temperature} --top-k {params.top_k} --top-p {params.top_p} --min-p {params.min_p}",
        '"$@"',
    ]
    return "#!/bin/sh\n" + " \\\n    ".join(words)


def _llama_notes(pair: ExportedPair) -> Iterator[str]:
    yield "Its kernels round with the block, so near-ties can flip: greedy texts need not be those of plain decoding."
    if not pair.params.greedy:
        yield (
            "It drafts greedily and keeps tokens while they are equal to the target's own draws: exact, but fewer "
            "tokens are accepted than with min(1, p/q)."
        )
    yield "The draft length is fixed there. On a CPU a pass over several tokens may cost too much: measure it."
    if isinstance(pair.target.gguf, HubSource):
        yield "It takes the newest revision of a repository and does not compare checksums."


ENGINES = {
    "vllm": OtherEngine(
        title="vLLM",
        file="vllm.yaml",
        start="vllm serve --config {file}",
        checked="vLLM 0.33.0",
        require=_require_originals,
        body=_vllm,
        notes=_vllm_notes,
    ),
    "sglang": OtherEngine(
        title="SGLang",
        file="sglang.yaml",
        start="python -m sglang.launch_server --config {file}",
        checked="SGLang 0.5.23",
        require=_require_sglang,
        body=_sglang,
        notes=_sglang_notes,
    ),
    "tensorrt-llm": OtherEngine(
        title="TensorRT-LLM",
        file="tensorrt-llm.yaml",
        start="trtllm-serve {target} --config {file}",
        checked="the published source of TensorRT-LLM (after 1.3.0rc), not with a package",
        require=_require_tensorrt,
        body=_tensorrt,
        notes=_tensorrt_notes,
    ),
    "transformers": OtherEngine(
        title="transformers",
        file="run-transformers.py",  # a name that no import of `transformers` finds
        start='python {file} "PROMPT"',
        checked="transformers 5.24.0",
        require=_require_transformers,
        body=_transformers,
        notes=_transformers_notes,
    ),
    "llama-server": OtherEngine(
        title="llama-server",
        file="llama-server.sh",
        start="sh {file}",
        checked="llama.cpp 0c1e570 (llama-cpp-python 0.3.36)",
        require=_require_llama,
        body=_llama,
        notes=_llama_notes,
    ),
}
