"""What to expect of a pair by its profile, in words."""

from __future__ import annotations

from specllama.base.text import counted
from specllama.drafters import TRANSLATED
from specllama.drafters.controller import CostProfile
from specllama.pairs.ask import Names
from specllama.pairs.profile import LOOKUP_ALONE, Profile
from specllama.pairs.setup import Setup
from specllama.tuning import forecast

GOOD = 0.9  # acceptance of a good draft for code


def expectation(profile: Profile) -> str:
    """The speed that the profile promises, in a few words."""
    by = f" with {TRANSLATED}" if profile.strategy == TRANSLATED else ""
    if profile.strategy == LOOKUP_ALONE:
        return "without a draft model, only lookups draft"
    if not profile.draft_can_pay:
        return "the draft costs more than it can save here, so only lookups draft"
    if not profile.classes:
        return _break_even(profile.costs)
    speeds = [each.speedup for each in profile.classes]
    if max(speeds) <= 1.0:
        return f"plain decoding is fastest here, drafts{by} are tried now and then"
    return f"{min(speeds):.2f} to {max(speeds):.2f} times plain decoding expected{by}"


def _break_even(costs: CostProfile) -> str:
    """From which acceptance on drafts pay, and what they give if most tokens are accepted."""
    lengths = range(1, costs.verify[-1][0])
    needed = forecast.break_even(costs, len(lengths))
    best = max(lengths, key=lambda n: forecast.speedup(costs, GOOD, n))
    speed = forecast.speedup(costs, GOOD, best)
    if needed is None or speed <= 1.0:
        return f"drafts pay here only if more than {100 * GOOD:.0f} % of their tokens are accepted"
    return (
        f"drafts pay here if {100 * needed:.0f} % of their tokens are accepted; at {100 * GOOD:.0f} %, drafts of "
        f"{counted(best, 'token')} give {speed:.2f} times plain decoding"
    )


def unused_draft(setup: Setup, names: Names) -> str:
    """Why a draft is not loaded: one that `names` holds, or any for so short an answer; else empty."""
    if setup.too_short and setup.profile is not None:
        return f"{setup.profile.origin}: {setup.too_short}"
    is_named = names.pair or names.draft or names.draft_repo
    if not is_named or setup.profile is None or setup.draft is not None or setup.subject.draft is None:
        return ""
    return f"{setup.profile.origin}: {expectation(setup.profile)}"
