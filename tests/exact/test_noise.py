"""Noise by seed and position: each draw has the law's own distribution, and one seed gives one text with any drafts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from specllama.core.distribution import Distribution
from specllama.core.noise import SharedNoise, same_draw
from specllama.core.sampling import SamplingParams
from specllama.core.types import Rule
from specllama.drafters import REGISTRY, TRANSLATED, DraftSettings
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.length import DraftLength
from tests.exact.harness import GREEDY, PLAIN, Pair, Rig, params_of, random_pair
from tests.exact.reference import Answer
from tests.exact.translating import WatchedDraft
from tests.fakes import random_laws
from tests.marks import slow

N_DRAWS = 4_000
PROMPT = (0, 1, 1, 0, 1, 1, 0)  # repeats itself, so that lookups draft from the first step on
LAWS = (
    Distribution.dense([0.5, 0.3, 0.2]),
    Distribution.on([3, 70, 151_000], [0.01, 0.09, 0.9]),
    Distribution.dense([0.0, 1.0]),
    Distribution.dense(np.full(16, 1 / 16)),
)


@pytest.mark.parametrize("law", LAWS)
def test_each_token_is_drawn_with_its_probability(law: Distribution) -> None:
    """A bias of the noise, for instance towards low ids."""
    noise = SharedNoise(7)
    drawn = [noise.first(law, position, 1)[0] for position in range(N_DRAWS)]
    ids, probs = law.items()
    counts = np.array([drawn.count(token) for token in ids.tolist()])
    assert counts.sum() == N_DRAWS
    chi_square = float(((counts - N_DRAWS * probs) ** 2 / (N_DRAWS * probs)).sum())
    assert chi_square < 4.0 * len(ids) + 10.0


def test_the_race_has_the_law_by_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong race, without the chance of the hash: over a lattice of the noise of three tokens the winners have p."""
    n = 4096  # a grid of 16 * 16 * 16 does not notice a bias of 0.7%
    lattice = -np.log((np.outer(np.arange(n), [1, 433, 433**2]) % n + 0.5) / n)
    law = Distribution.dense([0.6, 0.3, 0.1])
    wins = np.zeros(3)
    noise = SharedNoise(0)
    for times in lattice:
        monkeypatch.setattr(noise, "arrivals", lambda ids, position, times=times: times)
        wins[noise.first(law, 0, 1)[0]] += 1 / n
    assert wins == pytest.approx(law.cells()[1], abs=1e-3)  # the lattice itself is off by 4e-4


def test_seeds_positions_and_tokens_are_independent() -> None:
    """Noise that repeats itself in the next position, seed or token would tie tokens of one text together."""
    law = Distribution.dense(np.full(4, 0.25))
    pairs = {
        "positions": [(SharedNoise(3), n, SharedNoise(3), n + 1) for n in range(N_DRAWS // 2)],
        "seeds": [(SharedNoise(n), 5, SharedNoise(n + 1), 5) for n in range(N_DRAWS // 2)],
        "mixed": [(SharedNoise(n), n + 1, SharedNoise(n + 1), n) for n in range(N_DRAWS // 2)],
    }
    for name, cases in pairs.items():
        counts = np.zeros((4, 4))
        for one, here, other, there in cases:
            counts[one.first(law, here, 1)[0], other.first(law, there, 1)[0]] += 1
        expected = len(cases) / 16
        assert float(((counts - expected) ** 2 / expected).sum()) < 45.0, name  # 15 degrees of freedom


@pytest.mark.parametrize("seed", range(3))
def test_shared_noise_accepts_as_often_as_the_formula_says(seed: int) -> None:
    """Draft and target must read the same noise: independent draws would agree much less often."""
    p, q = (Distribution.dense(random_laws(6, 10 * seed + i)(())) for i in range(2))
    noise = SharedNoise(seed)
    agreed = sum(noise.first(p, n, 1) == noise.first(q, n, 1) for n in range(N_DRAWS // 2)) / (N_DRAWS // 2)
    expected = same_draw(p, q)
    assert agreed == pytest.approx(expected, abs=4.0 * math.sqrt(0.25 / (N_DRAWS // 2)))
    independent = float((p.cells()[1] * q.cells()[1]).sum())
    assert independent < expected <= p.overlap(q) + 1e-12


def test_siblings_arrive_as_draws_without_replacement() -> None:
    """A token twice, or an order that is not that of renewed races, would break trees."""
    noise, law = SharedNoise(11), LAWS[0]
    for position in range(50):
        order = noise.first(law, position, 5)
        assert sorted(order) == [0, 1, 2]
        left, again = law, []
        for _ in range(3):
            again += noise.first(left, position, 1)
            left = left.without(again[-1])
        assert again == order


def test_a_law_that_was_not_settled_is_refused() -> None:
    """p/q rules with shared noise are biased, so a mix must fail loudly."""
    noise = SharedNoise(0)
    assert (noise.flip(0.0), noise.flip(1.0)) == (False, True)
    assert noise.pick(noise.settled(LAWS[0], 4)) == noise.first(LAWS[0], 4, 1)[0]
    with pytest.raises(ValueError, match="settled"):
        noise.flip(0.5)
    with pytest.raises(ValueError, match="settled"):
        noise.pick(LAWS[0])


COSTS = CostProfile(verify=((1, 1.0), (2, 1.05), (8, 1.2)), draft=((1, 0.02), (8, 0.03)))
SETTINGS = {
    "plain": PLAIN,
    "filters": params_of(temperature=0.8, top_k=2, top_p=0.9, min_p=0.05),
    "penalty": params_of(repeat_penalty=1.6, repeat_last_n=3),
    "greedy": GREEDY,
}


def drafted(strategy: str, pair: Pair, n_max: int, choose: SharedNoise, params: SamplingParams, n: int) -> Answer:
    """An answer with a strategy of the registry, on new models."""
    rig = pair.rig()
    draft = WatchedDraft(pair.n_vocab) if strategy == TRANSLATED else rig.draft
    policy = Controller(COSTS) if n_max > 3 else None
    settings = DraftSettings(length=DraftLength(n_max), vocab_size=pair.n_vocab, policy=policy, n_leaves=8)
    drafter = REGISTRY[strategy].make(draft, settings)
    return Rig(rig.target, draft, drafter, rule=pair.rule).answer(PROMPT, params, choose, n)


@pytest.mark.parametrize("settings", [name if name == "greedy" else slow(name) for name in SETTINGS])
def test_one_seed_gives_one_text_with_any_drafts(settings: str) -> None:
    """Draft, strategy, length, rule and the controller's decisions must not reach the text."""
    params = SETTINGS[settings]
    for seed in range(20):  # each length with each rule
        pair = random_pair(seed, n_vocab=4)
        plain = Rig(pair.rig().target, None, None).answer(PROMPT, params, SharedNoise(seed), 8)
        n_max, rule = (1, 3, 6)[seed % 3], list(Rule)[seed // 3 % 3]
        for strategy in REGISTRY:
            found = drafted(strategy, replace(pair, rule=rule), n_max, SharedNoise(seed), params, 8)
            assert found == plain, (seed, strategy)


def test_a_draft_with_the_same_laws_is_always_accepted() -> None:
    """Draft and target must use the noise of the same position, after a rejection and in the bonus token as well."""
    pair = random_pair(5, n_vocab=4)
    pair = replace(pair, draft=pair.target, n_max=3)
    rig = pair.rig()
    rig.answer(PROMPT, PLAIN, SharedNoise(2), 30)
    assert all(step.accepted == len(step.drafted) for step in rig.steps)
    assert len(rig.steps) < 12
