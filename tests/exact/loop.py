"""`verify` in a minimal decoding loop, and the law of its tokens; no engine, no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from specllama.core.distribution import Distribution
from specllama.core.types import Chooser, Draft, Rule, Verdict
from specllama.core.verification import verify
from tests.enumeration import law_of
from tests.exact.reference import TokenLaw, first_tokens
from tests.fakes import History, Laws, Script, dense, drawn_tree

Verifier: TypeAlias = Callable[[Draft, Sequence[Distribution], Chooser, Rule], Verdict]

P, Q = (0.50, 0.30, 0.20), (0.15, 0.25, 0.60)  # the worked example of docs/design.md
N_VOCAB = 3


class LazyRows(Sequence[Distribution]):
    """p of every row of a draft, made when asked for; `asked` remembers the rows."""

    def __init__(self, laws: Laws, tokens: History, draft: Draft) -> None:
        parents = draft.parents or tuple(range(-1, len(draft.tokens) - 1))
        self._lines = [tokens]
        for parent, token in zip(parents, draft.tokens, strict=True):
            self._lines.append((*self._lines[parent + 1], token))
        self._laws = laws
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: int) -> Distribution:
        self.asked.append(row)
        return dense(self._laws(self._lines[row]))


def emit(
    laws: Laws, script: Script, rule: Rule, n_tokens: int, choose: Chooser, verifier: Verifier = verify
) -> History:
    """Propose, verify and commit until there are `n_tokens`."""
    tokens: History = ()
    while len(tokens) < n_tokens:
        draft = script(tokens, n_tokens - len(tokens), choose)
        verdict = verifier(draft, LazyRows(laws, tokens, draft), choose, rule)
        tokens = (*tokens, *(draft.tokens[node] for node in verdict.path), verdict.next_token)
    return tokens[:n_tokens]


def emitted_law(
    laws: Laws, script: Script, rule: Rule, n_tokens: int, verifier: Verifier = verify, *, closed: bool = False
) -> dict[History, float]:
    return law_of(lambda choose: emit(laws, script, rule, n_tokens, choose, verifier), closed=closed)


def drawn_trees(laws: Laws, *widths: int) -> Script:
    """Trees no deeper than the tokens that are still needed: deeper nodes would only multiply the branches."""
    n_nodes = sum(math.prod(widths[: depth + 1]) for depth in range(len(widths)))
    return lambda tokens, n_left, choose: drawn_tree(laws, widths[:n_left])(tokens, n_nodes, choose)


def plain_law(laws: Laws, n_tokens: int) -> dict[History, float]:
    def law_at(history: History) -> TokenLaw:
        return {token: prob for token, prob in enumerate(laws(history)) if prob > 0.0}

    return first_tokens(law_at, (), n_tokens)


def first_token(law: dict[History, float]) -> list[float]:
    return [math.fsum(weight for tokens, weight in law.items() if tokens[0] == token) for token in range(N_VOCAB)]
