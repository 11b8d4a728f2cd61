"""Drafts by lookup, by the model, or by the model after a lookup: whichever has the best expected gain."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.core.arrays import FloatArray
from specllama.core.constraint import AllowedAfter
from specllama.core.distribution import Distribution
from specllama.core.sampling import SamplingParams
from specllama.core.types import Chooser, Draft, DraftReport, Observation
from specllama.drafters.lookup import LookupDrafter
from specllama.drafters.model import ModelDrafter


class ChainDrafter:
    """One chain from two sources. The plan decides how many looked-up tokens are taken and how many the model draws.

    A looked-up token has a point mass as its law, beside the model's dense laws, so the chain is exact. The model reads
    looked-up tokens only to draw after them; its KV drops those that are not committed, as after any rejection.
    """

    name = "chain"
    wants: frozenset[str] = frozenset()

    def __init__(self, model: ModelDrafter, lookup: LookupDrafter) -> None:
        """The policy of `model` decides for both, a `Planner` by expected gain; that of `lookup` only when it waits."""
        self.model = model
        self.models = model.models
        self.lookup = lookup

    def begin(self, tokens: Sequence[int], features: FloatArray | None = None) -> None:
        self.lookup.begin(tokens)
        self.model.begin(tokens)

    def constrain(self, allowed: AllowedAfter) -> None:
        self.lookup.constrain(allowed)
        self.model.constrain(allowed)

    def propose(self, tokens: Sequence[int], limit: int, params: SamplingParams, choose: Chooser) -> Draft:
        """At most min(limit, n_max) tokens: looked up, drawn, or looked up and then drawn."""
        if self.lookup.waits(tokens) and self.model.rests(tokens, limit):
            return Draft()
        guesses = list(self.lookup.offer(tokens, min(limit, self.model.n_max)))
        plan = self.model.plan(tokens, limit, params, choose, [guess.confidence for guess in guesses])
        given = [guess.token for guess in guesses[: plan.n_given]]
        drawn, laws = self.model.draw(tokens, given, plan, params, choose)
        points = (Distribution.point(token) for token in given)
        return Draft((*given, *drawn), (*points, *laws) if laws else None, n_given=len(given))

    def report(self) -> DraftReport:
        return self.model.report()

    def observe(self, seen: Observation) -> None:
        self.model.observe(seen)  # the policy is the model's, so `lookup` need not observe

    def close(self) -> None:
        """The caller loaded the model and closes it."""
