"""The compatibility report: one row per test, and the rule that says whether a draft fits its target. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from specllama.base.errors import PairError
from specllama.base.jsonable import to_plain

RULE = (
    "A draft fits if both models can roll back, share the kind of tokenizer and the text of every token id that both "
    "have, and fit into memory; with `--spec-type draft-tli`, half of a sample text must be tokens of both instead. "
    "The text of the answer never depends on it: the draft's law is mapped to the target's tokens and padded with "
    "zeros, so a poor draft costs acceptance, not exactness."
)


class RowMark(Enum):
    """What a test came to."""

    PASS = "PASS"
    WARN = "WARN"  # works, but may be slower than it could be
    FAIL = "FAIL"  # does not fit


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One test: the value on each side, and where there is something to say, why it matters and what to do."""

    test: str
    mark: RowMark
    target: str
    draft: str
    reason: str = ""
    remedy: str = ""
    details: tuple[str, ...] = ()  # lines behind the reason, such as the tokens that differ


@dataclass(frozen=True, slots=True)
class CompatReport:
    """What was found about a target and a draft."""

    target: str  # what was compared, for people
    draft: str
    rows: tuple[CheckRow, ...]

    @property
    def fits(self) -> bool:
        """True unless a test failed."""
        return not self.failures

    @property
    def failures(self) -> Sequence[CheckRow]:
        """The rows that say why not."""
        return [row for row in self.rows if row.mark is RowMark.FAIL]

    @property
    def warnings(self) -> Sequence[CheckRow]:
        """The rows that say what may not pay."""
        return [row for row in self.rows if row.mark is RowMark.WARN]

    def require(self) -> None:
        """Raise PairError with the first reason, if the draft does not fit."""
        if failures := self.failures:
            raise PairError(f"the draft does not fit the target: {failures[0].reason}", hint=failures[0].remedy)

    def to_json(self) -> dict[str, object]:
        """The report as plain data."""
        return {
            "fits": self.fits,
            "reasons": [row.reason for row in self.failures],
            "target": self.target,
            "draft": self.draft,
            "rule": RULE,
            "rows": [to_plain(row) for row in self.rows],
        }
