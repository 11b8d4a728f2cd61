"""The expected speed over the draft length, from measured costs and acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from specllama.core.stats import SpecStats, expected_speedup
from specllama.drafters.calibration import Prior
from specllama.drafters.controller import LEAST_RATE, CostProfile, Points
from specllama.drafters.length import TUNED

FLAT: Points = ((1, 1.0), (TUNED + 1, 1.0))  # a pass over several rows costs as much as over one


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Accepted and rejected tokens of one class of prompts."""

    name: str
    n_accepted: int
    n_rejected: int

    @property
    def alpha(self) -> float:
        return self.n_accepted / (self.n_accepted + self.n_rejected)


@dataclass(frozen=True, slots=True)
class Point:
    """The expected speed of one draft length; plain decoding is 1."""

    n_max: int
    low: float  # at the acceptance of the worst class of prompts
    expected: float  # of all classes together
    high: float  # of the best class


@dataclass(frozen=True, slots=True)
class Outlook:
    """Measured costs and acceptance, and the advice that follows."""

    costs: CostProfile
    step_s: float
    classes: tuple[Acceptance, ...]  # empty if no acceptance was measured
    points: tuple[Point, ...]  # by draft length, from 0
    noise: float = 0.0  # of the measured costs, see `costs.Costs`

    @property
    def alpha(self) -> float:
        """Per-token acceptance of all classes together, or an assumed one."""
        if not self.classes:
            return Prior().typical
        n_accepted = sum(each.n_accepted for each in self.classes)
        return n_accepted / (n_accepted + sum(each.n_rejected for each in self.classes))

    @property
    def best(self) -> Point:
        """The fastest length, the shorter of equals; 0 if drafting does not pay."""
        best = max(self.points, key=lambda point: (point.expected, -point.n_max))
        return best if best.expected > LEAST_RATE else self.points[0]

    @property
    def pays(self) -> bool:
        return self.best.n_max > 0

    @property
    def advice(self) -> str:
        """One sentence for the user."""
        if not self.pays:
            return self._advice_against()
        best = self.best
        if not self.classes:
            return (
                f"expect {best.expected:.2f} times the speed of plain decoding with --spec-draft-n-max {best.n_max} if "
                f"{100 * self.alpha:.0f} % of the drafted tokens are accepted, which was not measured"
            )
        worst, top = (pick(self.classes, key=lambda each: each.alpha) for pick in (min, max))
        return (
            f"expect {best.expected:.2f} times the speed of plain decoding ({worst.name} {best.low:.2f}, {top.name} "
            f"{best.high:.2f}) with --spec-draft-n-max {best.n_max}"
        )

    def _advice_against(self) -> str:
        needed = break_even(self.costs, len(self.points) - 1)
        if needed is not None and not self.classes:
            return (
                f"at {100 * self.alpha:.0f} % acceptance (assumed) it does not pay here; it would pay from "
                f"{100 * needed:.0f} % on"
            )
        draft, check = self.costs.draft_cost(), self.costs.verify_cost(2) - 1
        reason = f"drafting a token takes {draft:.2f} of the time of a plain token"
        if self.measured_rows > 1:
            reason += f", verifying it {check:.2f} more"
        if needed is None:
            return f"do not use this draft here: {reason}; it cannot pay, even if nearly all its tokens are accepted"
        return (
            f"do not use this draft here: {reason}, and the per-token acceptance is {100 * self.alpha:.0f} %; it would "
            f"pay from {100 * needed:.0f} % on"
        )

    @property
    def measured_rows(self) -> int:
        """The longest block whose cost was measured."""
        return longest_measured(self.costs)

    def to_json(self) -> dict[str, object]:
        return {
            "pays": self.pays,
            "advice": self.advice,
            "best": asdict(self.best),
            "step_s": self.step_s,
            "noise": self.noise,
            "costs": asdict(self.costs),
            "acceptance": {each.name: {**asdict(each), "alpha": each.alpha} for each in self.classes},
            "points": [asdict(point) for point in self.points],
        }


def longest_measured(costs: CostProfile) -> int:
    """The rows of the longest block whose cost is not assumed."""
    return max(n for n, _ in costs.verify if n not in costs.assumed or n == 1)


def speedup(costs: CostProfile, alpha: float, n_max: int) -> float:
    """Speed over plain decoding with drafts of `n_max` tokens, each accepted with probability `alpha`.

    T(n) is measured, not constant as in the paper. After a fully accepted draft the next pass of the draft has one row
    more.
    """
    if n_max == 0:
        return 1.0
    reread = alpha**n_max * max(costs.draft_cost(2) - costs.draft_cost(), 0.0)
    return expected_speedup(alpha, n_max, costs.draft_cost(), costs.verify_cost(n_max + 1) + reread)


def break_even(costs: CostProfile, n_max: int) -> float | None:
    """The least acceptance, in hundredths, at which some length up to `n_max` pays; None if none below 1 does."""
    for hundredths in range(100):
        if any(speedup(costs, hundredths / 100, n) > LEAST_RATE for n in range(1, n_max + 1)):
            return hundredths / 100
    return None


def outlook(costs: CostProfile, step_s: float, found: Mapping[str, SpecStats], *, noise: float = 0.0) -> Outlook:
    """The outlook of measured costs and statistics by class, for lengths whose cost was measured."""
    classes = tuple(
        Acceptance(name, stats.n_accepted, stats.n_rejected)
        for name, stats in found.items()
        if stats.n_accepted + stats.n_rejected
    )
    outcome = Outlook(costs, step_s, classes, (), noise)
    alphas = [each.alpha for each in classes] or [outcome.alpha]
    levels = (min(alphas), outcome.alpha, max(alphas))
    lengths = range(longest_measured(costs))
    return replace(outcome, points=tuple(Point(n, *(speedup(costs, alpha, n) for alpha in levels)) for n in lengths))
