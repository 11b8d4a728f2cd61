"""How a benchmark's time is divided: what comes before the counted runs, how long answers are, what is left out."""

from __future__ import annotations

from dataclasses import dataclass

HURRIED_S = 180.0  # a budget below this is a small one
HASTY_S = 90.0  # and below this there is hardly time for anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a budget leaves time for."""

    n_warm_up: int  # tokens of every arm before anything counts
    costs_share: float  # of the budget, for measuring what passes cost; for every load and draft
    hurried: bool  # measure the costs of a few sizes of blocks alone
    # Answers get shorter where fewer prompts than so many fit; the last ones are taken whatever fits.
    lengths: tuple[tuple[int, int], ...]  # (tokens of an answer, prompts)
    hasty: bool = False  # ask the shortest prompts, for reading takes time, too, and compare what must be compared
    said: str = ""  # what is left out, for the report


_NORMAL = Pace(n_warm_up=16, costs_share=0.06, hurried=False, lengths=((128, 12), (64, 12), (32, 0)))
_HURRIED = Pace(n_warm_up=8, costs_share=0.06, hurried=True, lengths=_NORMAL.lengths, said="few sizes of blocks")
# Answers of 8 tokens say little, for the draft has hardly read the prompt; they are for machines that do no more.
_HASTY = Pace(
    n_warm_up=8,
    costs_share=0.12,
    hurried=True,
    lengths=((32, 4), (16, 2), (8, 0)),
    hasty=True,
    said="the shortest prompts, few sizes of blocks, a short warm-up",
)
LONGEST = _NORMAL.lengths[0][0]  # answer that a benchmark may choose


def pace(budget_s: float | None) -> Pace:
    """What there is time for; None = for everything."""
    if budget_s is None or budget_s >= HURRIED_S:
        return _NORMAL
    return _HURRIED if budget_s >= HASTY_S else _HASTY
