"""A draft with another vocabulary than its target: fakes that check that its KV spells the committed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from specllama.drafters.translated import TranslatedModel
from tests.fakes import Caps, FakeModel, History, Hook, RandomTable

# By the target's ids. Draft ids 0 and 3 mean nothing to the target, whose tokens 1, 4 and 5 are spelled with them. No
# spelling begins with another one, so a KV can be read back.
SPELLINGS: dict[int, History] = {0: (2,), 1: (0, 3), 2: (1,), 3: (4,), 4: (3, 0, 3), 5: (3, 3)}
N_DRAFT_VOCAB = 5
FIRST = (0, 0)  # a draft's tokens at the start of every text


@dataclass(frozen=True)
class FixedSpelling:
    """Spells by a table."""

    table: dict[int, History]
    first: History = ()

    def __call__(self, token: int) -> History:
        return self.table[token]


@cache
def draft_table(seed: int) -> RandomTable:
    """Logits over the draft's own histories; kept over the replays of one enumeration."""
    return RandomTable(N_DRAFT_VOCAB, 4000 + seed)


def id_map(n_vocab: int) -> np.ndarray:
    """The target's id of every draft id; of a target of two tokens the draft knows one."""
    to_target = np.full(N_DRAFT_VOCAB, -1, dtype=np.int64)
    for token, cells in SPELLINGS.items():
        if len(cells) == 1 and token < n_vocab:
            to_target[cells[0]] = token
    return to_target


class WatchedDraft(TranslatedModel):
    """Checks its tokens against the KV of the fake that it wraps."""

    def __init__(
        self,
        n_vocab: int,
        seed: int = 0,
        *,
        n_ctx: int = 64,
        end_tokens: frozenset[int] = frozenset(),
        first: History = (),
        max_block: int = 32,
        max_leaves: int = 1,
        hook: Hook = lambda n_call, name: None,
    ) -> None:
        to_target = id_map(n_vocab)
        ends = frozenset(token for token, ours in enumerate(to_target.tolist()) if ours in end_tokens)
        caps = Caps(max_block=max_block, tree=max_leaves > 1, max_leaves=max_leaves)
        self.fake = FakeModel(draft_table(seed), N_DRAFT_VOCAB, n_ctx, ends, caps, hook)
        super().__init__(self.fake, to_target, FixedSpelling(SPELLINGS, first), vocab_size=n_vocab)

    @property
    def tokens(self) -> History:
        """What the KV holds, read back from the draft's own tokens; StopIteration where they spell nothing."""
        cells, tokens = list(self.fake.tokens), []
        if cells and self._spell.first:
            assert tuple(cells[:2]) == FIRST
            del cells[:2]
        spelled = {cells: token for token, cells in SPELLINGS.items()}
        while cells:
            n = next(n for n in (3, 2, 1) if tuple(cells[:n]) in spelled)
            tokens.append(spelled[tuple(cells[:n])])
            del cells[:n]
        return tuple(tokens)
