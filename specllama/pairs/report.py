"""The compatibility report: one row per test, and the rule that says whether a draft fits its target. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from specllama.base.errors import PairError
from specllama.base.jsonable import to_plain

RULE = (
    "A draft fits if both models can roll back, have the same kind of tokenizer and the same text for every token id "
    "that both have, and fit into memory. With the strategy draft-tli, at least half of a sample text must be tokens "
    "of both instead. A draft that fits badly lowers the acceptance rate, never the exactness of the text."
)
MEASURE = "measure it: specllama check --probe"
MEASURE_BY_TEXT = "measure it: specllama check --spec-type draft-tli --probe"
OWN_FAMILY = "take a draft of the target's own family; `specllama models list` shows pairs that fit"


class RowMark(Enum):
    """The result of a test."""

    PASS = "PASS"
    WARN = "WARN"  # works, but may be slower than necessary
    FAIL = "FAIL"  # does not fit


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One test: the value of each side and, unless it passed, why it matters and what to do."""

    test: str
    mark: RowMark
    target: str
    draft: str
    reason: str = ""
    remedy: str = ""
    details: tuple[str, ...] = ()  # lines that explain the reason, such as the tokens that differ


def warned(test: str, values: tuple[str, str], reason: str, remedy: str) -> CheckRow:
    """A row that warns if there is a reason to, else passes. `values` are those of the target and the draft."""
    if not reason:
        return CheckRow(test, RowMark.PASS, *values)
    return CheckRow(test, RowMark.WARN, *values, reason, remedy)


@dataclass(frozen=True, slots=True)
class CompatReport:
    """What was found about a target and a draft."""

    target: str  # name of the file or model
    draft: str
    rows: tuple[CheckRow, ...]

    @property
    def fits(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> Sequence[CheckRow]:
        return [row for row in self.rows if row.mark is RowMark.FAIL]

    @property
    def warnings(self) -> Sequence[CheckRow]:
        return [row for row in self.rows if row.mark is RowMark.WARN]

    @property
    def probed(self) -> CompatReport:
        """The same for a pair that is about to be measured: without the advice to measure it."""
        rows = self.rows
        for advice in (MEASURE, MEASURE_BY_TEXT):
            rows = tuple(replace(row, remedy=row.remedy.removesuffix(advice).removesuffix("; ")) for row in rows)
        return replace(self, rows=rows)

    def require(self) -> None:
        """Raise PairError with the first reason if the draft does not fit."""
        if failures := self.failures:
            raise PairError(f"the draft does not fit the target: {failures[0].reason}", hint=failures[0].remedy)

    def to_json(self) -> dict[str, object]:
        return {
            "fits": self.fits,
            "reasons": [row.reason for row in self.failures],
            "target": self.target,
            "draft": self.draft,
            "rule": RULE,
            "rows": [to_plain(row) for row in self.rows],
        }
