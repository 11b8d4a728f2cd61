"""Check a pair of model files: read the facts, compare them, and remember what depends on the files alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from specllama import llama
from specllama.base import disk
from specllama.drafters import SIMPLE, TRANSLATED
from specllama.llama import Header, LoadOptions
from specllama.pairs.model_rows import MachineMemory, Side, model_rows, refusal_row
from specllama.pairs.report import CheckRow, CompatReport
from specllama.pairs.token_rows import token_rows
from specllama.pairs.tokenizer import read_tokenizer

_REMEMBERED = "token rows"
_VERSION = 6  # of the rows; rows of another version are not used

_tokenizer = functools.lru_cache(maxsize=2)(read_tokenizer)  # one target is compared with many drafts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model file and how to load it."""

    header: Header
    options: LoadOptions
    name: str = ""  # in the report; empty = the file's name

    @property
    def label(self) -> str:
        return self.name or self.header.path.name


def this_machine() -> MachineMemory:
    """The free memory and the installed llama.cpp. Raises BackendError."""
    build = llama.build_info()
    own = sum(device.memory_free for device in build.devices if device.kind == "gpu" and "Metal" not in device.name)
    return MachineMemory(llama.memory_free(), own, build.bindings, build.llama_cpp)


def check_pair(
    target: Candidate,
    find_draft: Callable[[], Candidate],
    machine: MachineMemory | None = None,
    *,
    strategy: str = SIMPLE,
) -> CompatReport:
    """Compare two model files by their headers. No weights are read.

    `strategy` is how the draft will draft; TRANSLATED compares texts and ignores ids. A target that cannot be used ends
    the comparison before `find_draft` is called. Raises ModelFileError, and what `find_draft` raises.
    """
    if refused := refusal_row(target.header, "target"):
        return CompatReport(target.label, "not checked", (refused,))
    draft = find_draft()
    if refused := refusal_row(draft.header, "draft"):
        return CompatReport(target.label, draft.label, (refused,))
    rows = _token_rows(target.header, draft.header, strategy)
    asked = target.options.n_ctx
    n_ctx = asked or target.header.n_ctx_train
    useful = min(n_ctx, draft.header.n_ctx_train or n_ctx)  # a draft gets no more than its training context
    sides = _side(target, asked, n_ctx), _side(draft, asked, useful)
    return CompatReport(target.label, draft.label, (*rows, *model_rows(*sides, machine or this_machine())))


def _side(one: Candidate, n_ctx: int, own: int) -> Side:
    """`n_ctx`: the context asked for; `own`: the context that this model is loaded with."""
    header = one.header
    options = replace(one.options, n_ctx=own)
    if not header.n_weight_bytes:
        return Side(header, header.n_params, None, n_ctx)
    need, way_back = llama.memory_needed(header, options), llama.way_back(header, options)
    return Side(header, header.n_params, need, n_ctx, way_back)


def _token_rows(target: Header, draft: Header, strategy: str) -> tuple[CheckRow, ...]:
    """The rows that depend on the two files alone, remembered: comparing 150,000 texts takes about a second."""
    kind = f"{_REMEMBERED} by text" if strategy == TRANSLATED else _REMEMBERED
    record = disk.FileRecord(kind, *target.parts, *draft.parts, by=[_VERSION, llama.build_info().fingerprint])
    rows = record.value(tuple[CheckRow, ...])
    if rows is None:
        rows = token_rows(_tokenizer(target), _tokenizer(draft), strategy=strategy)
        record.keep(rows)
    return rows
