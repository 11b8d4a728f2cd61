"""The laws of one verify pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specllama.base.errors import AllForbidden, NumericsError
from specllama.core import sampling
from specllama.core.arrays import FloatArray
from specllama.core.constraint import Allowed, Constraint, among
from specllama.core.distribution import Distribution
from specllama.core.noise import settled_by
from specllama.core.types import Chooser, Draft, Verdict

DEAD_END = "the format of the answer allows no token of the model here"


class RowLaws(Sequence[Distribution]):
    """Row 0 follows the pending token, row i+1 follows draft node i. A law is computed when it is first asked for.

    Plain decoding does not reach every row, so only row 0 can raise NumericsError. The row after an end token is not
    read; its law is a point mass on that token. A later row that gives no distribution is a point mass on no token;
    `settled` removes it from a verdict.
    rows: (n+1, V), valid as long as the model's view is.
    """

    def __init__(
        self,
        rows: FloatArray,
        tokens: Sequence[int],
        draft: Draft,
        params: sampling.SamplingParams,
        end_tokens: Collection[int] = (),
        choose: Chooser | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """`choose`: what will draw from the laws; `SharedNoise` settles each of them first.

        `constraint` masks the logits before everything else.
        """
        self._constraint = constraint
        self._n_text = len(tokens)
        self._settled = settled_by(choose)
        self._nothing = rows.shape[1]  # an id that no token has
        self._end_tokens = end_tokens
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
            self._laws[row] = self._law(row)
        return self._laws[row]

    def _allowed(self, path: Sequence[int]) -> Allowed | None:
        """What may follow `path`; None = every token."""
        return None if self._constraint is None else self._constraint.allowed(path)

    def _law(self, row: int) -> Distribution:
        if row > 0 and (token := self._draft.tokens[row - 1]) in self._end_tokens:
            return Distribution.point(token)
        path = self._path(row - 1) if self._params.penalised or self._settled or self._constraint else ()
        try:
            cells, ids = self._rows[row], None
            if (allowed := self._allowed(path)) is not None:
                cells, ids = among(cells, allowed)
                if not cells.size:
                    raise AllForbidden(DEAD_END, hint="allow more (--json-schema, --grammar, --regex)")
            found = sampling.law(cells, [*self._recent, *path], self._params, ids)
        except NumericsError:
            if row == 0:
                raise
            return Distribution.point(self._nothing)
        return found if self._settled is None else self._settled(found, self._n_text + len(path))

    def settled(self, verdict: Verdict) -> Verdict:
        """`verdict` without a row that gives no distribution. If the answer goes on, the next step begins with it."""
        if verdict.next_token != self._nothing:
            return verdict
        return Verdict(verdict.path[:-1], self._draft.tokens[verdict.path[-1]])
