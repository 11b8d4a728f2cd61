"""Rules broken on purpose, one by one: an audit that does not notice them proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specllama.audit.models import Passing
from specllama.audit.parts import Parts
from specllama.core.distribution import Distribution
from specllama.core.engine import Engine
from specllama.core.sampling import SamplingParams
from specllama.core.types import (
    Chooser,
    Draft,
    Drafter,
    DraftReport,
    FloatArray,
    LanguageModel,
    Observation,
    Rule,
    Verdict,
)

Verifier = Callable[[Draft, Sequence[Distribution], Chooser, Rule], Verdict]
Section = Literal["greedy", "law", "draws", "kv"]


# ------------------------------------------------------------------------------------------------- broken verification


def _law_of(draft: Draft, node: int) -> Distribution:
    return Distribution.point(draft.tokens[node]) if draft.probs is None else draft.probs[node]


def by_token(
    draft: Draft,
    p: Sequence[Distribution],
    choose: Chooser,
    *,
    accept: Callable[[float, float], float] = lambda p_x, q_x: min(1.0, p_x / q_x),
    correct: Callable[[Distribution, Distribution], Distribution] = Distribution.residual,
    bonus_row: int = 0,
) -> Verdict:
    """The token rule, written once more for being broken: what accepts, what corrects, and whose bonus it is."""
    for i, token in enumerate(draft.tokens):
        q = _law_of(draft, i)
        if not choose.flip(accept(p[i].prob(token), q.prob(token))):
            return Verdict(tuple(range(i)), choose.pick(correct(p[i], q)))
    n = len(draft.tokens)
    return Verdict(tuple(range(n)), choose.pick(p[max(n + bonus_row, 0)]))


def accepts_everything(draft: Draft, p: Sequence[Distribution], choose: Chooser, _rule: Rule) -> Verdict:
    """Whatever is drafted stays."""
    return by_token(draft, p, choose, accept=lambda _p, _q: 1.0)


def inverts_the_ratio(draft: Draft, p: Sequence[Distribution], choose: Chooser, _rule: Rule) -> Verdict:
    """Accepts with q/p."""
    return by_token(draft, p, choose, accept=lambda p_x, q_x: min(1.0, q_x / p_x) if p_x else 0.0)


def a_little_too_strict(draft: Draft, p: Sequence[Distribution], choose: Chooser, _rule: Rule) -> Verdict:
    """Rejects one token in a thousand that it should accept."""
    return by_token(draft, p, choose, accept=lambda p_x, q_x: 0.999 * min(1.0, p_x / q_x))


def corrects_from_p(draft: Draft, p: Sequence[Distribution], choose: Chooser, _rule: Rule) -> Verdict:
    """Draws the correction from p instead of the residual, as one source document says of the first row."""
    return by_token(draft, p, choose, correct=lambda p_row, _q: p_row)


def corrects_without_the_token(draft: Draft, p: Sequence[Distribution], choose: Chooser, _rule: Rule) -> Verdict:
    """Forbids only the rejected token instead of taking all of q off p."""
    token = draft.tokens[0] if draft.tokens else -1
    return by_token(draft, p, choose, correct=lambda p_row, _q: p_row.without(token))


def bonus_from_the_row_before(draft: Draft, p: Sequence[Distribution], choose: Chooser, _rule: Rule) -> Verdict:
    """Draws the bonus token from the row of the last drafted one."""
    return by_token(draft, p, choose, bonus_row=-1)


def block_by_ratio_alone(draft: Draft, p: Sequence[Distribution], choose: Chooser, _rule: Rule) -> Verdict:
    """Block verification that passes a prefix by its weight, without looking at what the next row has to spare."""
    weights = [1.0]
    for i, token in enumerate(draft.tokens):
        weights.append(min(1.0, weights[-1] * p[i].prob(token) / _law_of(draft, i).prob(token)))
    n = len(draft.tokens)
    n_accepted = next((i for i in range(n, 0, -1) if choose.flip(weights[i])), 0)
    path = tuple(range(n_accepted))
    if n_accepted == n:
        return Verdict(path, choose.pick(p[n]))
    return Verdict(path, choose.pick(p[n_accepted].residual(_law_of(draft, n_accepted), weights[n_accepted])))


def match_draws_again(draft: Draft, p: Sequence[Distribution], choose: Chooser, _rule: Rule) -> Verdict:
    """Matching that throws away the draw that differed and draws another."""
    for i, token in enumerate(draft.tokens):
        if choose.pick(p[i]) != token:
            return Verdict(tuple(range(i)), choose.pick(p[i]))
    return Verdict(tuple(range(len(draft.tokens))), choose.pick(p[-1]))


def engine_with(verifier: Verifier) -> type[Engine]:
    """The engine, with another verification."""

    class Broken(Engine):
        """See `engine_with`."""

        _verify: Any = staticmethod(verifier)

    return Broken


# -------------------------------------------------------------------------------------------- broken drafters and draws


class BrokenDrafter:
    """A drafter whose drafts pass through `change` on their way to the engine."""

    def __init__(self, drafter: Drafter, change: Callable[[Draft], Draft]) -> None:
        self.drafter = drafter
        self.name = drafter.name
        self.wants = drafter.wants
        self.models = drafter.models
        self._change = change

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        """Pass it on."""
        self.drafter.begin(tokens, features)

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """The changed draft."""
        return self._change(self.drafter.propose(tokens, limit, params, choose))

    def report(self) -> DraftReport:
        """Pass it on."""
        return self.drafter.report()

    def observe(self, seen: Observation) -> None:
        """Pass it on."""
        self.drafter.observe(seen)

    def close(self) -> None:
        """Pass it on."""
        self.drafter.close()


def drops_unlikely(draft: Draft) -> Draft:
    """Cuts before the first drawn token that is not q's likeliest: the length is decided after the draw."""
    if draft.probs is None:
        return draft
    n = next((i for i, q in enumerate(draft.probs) if q.prob(draft.tokens[i]) < q.peak()), len(draft.tokens))
    return Draft(draft.tokens[:n], draft.probs[:n] or None)


def claims_another_law(draft: Draft) -> Draft:
    """Hands over a flat law instead of the one that the token was drawn from."""
    if draft.probs is None:
        return draft
    flat = []
    for q in draft.probs:
        ids = q.support()
        flat.append(Distribution.on(ids, np.full(len(ids), 1.0 / len(ids))))
    return Draft(draft.tokens, tuple(flat))


class OneNumberForAll:
    """A generator that judges a drafted token with the very number that drew it."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._last = float(self._random.random())

    def flip(self, prob: float) -> bool:
        """Uses the last number once more."""
        return self._last < prob

    def pick(self, law: Distribution) -> int:
        """A fresh number, by inversion."""
        self._last = float(self._random.random())
        ids, probs = law.items()
        return int(ids[min(int(np.searchsorted(probs.cumsum(), self._last, side="right")), len(ids) - 1)])


# ------------------------------------------------------------------------------------------------------ broken models


class BrokenModel(Passing):
    """A model that passes everything on; the parts below break one thing each."""

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Keep the KV up to the pending token and the first nodes of a chain, by cutting as this model cuts."""
        self.truncate(length + len(path))


class ShiftedRows(BrokenModel):
    """Takes row i for row i + 1 of a block."""

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        """The rows, all but the first shifted by one."""
        rows = self.model.eval(tokens, parents)
        return np.stack([rows[max(i - 1, 0)] for i in range(len(rows))])


class Leftover(BrokenModel):
    """Leaves the first of the tokens that it is told to drop, and says that it dropped them all."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._n_left = 0

    @property
    def length(self) -> int:
        """What it claims."""
        return self.model.length - self._n_left

    def truncate(self, length: int) -> None:
        """Drops all but one; everything where nothing is to stay."""
        if length >= self.length:
            return
        self._n_left = 0 if length == 0 else self._n_left + 1
        self.model.truncate(length + self._n_left)


class KeepsOneMore(BrokenModel):
    """Is told to keep one token more of a block than was accepted."""

    def keep(self, length: int, path: Sequence[int]) -> None:
        """Keep the first rejected node, too."""
        self.truncate(min(length + len(path) + 1, self.length))


class Miscounting(Engine):
    """The engine, counting wrongly what it keeps."""

    def __init__(self, target: LanguageModel, drafter: Drafter | None = None, *, rule: Rule = Rule.TOKEN) -> None:
        super().__init__(KeepsOneMore(target), drafter, rule=rule)


# ----------------------------------------------------------------------------------------------------------- the list


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing broken, and the section that has to notice."""

    name: str
    section: Section
    parts: Parts
    strategy: str = "draft-simple"  # with what to draft; where the pair has no draft model, with lookups
    rule: Rule = Rule.TOKEN
    needs_draft: bool = False  # lookups, which are point masses and come seldom, would not show it everywhere


def _rule(
    name: str, section: Section, verifier: Verifier, rule: Rule = Rule.TOKEN, *, needs_draft: bool = False
) -> Fault:
    return Fault(name, section, Parts(engine=engine_with(verifier)), rule=rule, needs_draft=needs_draft)


def _drafts(name: str, change: Callable[[Draft], Draft]) -> Fault:
    return Fault(name, "law", Parts(drafter=lambda drafter: BrokenDrafter(drafter, change)), needs_draft=True)


FAULTS = (
    _rule("every drafted token is accepted", "law", accepts_everything),
    _rule("accepts with q/p instead of p/q", "law", inverts_the_ratio),
    _rule("rejects one good token in a thousand", "law", a_little_too_strict),
    _rule("the correction is drawn from p, not from the residual", "law", corrects_from_p),
    _rule("the residual takes off the rejected token only", "law", corrects_without_the_token, needs_draft=True),
    _rule("the bonus token comes from the row before", "law", bonus_from_the_row_before),
    _rule("block: a prefix passes by its ratio alone", "law", block_by_ratio_alone, Rule.BLOCK, needs_draft=True),
    _rule("match: draws again after a mismatch", "law", match_draws_again, Rule.MATCH),
    _drafts("a drawn token is dropped because it is unlikely", drops_unlikely),
    _drafts("q is not the law that was drawn from", claims_another_law),
    Fault("one random number drafts a token and judges it", "draws", Parts(choose=OneNumberForAll), needs_draft=True),
    _rule("greedy: every drafted token is accepted", "greedy", accepts_everything),
    Fault("greedy: row i is taken for row i+1", "greedy", Parts(target=ShiftedRows), needs_draft=True),
    Fault("a rejected token stays in the target's KV", "kv", Parts(target=Leftover)),
    Fault("a rejected token stays in the draft's KV", "kv", Parts(draft=Leftover), needs_draft=True),
    Fault("the engine keeps one token too many", "kv", Parts(engine=Miscounting)),
)
