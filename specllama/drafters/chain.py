"""Lookup where it matches, the model elsewhere, or the model behind a lookup: whatever is expected to earn most."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import SamplingParams
from specllama.core.types import Chooser, Draft, DraftReport, LanguageModel, Observation
from specllama.drafters.lookup import LookupDrafter
from specllama.drafters.model import ModelDrafter


class ChainDrafter:
    """One chain from two sources. The plan decides how much of the lookup is taken and whether the model draws.

    A looked-up token is a point mass and has the law of one beside the model's dense laws, so the chain stays exact.
    The model's cache is right whoever proposed: it reads looked-up tokens only to draw behind them, and what was not
    committed is dropped from it as after any rejection.
    """

    name = "chain"
    wants: frozenset[str] = frozenset()

    def __init__(self, model: ModelDrafter, lookup: LookupDrafter) -> None:
        """`model`'s policy decides for both; a `Planner` does it by expected gain. `lookup`'s own is not asked."""
        self.model = model
        self.lookup = lookup

    @property
    def models(self) -> Sequence[LanguageModel]:
        """The model's."""
        return self.model.models

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        """Both begin."""
        self.lookup.begin(tokens)
        self.model.begin(tokens)

    def _given(self, offered: Sequence[int], n_given: int) -> tuple[int, ...]:
        """The head of the offer, up to an end token, behind which nothing can follow."""
        given = tuple(offered[:n_given])
        ends = [i for i, token in enumerate(given) if token in self.model.model.end_tokens]
        return given[: ends[0] + 1] if ends else given

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """At most min(limit, n_max) tokens: looked up, drawn, or looked up and then drawn."""
        guesses = list(self.lookup.offer(tokens, min(limit, self.model.n_max)))
        plan = self.model.plan(tokens, limit, params, [guess.confidence for guess in guesses])
        given = self._given([guess.token for guess in guesses], plan.n_given)
        drawn, laws = self.model.draw(tokens, given, plan, params, choose)
        points = (Distribution.point(token) for token in given)
        return Draft((*given, *drawn), (*points, *laws) if laws else None)

    def report(self) -> DraftReport:
        """Decisions and notice of the last proposal."""
        return self.model.report()

    def observe(self, seen: Observation) -> None:
        """Both learn; the policy hears of it once, through the model."""
        self.model.observe(seen)

    def close(self) -> None:
        """Both close."""
        self.lookup.close()
        self.model.close()
