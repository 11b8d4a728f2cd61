"""Check a pair of model files: gather the facts, compare them, and remember what only the files decide."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from specllama import llama
from specllama.base import disk as storage
from specllama.base.jsonable import from_plain, to_plain
from specllama.drafters import SIMPLE, TRANSLATED
from specllama.llama import Header, LoadOptions
from specllama.pairs.model_rows import MachineMemory, Side, model_rows, refusal_row
from specllama.pairs.report import CheckRow, CompatReport
from specllama.pairs.token_rows import token_rows
from specllama.pairs.tokenizer import Tokenizer, read_tokenizer

_REMEMBERED = "token rows"
_VERSION = 3  # of the rows; another one makes what was remembered worthless


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model file and how it would be loaded."""

    header: Header
    options: LoadOptions
    name: str = ""  # for people; empty = the file's name

    @property
    def label(self) -> str:
        """What the report calls it."""
        return self.name or self.header.path.name


def this_machine() -> MachineMemory:
    """What is free now, and which llama.cpp is installed. Raises BackendError."""
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
    """Compare two model files by their headers; no weights are read.

    `strategy`: how the draft is to draft; TRANSLATED compares the tokens that both have, whatever their ids.
    A target that cannot be served ends the comparison before `find_draft` is called. Raises ModelFileError where a
    file cannot be read, and whatever `find_draft` raises.
    """
    if refused := refusal_row(target.header, "target"):
        return CompatReport(target.label, "not looked at", (refused,))
    draft = find_draft()
    if refused := refusal_row(draft.header, "draft"):
        return CompatReport(target.label, draft.label, (refused,))
    rows = _token_rows(target.header, draft.header, strategy)
    asked = target.options.n_ctx
    n_ctx = asked or target.header.n_ctx_train
    useful = min(n_ctx, draft.header.n_ctx_train or n_ctx)  # a draft gets no more than it was trained for
    sides = _side(target, asked, n_ctx), _side(draft, asked, useful)
    return CompatReport(target.label, draft.label, (*rows, *model_rows(*sides, machine or this_machine())))


def _side(one: Candidate, n_ctx: int, own: int) -> Side:
    """The model as it would be loaded: with a context of `own` tokens, where `n_ctx` are asked for (0 = as trained)."""
    header = one.header
    need = llama.memory_needed(header, replace(one.options, n_ctx=own)) if header.n_weight_bytes else None
    return Side(header, header.n_params, need, n_ctx)


def _token_rows(target: Header, draft: Header, strategy: str) -> tuple[CheckRow, ...]:
    """The rows that only the two files decide, remembered until one of them changes.

    Reading and comparing 150,000 texts takes about a second, which the first token would wait for at every start.
    """
    stamp = [_VERSION, llama.build_info().fingerprint]
    kind = f"{_REMEMBERED} by text" if strategy == TRANSLATED else _REMEMBERED
    known = storage.recall(kind, target.path, draft.path)
    if known is not None and known["stamp"] == stamp:
        return tuple(from_plain(CheckRow, row) for row in known["rows"])
    sides = map(_tokenizer, (target, draft))
    rows = token_rows(*sides, strategy=strategy)
    storage.remember(kind, {"stamp": stamp, "rows": [to_plain(row) for row in rows]}, target.path, draft.path)
    return rows


@functools.lru_cache(maxsize=2)
def _tokenizer(header: Header) -> Tokenizer:
    """A tokenizer, kept while one target is compared with many drafts."""
    return read_tokenizer(header)
