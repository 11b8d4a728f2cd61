"""Ablation of the controller: replays with one constant or mechanism switched off at a time.

`replay.py report FILE.jsonl --ablate` prints the table. A change patches a module or a class, so the program needs no
switches. A mechanism that gains less than 2 % on every machine is removed from the controller; docs/controller.md
names the exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from unittest.mock import patch

from replaying import Machine, Replays

from specllama.drafters import calibration, controller
from specllama.drafters.calibration import Calibration
from specllama.drafters.controller import Controller

Change = Callable[[], AbstractContextManager[object]]


def constants(module: object, **values: object) -> Change:
    return lambda: patch.multiple(module, **values)


def _next_token_alone(self: Controller, step: controller._Step, n: int, chance: float, cost: float) -> bool:
    return chance * step.reach > step.plan.rate * (cost + self._verify[n + 1] - self._verify[n])


CHANGES: Mapping[str, Change] = {
    "LEAST_RATE = 1": constants(controller, LEAST_RATE=1.0),
    "FIRST_GAP = DOUBTFUL_GAP": constants(controller, FIRST_GAP=20),
    "DOUBTFUL_GAP = FIRST_GAP": constants(controller, DOUBTFUL_GAP=8),
    "GAP_PER_PROBE_COST = 0": constants(controller, GAP_PER_PROBE_COST=0.0),
    "PROMISING = 1": constants(controller, PROMISING=1.0),
    "always worth probing": constants(Controller, _worth_probing=lambda *_: True),
    "PROBE_TOKENS = 24": constants(controller, PROBE_TOKENS=24),
    "no probes": constants(controller, FIRST_GAP=10**6, DOUBTFUL_GAP=10**6),
    "HORIZON = 16": constants(controller, HORIZON=16),
    "always worth catching up": constants(Controller, _worth_catching_up=lambda *_: True),
    "looked-up tokens pay for the model": lambda: patch.object(
        Controller, "_n_bare", property(lambda self: self._n_unused, lambda *_: None), create=True
    ),
    "BLIND_INVESTMENT = 0": constants(controller, BLIND_INVESTMENT=0.0),
    "BLIND_INVESTMENT = inf": constants(controller, BLIND_INVESTMENT=math.inf),
    "evaluate without `look`": constants(Controller, look=lambda self, depth: depth < self._step.limit),
    "look one token ahead": constants(Controller, _pays=_next_token_alone),
    "a re-read row is free": lambda: patch.object(
        Controller, "_reread", property(lambda _: 0.0, lambda *_: None), create=True
    ),
    "confidence does not count": constants(Calibration, at=lambda self, _: self.typical),
    "nothing is learned": constants(Calibration, learn=lambda *_: None),
    "FADE = 1": constants(calibration, FADE=1.0),
    "samples do not age": constants(Calibration, age=lambda *_: None),
    "PRIOR_WEIGHT = 12": constants(calibration, PRIOR_WEIGHT=12.0),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Answers of one class at one temperature on one machine, drafted by one strategy."""

    table: str
    machine: Machine
    strategy: str
    answers: Replays


def measured(cases: Sequence[Case], change: Change) -> dict[str, list[float]]:
    """Rates by table, case by case."""
    rates: dict[str, list[float]] = {}
    with change():
        for case in cases:
            rates.setdefault(case.table, []).append(case.answers.controlled(case.machine, case.strategy)[0])
    return rates


def losses(rates: Sequence[float], before: Sequence[float]) -> tuple[float, float]:
    """(loss of the geometric mean, largest loss of a case), in percent of the rate before."""
    logs = [math.log(rate / was) for rate, was in zip(rates, before, strict=True)]
    return 100 * (1 - math.exp(fmean(logs))), 100 * (1 - math.exp(min(logs)))


def table(cases: Sequence[Case], changes: Mapping[str, Change] = CHANGES) -> Iterator[str]:
    """Yields each row as soon as it is measured."""
    before = measured(cases, nullcontext)
    yield f"| switched off | {' | '.join(before)} |"
    yield "|---|" + "---|" * len(before)
    rates = (f"{geometric_mean(each):.3f} ({min(each):.3f})" for each in before.values())
    yield f"| nothing: geometric mean of the rates (least) | {' | '.join(rates)} |"
    for name, change in changes.items():
        lost = (losses(rates, before[of]) for of, rates in measured(cases, change).items())
        yield f"| {name} | {' | '.join(f'{mean:.1f} ({most:.1f})' for mean, most in lost)} |"
