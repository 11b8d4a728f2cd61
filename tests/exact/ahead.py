"""Fakes for models that read ahead: paces instead of clocks, a watched KV, and models that tell on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import sleep

from specllama.audit.enumeration import ContractBroken
from specllama.core.types import DraftPolicy, FloatArray, Guess
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.model import PREFILL_AT_ONCE
from specllama.llama.running_ahead import AheadModel
from tests.exact.harness import Pair, Rig
from tests.exact.translating import FIRST, WatchedDraft
from tests.fakes import FakeModel, History


class Paced(Executor):
    """Instead of a thread: every background reading comes `n_tokens` far, before its caller goes on."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.n_runs = 0

    def submit(  # type: ignore[override]
        self, read_on: Callable[..., None], run: object, first: int, n_most: int, guess: Guess
    ) -> None:
        self.n_runs += 1
        read_on(run, first, min(n_most, self.n_tokens), guess)


class WatchedAhead(AheadModel):
    """Shows what it holds without what was read ahead, and checks that the rest of the KV is exactly that."""

    n_served = 0  # rows that were there when they were asked for

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        n_before = len(self._read)
        rows = AheadModel.eval(self, tokens, parents)
        self.n_served += n_before > 0 and len(self._read) == n_before - 1 and len(tokens) == 1
        return rows

    @property
    def tokens(self) -> History:
        """What was asked for; the harness compares it with what was committed."""
        length = self.length
        held = self._model.tokens  # type: ignore[attr-defined]
        assert held[length:] == tuple(token for token, _ in self._read), "the KV holds more than it should"
        return tuple(held[:length])


def ahead_rig(
    pair: Pair,
    strategy: str = "draft-simple",
    *,
    worker: Executor | None = None,
    policy: DraftPolicy | None = None,
    below: FakeModel | None = None,
    kind: type[WatchedAhead] = WatchedAhead,
) -> Rig:
    """An engine whose draft reads ahead; `below` in place of the pair's own draft. `chain-tli`: chain, by texts."""
    target = FakeModel(pair.target, pair.n_vocab, pair.n_ctx, pair.end_tokens)
    translated = strategy.endswith("tli")
    if translated:
        model = WatchedDraft(
            pair.n_vocab,
            n_ctx=pair.n_draft_ctx,
            end_tokens=pair.end_tokens,
            first=FIRST if strategy == "chain-tli" else (),
        )
    else:
        assert pair.draft is not None
        n_vocab = pair.n_draft_vocab or pair.n_vocab
        model = below or FakeModel(pair.draft, n_vocab, pair.n_draft_ctx, pair.end_tokens)  # type: ignore[assignment]
    draft = kind(model, worker=worker)
    settings = DraftSettings(n_max=pair.n_max, vocab_size=pair.n_vocab, policy=policy, n_at_once=PREFILL_AT_ONCE)
    drafter = REGISTRY[strategy.removesuffix("-tli") if strategy == "chain-tli" else strategy].make(draft, settings)
    return Rig(target, draft, drafter, rule=pair.rule)  # type: ignore[arg-type]


@dataclass(slots=True)
class WidthModel(FakeModel):
    """Its logits depend a little on how many tokens each pass read, as those of a GPU do.

    Fed tokens wait for the next `eval` and are read in its pass, as `LlamaModel` does it.
    """

    widths: list[int] = field(default_factory=list)  # for every token of the KV; 0 = it still waits

    def feed(self, tokens: Sequence[int]) -> None:
        FakeModel.feed(self, tokens)
        self.widths += [0] * len(tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        rows = FakeModel.eval(self, tokens, parents)
        self.widths = [width for width in self.widths if width]
        self.widths += [self.length - len(self.widths)] * (self.length - len(self.widths))
        assert self._rows is not None
        for i in range(len(rows)):
            read = self.widths[: self.length - len(rows) + i + 1]
            self._rows[i, 0] += 0.3 * sum(at * width for at, width in enumerate(read, 1)) % 1.0
        return rows

    def truncate(self, length: int) -> None:
        FakeModel.truncate(self, length)
        del self.widths[length:]


@dataclass(slots=True)
class JealousModel(FakeModel):
    """Raises ContractBroken where a second thread comes in. Every call takes `pause_s`, so that one could."""

    pause_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _owner: int = 0  # the thread that is in

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise ContractBroken("two threads use a model at once")
        self._owner = threading.get_ident()
        try:
            sleep(self.pause_s)
            yield
        finally:
            self._lock.release()

    @property
    def length(self) -> int:
        if self._lock.locked() and self._owner != threading.get_ident():
            raise ContractBroken("the length of a model that another thread is changing")
        return len(self._kv)

    def feed(self, tokens: Sequence[int]) -> None:
        with self._alone():
            FakeModel.feed(self, tokens)

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        with self._alone():
            return FakeModel.eval(self, tokens, parents)

    def truncate(self, length: int) -> None:
        with self._alone():
            FakeModel.truncate(self, length)
