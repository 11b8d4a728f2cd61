"""The bias of llama.cpp's `examples/speculative` above temperature 0, by its exact law on three tokens.

    python benchmarks/bias.py

A model of `examples/speculative/speculative.cpp` as llama-cpp-python 0.3.36 vendors it, at temperature 1 without
filters. Its random choices are enumerated, nothing is sampled. By its lines:

    528-578  a sequence drafts the top-ranked token; ranks 2, 3, ... start further sequences while their q is above
             --spec-draft-p-split and there are fewer than -np. Nothing is drawn, but the dense q is stored.
    279-325  the sequences are judged in random order, each with min(1, p/q).
    346-355  a rejection leaves max(p - q, 0), normalised, to the next sequence; q stays as it is.
    325      after an acceptance sequences with another token at this place stay active. They are judged at the next
             place too, and if one is accepted, the KV of its own path is kept (454-461), not that of the text.
    380-394  if all are rejected, the token is drawn from what is left of p.

The last column judges the same tokens with `specllama.verify`, as what they are: chosen without chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from specllama import Distribution, Draft, Rule, verify
from specllama.audit.enumeration import law_of, tv
from specllama.core.types import Chooser

Tokens: TypeAlias = tuple[int, ...]
Laws: TypeAlias = Callable[[Tokens], tuple[float, ...]]  # after these tokens

P_SPLIT = 0.1  # default
N_DRAFT = 3  # default


@dataclass(slots=True)
class Sequence:
    """One path of the tree."""

    tokens: Tokens = ()
    laws: tuple[tuple[float, ...], ...] = ()  # the dense q of each token


def drafted(q: Laws, held: Tokens, n_most: int) -> list[Sequence]:
    """The sequences of one pass after the tokens in the KV."""
    sequences = [Sequence()]
    n_nodes = 0
    growing = [sequences[0]]
    while growing and n_nodes < N_DRAFT:
        for each in list(growing):
            law = q((*held, *each.tokens))
            ranked = sorted(range(len(law)), key=lambda token: -law[token])
            here = [each]
            while len(sequences) < n_most and len(here) < len(law) and law[ranked[len(here)]] > P_SPLIT:
                here.append(Sequence(each.tokens, each.laws))
                sequences.append(here[-1])
                growing.append(here[-1])
            for one, token in zip(here, ranked, strict=False):
                one.tokens, one.laws = (*one.tokens, token), (*one.laws, law)
                n_nodes += 1
                if n_nodes >= N_DRAFT:
                    growing.remove(one)
    return sequences


def theirs(p: Laws, q: Laws, n_most: int, n_tokens: int, choose: Chooser) -> Tokens:
    """The first tokens of an answer by `examples/speculative`."""
    text: Tokens = ()
    held: Tokens = ()  # in the KV, with the pending token
    while len(text) < n_tokens:
        sequences, kept, depth = drafted(q, held, n_most), 0, 0
        active = set(range(len(sequences)))
        while True:
            target = np.array(p((*held, *sequences[kept].tokens[:depth])))
            active = {i for i in active if depth < len(sequences[i].tokens)}
            accepted = None
            while active and accepted is None:
                i = choose.pick(Distribution.on(sorted(active), [1 / len(active)] * len(active)))
                token, law = sequences[i].tokens[depth], sequences[i].laws[depth]
                if choose.flip(min(1.0, target[token] / law[token])):
                    accepted = i
                else:
                    active.remove(i)
                    target = np.maximum(target - law, 0.0)
                    target /= target.sum()
            if accepted is None:
                token = choose.pick(Distribution.dense(target))
                held = (*held, *sequences[kept].tokens[:depth], token)
                text = (*text, token)
                break
            kept, depth = accepted, depth + 1
            text = (*text, token)
    return text[:n_tokens]


def ours(p: Laws, q: Laws, n_most: int, n_tokens: int, choose: Chooser) -> Tokens:
    """The same, with the sequences as a tree of point masses."""
    text: Tokens = ()
    while len(text) < n_tokens:
        nodes: dict[Tokens, int] = {}
        for each in drafted(q, text, n_most):
            for n in range(1, len(each.tokens) + 1):
                nodes.setdefault(each.tokens[:n], len(nodes))
        draft = Draft(tuple(path[-1] for path in nodes), None, tuple(nodes.get(path[:-1], -1) for path in nodes))
        rows = [Distribution.dense(p((*text, *path))) for path in ((), *nodes)]
        verdict = verify(draft, rows, choose, Rule.BLOCK)
        text = (*text, *(draft.tokens[node] for node in verdict.path), verdict.next_token)
    return text[:n_tokens]


def plain(p: Laws, n_tokens: int, choose: Chooser) -> Tokens:
    text: Tokens = ()
    while len(text) < n_tokens:
        text = (*text, choose.pick(Distribution.dense(p(text))))
    return text


def tables(seed: int, likeness: float) -> tuple[Laws, Laws]:
    """A random target, and a draft that shares this part of its logits; both depend on the whole text."""

    def logits(number: int, text: Tokens) -> np.ndarray:
        return 1.5 * np.random.default_rng([seed, number, len(text), *(token + 1 for token in text)]).normal(size=3)

    def softmax(row: np.ndarray) -> tuple[float, ...]:
        return tuple((np.exp(row) / np.exp(row).sum()).tolist())

    def draft(text: Tokens) -> tuple[float, ...]:
        return softmax(likeness * logits(0, text) + (1 - likeness) * logits(1, text))

    return lambda text: softmax(logits(0, text)), draft


def cases() -> Iterator[tuple[str, Laws, Laws]]:
    yield "p = [.5, .3, .2], q = [.15, .25, .6]", lambda text: (0.5, 0.3, 0.2), lambda text: (0.15, 0.25, 0.6)
    yield "p = q = [.5, .3, .2]", lambda text: (0.5, 0.3, 0.2), lambda text: (0.5, 0.3, 0.2)
    for likeness in (0.0, 0.5, 0.9):
        yield f"random tables, the draft shares {likeness:.0%} of the logits", *tables(1, likeness)


def main() -> None:
    print("Total variation from p\n")
    print("| laws | -np | 1 token | 2 tokens | 3 tokens | the first token, and p | ours, 3 tokens |")
    print("|---|---|---|---|---|---|---|")
    for name, p, q in cases():
        for n_most in (1, 2, 3):
            found = [law_of(partial(theirs, p, q, n_most, n)) for n in (1, 2, 3)]
            expected = [law_of(partial(plain, p, n)) for n in (1, 2, 3)]
            figures = " | ".join(f"{tv(law, right):.3f}" for law, right in zip(found, expected, strict=True))
            shown = " ".join(f"{found[0].get((token,), 0.0):.3f}" for token in range(3))
            wanted = " ".join(f"{prob:.3f}" for prob in p(()))
            exact = tv(law_of(partial(ours, p, q, n_most, 3)), expected[-1])
            print(f"| {name} | {n_most} | {figures} | {shown} ({wanted}) | {exact:.0e} |")


if __name__ == "__main__":
    main()
