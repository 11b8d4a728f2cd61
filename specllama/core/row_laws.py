"""The laws of one verify pass."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.core import sampling
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.types import Draft


class RowLaws(Sequence[Distribution]):
    """Row 0 follows the pending token, row i+1 follows draft node i. A law is computed when it is first asked for.

    rows: (n+1, V), valid as long as the model's view is.
    """

    def __init__(self, rows: FloatArray, tokens: Sequence[int], draft: Draft, params: sampling.SamplingParams) -> None:
        self._rows = rows
        self._recent = list(params.window(tokens))
        self._draft = draft
        self._params = params
        self._laws: dict[int, Distribution] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def _path(self, node: int) -> list[int]:
        """Draft tokens from the root to `node`; -1 is the pending token, whose path is empty."""
        parents, path = self._draft.parents, list[int]()
        while node >= 0:
            path.append(self._draft.tokens[node])
            node = node - 1 if parents is None else parents[node]
        return path[::-1]

    def __getitem__(self, row: int) -> Distribution:  # type: ignore[override]  # no slices
        if row not in self._laws:
            history = self._recent + self._path(row - 1) if self._params.penalised else ()
            self._laws[row] = sampling.law(self._rows[row], history, self._params)
        return self._laws[row]
