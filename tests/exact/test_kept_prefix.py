"""`KeptPrefix`: the record of a KV is right after any sequence of users."""

from __future__ import annotations

import random

import pytest

from specllama.base.errors import Interrupted
from specllama.core.kept_prefix import KeptPrefix
from specllama.core.types import common_prefix
from tests.fakes import FakeModel, RandomTable

N_VOCAB = 3  # few, so that wrong tokens are often right by chance


@pytest.mark.parametrize("seed", range(60))
def test_a_marked_text_keeps_exactly_what_leads_to_it(seed: int) -> None:
    """Prevents: tokens of a rejected draft, or of another text, not compared because the text was seen before."""
    chance = random.Random(seed)
    model = FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB, n_ctx=4000)
    record = KeptPrefix.of(model)
    text, mark = [0], object()
    for _ in range(60):
        action = chance.randrange(8)
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
        else:
            record.feed(some if chance.random() < 0.5 else text[model.length : -1])
        text = [*text, *(chance.randrange(N_VOCAB) for _ in range(chance.randrange(4)))]
        known = model.tokens
        n_kept = record.rewind(text, mark)
        assert model.tokens == tuple(text[:n_kept])
        if action != 2:  # after a stranger nothing is known
            assert n_kept == min(common_prefix(known, text), len(text) - 1)
