"""The rows of the compatibility report that compare two models by their headers, without their tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher

from specllama.base.disk import size_text
from specllama.base.errors import UnsupportedModel
from specllama.base.text import counted, figure
from specllama.llama.header import Header, memory_kind, refuse_architecture, why_no_tree
from specllama.llama.load_plan import LoadOptions
from specllama.llama.memory import MemoryNeed
from specllama.llama.ways import WayBack
from specllama.pairs.report import MEASURE, CheckRow, RowMark, warned

# A draft with more than a quarter of the target's bytes is slow, one with less than a hundredth is seldom accepted.
TOO_LARGE, TOO_SMALL = 1 / 4, 1 / 100

_SAME_TEMPLATE = 0.98  # templates of one family differ in a space or in a default system prompt
_PLAIN_TYPES = ("f32", "f16", "bf16")
_TUNED_WORDS = frozenset(["instruct", "it", "chat", "sft", "dpo", "rl", "assistant", "thinking", "reasoning", "tuned"])
_FORMAT_WORDS = frozenset(["gguf", "awq", "gptq", "bf16", "fp16", "f16", "hf"])
_SIZE_WORD = re.compile(r"\d+(\.\d+)?[bm]|\d+x\d+(\.\d+)?b|a\d+(\.\d+)?b")
_WORDS = re.compile(r"[a-z0-9]+(?:\.\d+[a-z]*)*")


@dataclass(frozen=True, slots=True)
class Side:
    """One model, as it will be loaded."""

    header: Header
    n_params: int
    need: MemoryNeed | None  # None = the file has no weights
    n_ctx: int  # the context asked for; 0 = the training context, as far as memory allows
    way_back: WayBack | None = None  # None = the file has no weights


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Free memory in bytes, and the installed versions."""

    memory_free: int
    gpu_free: int  # beside main memory; 0 without a GPU, or if it shares main memory
    bindings: str
    llama_cpp: str


def _both(values: Iterable[str]) -> tuple[str, str]:
    ours, theirs = values
    return ours, theirs


def refusal_row(header: Header, role: str) -> CheckRow | None:
    """The row of a model that cannot be used with any partner; None if it can be used."""
    try:
        refuse_architecture(header)
    except UnsupportedModel as error:
        shown = {"target": "", "draft": "", role: _architecture(header)}
        return CheckRow("architecture", RowMark.FAIL, shown["target"], shown["draft"], str(error), error.hint)
    return None


def model_rows(target: Side, draft: Side, machine: MachineMemory) -> tuple[CheckRow, ...]:
    """One row per test of two models that passed `refusal_row`."""
    rows = [
        _template_row(target.header, draft.header),
        _context_row(target, draft),
        CheckRow("architecture", RowMark.PASS, _architecture(target.header), _architecture(draft.header)),
        _experts_row(target.header, draft.header),
        _family_row(target.header, draft.header),
        _tuning_row(target.header, draft.header),
    ]
    if target.way_back and draft.way_back:
        rows.append(_rollback_row(target.way_back, draft.way_back))
    rows.append(_trees_row(target.header, draft.header))
    if target.need is None or draft.need is None:
        rows.append(_no_weights_row(target, draft))
    else:
        rows += [
            _quantization_row(target.header, draft.header),
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
    ours, theirs = target.chat_template or "", draft.chat_template or ""
    reason, remedy = "", ""
    if not ours:
        reason = "the target has no chat template: prompts are rendered by a general template, or not at all"
        remedy = "use raw prompts, or a target that is tuned for chats"
    elif theirs and SequenceMatcher(None, ours, theirs, autojunk=False).quick_ratio() < _SAME_TEMPLATE:
        reason = "prompts are rendered by the target's template; the draft was trained with another one"
        remedy = f"expect fewer accepted tokens in chats; {MEASURE}"
    return warned("chat template", (_template(ours), _template(theirs)), reason, remedy)


def _template(text: str) -> str:
    return f"{figure(len(text))} chars, {hashlib.sha256(text.encode()).hexdigest()[:6]}" if text else "none"


def _context_row(target: Side, draft: Side) -> CheckRow:
    ours, theirs, n_ctx = target.header.n_ctx_train, draft.header.n_ctx_train, target.n_ctx
    reason, remedy = "", ""
    if 0 < ours < n_ctx:
        reason = f"the context of {figure(n_ctx)} tokens is longer than the target was trained for"
        remedy = f"use a context of at most {counted(ours, 'token')}"
    elif 0 < theirs < min(n_ctx, ours or n_ctx):
        reason = (
            f"the draft was trained for less than {counted(n_ctx, 'token')}: beyond {figure(theirs)} nothing is drafted"
        )
        remedy = "use a draft with a longer context for texts of this length"
    return warned("context", (f"{figure(ours)} trained", f"{figure(theirs)} trained"), reason, remedy)


def _rollback_row(target: WayBack, draft: WayBack) -> CheckRow:
    whys = dict.fromkeys((target.why, draft.why))
    why = target.why if len(whys) == 1 else f"target: {target.why}; draft: {draft.why}"
    return CheckRow("rollback", RowMark.PASS, target.text, draft.text, why)


def _trees_row(target: Header, draft: Header) -> CheckRow:
    """By the headers: loading tries it."""
    ours, theirs = (why_no_tree(header, LoadOptions().max_block) for header in (target, draft))
    whys = {"target": ours, "draft": theirs}
    why = ours if ours == theirs else "; ".join(f"{role}: {each}" for role, each in whys.items() if each)
    return CheckRow("trees", RowMark.PASS, *_both("chains only" if each else "yes" for each in whys.values()), why)


def _experts_row(target: Header, draft: Header) -> CheckRow:
    reason = ""
    if target.n_expert:
        reason = "the target is a mixture of experts: each verified token may read other experts, which costs time"
    return warned("experts", (_experts(target), _experts(draft)), reason, MEASURE)


def _experts(header: Header) -> str:
    return f"{header.n_expert}, {header.n_expert_used} used" if header.n_expert else "none"


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.lower().replace("_", "-"))


def family(header: Header) -> str:
    """The name that models of one family share; the architecture's if the file has none."""
    words = [
        word
        for word in _words(header.basename or header.name)
        if word not in _TUNED_WORDS | _FORMAT_WORDS and not _SIZE_WORD.fullmatch(word)
    ]
    return " ".join(words) or header.architecture


def is_tuned(header: Header) -> bool:
    """True if the file's metadata or name says that the model follows instructions."""
    texts = (header.finetune, header.name, header.path.stem)
    return any(word in _TUNED_WORDS for text in texts for word in _words(text))


def _family_row(target: Header, draft: Header) -> CheckRow:
    values = family(target), family(draft)
    same = values[0] == values[1] and target.architecture == draft.architecture
    reason = "" if same else "the models seem to be of different families: the draft may choose different words"
    return warned("family", values, reason, MEASURE)


def _tuning_row(target: Header, draft: Header) -> CheckRow:
    tuned = is_tuned(target), is_tuned(draft)
    role, wanted = ("target", "instruct") if tuned[0] else ("draft", "base")
    reason = "" if tuned[0] == tuned[1] else f"only the {role} seems to be tuned to follow instructions"
    values = _both("tuned" if one else "base" for one in tuned)
    return warned("fine-tuning", values, reason, f"use the {wanted} version of the draft")


def _no_weights_row(target: Side, draft: Side) -> CheckRow:
    """Two files with a vocabulary alone can be compared. A pair with one of them cannot run."""
    values = _both("none" if side.need is None else size_text(side.need.weights) for side in (target, draft))
    remedy = "give the model's own file, not its vocabulary"
    if target.need is None and draft.need is None:
        return warned("weights", values, "the files have no weights: sizes and memory were not compared", remedy)
    role = "target" if target.need is None else "draft"
    reason = f"the {role} holds a vocabulary but no weights: it cannot run"
    return CheckRow("weights", RowMark.FAIL, *values, reason, remedy)


def _quantization_row(target: Header, draft: Header) -> CheckRow:
    reason = ""
    if _is_plain(draft) and not _is_plain(target):
        reason = "the draft is not quantized: reading its weights takes two to four times as long as necessary"
    return warned("quantization", (_types(target), _types(draft)), reason, "use the Q4_0 or Q8_0 file of the draft")


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
    n_params = f"{draft.n_params / target.n_params:.2g}"
    share = f"the draft has {ratio:.2g} of the target's bytes and {n_params} of its parameters"
    if ratio > TOO_LARGE:
        reason, remedy = "above a quarter, it may cost more than it saves", "a smaller draft, or this one in Q4_0"
    elif ratio < TOO_SMALL:
        reason, remedy = "below a hundredth, it is seldom accepted", "a larger draft of the same family"
    else:
        return CheckRow("size", RowMark.PASS, *values, share)
    return CheckRow("size", RowMark.WARN, *values, f"{share}: {reason}", f"{remedy}; {MEASURE}")


def _memory_row(side: Side, target: MemoryNeed, draft: MemoryNeed, machine: MachineMemory) -> CheckRow:
    """Weights, KV cache and buffers of both models, and the free memory. `side` is the target's."""
    needed, free = target.total + draft.total, machine.memory_free + machine.gpu_free
    on_gpu = f", {size_text(machine.gpu_free)} on GPUs" if machine.gpu_free else ""
    values = f"{size_text(needed)} for both", f"{size_text(free)} free{on_gpu}"
    weights = target.weights + draft.weights
    parts = (
        f"weights {size_text(weights)}, KV {size_text(target.kv + draft.kv)}, "
        f"buffers {size_text(target.compute + draft.compute)}, "
        f"at {counted(side.n_ctx or side.header.n_ctx_train, 'token')} of context"
    )
    if needed <= free:
        return CheckRow("memory", RowMark.PASS, *values, parts)
    reason = f"target and draft need {size_text(needed)} ({parts}), but only {size_text(free)} are free"
    if side.n_ctx == 0 and weights < free:
        return warned("memory", values, reason, "nothing to do: the context is made as long as fits")
    return CheckRow("memory", RowMark.FAIL, *values, reason, "use a shorter context (--ctx-size) or smaller models")
