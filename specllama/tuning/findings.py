"""What all children of a tuning found together: every way of loading the pair, the drafts, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from specllama.drafters import SIMPLE
from specllama.drafters.controller import Points
from specllama.pairs.profile import Threads
from specllama.tuning.child import Measured, Way
from specllama.tuning.traces import Trace

# Where visits of the same path differ by more than this, the machine was busy with something else, and paths that were
# measured one after the other cannot be compared.
MOST_DRIFT = 1.1


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of loading the pair, as one or more children measured it."""

    way: Way
    step_s: float  # T(1), in the fastest visit
    verify: Points | None  # in units of T(1) in the same visit: a machine that is slow for a while does not matter
    draft: Points

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        way = {"target": self.way.target.to_json(), "draft": self.way.draft.to_json()}
        return {**way, "step_s": self.step_s, "verify": self.verify, "draft_passes": self.draft}


@dataclass(frozen=True, slots=True)
class Variant:
    """A draft that could be used instead, as its children measured it."""

    path: Path
    layouts: tuple[Layout, ...]  # without target
    traces: tuple[Trace, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """What all children together found."""

    layouts: tuple[Layout, ...]
    traces: tuple[Trace, ...]
    failures: tuple[str, ...]  # paths and drafts that cannot be used, and why
    drift: float  # by how much visits of the same path differ; 1 = not at all
    variants: tuple[Variant, ...] = ()
    threads: Threads | None = None  # all was measured with; None = as the options say
    strategy: str = SIMPLE  # whose drafts these are; see `profiles.Subject`
    n_spelled: float = 1.0  # of the draft's own tokens to one of the target's

    @property
    def comparable(self) -> bool:
        """Was the machine quiet enough to compare paths that were measured one after the other?"""
        return self.drift <= MOST_DRIFT


def scaled(points: Points, factor: float) -> Points:
    """The same costs in another unit."""
    return tuple((n, cost * factor) for n, cost in points)


def _mean_points(several: Sequence[Points]) -> Points:
    """The mean of several measurements of the same rows."""
    return tuple((points[0][0], fmean(cost for _, cost in points)) for points in zip(*several, strict=True))


def merged(way: Way, visits: Sequence[Measured]) -> Layout:
    """What several children found about one way."""
    # Both were measured in the same rounds, so the first point of one is the unit of the other.
    units = [each.verify[0][1] if each.verify else each.step_s for each in visits]
    curves = [scaled(each.verify, 1.0 / unit) for each, unit in zip(visits, units, strict=True) if each.verify]
    drafts = [scaled(each.draft, 1.0 / unit) for each, unit in zip(visits, units, strict=True) if each.draft]
    step_s = min(each.step_s for each in visits)
    return Layout(way, step_s, _mean_points(curves) if curves else None, _mean_points(drafts))
