"""`KeptPrefix`: the record of a KV is right after any sequence of users."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from specllama.base.errors import Interrupted
from specllama.core.kept_prefix import KeptPrefix
from specllama.core.types import common_prefix
from tests.fakes import FakeModel, History, RandomTable
from tests.marks import looped

N_VOCAB = 3  # few, so that wrong tokens are often right by chance


def lines_of(model: FakeModel) -> list[History]:
    """What the KV holds: a text, or the line to every node of a tree."""
    tokens, n = model.tokens, (model._pending_at or 0) + 1
    if model._pending_at is None or len(tokens) < n:
        return [tokens]
    lines = [tokens[:n]]
    for token, parent in zip(tokens[n:], model._parents, strict=False):
        lines.append((*lines[parent + 1], token))
    return lines


@pytest.mark.slow
@looped(seed=range(60))
def test_a_marked_text_keeps_exactly_what_leads_to_it(seed: int) -> None:
    """Prevents: tokens of a rejected draft, or of another text, not compared because the text was seen before."""
    chance = random.Random(seed)
    model = FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB, n_ctx=4000)
    record = KeptPrefix.of(model)
    text, mark = [0], object()

    def lose(n_call: int, name: str) -> None:
        n_line = model.length if model._pending_at is None else model._pending_at + 1
        del model._kv[chance.randrange(n_line + 1) :]
        model._pending_at, model._parents = None, ()
        raise OSError("lost")

    for _ in range(60):
        action = chance.randrange(11)
        some = [chance.randrange(N_VOCAB) for _ in range(chance.randrange(5))]
        if action == 0:  # another answer
            text, mark = text[: chance.randrange(1, len(text) + 1)] + some, object()
        elif action == 1:  # another user, who keeps the record
            record.rewind([*text[: chance.randrange(len(text) + 1)], *some, 0])
            record.feed(some)
        elif action == 2:  # another user, who does not
            model.truncate(chance.randrange(model.length + 1))
        elif action == 3:  # an interrupted prefill, with half of it read, or an interrupted pass
            model.hook = lambda n_call, name: (_ for _ in ()).throw(Interrupted("stopped"))
            with pytest.raises(Interrupted):
                chance.choice((record.feed, record.eval))([*some, 0])
            model.hook = lambda n_call, name: None
        elif action == 4:
            record.eval([*some, 0])
        elif action == 5:  # a failed pass that takes what was there with it
            model.hook = lose
            with pytest.raises(OSError, match="lost"):
                record.eval([*some, 0])
            model.hook = lambda n_call, name: None
        elif action >= 9:  # a tree; perhaps a failed pass in it
            model.hook = lose if action == 10 and chance.random() < 0.5 else lambda n_call, name: None
            nodes: list[tuple[int, int]] = []
            with suppress(OSError):
                record.eval(text[model.length : model.length + 1] or [0])
                while len(nodes) < 8:
                    new = [(chance.randrange(N_VOCAB), chance.randrange(-1, len(nodes))) for _ in range(2)]
                    new = [node for node in dict.fromkeys(new) if node not in nodes]
                    nodes += new
                    if new:
                        record.grow([token for token, _ in new], [parent for _, parent in new])
                    if action == 10:
                        model.hook = lose if chance.random() < 0.2 else model.hook
            model.hook = lambda n_call, name: None
        else:
            record.feed(some if chance.random() < 0.5 else text[model.length : -1])
        text = [*text, *(chance.randrange(N_VOCAB) for _ in range(chance.randrange(4)))]
        known = lines_of(model)
        n_kept = record.rewind(text, mark)
        assert model.tokens == tuple(text[:n_kept])
        if action != 2:  # after a stranger nothing is known
            assert n_kept == min(max(common_prefix(line, text) for line in known), len(text) - 1)


class Read(list[int]):
    """A text that notes from where on it is read."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.starts: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.starts.append(index.start or 0 if isinstance(index, slice) else index)
        return super().__getitem__(index)


def test_a_marked_text_is_not_compared_from_its_beginning_again() -> None:
    """Prevents: half a millisecond at each step of an answer with 32k tokens; a call of the model for nothing."""
    model, mark = FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB, n_ctx=400), object()
    record = KeptPrefix.of(model)
    text = [token % N_VOCAB for token in range(100)]
    record.feed(text)
    assert record.rewind(text, mark) == 99
    n_calls = len(model.calls)
    record.feed([])
    assert len(model.calls) == n_calls
    longer, other = Read([*text, 1]), Read([*text, 1])
    assert record.rewind(longer, mark) == 99
    assert not longer.starts, "the beginning is known, and the end is not in the KV"
    assert record.rewind(other, object()) == 99
    assert min(other.starts) == 0, "another text is compared"
