"""Checks the KV cache after random accept and reject patterns, and the draws along these answers."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from specllama.audit.chi_square import LEAST_EXPECTED, ChiSquare, of_counts
from specllama.audit.models import Change, Recorded, again, held, n_dropped
from specllama.audit.parts import AuditEffort, AuditPrompt, AuditSubject, Combination, Watching
from specllama.audit.report import DrawRow, KvRow
from specllama.base.errors import ContextFull, Interrupted
from specllama.base.text import counted
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.events import Event, Finished, StepEvent, TokenEvent
from specllama.core.types import LanguageModel, Observation
from specllama.core.verification import children_of
from specllama.drafters.length import AUDIT_KV

MOST_BINS = 20
N_PROBED = 3  # tokens whose logits are compared
MOST_NODES = 8  # of a random tree


@dataclass(slots=True)
class Along:
    """The place of every emitted token in its cumulative law: uniform on [0, 1) and independent if drawn from it.

    A token that covers [low, high) gets a random place in this range. The order is that of q / p if q is known, so that
    a bias towards the draft is a bias towards 0.
    """

    end_tokens: frozenset[int]
    random: np.random.Generator
    places: list[float] = field(default_factory=list)
    impossible: int = 0

    def see(self, seen: Observation) -> None:
        assert seen.laws is not None
        draft, path = seen.draft, seen.verdict.path
        block = (*(draft.tokens[node] for node in path), seen.verdict.next_token)
        for node, token in zip((-1, *path), block, strict=True):
            child = next(iter(children_of(draft, node)), None) if draft.probs is not None else None
            q = None if child is None or draft.probs is None else draft.probs[child]
            self._place(seen.laws[node + 1], q, token)
            if token in self.end_tokens:
                break  # later tokens are not emitted

    def _place(self, p: Distribution, q: Distribution | None, token: int) -> None:
        ids, probs = p.items()
        wished = probs if q is None else np.array([q.prob(int(each)) for each in ids]) / probs
        order = np.argsort(-wished, kind="stable")
        at = np.flatnonzero(ids[order] == token)
        if not len(at):
            self.impossible += 1
            return
        before = float(probs[order][: at[0]].sum())
        self.places.append(before + float(self.random.random()) * p.prob(token))

    def test(self) -> ChiSquare:
        """The test that the places are uniform."""
        n_bins = min(int(len(self.places) / LEAST_EXPECTED), MOST_BINS)
        if n_bins < 2:
            return ChiSquare(len(self.places))
        counts, _ = np.histogram(np.minimum(self.places, 1.0), bins=n_bins, range=(0.0, 1.0))
        return of_counts(counts.tolist(), [len(self.places) / n_bins] * n_bins)

    def row(self) -> DrawRow:
        failure = f"emitted {counted(self.impossible, 'token')} with probability 0 under p" if self.impossible else ""
        return DrawRow("all", "all", self.test(), failure)


def _probed(model: LanguageModel, tokens: Sequence[int]) -> FloatArray:
    """The logits after each of `tokens`, read one by one.  (n, V)"""
    return np.stack([np.array(model.eval((token,))[0]) for token in tokens])


def _apart(a: FloatArray, b: FloatArray) -> float:
    """The largest difference of logits, as a finite number; 0 where both are masked.  (n, V)"""
    differences: FloatArray = np.zeros(a.shape)
    np.subtract(a, b, out=differences, where=a != b)
    most = float(np.finfo(float).max)  # JSON has no NaN and infinity
    return float(np.nan_to_num(np.abs(differences), nan=most, posinf=most).max())


def _n_foreign(found: Sequence[int], said: Sequence[int], *, whole: bool) -> int:
    """Number of positions at which a KV cache differs from the answer; missing tokens count if `whole`."""
    n_wrong = sum(a != b for a, b in zip(found, said, strict=False))
    return n_wrong + max(len(found) - len(said), 0) + (max(len(said) - len(found), 0) if whole else 0)


def check_kv(
    strategy: str, name: str, model: Recorded, n_steps: int, after: Sequence[int], said: Sequence[int]
) -> KvRow:
    """Compares the KV cache of a recorded model with caches that never contained the rejected tokens.

    `said`: prompt and answer without the pending token. The target's cache must be equal to it, the draft's a beginning
    of it.
    """
    ops, raw, n_vocab = list(model.ops), model.model, model.vocab_size
    facts = (strategy, name, n_steps, n_dropped(ops), _n_foreign(held(ops), said, whole=name == "target"))
    if model.room_after(after) < 0:
        return KvRow(*facts, 0.0, 0.0, 0.0, full=True)
    middle = max(model.length // 2, 0)
    found = _probed(raw, after)

    def other(_position: int, token: int) -> int:
        return (token + 1) % n_vocab

    def reread(*, stale: Change | None, wrong_at: int = -1) -> float:
        again(raw, ops, stale=stale, kept=lambda at, token: other(at, token) if at == wrong_at else token)
        return _apart(_probed(raw, after), found)

    try:
        return KvRow(*facts, reread(stale=other), reread(stale=None), reread(stale=other, wrong_at=middle))
    except ContextFull:  # other tokens may take more cells
        return KvRow(*facts, 0.0, 0.0, 0.0, full=True)


def _run(
    subject: AuditSubject,
    combination: Combination,
    prompt: AuditPrompt,
    models: tuple[Recorded, Recorded | None],
    *,
    along: Along,
    seed: int,
    n_steps: int,
) -> tuple[int, tuple[int, ...]]:
    """Runs `n_steps` of a sampled answer with a random draft length, and leaves the models as they are.

    Returns the number of steps, and prompt and answer without the pending token.
    """
    target, draft = models
    random = np.random.default_rng([subject.seed, seed])
    target.empty()
    if draft is not None:
        draft.empty()
    n_max = int(random.integers(2, AUDIT_KV + 1))
    choose = subject.parts.choose(int(random.integers(2**32)))
    # Without end tokens, so that the answer does not stop early.
    endless = {**subject.params.logit_bias, **dict.fromkeys(target.end_tokens, -math.inf)}
    params = replace(subject.params, logit_bias=endless)
    n_done, said = 0, list(prompt.tokens)
    with ExitStack() as stack:
        drafter = subject.drafter(combination.strategy, draft, n_max)
        stack.enter_context(closing(drafter))
        engine = subject.parts.engine(target, Watching(drafter, along.see), rule=combination.rule)
        events = engine.generate(prompt.tokens, params, choose, max_tokens=-1, cancel=subject.cancel)
        stack.enter_context(closing(cast("Generator[Event, None, None]", events)))
        for event in events:
            if isinstance(event, TokenEvent):
                said.append(event.token)
            elif isinstance(event, StepEvent):
                n_done += 1
                if n_done == n_steps:
                    break
            elif isinstance(event, Finished) and event.reason == "cancelled":
                raise Interrupted("cancelled during an answer")
    return n_done, tuple(said[:-1])


def _random_parents(random: np.random.Generator, n: int, max_leaves: int) -> tuple[int, ...]:
    """The parents of `n` nodes with at most `max_leaves` leaves: long paths and broad families."""
    parents: list[int] = []
    for node in range(n):
        leaves = sorted({-1, *range(node)}.difference(parents))
        free = leaves if len(leaves) >= max_leaves else list(range(-1, node))
        parents.append(int(random.choice(free[-3:] if random.random() < 0.5 else free)))
    return tuple(parents)


def check_trees(name: str, model: Recorded, prompt: AuditPrompt, n_steps: int, random: np.random.Generator) -> KvRow:
    """The row of a model that keeps a random path of a random tree in every step; some nodes are grown."""
    model.empty()
    model.feed(prompt.tokens)
    said, n_room = list(prompt.tokens), model.room_after(())
    usable = [token for token in set(prompt.tokens) if n_room - model.room_after((token,)) == 1]  # of one cell
    for _ in range(n_steps):
        n = int(random.integers(1, MOST_NODES + 1))
        if not usable or model.room_after(()) < n + 1:
            break
        parents = _random_parents(random, n, model.caps.max_leaves)
        tokens = [int(token) for token in random.choice(usable, n + 1)]
        n_first = int(random.integers(0, min(n, model.caps.max_block - 1) + 1))
        model.eval(tokens[: n_first + 1], parents[:n_first])
        for node in range(n_first, n):
            model.grow(tokens[node + 1 : node + 2], parents[node : node + 1])
        path: list[int] = []
        node = int(random.integers(-1, n))
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        model.keep(len(said) + 1, path)
        said += [tokens[0], *(tokens[node + 1] for node in path)]
    return check_kv("random trees", name, model, n_steps, prompt.tokens[-N_PROBED:], said)


def check(subject: AuditSubject, effort: AuditEffort, along: Along) -> Iterator[list[KvRow]]:
    """The rows of both models, run by run; the combinations take turns. `along` collects the draws.

    The first rows are those of random trees, of the models that evaluate trees.
    """
    target = Recorded(subject.parts.target(subject.target))
    draft = None if subject.draft is None else Recorded(subject.parts.draft(subject.draft))
    models = [("target", target)] if draft is None else [("target", target), ("draft", draft)]
    found = [
        check_trees(*each, subject.prompts[0], effort.n_steps, np.random.default_rng(subject.seed))
        for each in models
        if each[1].caps.tree
    ]
    combinations = subject.combinations
    for i in range(effort.n_runs):
        subject.require_going()
        combination, prompt = combinations[i % len(combinations)], subject.prompts[i % len(subject.prompts)]
        n_steps, said = _run(subject, combination, prompt, (target, draft), along=along, seed=i, n_steps=effort.n_steps)
        after = prompt.tokens[-N_PROBED:]
        found.append(check_kv(combination.strategy, "target", target, n_steps, after, said))
        if draft is not None and draft.length:
            found.append(check_kv(combination.strategy, "draft", draft, n_steps, after, said))
        yield found
        found = []
