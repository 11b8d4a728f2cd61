"""Drafts that read ahead while the target verifies: the same laws, the same draws, the same text at any speed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from specllama.audit.enumeration import ContractBroken
from specllama.base.errors import BackendError, Interrupted, SpecllamaError
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import FloatArray, Rule, RunsAhead
from specllama.drafters.controller import Controller
from specllama.drafters.model import ModelDrafter
from specllama.llama.running_ahead import AheadModel
from specllama.pairs.draft_in_target_ids import on_other_devices
from tests.enumeration import law_of
from tests.exact.ahead import JealousModel, Paced, WatchedAhead, WidthModel, ahead_rig
from tests.exact.harness import (
    GREEDY,
    N_VOCAB,
    PLAIN,
    REPEAT,
    Certain,
    Pair,
    Rig,
    assert_answers_like_new,
    assert_same_law,
    good_pair,
    plain_greedy,
    random_pair,
)
from tests.exact.harness import PROMPT as SHORT
from tests.exact.reference import Answer
from tests.exact.test_drafters_law import CHEAP, PROMPT, SAMPLERS, Moody
from tests.fakes import FakeModel, RandomTable

STRATEGIES = ("draft-simple", "chain", "draft-tli", "chain-tli")
PACES = (0, 1, 2, 9)  # tokens that a background reading gets to; 9 = all
WARM = SamplingParams(temperature=0.8, top_k=4, top_p=0.95, min_p=0.02, repeat_penalty=1.3, repeat_last_n=8)


def ahead_law(make: Callable[[], Rig], params: SamplingParams, n_tokens: int) -> dict[Answer, float]:
    return law_of(lambda choose: make().answer(PROMPT, params, choose, n_tokens))


# ---------------------------------------------------------------------------------------------------------- exactness


SLOW = [pytest.param(rule, marks=pytest.mark.slow) for rule in (Rule.TOKEN, Rule.MATCH)]


@pytest.mark.parametrize("rule", [Rule.BLOCK, *SLOW])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_answer_follows_the_targets_law_however_far_was_read_ahead(strategy: str, sampler: str, rule: Rule) -> None:
    """A row that was read for another token, or a KV with something too much: both are a wrong q."""
    pair = random_pair(41, n_vocab=2, n_max=2, rule=rule)
    params = SAMPLERS[sampler]
    expected = pair.plain_law(params, 4, prompt=PROMPT)
    for pace in (1, 9):
        assert_same_law(ahead_law(lambda pace=pace: ahead_rig(pair, strategy, worker=Paced(pace)), params, 4), expected)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 9))])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whatever_a_planner_says_reading_ahead_keeps_the_law(strategy: str, seed: int) -> None:
    """A pause, a probe, or a looked-up block between the reading and the asking."""
    params = list(SAMPLERS.values())[seed % 4]
    pair = random_pair(50 + seed, n_vocab=2, n_max=3, rule=list(Rule)[seed % 3])
    found = ahead_law(
        lambda: ahead_rig(pair, strategy, worker=Paced(PACES[seed % 4]), policy=Moody(seed)), params, 3 + seed % 2
    )
    assert_same_law(found, pair.plain_law(params, 3 + seed % 2, prompt=PROMPT))


@pytest.mark.parametrize("room", range(-1, 6))
def test_reading_ahead_stops_where_the_draft_is_full(room: int) -> None:
    """FIELD 26: an error in the background, or cells that are missing when the answer wants them."""
    pair = random_pair(65, n_vocab=2, n_max=3, n_draft_ctx=len(PROMPT) + room)
    for strategy in ("draft-simple", "chain-tli"):
        found = ahead_law(lambda strategy=strategy: ahead_rig(pair, strategy, worker=Paced(9)), PLAIN, 3)
        assert_same_law(found, pair.plain_law(PLAIN, 3, prompt=PROMPT))


def test_with_threads_the_law_is_the_same() -> None:
    """Real threads, one for each of some hundred branches."""
    pair = random_pair(42, n_vocab=2, n_max=2, rule=Rule.BLOCK)
    assert_same_law(ahead_law(lambda: ahead_rig(pair, "chain"), REPEAT, 3), pair.plain_law(REPEAT, 3, prompt=PROMPT))


class Unmoved(WatchedAhead):
    """Never reads ahead: what all others are compared with."""

    def run_ahead(self, first: int, n_most: int, guess: object) -> None:
        pass


def told(rig: Rig, params: SamplingParams, seed: int, prompt: Sequence[int] = SHORT) -> list[object]:
    """Everything that one answer was and decided, times left out."""
    rig.answer(prompt, params, RandomChooser(seed), 24)
    return [rig.emitted, *((step.drafted, step.accepted, step.decisions) for step in rig.steps)]


@pytest.mark.parametrize("params", [PLAIN, WARM, GREEDY], ids=["plain", "warm", "greedy"])
@pytest.mark.parametrize("planned", [False, True])
def test_every_draw_and_decision_is_the_same_as_without_it(params: SamplingParams, planned: bool) -> None:
    """A draw in the background shifts every later one; a plan that knows of it decides otherwise."""
    pair = good_pair(rule=Rule.BLOCK, end_tokens=frozenset({5}))

    def rig(worker: Paced | None, kind: type[WatchedAhead] = WatchedAhead) -> Rig:
        return ahead_rig(pair, "chain", worker=worker, policy=Controller(CHEAP) if planned else None, kind=kind)

    rigs = [rig(Paced(0), Unmoved), rig(Paced(2)), rig(Paced(9)), rig(None)]
    rng = random.Random(7)
    for seed in range(8):
        prompt = [rng.randrange(N_VOCAB - 1) for _ in range(rng.randrange(2, 10))]
        plain, *others = [told(rig, params, seed, prompt) for rig in rigs]
        assert others == [plain] * 3
    served = [rig.draft.n_served for rig in rigs]  # type: ignore[union-attr]
    assert served[0] == 0
    assert 0 < served[1] <= served[2], "rows that were never used show nothing"


@pytest.mark.parametrize("n_max", [1, 4])
@pytest.mark.parametrize("pace", [0, 1, 3, 9, None])
def test_a_model_that_drafts_for_itself_is_accepted_throughout(n_max: int, pace: int | None) -> None:
    """DESIGN, invariant 2, with a cache that ran ahead: a hole in it shows as a rejection."""
    table = RandomTable(N_VOCAB, 43)
    worker = None if pace is None else Paced(pace)
    rig = ahead_rig(Pair(target=table, draft=table, n_vocab=N_VOCAB, n_max=n_max), worker=worker)
    n_tokens = 9 * (n_max + 1)
    tokens, _ = rig.answer(SHORT, GREEDY, Certain(), n_tokens)
    stats = rig.finished.stats
    assert tokens == plain_greedy(table, SHORT, n_tokens)
    assert (stats.n_steps, stats.n_drafted, stats.n_accepted) == (9, 9 * n_max, 9 * n_max)
    if worker is not None and pace == 9:  # of the first step nothing was read before
        assert rig.draft.n_served == 8 * (n_max + 1)  # type: ignore[union-attr]
        assert worker.n_runs == 9


# -------------------------------------------------------------------------------------------------- clocks and widths


def texts_at(pace: int, kind: type[WatchedAhead] = WatchedAhead) -> list[object]:
    """Answers of a draft whose logits depend on which tokens were read together."""
    pair = good_pair()
    assert pair.draft is not None
    rig = ahead_rig(pair, worker=Paced(pace), below=WidthModel(pair.draft, N_VOCAB, n_ctx=200), kind=kind)
    return [told(rig, WARM, seed) for seed in range(3)]


@pytest.mark.parametrize("pace", PACES[1:])
def test_the_text_does_not_depend_on_how_far_the_background_came(pace: int) -> None:
    """DESIGN, invariant 7, where logits depend on the width of a pass: a clock would decide what is said."""
    assert texts_at(pace) == texts_at(0)


class FeedsTogether(WatchedAhead):
    """Reads the first token alone only where the background did."""

    def feed(self, tokens: Sequence[int]) -> None:
        if not self._read:
            self._first = None
        WatchedAhead.feed(self, tokens)


def test_a_clock_that_decides_widths_would_be_seen() -> None:
    """A test of speeds that any implementation passes."""
    assert texts_at(9, FeedsTogether) != texts_at(0, FeedsTogether)


# ------------------------------------------------------------------------------------------------------ seeded faults


class Stale(WatchedAhead):
    """Serves the next row whatever token it was read for."""

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self._settle()
        if self._read and len(tokens) == 1:
            tokens = (self._read[0][0],)
        return WatchedAhead.eval(self, tokens, parents)


class StaleRow(WatchedAhead):
    """Reads the right token and hands out the row of another: exact, since that is what is drawn from, and useless."""

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        self._settle()
        stale = self._read[0][1] if self._read and len(tokens) == 1 else None
        rows = WatchedAhead.eval(self, tokens, parents)
        return rows if stale is None else stale


class Lingering(WatchedAhead):
    """Serves rows that were read before a rejection."""

    def truncate(self, length: int) -> None:
        kept = list(self._read) if length < self.length else None
        WatchedAhead.truncate(self, length)
        if kept is not None:
            self._model.feed([token for token, _ in kept])
            self._read[:] = kept


class Unsaid(WatchedAhead):
    """Leaves in the KV what was guessed wrong."""

    def _drop(self) -> None:
        self._read.clear()


class Borrowed(WatchedAhead):
    """Hands out the model's own view, which ended with the next token."""

    def _read_on(self, *args: object) -> None:
        WatchedAhead._read_on(self, *args)  # type: ignore[arg-type]
        self._read[:] = [(token, np.full_like(row, np.nan)) for token, row in self._read[:-1]] + self._read[-1:]


def caught(kind: type[WatchedAhead]) -> str:
    """How the suite sees a fault; '' where it does not."""
    for pair, params in ((good_pair(), WARM), (good_pair(), GREEDY), (random_pair(44, n_vocab=2), PLAIN)):
        try:
            rigs = ahead_rig(pair, worker=Paced(0), kind=Unmoved), ahead_rig(pair, worker=Paced(9), kind=kind)
            for seed in range(4):
                plain, found = [told(rig, params, seed) for rig in rigs]
                if plain != found:
                    return "other draws"
        except (AssertionError, SpecllamaError, ValueError) as error:
            return repr(error)
    return ""


@pytest.mark.parametrize("kind", [Stale, StaleRow, Lingering, Unsaid, Borrowed])
def test_a_broken_reading_ahead_is_caught(kind: type[WatchedAhead]) -> None:
    """A suite that stays green whatever is broken."""
    found = caught(kind)
    assert found
    print(f"{kind.__name__}: {found}")


def test_a_sound_reading_ahead_is_not() -> None:
    """Faults that are seen where there are none."""
    assert caught(WatchedAhead) == ""


# ------------------------------------------------------------------------------------------- the adapter as a model


def argmax(row: FloatArray) -> int:
    return int(row.argmax())


def operations(rng: random.Random, n: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A random use of a model, its arguments drawn too."""
    for _ in range(n):
        name = rng.choice(("ahead", "ahead", "feed", "eval", "eval", "likely", "likely", "truncate", "keep", "room"))
        yield name, tuple(rng.randrange(4) for _ in range(rng.randrange(1, 4)))


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_model_that_it_wraps_whatever_is_asked_of_it(seed: int, threaded: bool) -> None:
    """Any order of calls, in the middle of any background reading, errors of the model in it included."""
    rng = random.Random(seed)

    def fail(n_call: int, name: str) -> None:
        if name == "eval" and in_background and rng.random() < 0.1:
            raise (Interrupted if n_call % 2 else BackendError)("the test says so")

    in_background = False
    table = RandomTable(4, 45)
    plain = FakeModel(table, 4, n_ctx=60)
    below = JealousModel(table, 4, n_ctx=60, hook=fail, pause_s=0.0002 if threaded else 0.0)
    ahead = WatchedAhead(below, worker=None if threaded else Paced(rng.randrange(6)))
    with closing(ahead):
        likely = 0
        for name, arguments in operations(rng, 60 if threaded else 150):
            if plain.length + 8 > plain.n_ctx or (name == "truncate" and plain.length > 4):
                length = rng.randrange(plain.length + 1)
                plain.truncate(length)
                ahead.truncate(length)
            elif name == "ahead":
                in_background = not threaded
                ahead.run_ahead(arguments[0] if rng.random() < 0.3 else likely, 1 + arguments[-1], argmax)
                in_background = False
                continue  # `tokens` would wait for it
            elif name in ("eval", "likely", "keep"):
                tokens = (likely,) if name == "likely" else arguments
                rows = ahead.eval(tokens)
                assert np.array_equal(rows, plain.eval(tokens))
                assert not rows.flags.writeable
                likely = argmax(rows[-1])
                if name == "keep":
                    path = range(rng.randrange(len(tokens)))
                    n_pending = plain.length - len(tokens) + 1
                    plain.keep(n_pending, path)
                    ahead.keep(n_pending, path)
            elif name == "feed":
                plain.feed(arguments)
                ahead.feed(arguments)
            assert ahead.room_after(arguments) == plain.n_ctx - plain.length - len(arguments)
            assert ahead.tokens == plain.tokens


class Hasty(WatchedAhead):
    """Does not wait for the background."""

    def _settle(self) -> None:
        pass


def test_two_threads_in_one_model_would_be_seen() -> None:
    """A stress test whose fake lets anybody in."""
    model = Hasty(JealousModel(RandomTable(4, 45), 4, pause_s=0.02))
    model.eval((0,))
    model.run_ahead(1, 3, argmax)
    with pytest.raises(ContractBroken):
        for _ in range(3):
            model.eval((1,))
    AheadModel._settle(model)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_reading_that_begins_late_reads_nothing(error: type[BaseException]) -> None:
    """Ctrl-C while it is being started, or a thread that cannot be had at first: nobody waits for it any more."""

    class Late(Paced):
        def submit(self, *args: object) -> None:  # type: ignore[override]
            waiting.append(args)
            raise error

    waiting: list[tuple[object, ...]] = []
    below = FakeModel(RandomTable(4, 45), 4)
    model = WatchedAhead(below, worker=Late(9))
    model.eval((0,))
    try:
        model.run_ahead(1, 3, argmax)
    except KeyboardInterrupt:
        assert error is KeyboardInterrupt
    model.eval((2,))
    Paced.submit(model._worker, *waiting[0])  # type: ignore[arg-type]
    assert below.tokens == model.tokens == (0, 2)


def test_it_cannot_be_cut_to_more_than_it_holds() -> None:
    """What was read ahead taken for what is there."""
    model = AheadModel(FakeModel(RandomTable(4, 45), 4), worker=Paced(3))
    model.eval((0, 1))
    model.run_ahead(2, 3, argmax)
    with pytest.raises(ValueError, match="cannot truncate 2 tokens to 3"):
        model.truncate(3)
    model.truncate(2)
    assert model.length == 2


class CutOff(FakeModel):
    """Ctrl-C arrives when a cut returns: it is carried out, and the caller does not get to know."""

    interrupts = False

    def truncate(self, length: int) -> None:
        FakeModel.truncate(self, length)
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("cut", ["drop", "truncate", "settle"])
def test_a_ctrl_c_while_it_cuts_leaves_no_row_for_a_token_that_is_gone(cut: str) -> None:
    """Rows of a KV that is no more: a length below nothing, and a draft that fails from then on."""
    table = RandomTable(4, 45)
    below = CutOff(table, 4)
    model = WatchedAhead(below, worker=Paced(9))
    likely = argmax(model.eval((0, 1)))
    if cut == "settle":  # a reading that got further than it knows

        def fail(row: FloatArray) -> int:
            below.feed((3,))
            raise BackendError("the test says so")

        model.run_ahead(likely, 5, fail)
    else:
        model.run_ahead(likely, 5, argmax)
    below.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        if cut == "drop":
            model.eval(((likely + 1) % 4,))
        elif cut == "truncate":
            model.truncate(1)
        else:
            assert model.length
    assert model.length == (1 if cut == "truncate" else 2)
    model.truncate(1)
    assert np.array_equal(model.eval((2,))[0], table((0, 2)))
    assert model.tokens == (0, 2)


def test_what_somebody_else_did_with_the_model_is_not_taken_for_its_own() -> None:
    """Two adapters of one draft, or a draft that was emptied: a row of another text, or a length below nothing."""
    table = RandomTable(4, 45)
    below = FakeModel(table, 4)
    ahead, other = (WatchedAhead(below, worker=Paced(9)) for _ in range(2))
    likely = argmax(ahead.eval((0, 1)))
    ahead.run_ahead(likely, 5, argmax)
    assert ahead.length == 2
    below.truncate(0)
    assert ahead.length == 0
    assert np.array_equal(ahead.eval((likely,))[0], table((likely,)))
    ahead.run_ahead(argmax(table((likely,))), 5, argmax)
    assert ahead.length == 1
    other.truncate(0)
    other.eval((3, 3))
    assert ahead.tokens == other.tokens == (3, 3)


def test_a_model_that_was_closed_under_it_is_told_once_and_can_be_closed() -> None:
    """An error out of the closing of models that hides why they are closed; or one that comes with every call."""

    class Closed(FakeModel):
        closed = False

        def truncate(self, length: int) -> None:
            if self.closed:
                raise BackendError("draft.gguf was closed")
            FakeModel.truncate(self, length)

    for told in (False, True):
        below = Closed(RandomTable(4, 45), 4)
        model = AheadModel(below, worker=Paced(9))
        model.eval((0, 1))

        def fail(row: FloatArray, below: Closed = below) -> int:
            below.feed((3,))  # a pass that was carried out, and then could not hand out its row
            below.closed = True
            raise BackendError("draft.gguf was closed")

        model.run_ahead(2, 5, fail)
        if told:
            with pytest.raises(BackendError, match="was closed"):
                assert model.length
            assert model.length == 4, "as much as the KV holds: whoever knows better reads it anew"
        model.close()
        model.close()


def test_who_leaves_it_finds_the_model_open_and_with_what_was_asked_for() -> None:
    """A draft that is looked at afterwards, with tokens in it that nobody said; or a thread that stays."""
    below = FakeModel(RandomTable(4, 45), 4)
    for worker in (Paced(9), None):
        model = AheadModel(below, worker=worker)
        model.truncate(0)
        model.run_ahead(argmax(model.eval((0, 1))), 5, argmax)
        model.leave()
        assert model.model is below
        assert below.tokens == (0, 1)
        model.run_ahead(2, 3, argmax)  # nobody is there to do it
        assert (model.length, np.array_equal(model.eval((2,))[0], below.table((0, 1, 2)))) == (2, True)
    assert not any("specllama-ahead" in thread.name for thread in threading.enumerate())


# ------------------------------------------------------------------------------------------------- when things go wrong


def test_answers_cut_short_anywhere_leave_the_draft_as_they_should() -> None:
    """FIELD 13: the reader leaves, the flag is set, or the target fails, while the draft reads on in its thread."""
    for n_events in range(0, 14, 2):
        rig = ahead_rig(good_pair())
        with closing(rig.run(SHORT, GREEDY, Certain(), 12)) as run:
            list(islice(run, n_events))
        assert_answers_like_new(rig, rig.emitted)

    rig = ahead_rig(good_pair())

    def fail(n_call: int, name: str) -> None:
        if n_call > 6 and name == "eval":
            raise BackendError("the test says so")

    rig.target.hook = fail
    with pytest.raises(BackendError):
        rig.answer(SHORT, GREEDY, Certain(), 12)
    rig.target.hook = lambda n_call, name: None
    assert_answers_like_new(rig, rig.emitted)


def test_a_stop_in_the_middle_of_a_block_is_found_where_it_was() -> None:
    """FIELD 11: the draft is ahead of a text that ended."""
    pair = good_pair()
    said = plain_greedy(pair.target, SHORT, 10)
    for at in range(8):
        rig = ahead_rig(pair, worker=Paced(9))
        stop = said[at : at + 2]
        tokens, reason = rig.answer(SHORT, GREEDY, Certain(), 10, stops=[stop])
        ends = next(i for i in range(9) if said[i : i + 2] == stop) + 2
        assert (tokens, reason) == (said[:ends], "stop")
        assert_answers_like_new(rig, tokens)


def failing_in_background(worker: Paced | None, error: BaseException) -> Rig:
    """A rig whose draft fails at every second token that is read ahead."""
    rig = ahead_rig(good_pair(), worker=worker)
    draft: WatchedAhead = rig.draft  # type: ignore[assignment]
    read_on, n_read = draft._read_on, 0
    reader = 0  # the thread that reads ahead; a thread of its own may still be leaving while the answer goes on

    def fail(n_call: int, name: str) -> None:
        nonlocal n_read
        if reader == threading.get_ident():
            n_read += 1
            if n_read % 2 == 0:
                raise error

    def read_and_fail(*args: object) -> None:
        nonlocal reader
        reader = threading.get_ident()
        try:
            read_on(*args)  # type: ignore[arg-type]
        finally:
            reader = 0

    draft._read_on = read_and_fail  # type: ignore[method-assign]
    draft._model.hook = fail  # type: ignore[attr-defined]
    return rig


@pytest.mark.parametrize("error", [Interrupted("stopped"), BackendError("failed"), MemoryError()])
@pytest.mark.parametrize("worker", [Paced(9), None], ids=["paced", "thread"])
def test_an_error_in_the_background_costs_nothing_but_the_row(error: Exception, worker: Paced | None) -> None:
    """A hang, an answer that ends, or a KV that is believed to hold what failed."""
    rig = failing_in_background(worker, error)
    tokens, reason = rig.answer(SHORT, GREEDY, Certain(), 20)
    assert (tokens, reason) == (plain_greedy(rig.target.table, SHORT, 20), "length")


def test_a_mistake_in_the_background_is_not_hidden() -> None:
    """Broken contracts that nobody hears of, because they happen in a thread."""
    rig = failing_in_background(None, ContractBroken("a mistake"))
    with pytest.raises(ContractBroken, match="a mistake"):
        rig.answer(SHORT, GREEDY, Certain(), 20)


def test_a_kv_that_was_emptied_in_the_background_is_read_again() -> None:
    """llama.cpp refuses to cut an interrupted pass back: everything is gone, and `length` must say so."""
    rig = ahead_rig(good_pair(), worker=Paced(9))
    below: FakeModel = rig.draft._model  # type: ignore[union-attr]
    read_on = rig.draft._read_on  # type: ignore[union-attr]
    n_runs = 0

    def reading(*args: object) -> None:
        nonlocal n_runs
        n_runs += 1
        read_on(*args)
        if n_runs in (1, 3):
            below.truncate(0)

    rig.draft._read_on = reading  # type: ignore[union-attr]
    assert rig.answer(SHORT, GREEDY, Certain(), 20)[0] == plain_greedy(rig.target.table, SHORT, 20)
    assert n_runs > 3


# ---------------------------------------------------------------------------------------------------- when it is used


def test_nothing_is_read_ahead_of_a_step_without_drafts_or_behind_an_end() -> None:
    """A paused draft that is evaluated after all, and tokens that nothing can follow."""
    paced = Paced(9)
    rig = ahead_rig(good_pair(n_max=0), worker=paced)
    rig.answer(SHORT, GREEDY, Certain(), 12)
    assert paced.n_runs == 0
    for seed in range(20):
        rig = ahead_rig(good_pair(end_tokens=frozenset({1})), worker=paced)
        rig.answer((0, 2, 0), PLAIN, RandomChooser(seed), 12)
        below: FakeModel = rig.draft._model  # type: ignore[union-attr]
        assert not any(1 in call.tokens for call in below.calls)
    assert paced.n_runs > 20


def test_only_tokens_that_the_target_knows_are_guessed_with_its_settings() -> None:
    """Guesses by the bare logits, where a bias, a penalty or the target's vocabulary say otherwise: all in vain."""
    table = RandomTable(N_VOCAB, 46)
    bias = {int(table((0, 1)).argmax()): -np.inf}
    below = FakeModel(table, N_VOCAB)
    ModelDrafter(AheadModel(below, worker=Paced(9)), n_max=3, vocab_size=N_VOCAB - 2).propose(
        (0, 1), 3, replace(GREEDY, logit_bias=bias, repeat_penalty=1.5), Certain()
    )
    tokens = below.tokens
    assert len(tokens) == 2 + 3 + 3, "the drafted ones, and one for every row of the next step"
    assert max(tokens) < N_VOCAB - 2
    assert not set(bias) & set(tokens[2:])


def test_time_that_nobody_waited_for_is_not_the_drafts() -> None:
    """Hidden time in the figures: drafts that look dearer than they are, and a loop that takes less than nothing."""

    class Busy(FakeModel):
        busy_s = 0.0

        def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
            self.busy_s += 1.0
            return FakeModel.eval(self, tokens, parents)

    model = AheadModel(Busy(RandomTable(4, 45), 4), worker=Paced(9))
    likely = argmax(model.eval((0,)))
    assert model.busy_s == 1.0
    model.run_ahead(likely, 3, argmax)
    assert model.busy_s == 1.0
    assert model.length == 1
    assert 1.0 <= model.busy_s < 1.5
    model.eval((argmax(model.eval((likely,))),))
    assert 1.0 <= model.busy_s < 1.5
    model.feed((0, 1))
    model.eval((0,))
    assert 2.0 <= model.busy_s < 2.5


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "expected"),
    [(0, 13, True), (25, 0, True), (0, 0, False), (25, 13, False), (12, 13, False), (0, 7, False), (25, 12, False)],
)
def test_it_is_on_only_where_the_devices_differ(target_layers: int, draft_layers: int, expected: bool) -> None:
    """On one device it would take from the target the time that it saves the draft."""

    def model(n_layer: int, n_gpu_layers: int) -> SimpleNamespace:
        return SimpleNamespace(header=SimpleNamespace(n_layer=n_layer), plan=SimpleNamespace(n_gpu_layers=n_gpu_layers))

    target, draft = model(24, target_layers), model(12, draft_layers)
    assert on_other_devices(target, draft) == expected  # type: ignore[arg-type]


def test_only_an_adapter_reads_ahead() -> None:
    """A protocol that any model fulfils by accident."""
    model = FakeModel(RandomTable(4, 45), 4)
    assert not isinstance(model, RunsAhead)
    assert isinstance(AheadModel(model, worker=Paced(0)), RunsAhead)
