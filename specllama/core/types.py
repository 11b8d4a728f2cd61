"""The types and protocols that cross rooms: drafts, verdicts, observations, models, drafters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable

from specllama.base.errors import UnsupportedModel
from specllama.core.arrays import FloatArray, IntArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import SamplingParams

# The bytes of a token; empty for control tokens.
PieceOf: TypeAlias = Callable[[int], bytes]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two token lists.

    Binary search over slices, which Python compares in C: the lists are mostly equal and thousands long.
    """
    known, unknown = 0, min(len(a), len(b))  # a[:known] == b[:known]; the prefix ends between the two
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
    n_given: int = field(default=0, compare=False)  # the first so many were copied from the text or forced, not drawn

    def until(self, end_tokens: Collection[int]) -> Draft:
        """The draft without the nodes below an end token. A tree of one path becomes a chain."""
        draft = self.cut([node for node, token in enumerate(self.tokens) if token in end_tokens])
        if draft.parents is not None and all(parent == node - 1 for node, parent in enumerate(draft.parents)):
            return replace(draft, parents=None)
        return draft

    def cut(self, ends: Collection[int]) -> Draft:
        """The draft without the nodes below `ends`. A node without one before it keeps its number."""
        if not ends:
            return self
        parents = range(-1, len(self.tokens) - 1) if self.parents is None else self.parents
        kept, below = list[int](), set(ends)
        for node, parent in enumerate(parents):
            if parent in below:
                below.add(node)
            else:
                kept.append(node)
        at = {-1: -1, **{node: i for i, node in enumerate(kept)}}
        return Draft(
            tuple(self.tokens[node] for node in kept),
            self.probs and tuple(self.probs[node] for node in kept),
            self.parents and tuple(at[self.parents[node]] for node in kept),
            sum(node < self.n_given for node in kept),
        )


def require_chain(parents: Sequence[int] | None = None, kept: Sequence[int] = ()) -> None:
    """For models without trees. Raises UnsupportedModel if `parents` or `kept` are not those of a chain."""
    if parents is not None and any(parent != index - 1 for index, parent in enumerate(parents)):
        raise UnsupportedModel("this model cannot evaluate a tree of drafted tokens", hint="draft a chain")
    if any(node != index for index, node in enumerate(kept)):
        raise UnsupportedModel("this model can keep only the beginning of a chain", hint="draft a chain")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verification."""

    path: tuple[int, ...]  # accepted node indices, root to leaf
    next_token: int  # correction after a rejection, else the bonus token; always present


@dataclass(frozen=True, slots=True)
class Observation:
    """What every drafter learns after every verification."""

    tokens: Sequence[int]  # committed tokens, the new ones included
    draft: Draft
    verdict: Verdict
    proposed_by: str
    features: FloatArray | None = None  # (n+1, n_embd) hidden rows of the verified block, if the drafter wants them
    logits: FloatArray | None = None  # (n+1, V) rows of the verified block, if the drafter wants them
    laws: Sequence[Distribution] | None = None  # n+1 rows of p, computed when read; the verified ones are computed


@dataclass(frozen=True, slots=True)
class Caps:
    """What a loaded model can do."""

    rollback: bool = True  # tokens can be removed from the KV again
    tree: bool = False  # eval understands `parents`, and the model is a `Growing` one
    max_leaves: int = 1  # most leaves of a tree
    features: bool = False  # hidden rows are available
    max_block: int = 32  # most tokens one eval may hold
    n_again: int = 0  # tokens, about, that the block after a rejection computes again


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a `Planner` allows for one step, before anything is evaluated or drawn."""

    n_given: int = 0  # tokens to take from the offer; they come first
    n_drawn: int = 0  # most tokens the draft model may draw after them; 0 = it is not evaluated
    probe: int = 0  # > 0: test the model on at most so many tokens of the text, then plan again
    rate: float = 1.0  # tokens per T(1) that the plan is expected to emit; 1 = plain decoding


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer of a `DraftPolicy`: the plan of a step, or whether token `depth` (0 = first) may be drafted."""

    depth: int
    confidence: float  # in token `depth`, see DraftPolicy.go_on; 0.0 = not known yet
    go_on: bool
    plan: DraftPlan | None = None  # the plan, if that was the question


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What a drafter reports about its last proposal."""

    decisions: tuple[Decision, ...] = ()
    notice: str = ""  # one sentence for the user, e.g. the draft's context is full; reported once


class Rule(Enum):
    """How drafted tokens are accepted. All three keep the target's law exactly."""

    TOKEN = "token"  # accept token by token with min(1, p/q)
    BLOCK = "block"  # accept the longest prefix that the joint law allows; on a tree from the leaves to the root
    MATCH = "match"  # draw from p and go on while the draw equals the draft


@dataclass(slots=True)
class Cancel:
    """A flag that asks a running answer to stop.

    `buffer` is a C string of zero or one character. llama.cpp's abort callback reads it directly (see `llama/`),
    without lock, GIL or Python code.
    """

    buffer: bytearray = field(default_factory=lambda: bytearray(2))

    def set(self) -> None:
        """Ask to stop. Safe in a signal handler."""
        self.buffer[0] = 1

    def clear(self) -> None:
        self.buffer[0] = 0

    def is_set(self) -> bool:
        return self.buffer[0] != 0


class Chooser(Protocol):
    """The only source of randomness in the program."""

    def flip(self, prob: float) -> bool:
        """True with probability `prob`; certain at prob >= 1, impossible at prob <= 0."""

    def pick(self, law: Distribution) -> int:
        """One token drawn from `law`."""


class DraftPolicy(Protocol):
    """Decides the draft's length, always BEFORE a token is drawn."""

    def go_on(self, depth: int, confidence: float) -> bool:
        """May the drafter draw token number `depth` (0 = first)?

        `confidence` is the largest mass of the law it would be drawn from (for a greedy draft, of the law at
        temperature 1), or the measured chance that the token of a drafter without laws is right.
        """

    def observe(self, seen: Observation) -> None:
        """Learn from a verification."""


@runtime_checkable
class Planner(DraftPolicy, Protocol):
    """A policy that knows what drafting costs: it also decides whether the draft model is evaluated at all."""

    def plan(self, limit: int, *, offer: Sequence[float] = (), lag: int | None = None, depth: int = 0) -> DraftPlan:
        """How to draft at most `limit` tokens after `depth` tokens of text.

        `offer`: confidences of tokens that cost nothing to propose, in order. `lag`: tokens that the draft model must
        read first, besides the pending one; None = no model can draft now.
        """

    def look(self, depth: int) -> bool:
        """May the draft model be evaluated for the law of token `depth`? Not asked for the first token of a step."""

    def learn(self, confidence: float, acceptance: float) -> None:
        """A token of the draft model that was not submitted would have been accepted with a chance of `acceptance`."""


class Drafter(Protocol):
    """Proposes tokens. It observes every verification, also those of other drafters' proposals."""

    name: str
    wants: frozenset[str]  # of {"features", "logits"}

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        """A new answer to `tokens` starts. Must be cheap: the first token waits for it."""

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """At most `limit` tokens to follow `tokens`; an empty draft means plain decoding for one step."""

    def observe(self, seen: Observation) -> None:
        """Bring the drafter's state in line with what was committed."""

    def close(self) -> None: ...


class LanguageModel(Protocol):
    """A model with a KV cache for one sequence."""

    vocab_size: int
    n_ctx: int
    caps: Caps

    @property
    def end_tokens(self) -> frozenset[int]:
        """Every token that ends an answer."""

    @property
    def length(self) -> int:
        """Tokens now in the KV."""

    def feed(self, tokens: Sequence[int]) -> None:
        """Append tokens without logits, in chunks if there are many."""

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        """Append tokens and return their logits (len(tokens), V): a view, valid until the next feed or eval."""

    def truncate(self, length: int) -> None:
        """Drop every token from `length` on. Raises RollbackRefused."""

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Of the last eval keep the pending token (the KV up to `length`) and the nodes of `path`."""


class LoadedModel(LanguageModel, Protocol):
    """A model that holds memory of its own and whose calls take long."""

    def watch(self, cancel: Cancel | None) -> None:
        """Stop a long computation when `cancel` is set; None = watch nothing."""

    def close(self) -> None:
        """Free the model; closing twice does nothing."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one sequence wants from a shared pass: `feed` of the first tokens, then `eval` or `grow` of the rest."""

    slot: int
    tokens: tuple[int, ...]
    n_rows: int  # the last so many tokens have logits; 0 = the part of a prompt
    parents: tuple[int, ...] | None = None  # as `LanguageModel.eval` or `Growing.grow` takes them; None = a chain
    grows: bool = False  # `grow`; with it, and with `parents`, all tokens have logits


class SlotModel(Protocol):
    """A model whose KV holds one sequence per slot; slots count from 0 and do not see each other."""

    vocab_size: int
    n_ctx: int  # most tokens of one slot
    caps: Caps  # of a part
    n_slots: int
    max_rows: int  # most tokens of one pass, of all parts together
    max_outputs: int  # most of them with logits; a part has at most `caps.max_block`

    @property
    def end_tokens(self) -> frozenset[int]:
        """Every token that ends an answer."""

    def length(self, slot: int) -> int:
        """Tokens now in the slot, the shared ones included."""

    def run(self, parts: Sequence[Part]) -> list[FloatArray]:
        """One pass over `parts`, at most one per slot; of each the logits (n_rows, V): views, valid until the next run.

        Raises ContextFull, with every slot as before, if a part does not fit into its slot. After Interrupted or
        BackendError every slot is empty.
        """

    def truncate(self, slot: int, length: int) -> None:
        """Drop every token of the slot from `length` on."""

    def keep(self, slot: int, length: int, path: Sequence[int]) -> None:
        """Of the slot's last part keep the pending token (its KV up to `length`) and the nodes of `path`."""

    def share(self, tokens: Sequence[int]) -> None:
        """Read `tokens` once: every slot, empty until now, begins with them. `truncate` may cut a slot below them."""

    def watch(self, cancel: Cancel | None) -> None:
        """Stop a long computation when `cancel` is set; None = watch nothing."""

    def close(self) -> None:
        """Free the KV; closing twice does nothing."""


@runtime_checkable
class Adapter(LanguageModel, Protocol):
    """A model that uses the KV of another model."""

    @property
    def model(self) -> LanguageModel:
        """The other model."""


@runtime_checkable
class Narrow(Protocol):
    """Optional for a model that knows few of the token ids it accepts: rows without the empty cells."""

    @property
    def known(self) -> IntArray:
        """The known ids, ascending.  (n,)"""

    def eval_known(self, tokens: Sequence[int]) -> FloatArray:
        """`eval` of a chain; column i belongs to token `known[i]`.  (len(tokens), n)"""

    def grow_known(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        """`Growing.grow`, if `caps.tree`, with the columns of `eval_known`."""


@runtime_checkable
class Growing(Protocol):
    """For a model with `caps.tree`: a tree that grows level by level."""

    def grow(self, tokens: Sequence[int], parents: Sequence[int]) -> FloatArray:
        """Append nodes to the tree of the last `eval` or `grow` and return their logits (len(tokens), V).

        Nodes count on: node 0 is the first token of that `eval` after the pending one. parents[i]: an earlier node, or
        -1 for the pending token. As after `eval`, `keep` or `truncate` ends the tree. After an error, nodes of earlier
        calls may be gone as well; the pending token stays.
        """


@runtime_checkable
class Resuming(Protocol):
    """Optional for a model that may have to compute tokens again after `truncate`."""

    def resume_at(self, length: int) -> int:
        """The most tokens, up to `length`, to which `truncate` leads without computing many of them again."""

    def expect_return(self, tokens: Sequence[int]) -> None:
        """An answer begins after the held tokens and `tokens`; keep the way back to there short, for another answer."""


def resume_at(model: LanguageModel, length: int) -> int:
    """`Resuming.resume_at` of any model: by default all of them."""
    return model.resume_at(length) if isinstance(model, Resuming) else length


@runtime_checkable
class Recording(Protocol):
    """Optional for a model that records what its KV holds."""

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens now in the KV; of a tree, its nodes in the order in which they were added."""


@runtime_checkable
class Spelling(Protocol):
    """Optional for a model in whose KV a token may take several cells; its `n_ctx` is only an upper limit."""

    def room_after(self, tokens: Sequence[int]) -> int:
        """Tokens of one cell each that still fit after `tokens` are appended; below 0 if `tokens` do not fit."""


def room_after(model: LanguageModel, tokens: Sequence[int]) -> int:
    """`Spelling.room_after` of any model: by default a token takes one cell."""
    if isinstance(model, Spelling):
        return model.room_after(tokens)
    return model.n_ctx - model.length - len(tokens)


class Stopper(Protocol):
    """Recognises stop strings, see `chat/stream.py`."""

    def push(self, token: int) -> bool:
        """True if this token completes a stop string."""
