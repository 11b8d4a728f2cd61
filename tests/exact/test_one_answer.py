"""One answer at a time: two answers on shared models, begun, read and closed in every order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import pytest

from specllama.base.errors import ModelBusy, PairError
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, StepEvent, TokenEvent
from specllama.core.sampling import RandomChooser
from specllama.core.types import Drafter, LanguageModel
from specllama.drafters.lookup import LookupDrafter
from specllama.drafters.model import ModelDrafter
from specllama.drafters.shape import FixedShape
from specllama.drafters.translated import TranslatedModel
from specllama.drafters.tree import TreeDrafter
from tests import tiny
from tests.exact.harness import GREEDY, N_VOCAB, agreeing, plain_greedy
from tests.exact.reference import History
from tests.exact.translating import SPELLINGS, FixedSpelling, id_map
from tests.fakes import FakeModel, RandomTable
from tests.marks import slow

ACTIONS = ("create", "take", "take", "end")
ORDERS = tuple(
    "".join("A" if i in places else "B" for i in range(2 * len(ACTIONS)))
    for places in combinations(range(2 * len(ACTIONS)), len(ACTIONS))
)
PROMPTS = {"A": (0, 1, 0, 2, 2), "B": (0, 1, 3, 4)}
N_TAKEN, N_TOKENS = 2, 7  # of one `take`, and of a whole answer


class Answering(Protocol):
    """The events of one answer, which can be closed."""

    def __iter__(self) -> Iterator[Event]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Bench:
    """Two engines that share a model, or one engine for both answers."""

    engines: Mapping[str, Engine]

    def begin(self, who: str) -> Answering:
        return self.of(who, PROMPTS[who])

    def of(self, who: str, prompt: Sequence[int]) -> Answering:
        return self.engines[who].generate(prompt, GREEDY, RandomChooser(0), max_tokens=N_TOKENS)


def read(answer: Answering, n_tokens: int = N_TOKENS + 1) -> list[int]:
    """The next `n_tokens` tokens, or those that are left."""
    tokens = list[int]()
    for event in answer:
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
            if len(tokens) == n_tokens:
                break
    return tokens


def play(order: str, bench: Bench, ending: str) -> tuple[dict[str, list[int]], set[str]]:
    """The tokens of each answer, and which were refused. `ending`: it is read to its end, closed or collected.

    An answer is open from its first event to its end. One that is begun meanwhile is refused, and stays empty.
    """
    done, answers = Counter[str](), dict[str, Answering]()
    said: dict[str, list[int]] = {"A": [], "B": []}
    refused, opened = set[str](), ""
    for who in order:
        action = ACTIONS[done[who]]
        done[who] += 1
        if action == "create":
            answers[who] = bench.begin(who)
        elif action == "end" and ending != "read":
            answer = answers.pop(who)
            if ending == "close":
                answer.close()
            del answer
            opened = "" if opened == who else opened
        elif who in refused:
            assert read(answers[who]) == []
        elif opened not in ("", who):
            with pytest.raises(ModelBusy):
                read(answers[who])
            refused.add(who)
        elif action == "take":
            opened = who
            said[who] += read(answers[who], N_TAKEN)
        else:
            opened = ""
            said[who] += read(answers[who])
    return said, refused


def assert_all_as_new(bench: Bench, order: str, fresh: Callable[[str, History], History], ending: str) -> bool:
    """Every answer that was allowed, and every later one, equals the answer of unused models. True if one was not."""
    said, refused = play(order, bench, ending)
    for who, tokens in said.items():
        n_said = 0 if who in refused else N_TOKENS if ending == "read" else N_TAKEN * ACTIONS.count("take")
        assert tuple(tokens) == fresh(who, PROMPTS[who])[:n_said], f"{who} in {order}"
    for who, prompt in PROMPTS.items():
        for later in ((*prompt, *said[who]), (*PROMPTS["A"], 5), prompt):
            assert tuple(read(bench.of(who, later))) == fresh(who, later), f"after {order}"
    return bool(refused)


TARGET = RandomTable(N_VOCAB, 40)
OTHER = RandomTable(N_VOCAB, 50)
DRAFT = agreeing(TARGET, N_VOCAB, 41)


def fake_benches() -> dict[str, Bench]:
    """Every way to share a model; the models are new."""

    def fake(table: RandomTable) -> FakeModel:
        return FakeModel(table, N_VOCAB)

    def draft() -> ModelDrafter:
        return ModelDrafter(FakeModel(DRAFT, N_VOCAB), n_max=3)

    def tree(model: FakeModel) -> TreeDrafter:
        return TreeDrafter(model, FixedShape((-1, -1, 0, 0, 1, 2)), lookup=LookupDrafter(n_max=4), n_leaves=8)

    target, shared, grown = fake(TARGET), FakeModel(DRAFT, N_VOCAB), FakeModel(DRAFT, N_VOCAB)
    one, plain = Engine(fake(TARGET), draft()), Engine(fake(TARGET))
    return {
        "one engine": Bench({"A": one, "B": one}),
        "one engine without drafts": Bench({"A": plain, "B": plain}),
        "two engines on one target": Bench({"A": Engine(target, draft()), "B": Engine(target, LookupDrafter(n_max=8))}),
        "two targets with one draft": Bench(
            {who: Engine(fake(table), ModelDrafter(shared, n_max=3)) for who, table in (("A", TARGET), ("B", OTHER))}
        ),
        "two targets with one draft of trees": Bench(
            {who: Engine(fake(table), tree(grown)) for who, table in (("A", TARGET), ("B", OTHER))}
        ),
    }


# What is shared does not depend on how an answer ends: every ending with one engine, and closing with all.
@pytest.mark.parametrize(
    ("shared", "ending"),
    [
        *((name, "close") if name.startswith("one engine") else slow(name, "close") for name in fake_benches()),
        *(
            slow(name, ending)
            for name in ("one engine", "two targets with one draft")
            for ending in ("read", "collect")
        ),
    ],
)
def test_two_answers_in_any_order_are_right_or_refused(shared: str, ending: str) -> None:
    """Prevents: a generator closed late that records what the KV does not hold, so that a third answer is wrong."""
    tables = {"A": TARGET, "B": OTHER if shared.startswith("two targets") else TARGET}
    n_refused = 0
    # With one engine, an order that begins with B is another one with the names exchanged.
    for order in (each for each in ORDERS if each[0] == "A" or not shared.startswith("one engine")):
        bench = fake_benches()[shared]
        n_refused += assert_all_as_new(
            bench, order, lambda who, prompt: plain_greedy(tables[who], prompt, N_TOKENS), ending
        )
    assert 0 < n_refused < len(ORDERS)


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["one engine", "one engine with trees", "two engines", "two targets"])
def test_two_answers_of_llama_models_in_any_order_are_right_or_refused(
    shared: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same on a real KV."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    paths = tiny.write_pair(tmp_path_factory.mktemp("pair"), vocabulary=tiny.letters(10))
    trees, options = "trees" in shared, {"max_leaves": 8 if "trees" in shared else 1}
    with tiny.load(paths[0], **options) as a, tiny.load(paths[0]) as b, tiny.load(paths[1], **options) as draft:
        models = {"A": a, "B": b if shared == "two targets" else a}
        drafter: Drafter = ModelDrafter(draft, n_max=3, vocab_size=a.vocab_size)
        if trees:
            drafter = TreeDrafter(draft, FixedShape((-1, -1, 0, 0, 1)), n_leaves=8, vocab_size=a.vocab_size)
        engines = {who: Engine(model, drafter) for who, model in models.items()}
        if shared.startswith("one engine"):
            engines["B"] = engines["A"]
        known: dict[History, History] = {}

        def fresh(who: str, prompt: History) -> History:
            if prompt not in known:
                b.truncate(0)
                known[prompt] = tuple(read(Engine(b).generate(prompt, GREEDY, RandomChooser(0), max_tokens=N_TOKENS)))
            return known[prompt]

        expected = {who: fresh(who, prompt) for who, prompt in PROMPTS.items()}
        for order in ORDERS:
            said, refused = play(order, Bench(engines), "close")
            for who in {"A", "B"} - refused:
                assert tuple(said[who]) == expected[who][: len(said[who])], f"{who} in {order}"
            third = tuple(read(Bench(engines).of("A", PROMPTS["A"])))
            assert third == expected["A"], f"after {order}"


def test_a_failed_answer_frees_its_models() -> None:
    """Prevents: one error that makes every later answer fail."""
    target = FakeModel(TARGET, N_VOCAB)
    engine = Engine(target, ModelDrafter(FakeModel(DRAFT, N_VOCAB), n_max=3))

    def fail(n_call: int, name: str) -> None:
        raise OSError(name)

    target.hook = fail
    with pytest.raises(OSError, match="feed"):
        read(engine.generate(PROMPTS["A"], GREEDY, RandomChooser(0), max_tokens=N_TOKENS))
    target.hook = lambda n_call, name: None
    answer = engine.generate(PROMPTS["A"], GREEDY, RandomChooser(0), max_tokens=N_TOKENS)
    assert tuple(read(answer)) == plain_greedy(TARGET, PROMPTS["A"], N_TOKENS)


def test_the_last_event_frees_the_models() -> None:
    """Prevents: a reader that stops at `Finished`, as most do, and finds the model busy."""
    engine = fake_benches()["one engine"].engines["A"]
    first = engine.generate(PROMPTS["A"], GREEDY, RandomChooser(0), max_tokens=N_TOKENS)
    assert not any(isinstance(next(first), Finished) for _ in range(N_TOKENS))
    while not isinstance(next(first), Finished):
        pass
    answer = engine.generate(PROMPTS["B"], GREEDY, RandomChooser(0), max_tokens=N_TOKENS)
    assert tuple(read(answer)) == plain_greedy(TARGET, PROMPTS["B"], N_TOKENS)


class Passed:
    """A model that forwards every call to another one."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)


def translated(model: FakeModel) -> LanguageModel:
    return TranslatedModel(model, id_map(N_VOCAB), FixedSpelling(SPELLINGS), vocab_size=N_VOCAB)


@pytest.mark.parametrize("adapter", [lambda model: model, Passed, lambda model: Passed(Passed(model))])
def test_a_target_that_drafts_for_itself_is_refused(adapter: Callable[[FakeModel], LanguageModel]) -> None:
    """Prevents: greedy text that is silently wrong, because the draft's tokens are in the target's KV."""
    target = FakeModel(TARGET, N_VOCAB)
    with pytest.raises(PairError):
        Engine(target, ModelDrafter(adapter(target), n_max=3))
    engine = Engine(target)
    engine.drafter = ModelDrafter(adapter(target), n_max=3)
    with pytest.raises(PairError):
        read(engine.generate(PROMPTS["A"], GREEDY, RandomChooser(0), max_tokens=N_TOKENS))


def test_a_translated_draft_leases_the_model_that_it_reads_to() -> None:
    """Prevents: two adapters on one draft, each with a record of its own of what that draft holds."""
    shared = FakeModel(RandomTable(5, 3), 5)
    a, b = (Engine(FakeModel(TARGET, N_VOCAB), ModelDrafter(translated(shared), n_max=2)) for _ in range(2))
    first = a.generate(PROMPTS["A"], GREEDY, RandomChooser(0), max_tokens=N_TOKENS)
    assert len(read(first, N_TAKEN)) == N_TAKEN
    with pytest.raises(ModelBusy):
        read(b.generate(PROMPTS["B"], GREEDY, RandomChooser(0), max_tokens=N_TOKENS))
    assert tuple(read(first)) == plain_greedy(TARGET, PROMPTS["A"], N_TOKENS)[N_TAKEN:]


def test_a_drafter_that_is_changed_while_an_answer_is_open_serves_the_next_one() -> None:
    """Prevents: a second question that changes the settings of an open answer."""
    target, draft = FakeModel(TARGET, N_VOCAB), FakeModel(DRAFT, N_VOCAB)
    engine = Engine(target, ModelDrafter(draft, n_max=3))
    first = engine.generate(PROMPTS["A"], GREEDY, RandomChooser(0), max_tokens=N_TOKENS)
    read(first, N_TAKEN)
    engine.drafter = LookupDrafter(n_max=8)
    assert {event.drafter for event in first if isinstance(event, StepEvent)} == {"draft-simple"}
