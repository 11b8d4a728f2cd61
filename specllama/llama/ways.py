"""Which ways back a model has, and which of them is used and why: by kind, by memory or by measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specllama.base.cpu import this_cpu
from specllama.base.disk import FileRecord
from specllama.llama import crash_test, library_hash
from specllama.llama.header import Header, has_states, keeps_states, window_layers
from specllama.llama.rollback import DEVICE, KEPT, SAVED, TRUNCATION, WAYS, WINDOW

ASKED = "as asked"  # why
N_ROWS, N_REJECTED = 5, 2  # of the measured step: a usual draft and a usual rejection
N_STEPS = 4  # measured ones, after one that is not
_LEAST_GAIN = 0.05  # of the measured step; below it the way to prefer stays
_KIND = "ways"  # of record
_ONLY = {
    TRUNCATION: "attention alone removes tokens at no cost",
    SAVED: "llama.cpp keeps no states of this architecture",
}


@dataclass(frozen=True, slots=True)
class WayBack:
    """A way back and why it is used."""

    way: str  # of WAYS
    why: str

    @property
    def text(self) -> str:
        return WAYS[self.way]


def possible(header: Header) -> tuple[str, ...]:
    """The ways of a model, the one to prefer first."""
    if has_states(header):
        return (*((KEPT,) if keeps_states(header) else ()), SAVED, DEVICE)
    return (TRUNCATION, WINDOW) if any(window_layers(header)) else (TRUNCATION,)


def wished(header: Header, rollback: str) -> str:
    """The way that was asked for if the model has it, else the one to prefer."""
    ways = possible(header)
    return rollback if rollback in ways else ways[0]


def compared(header: Header, *, on_gpu: bool) -> tuple[str, ...]:
    """The ways whose cost is measured, if there are several. On the CPU, the device's memory is the CPU's."""
    ways = tuple(way for way in possible(header) if has_states(header) and (on_gpu or way != DEVICE))
    return ways if len(ways) > 1 else ()


def by_kind(way: str) -> WayBack:
    """Without a comparison."""
    return WayBack(way, _ONLY.get(way, "not measured yet"))


class MeasuredWays:
    """What a step with rejections costs by each way, remembered until the file, llama.cpp or the CPU changes."""

    def __init__(self, header: Header, ways: Sequence[str]) -> None:
        self._ways = ways
        folder = crash_test.library_folder()
        build = "" if folder is None else library_hash.of(folder)
        self._record = FileRecord(_KIND, *header.parts, by=[build, this_cpu().fingerprint, *ways])

    def choice(self) -> WayBack | None:
        """The cheapest way; None if it was not measured."""
        step_s = self._record.value(dict[str, float])
        return None if step_s is None else cheapest(self._ways, step_s)

    def keep(self, step_s: Mapping[str, float]) -> WayBack:
        """`step_s`: seconds of a step with rejections by each way."""
        self._record.keep(step_s)
        return cheapest(self._ways, step_s)


def cheapest(ways: Sequence[str], step_s: Mapping[str, float]) -> WayBack:
    """The way with the shortest step; an earlier one unless a later one gains clearly."""
    best = ways[0]
    for way in ways[1:]:
        if step_s[way] < (1.0 - _LEAST_GAIN) * step_s[best]:
            best = way
    times = ", ".join(f"{WAYS[way]} {1e3 * step_s[way]:.3g} ms" for way in sorted(ways, key=lambda way: way != best))
    return WayBack(best, f"measured, {N_ROWS} rows of which {N_REJECTED} are rejected: {times}")
