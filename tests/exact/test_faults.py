"""The suite proves itself: each seeded fault must be caught, and the same case must be clean without it."""

from __future__ import annotations

from collections import Counter

import pytest

from specllama.audit.chi_square import of_law
from specllama.audit.faults import CorrectionFromTarget, ForgetsRemoval, ReusedAcceptanceUniform
from specllama.audit.rules import RULES
from specllama.core.distribution import Distribution
from specllama.core.sampling import RandomChooser
from specllama.core.types import Chooser, Rule, Verdict
from specllama.core.verification import verify
from tests.enumeration import law_of, tv
from tests.exact.faults import SEEDED, SOFT, SeededFault, drops_low_q, with_laws
from tests.exact.harness import PLAIN, PROMPT, random_pair
from tests.exact.loop import LazyRows, P, Q, Verifier, drawn_trees, emitted_law, first_token
from tests.fakes import Script, always, drawn_chain, drawn_tree, points, random_laws


@pytest.mark.parametrize("fault", SEEDED, ids=[fault.name for fault in SEEDED])
def test_a_broken_rule_is_caught(fault: SeededFault) -> None:
    """A suite that stays green whatever is broken."""
    assert fault.healthy.verdict == "", "the case must be exact as long as nothing is broken"
    caught = fault.broken.verdict
    assert caught
    print(f"{fault.name}: {caught}")


@pytest.mark.parametrize(
    ("verifier", "script", "figures"),
    [
        # The figures of docs/design.md, Exactness.
        (verify, drops_low_q, [0.550, 0.170, 0.280]),
        (ReusedAcceptanceUniform(), drawn_chain(always(Q), 1), [0.475, 0.325, 0.200]),
        (ForgetsRemoval(), drawn_trees(always(Q), 2), [0.425, 0.375, 0.200]),
        (verify, with_laws(points(lambda tokens: (0,)), SOFT), [5 / 6, 0.0, 1 / 6]),
        (CorrectionFromTarget(first_row=True), drawn_chain(always(Q), 1), [0.350, 0.370, 0.280]),
        (verify, drawn_chain(always(Q), 1), list(P)),
    ],
    ids=["drop after the draw", "reused uniform", "sibling left in q", "soft q for argmax", "redraw from p", "right"],
)
def test_the_known_mistakes_give_their_known_figures(verifier: Verifier, script: Script, figures: list[float]) -> None:
    """Faults that are not the ones the design speaks of."""
    found = first_token(emitted_law(always(P), script, Rule.TOKEN, 1, verifier))
    assert found == pytest.approx(figures, abs=1e-9)


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("widths", [(1, 1, 1), (3,), (2, 1), (1, 2), (2, 2)])
def test_verdicts_have_the_law_that_the_papers_give_them(widths: tuple[int, ...], rule: Rule) -> None:
    """Exact but not the rule it is called: an acceptance below what the paper promises would go unnoticed."""
    p, q = random_laws(3, 92, zeros=0.2), random_laws(3, 93, zeros=0.2)

    def verdict(choose: Chooser, verifier: Verifier) -> Verdict:
        draft = drawn_tree(q, widths)((), 6, choose)
        return verifier(draft, LazyRows(p, (), draft), choose, rule)

    ours, theirs = (law_of(lambda choose, each=each: verdict(choose, each)) for each in (verify, RULES[rule]))  # type: ignore[misc]
    assert tv(ours, theirs) < 1e-12


class Stuttering(RandomChooser):
    """Every pick repeats the uniform of the one before it, as two generators of one seed would."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._seed = seed

    def pick(self, law: Distribution) -> int:
        """A draw by a generator that starts anew."""
        return RandomChooser(self._seed).pick(law)


@pytest.mark.slow
@pytest.mark.parametrize("chooser", [RandomChooser, Stuttering])
def test_draws_that_depend_on_each_other_are_seen_by_counting(chooser: type[RandomChooser]) -> None:
    """Draft and verifier seeded alike. Enumeration takes draws to be independent; counting does not."""
    pair = random_pair(94)
    law = pair.plain_law(PLAIN, 2)
    rig, n_runs = pair.rig(), 1500
    counts = Counter(rig.answer(PROMPT, PLAIN, chooser(seed), 2) for seed in range(n_runs))
    assert of_law(counts, law).surprising == (chooser is not RandomChooser)
