"""The types and protocols that cross rooms: drafts, verdicts, observations, models, drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from specllama.base.errors import UnsupportedModel
from specllama.core.arrays import FloatArray, IntArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import SamplingParams


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two token lists.

    Halves the search by comparing slices, which Python does in C: the lists are mostly equal and thousands long.
    """
    known, unknown = 0, min(len(a), len(b))  # a[:known] == b[:known]; what lies behind `unknown` differs or is missing
    while known < unknown:
        middle = (known + unknown + 1) // 2
        if list(a[known:middle]) == list(b[known:middle]):
            known = middle
        else:
            unknown = middle - 1
    return known


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, laid out so that a parent always comes before its children."""

    tokens: tuple[int, ...] = ()
    probs: tuple[Distribution, ...] | None = None  # law of node i given its path; None = point mass
    parents: tuple[int, ...] | None = None  # None = chain; else per node the parent's index, -1 = pending token


def require_chain(parents: Sequence[int] | None = None, kept: Sequence[int] = ()) -> None:
    """For models that evaluate and keep chains only: raise UnsupportedModel for the nodes of a tree."""
    if parents is not None and any(parent != index - 1 for index, parent in enumerate(parents)):
        raise UnsupportedModel("this model evaluates chains of drafted tokens, no trees", hint="draft a chain")
    if any(node != index for index, node in enumerate(kept)):
        raise UnsupportedModel("this model keeps the beginning of a chain, no other nodes", hint="draft a chain")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier decided about one draft."""

    path: tuple[int, ...]  # accepted node indices, root to leaf
    next_token: int  # correction after a rejection, else the bonus token; always present


@dataclass(frozen=True, slots=True)
class Observation:
    """Told to every drafter after every verification, whoever proposed."""

    tokens: Sequence[int]  # committed tokens, the new ones included
    draft: Draft
    verdict: Verdict
    proposed_by: str
    features: FloatArray | None = None  # (n+1, n_embd) hidden rows of the verified block, if a drafter wants them
    logits: FloatArray | None = None  # (n+1, V) rows of the verified block, if a drafter wants them
    laws: Sequence[Distribution] | None = None  # n+1 rows of p, made when asked for; the reached ones are there already


@dataclass(frozen=True, slots=True)
class Caps:
    """What a loaded model can do."""

    rollback: bool = True  # tokens can be removed from the KV again
    tree: bool = False  # eval understands `parents`
    features: bool = False  # hidden rows can be had
    max_block: int = 32  # most tokens one eval may hold


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a `Planner` allows for one step. It is made before anything is evaluated or drawn."""

    n_given: int = 0  # tokens to take from the offer; they come first
    n_drawn: int = 0  # most tokens the draft model may draw behind them; 0 = it is not even fed
    probe: int = 0  # above 0: judge the model by what was said, reading at most so many tokens; then plan anew
    rate: float = 1.0  # tokens per T(1) that the plan is expected to emit; 1 = plain decoding

    def to_json(self) -> Mapping[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer of a `DraftPolicy`: the plan of a step, or whether token `depth` (0 = first) may be drafted."""

    depth: int
    confidence: float  # in token `depth`: see DraftPolicy.go_on; 0.0 where the law was not looked at yet
    go_on: bool
    plan: DraftPlan | None = None  # the whole plan, where that was the question

    def to_json(self) -> Mapping[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What a drafter has to say about its last proposal, besides the draft."""

    decisions: tuple[Decision, ...] = ()
    notice: str = ""  # one sentence for the user, e.g. the draft's context is full; said once


class Rule(Enum):
    """How drafted tokens are accepted. All three keep the target's law exactly."""

    TOKEN = "token"  # accept token by token with min(1, p/q)
    BLOCK = "block"  # accept the longest prefix that the joint law allows
    MATCH = "match"  # draw from p and go on while the draw equals the draft


@dataclass(slots=True)
class Cancel:
    """A flag that asks a running answer to stop.

    `buffer` is a C string of zero or one character: llama.cpp's abort callback reads it directly (see `llama.py`),
    so setting the flag needs no lock, no GIL and no Python code on the other side.
    """

    buffer: bytearray = field(default_factory=lambda: bytearray(2))

    def set(self) -> None:
        """Ask to stop. Safe in a signal handler."""
        self.buffer[0] = 1

    def clear(self) -> None:
        """Forget an earlier request."""
        self.buffer[0] = 0

    def is_set(self) -> bool:
        """True once `set` was called."""
        return self.buffer[0] != 0


class Chooser(Protocol):
    """The only source of randomness in the program."""

    def flip(self, prob: float) -> bool:
        """True with probability `prob`; certain at prob >= 1, impossible at prob <= 0."""
        ...

    def pick(self, law: Distribution) -> int:
        """One token drawn from `law`."""
        ...


class DraftPolicy(Protocol):
    """Decides the draft's length, always BEFORE a token is drawn."""

    def go_on(self, depth: int, confidence: float) -> bool:
        """May the drafter draw token number `depth` (0 = first)?

        `confidence` is the largest mass of the law it would be drawn from (for a greedy draft, of the law at
        temperature 1), or the chance that a drafter without laws gives its token.
        """
        ...

    def observe(self, seen: Observation) -> None:
        """Learn from a verification."""
        ...


@runtime_checkable
class Planner(DraftPolicy, Protocol):
    """A policy that knows what drafting costs: it also decides whether the draft model is to be evaluated at all."""

    def plan(self, limit: int, *, offer: Sequence[float] = (), lag: int | None = None) -> DraftPlan:
        """How to draft at most `limit` tokens.

        `offer`: confidences of tokens that cost nothing to propose, in order. `lag`: tokens that the draft model must
        catch up on, 0 = none but the pending one; None = no model can draft now.
        """
        ...

    def look(self, depth: int) -> bool:
        """May the draft model be evaluated for the law of token `depth`? The first of a step needs no asking."""
        ...

    def learn(self, confidence: float, acceptance: float) -> None:
        """A token of the draft model that was not submitted would have been accepted with a chance of `acceptance`."""
        ...


class Drafter(Protocol):
    """Proposes tokens. It may be told to draft nothing, and it hears of every verification."""

    name: str
    wants: frozenset[str]  # of {"features", "logits"}

    @property
    def models(self) -> Sequence[LanguageModel]:
        """The models that it evaluates; while an answer is open, nothing else may use them."""
        ...

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        """A new answer to `tokens` starts; cheap, the first token must not wait for it."""
        ...

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """At most `limit` tokens to follow `tokens`; an empty draft means plain decoding for one step."""
        ...

    def observe(self, seen: Observation) -> None:
        """Bring the drafter's state in line with what was committed."""
        ...

    def report(self) -> DraftReport:
        """Decisions and notice of the last `propose`."""
        ...

    def close(self) -> None:
        """Free what the drafter owns."""
        ...


class LanguageModel(Protocol):
    """A model with a KV cache for one sequence."""

    vocab_size: int
    n_ctx: int
    caps: Caps

    @property
    def end_tokens(self) -> frozenset[int]:
        """Every token that ends an answer."""
        ...

    @property
    def length(self) -> int:
        """Tokens now in the KV."""
        ...

    @property
    def busy_s(self) -> float:
        """Seconds spent so far inside the model's own calls; callers look at differences. 0.0 = it does not count."""
        ...

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens without asking for logits; chunks by itself."""
        ...

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        """Append tokens and return their logits (len(tokens), V): a view, valid until the next feed or eval."""
        ...

    def truncate(self, length: int) -> None:
        """Drop every token from `length` on. Raises RollbackRefused."""
        ...

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Of the last eval keep the pending token (the KV up to `length`) and the nodes of `path`."""
        ...


class LoadedModel(LanguageModel, Protocol):
    """A model that holds memory of its own and computes for long."""

    def watch(self, cancel: Cancel | None) -> None:
        """Stop a long computation when `cancel` is set; None ends that."""
        ...

    def close(self) -> None:
        """Free the model; closing twice does nothing."""
        ...


@runtime_checkable
class Adapter(LanguageModel, Protocol):
    """A model that uses the KV of another one."""

    @property
    def model(self) -> LanguageModel:
        """The other one."""
        ...


@runtime_checkable
class Narrow(Protocol):
    """The optional side of a model that knows few of the ids it speaks: rows without the empty cells."""

    @property
    def known(self) -> IntArray:
        """The ids that it knows, ascending.  (n,)"""
        ...

    def eval_known(self, tokens: Sequence[int]) -> FloatArray:
        """`eval` of a chain; column i belongs to token `known[i]`.  (len(tokens), n)"""
        ...


@runtime_checkable
class Spelling(Protocol):
    """The optional side of a model: a token may take several cells of its KV, so `n_ctx` is only the most it holds."""

    def room_after(self, tokens: Sequence[int]) -> int:
        """Tokens of one cell each that still fit once `tokens` were appended; below 0 where not even these do."""
        ...


def room_after(model: LanguageModel, tokens: Sequence[int]) -> int:
    """The same of any model; where it is no `Spelling`, a token is a cell."""
    if isinstance(model, Spelling):
        return model.room_after(tokens)
    return model.n_ctx - model.length - len(tokens)


class Stopper(Protocol):
    """Recognises stop strings; they live in `text.py`, the engine only asks."""

    def push(self, token: int) -> bool:
        """True if this token completes a stop."""
        ...
