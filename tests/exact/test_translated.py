"""`TranslatedModel` alone: its rows, its KV, and its state after errors."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specllama.base.errors import ContextFull, Interrupted, RollbackRefused, UnsupportedModel
from specllama.core.sampling import RandomChooser, law
from specllama.core.types import Cancel, Caps, Draft, room_after
from specllama.drafters.model import ModelDrafter
from specllama.drafters.token_map import NO_TOKEN
from specllama.drafters.translated import TranslatedModel
from tests.exact.harness import GREEDY, PLAIN, PROMPT, Certain, Rig, plain_greedy
from tests.exact.translating import FIRST, N_DRAFT_VOCAB, SPELLINGS, FixedSpelling, WatchedDraft, draft_table, id_map
from tests.fakes import FakeModel, History, Hook, RandomTable

N_VOCAB = 6
TEXT = (0, 4, 3, 1, 5, 2, 4, 1)  # of tokens that are one to three of the draft's


def expected_row(history: History, first: History = ()) -> np.ndarray:
    """The draft's row after its own spelling of `history`, in the target's ids."""
    cells = (*first, *(cell for token in history for cell in SPELLINGS[token]))
    row, wide = draft_table(0)(cells), np.full(N_VOCAB, -np.inf, np.float32)
    for theirs, ours in enumerate(id_map(N_VOCAB).tolist()):
        if ours >= 0:
            wide[ours] = row[theirs]
    return wide


@pytest.mark.parametrize("first", [(), FIRST])
@pytest.mark.parametrize("n_fed", [0, 1, 5])
def test_every_row_follows_the_spelling_of_its_whole_history(n_fed: int, first: History) -> None:
    """A row read before the last cell of its token, or scattered to the wrong ids."""
    model = WatchedDraft(N_VOCAB, first=first)
    model.feed(TEXT[:n_fed])
    rows = model.eval(TEXT[n_fed:])
    assert rows.shape == (len(TEXT) - n_fed, N_VOCAB)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(row, expected_row(TEXT[: n_fed + i + 1], first))
    assert np.isneginf(rows[:, [1, 4, 5]]).all(), "tokens that the draft lacks have no mass"
    assert not rows.flags.writeable
    assert (model.length, model.tokens) == (len(TEXT), TEXT)


@pytest.mark.parametrize("text", [(0, 1), (1, 0), (1, 1, 2), (2, 3), (3, 1)])
def test_begin_tokens_come_once_at_the_start_of_a_text(text: History) -> None:
    """A draft that reads its begin token twice, not at all, or within the text."""
    spell = FixedSpelling({0: (2,), 1: FIRST, 2: (*FIRST, 3), 3: FIRST[:1]}, FIRST)
    cells = [cell for token in text for cell in spell(token)]
    expected = cells if text[0] in (1, 2) else [*FIRST, *cells]
    for n_fed in range(len(text)):
        model = TranslatedModel(FakeModel(draft_table(0), N_DRAFT_VOCAB), id_map(N_VOCAB), spell, vocab_size=N_VOCAB)
        assert room_after(model, text) == 64 - len(expected)
        model.feed(text[:n_fed])
        model.eval(text[n_fed:])
        assert model.model.tokens == tuple(expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", range(6))
def test_after_any_feed_eval_keep_and_truncate_the_next_row_is_that_of_a_fresh_model(seed: int) -> None:
    """A partial spelling, or one left by a rejection, which changes every later row (docs/design.md, invariant 2)."""
    choose, model = random.Random(seed), WatchedDraft(N_VOCAB, n_ctx=400, first=FIRST if seed % 2 else ())
    held: History = ()
    for _ in range(60):
        block = tuple(choose.randrange(N_VOCAB) for _ in range(choose.randrange(1, 5)))
        move = choose.randrange(4)
        if move == 0:
            model.feed(block)
            held += block
        elif move == 1:
            rows = model.eval(block)
            held += block
            np.testing.assert_array_equal(rows[-1], expected_row(held, tuple(model._spell.first)))
        elif move == 2:
            model.eval(block)
            n_accepted = choose.randrange(len(block))
            model.keep(len(held) + 1, range(n_accepted))
            held += block[: n_accepted + 1]
        else:
            held = held[: choose.randrange(max(len(held) - 6, 0), len(held) + 1)]
            model.truncate(len(held))
        assert (model.length, model.tokens) == (len(held), held)


def test_a_context_that_is_full_is_known_before_anything_is_computed() -> None:
    """`n_ctx` counts the draft's cells, and a target's token may take three of them."""
    model = WatchedDraft(N_VOCAB, n_ctx=10, first=FIRST)
    assert room_after(model, (4, 1)) == 10 - 2 - 5
    plain = FakeModel(draft_table(0), N_DRAFT_VOCAB, n_ctx=10)
    plain.feed([4, 1, 4])
    assert room_after(plain, (4, 1)) == 10 - 3 - 2
    model.feed((4, 1))
    assert (room_after(model, ()), room_after(model, (4,)), room_after(model, (4, 0))) == (3, 0, -1)
    n_calls = len(model.fake.calls)
    for refused in (lambda: model.feed((4, 0)), lambda: model.eval((0, 4))):
        with pytest.raises(ContextFull, match="context of 10"):
            refused()
        assert (model.length, model.tokens, len(model.fake.calls)) == (2, (4, 1), n_calls)
    model.eval((4,))
    assert (room_after(model, ()), model.length) == (0, 3)
    model.truncate(0)
    assert (room_after(model, ()), model.fake.length) == (10, 0)


@pytest.mark.parametrize("n_room", range(6))
def test_a_draft_takes_the_last_cells_and_no_more(n_room: int) -> None:
    """One token too few drafted, or a crash, when cells run out after a text of more cells than tokens."""
    text = (4, 1, 0)  # six cells
    drafter = ModelDrafter(WatchedDraft(N_VOCAB, n_ctx=5 + n_room), n_max=8, vocab_size=N_VOCAB)
    draft = drafter.propose(text, 8, PLAIN, RandomChooser(0))
    assert len(draft.tokens) == n_room
    assert bool(drafter.report().notice) == (n_room == 0)


def interrupting(at: int) -> Hook:
    def hook(n_call: int, name: str) -> None:
        if n_call == at:
            raise Interrupted("stopped")

    return hook


@pytest.mark.parametrize("text", [(0, 4, 3), (4, 4, 4, 4), (1, 1, 1), (2, 0)])
def test_an_interrupted_feed_keeps_whole_tokens_only(text: History) -> None:
    """A prefill stopped within a spelling: a wrong length, or a partial token that stays."""
    model = WatchedDraft(N_VOCAB, first=FIRST, hook=interrupting(1))
    model.feed((3,))
    with pytest.raises(Interrupted):
        model.feed(text)
    n_cells = sum(len(SPELLINGS[token]) for token in text) // 2
    whole = [n for n in range(len(text) + 1) if sum(len(SPELLINGS[token]) for token in text[:n]) <= n_cells]
    assert (model.length, model.tokens) == (1 + whole[-1], (3, *text[: whole[-1]]))
    rows = model.eval(text[whole[-1] :])
    np.testing.assert_array_equal(rows[-1], expected_row((3, *text), FIRST))


@pytest.mark.parametrize("at", range(1, 5))
def test_an_interrupted_eval_leaves_what_was_there(at: int) -> None:
    """The same within a block, which takes several calls if a token takes several cells."""
    model = WatchedDraft(N_VOCAB, hook=interrupting(at))
    model.feed((3,))
    with pytest.raises(Interrupted):
        model.eval((0, 4, 3, 1))
    assert (model.length, model.tokens) == (1, (3,))
    np.testing.assert_array_equal(model.eval((0, 4))[-1], expected_row((3, 0, 4)))


def refusing(n_call: int, name: str) -> None:
    if name == "truncate":
        raise RollbackRefused("no")


def test_a_refused_rollback_is_told_and_changes_nothing() -> None:
    """A length that the draft's KV does not have (docs/design.md, invariant 3)."""
    model = WatchedDraft(N_VOCAB, hook=refusing)
    model.feed(TEXT)
    with pytest.raises(RollbackRefused):
        model.truncate(2)
    assert (model.length, model.tokens) == (len(TEXT), TEXT)


def test_the_drafts_own_model_is_watched_and_closed() -> None:
    """A draft that computes on after Ctrl-C, or stays in memory."""
    model, cancel = WatchedDraft(N_VOCAB), Cancel()
    model.watch(cancel)
    model.close()
    assert (model.fake.watched, model.fake.closed) == (cancel, True)


def test_a_model_for_chains_refuses_trees_and_not_a_spelled_out_chain() -> None:
    """A tree flattened into a chain."""
    model = WatchedDraft(N_VOCAB)
    assert not model.caps.tree
    for refused in (lambda: model.eval((0, 2, 3), (-1, -1)), lambda: model.keep(1, (1,))):
        with pytest.raises(UnsupportedModel):
            refused()
    assert model.eval((0, 2, 3), (-1, 0)).shape == (3, N_VOCAB)
    with pytest.raises(ValueError, match="truncate"):
        model.truncate(4)


@pytest.mark.parametrize(
    "to_target", [[-1] * 5, [0, 1, 2, 3], [0, 0, 1, 2, 3], [0, 1, 2, 3, N_VOCAB], [0, 1, -2, 3, 4], [[0, 1, 2, 3, 4]]]
)
def test_a_wrong_map_is_refused(to_target: list[int]) -> None:
    """Two draft tokens for one of the target's: the later logit would hide the other one's mass."""
    fake = FakeModel(draft_table(0), N_DRAFT_VOCAB)
    with pytest.raises(ValueError, match="map"):
        TranslatedModel(fake, np.array(to_target), FixedSpelling(SPELLINGS), vocab_size=N_VOCAB)


def test_end_tokens_are_the_drafts_in_the_targets_ids() -> None:
    """Drafts after the end, or an end token that only the draft has."""
    caps = Caps(tree=True, features=True, max_block=7)
    fake = FakeModel(draft_table(0), N_DRAFT_VOCAB, end_tokens=frozenset({0, 4}), caps=caps)
    model = TranslatedModel(fake, id_map(N_VOCAB), FixedSpelling(SPELLINGS), vocab_size=N_VOCAB)
    assert model.end_tokens == {3}
    assert model.known.tolist() == [0, 2, 3]
    assert (model.busy_s, model.n_ctx, model.caps) == (0.0, 64, Caps(tree=True, max_block=7))


def test_the_target_itself_under_other_ids_is_accepted_whole_for_fifty_rounds() -> None:
    """An off-by-one in the translation of a truncation, or of a row, costs acceptance."""
    n_vocab, order = 7, [3, 0, 6, 2, 5, 1, 4]
    table = RandomTable(n_vocab, 71)
    mirrored = lambda history: table(tuple(order[token] for token in history))[order]  # noqa: E731
    spell = FixedSpelling({ours: (theirs,) for theirs, ours in enumerate(order)})
    draft = TranslatedModel(FakeModel(mirrored, n_vocab, 400), np.array(order), spell, vocab_size=n_vocab)
    rig = Rig(FakeModel(table, n_vocab, 400), None, ModelDrafter(draft, n_max=4, vocab_size=n_vocab))
    tokens, _ = rig.answer(PROMPT, GREEDY, Certain(), 250)
    assert tokens == plain_greedy(table, PROMPT, 250)
    assert rig.finished.stats.acceptance_rate == 1.0
    assert rig.finished.stats.n_steps == 50


def test_a_stopped_answer_leaves_a_draft_that_goes_on() -> None:
    """The draft's KV after Ctrl-C in its prefill, in its drafting, and in between."""
    for at in range(8):
        target, draft = FakeModel(RandomTable(N_VOCAB, 72), N_VOCAB), WatchedDraft(N_VOCAB, hook=interrupting(at))
        drafter = ModelDrafter(draft, n_max=3, vocab_size=N_VOCAB)
        rig = Rig(target, draft, drafter)
        said, reason = rig.answer(TEXT, GREEDY, Certain(), 8)
        assert reason == "cancelled"
        more, _ = rig.answer((*TEXT, *said), GREEDY, Certain(), 8)
        assert (*said, *more) == plain_greedy(target.table, TEXT, len(said) + 8)
        assert draft.tokens == (*TEXT, *said, *more)[: draft.length]
        fresh = ModelDrafter(WatchedDraft(N_VOCAB), n_max=3, vocab_size=N_VOCAB)
        line = (*TEXT, *said, *more)
        assert drafter.propose(line, 3, GREEDY, Certain()) == fresh.propose(line, 3, GREEDY, Certain()) != Draft()


@pytest.mark.parametrize("n_target", [N_VOCAB, 3])
def test_a_draft_is_drawn_from_the_rows_that_it_gives(n_target: int) -> None:
    """Columns of a row of all ids taken for those of the known ids, or ids drafted that the target does not have."""
    text = TEXT[:1]
    drafter = ModelDrafter(WatchedDraft(N_VOCAB), n_max=1, vocab_size=n_target)
    drafter.begin(text)
    (q,) = drafter.propose(text, 1, PLAIN, RandomChooser(0)).probs or ()
    expected = law(expected_row(text)[:n_target], text, PLAIN)
    assert [q.prob(token) for token in range(N_VOCAB)] == pytest.approx([expected.prob(i) for i in range(N_VOCAB)])


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 4, 2, 1)])
@pytest.mark.parametrize("tokens", [(2,), (0, 2, 0), (1, 4, 2), (5, 5)])
def test_the_rows_of_known_tokens_are_those_of_all_without_the_empty_cells(
    order: tuple[int, ...], tokens: History
) -> None:
    """Prevents: columns in the draft's order where ids ascend, and rows of a pass that a later pass overwrote."""
    spell = FixedSpelling(SPELLINGS)
    to_target = np.array(order) * 2  # every second id of the target, as a trimmed draft has them
    to_target[-1] = NO_TOKEN
    whole, narrow = (TranslatedModel(FakeModel(draft_table(2), 5), to_target, spell, vocab_size=10) for _ in range(2))
    rows = whole.eval(tokens)
    assert narrow.known.tolist() == sorted(token for token in to_target.tolist() if token != NO_TOKEN)
    assert np.array_equal(narrow.eval_known(tokens), rows[:, narrow.known])
    assert np.isneginf(np.delete(rows, narrow.known, axis=1)).all()
    assert (narrow.length, narrow.model.length) == (whole.length, whole.model.length)


def test_a_kv_that_lost_its_tokens_is_read_again() -> None:
    """A spelling that goes on after tokens that are gone: a failed pass empties the slots of others as well."""
    model = WatchedDraft(N_VOCAB)
    model.feed(TEXT[:5])
    model.model.truncate(3)  # the second token takes cells 1 to 3
    assert (model.length, model.model.length) == (1, 1)
    model.model.truncate(0)
    assert model.length == 0
    np.testing.assert_array_equal(model.eval(TEXT[:3])[-1], expected_row(TEXT[:3]))
