"""What two models have in common besides their tokens: the rows of the compatibility report read from two headers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher

from specllama.base.disk import size_text
from specllama.base.errors import UnsupportedModel
from specllama.llama.header import Header, memory_kind, refuse_architecture
from specllama.llama.memory import MemoryNeed
from specllama.pairs.report import CheckRow, RowMark

# A draft of more than a quarter of the target's bytes takes long to ask; one of less than a hundredth guesses badly.
TOO_LARGE, TOO_SMALL = 1 / 4, 1 / 100

_SAME_TEMPLATE = 0.98  # templates of one family differ in a space or in a default system prompt
_MEASURE = "measure it here: specllama check --probe"
_PLAIN_TYPES = ("f32", "f16", "bf16")
_TUNED_WORDS = frozenset(["instruct", "it", "chat", "sft", "dpo", "rl", "assistant", "thinking", "reasoning", "tuned"])
_FORMAT_WORDS = frozenset(["gguf", "awq", "gptq", "bf16", "fp16", "f16", "hf"])
_SIZE_WORD = re.compile(r"\d+(\.\d+)?[bm]|\d+x\d+(\.\d+)?b|a\d+(\.\d+)?b")
_WORDS = re.compile(r"[a-z0-9]+(?:\.\d+[a-z]*)*")


@dataclass(frozen=True, slots=True)
class Side:
    """One model, as it is to be loaded."""

    header: Header
    n_params: int
    need: MemoryNeed | None  # None where it has no weights
    n_ctx: int  # the context asked for; 0 = what the model was trained for, as far as memory allows


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What there is to run on. Bytes."""

    memory_free: int
    gpu_free: int  # beside main memory; 0 without a GPU or where it shares main memory
    bindings: str
    llama_cpp: str


def _row(test: str, values: tuple[str, str], mark: RowMark, reason: str = "", remedy: str = "") -> CheckRow:
    return CheckRow(test, mark, *values, reason, remedy)


def _both(values: Iterable[str]) -> tuple[str, str]:
    ours, theirs = values
    return ours, theirs


def refusal_row(header: Header, role: str) -> CheckRow | None:
    """The row of a model that cannot be served at all, whatever the other one is; None for one that can."""
    try:
        refuse_architecture(header)
    except UnsupportedModel as error:
        shown = {"target": "", "draft": "", role: _architecture(header)}
        return CheckRow("architecture", RowMark.FAIL, shown["target"], shown["draft"], str(error), error.hint)
    return None


def model_rows(target: Side, draft: Side, machine: MachineMemory) -> tuple[CheckRow, ...]:
    """One row per test of two models that can be served."""
    rows = [
        _template_row(target.header, draft.header),
        _context_row(target, draft),
        CheckRow("architecture", RowMark.PASS, _architecture(target.header), _architecture(draft.header)),
        _experts_row(target.header, draft.header),
        _family_row(target.header, draft.header),
        _tuning_row(target.header, draft.header),
    ]
    if target.need is None or draft.need is None:
        rows.append(_no_weights_row(target, draft))
    else:
        rows += [
            _quantisation_row(target.header, draft.header),
            _size_row(target, draft),
            _memory_row(target, target.need, draft.need, machine),
        ]
    rows.append(
        CheckRow("versions", RowMark.PASS, f"llama-cpp-python {machine.bindings}", f"llama.cpp {machine.llama_cpp}")
    )
    return tuple(rows)


def _architecture(header: Header) -> str:
    return f"{header.architecture}, {memory_kind(header)}"


def _template_row(target: Header, draft: Header) -> CheckRow:
    ours, theirs = (header.metadata.get("tokenizer.chat_template", "") for header in (target, draft))
    values = _template(ours), _template(theirs)
    if not ours:
        reason = "the target has no chat template: questions are put to it in another model's form, or as they stand"
        return _row("chat template", values, RowMark.WARN, reason, "use --raw, or a target that is tuned for chats")
    if theirs and SequenceMatcher(None, ours, theirs, autojunk=False).quick_ratio() < _SAME_TEMPLATE:
        reason = "prompts are rendered by the target's template; the draft was trained on another one"
        return _row("chat template", values, RowMark.WARN, reason, "expect fewer accepted tokens in chats, or measure")
    return _row("chat template", values, RowMark.PASS)


def _template(text: str) -> str:
    return f"{len(text):,} chars, {hashlib.sha256(text.encode()).hexdigest()[:6]}" if text else "none"


def _context_row(target: Side, draft: Side) -> CheckRow:
    ours, theirs = target.header.n_ctx_train, draft.header.n_ctx_train
    values = f"{ours:,} trained", f"{theirs:,} trained"
    n_ctx = target.n_ctx
    if 0 < ours < n_ctx:
        reason = f"the context of {n_ctx:,} tokens that is asked for is longer than the target was trained for"
        return _row("context", values, RowMark.WARN, reason, f"ask for less: --ctx-size {ours}")
    if 0 < theirs < min(n_ctx, ours or n_ctx):
        reason = (
            f"the draft was trained for less than the {n_ctx:,} tokens asked for: beyond {theirs:,} nothing is drafted"
        )
        return _row("context", values, RowMark.WARN, reason, "take a draft with a longer context for texts that long")
    return _row("context", values, RowMark.PASS)


def _experts_row(target: Header, draft: Header) -> CheckRow:
    values = _experts(target), _experts(draft)
    if not target.n_expert:
        return _row("experts", values, RowMark.PASS)
    reason = (
        "the target is a mixture of experts: every verified token may read other experts, so checking several is dear"
    )
    return _row("experts", values, RowMark.WARN, reason, _MEASURE)


def _experts(header: Header) -> str:
    used = header.metadata.get(f"{header.architecture}.expert_used_count", "?")
    return f"{header.n_expert}, {used} used" if header.n_expert else "none"


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.lower().replace("_", "-"))


def family(header: Header) -> str:
    """The name that models of one family share; the architecture's where the file tells none."""
    name = header.metadata.get("general.basename") or header.name
    words = [
        word for word in _words(name) if word not in _TUNED_WORDS | _FORMAT_WORDS and not _SIZE_WORD.fullmatch(word)
    ]
    return " ".join(words) or header.architecture


def is_tuned(header: Header) -> bool:
    """Was the model trained to answer, by what its file says of itself?"""
    told = (header.metadata.get("general.finetune", ""), header.name, header.path.stem)
    return any(word in _TUNED_WORDS for text in told for word in _words(text))


def _family_row(target: Header, draft: Header) -> CheckRow:
    ours, theirs = family(target), family(draft)
    if ours == theirs and target.architecture == draft.architecture:
        return CheckRow("family", RowMark.PASS, ours, theirs)
    reason = "the models seem to be of different families: they may put things in different words"
    return CheckRow("family", RowMark.WARN, ours, theirs, reason, _MEASURE)


def _tuning_row(target: Header, draft: Header) -> CheckRow:
    tuned = is_tuned(target), is_tuned(draft)
    values = _both("tuned" if one else "base" for one in tuned)
    if tuned[0] == tuned[1]:
        return _row("fine-tuning", values, RowMark.PASS)
    role = "target" if tuned[0] else "draft"
    reason = f"only the {role} seems to be tuned to follow instructions: the other one would go on in another way"
    remedy = f"take the {'instruct' if tuned[0] else 'base'} version of the draft"
    return _row("fine-tuning", values, RowMark.WARN, reason, remedy)


def _no_weights_row(target: Side, draft: Side) -> CheckRow:
    """Two bare vocabularies can be compared; a pair of which one cannot be run is none."""
    values = _both("none" if side.need is None else size_text(side.need.weights) for side in (target, draft))
    remedy = "give the model's own file, not its vocabulary"
    if target.need is None and draft.need is None:
        reason = "files without weights can be compared but not run: sizes and memory were not looked at"
        return _row("weights", values, RowMark.WARN, reason, remedy)
    role = "target" if target.need is None else "draft"
    return _row("weights", values, RowMark.FAIL, f"the {role} holds a vocabulary but no weights: it cannot run", remedy)


def _quantisation_row(target: Header, draft: Header) -> CheckRow:
    values = _types(target), _types(draft)
    if _is_plain(draft) and not _is_plain(target):
        reason = "the draft is not quantised: reading its weights takes two to four times as long as it need"
        return _row("quantisation", values, RowMark.WARN, reason, "take the Q4_0 or Q8_0 file of the same draft")
    return _row("quantisation", values, RowMark.PASS)


def _types(header: Header) -> str:
    """The two types that hold most of the weights."""
    most = sorted(header.weight_bytes.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{kind} {100 * size / header.n_weight_bytes:.0f} %" for kind, size in most)


def _is_plain(header: Header) -> bool:
    plain = sum(size for kind, size in header.weight_bytes.items() if kind in _PLAIN_TYPES)
    return plain > header.n_weight_bytes / 2


def _count(n: int) -> str:
    return f"{n / 1e9:.3g} G" if n >= 1e9 else f"{n / 1e6:.3g} M"


def _size_row(target: Side, draft: Side) -> CheckRow:
    values = _both(f"{_count(side.n_params)}, {size_text(side.header.n_weight_bytes)}" for side in (target, draft))
    ratio = draft.header.n_weight_bytes / target.header.n_weight_bytes
    share = (
        f"the draft has {ratio:.2g} of the target's bytes and {draft.n_params / target.n_params:.2g} of its parameters"
    )
    if ratio > TOO_LARGE:
        reason = f"{share}: above a quarter, it may cost more than it saves"
        return _row("size", values, RowMark.WARN, reason, f"a smaller draft, or this one in Q4_0; {_MEASURE}")
    if ratio < TOO_SMALL:
        reason = f"{share}: below a hundredth, it will seldom guess right"
        return _row("size", values, RowMark.WARN, reason, f"a larger draft of the same family; {_MEASURE}")
    return _row("size", values, RowMark.PASS, share)


def _memory_row(side: Side, target: MemoryNeed, draft: MemoryNeed, machine: MachineMemory) -> CheckRow:
    """Weights, KV cache and buffers of both against what is free now. `side` is the target's."""
    needed, free = target.total + draft.total, machine.memory_free + machine.gpu_free
    on_gpu = f", {size_text(machine.gpu_free)} on GPUs" if machine.gpu_free else ""
    values = f"{size_text(needed)} for both", f"{size_text(free)} free{on_gpu}"
    parts = (("weights", target.weights + draft.weights), ("KV", target.kv + draft.kv))
    told = ", ".join(
        f"{name} {size_text(size)}" for name, size in (*parts, ("buffers", target.compute + draft.compute))
    )
    told += f", at {side.n_ctx or side.header.n_ctx_train:,} tokens of context"
    if needed <= free:
        return _row("memory", values, RowMark.PASS, told)
    reason = f"target and draft need {size_text(needed)} ({told}), but only {size_text(free)} are free"
    if side.n_ctx == 0 and target.weights + draft.weights < free:
        return _row(
            "memory", values, RowMark.WARN, reason, "the context will be made as long as fits, or set --ctx-size"
        )
    return _row("memory", values, RowMark.FAIL, reason, "a shorter context (--ctx-size), or smaller models")
