"""The engine's law on the real llama.cpp: random models small enough to enumerate, real KV, rollback and logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from specllama import llama
from specllama.audit.chi_square import of_law
from specllama.core.engine import Engine
from specllama.core.events import Finished, StepEvent, TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.stats import SpecStats
from specllama.core.types import Chooser, LanguageModel, Rule
from specllama.derive import make as derive
from specllama.drafters.lookup import LookupDrafter
from specllama.drafters.model import ModelDrafter
from specllama.drafters.shape import FixedShape
from specllama.drafters.tree import TreeDrafter
from specllama.llama import LlamaModel
from specllama.llama.rollback import DEVICE, KEPT, SAVED, WINDOW
from specllama.pairs.derived import Recipe
from specllama.pairs.draft_in_target_ids import in_target_ids, read_vocab_map
from tests import tiny
from tests.enumeration import law_of, tv
from tests.exact.harness import GREEDY, PLAIN
from tests.exact.reference import Answer, History, TokenLaw, answer_law, token_law
from tests.llama.test_rollback import ARCHITECTURES, KEEPING, doubling

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

pytestmark = pytest.mark.slow

LETTERS = tiny.letters(7)  # a, b, c, d and three special tokens, the last two end an answer
N_LETTERS = 57  # of the models with more to say
PROMPT = (0, 2, 1, 3, 0)
LONG_PROMPT = PROMPT * 3  # the state is saved only after more than MOST_AGAIN tokens
TREES = {"max_leaves": 8}  # as a model is loaded for them
SHAPES = [(-1, -1), (-1, -1, 0, 0), (-1, -1, 1, 0, 2), (-1, -1, 0, 0, 1, 2, 3, 3)]
FILTERED = SamplingParams(
    temperature=0.9, top_k=4, top_p=0.97, min_p=0.03, repeat_penalty=1.3, presence_penalty=0.2, repeat_last_n=3
)
NARROW = SamplingParams(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, repeat_penalty=1.4, repeat_last_n=4)


@dataclass(frozen=True)
class Tiny:
    """A loaded target and its draft."""

    target: LlamaModel
    draft: LanguageModel

    def engine(self, n_max: int, rule: Rule = Rule.BLOCK) -> Engine:
        """A new engine on empty models; it drafts `n_max` tokens per step."""
        self.target.truncate(0)
        self.draft.truncate(0)
        drafter = ModelDrafter(self.draft, n_max=n_max, vocab_size=self.target.vocab_size)
        return Engine(self.target, drafter if n_max else None, rule=rule)

    def tree_engine(self, parents: Sequence[int], rule: Rule = Rule.BLOCK, *, lookup: bool = True) -> Engine:
        """The same with trees of this shape, and looked-up tokens beside the model's."""
        self.target.truncate(0)
        self.draft.truncate(0)
        caps = self.target.caps
        assert caps.tree
        assert self.draft.caps.tree
        shape, n_vocab = FixedShape(parents), self.target.vocab_size
        offers = LookupDrafter(n_max=4) if lookup else None
        drafter = TreeDrafter(self.draft, shape, lookup=offers, n_leaves=caps.max_leaves, vocab_size=n_vocab)
        return Engine(self.target, drafter, rule=rule)

    def plain_law(self, params: SamplingParams, n_max: int, prompt: History = PROMPT) -> dict[Answer, float]:
        """The law of plain decoding's answer, by enumeration through the target."""

        def law_at(history: History) -> TokenLaw:
            self.target.truncate(0)
            self.target.feed(history[:-1])
            return token_law(self.target.eval(history[-1:])[0].tolist(), history, params)

        return answer_law(law_at, prompt, n_max, end_tokens=self.target.end_tokens)


def answer(
    engine: Engine, params: SamplingParams, choose: Chooser, n_max: int, prompt: Sequence[int] = PROMPT
) -> Answer:
    events = list(engine.generate(prompt, params, choose, max_tokens=n_max))
    last = events[-1]
    assert isinstance(last, Finished)
    return tuple(event.token for event in events if isinstance(event, TokenEvent)), last.reason


def stats_of(engine: Engine, prompt: Sequence[int], n_max: int) -> tuple[History, SpecStats]:
    """A greedy answer without end tokens, and its counters."""
    events = list(engine.generate(prompt, unending(engine), RandomChooser(0), max_tokens=n_max))
    assert isinstance(events[-1], Finished)
    return tuple(event.token for event in events if isinstance(event, TokenEvent)), events[-1].stats


def unending(engine: Engine) -> SamplingParams:
    """Greedy, end tokens banned."""
    bias = dict.fromkeys(engine.target.end_tokens, -np.inf)
    return SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.3, logit_bias=bias)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """A target and a draft that agree about four times in five, over few enough tokens to enumerate."""
    target, draft = tiny.write_pair(tmp_path_factory.mktemp("pair"), vocabulary=LETTERS)
    with tiny.load(target, **TREES) as loaded_target, tiny.load(draft, **TREES) as loaded_draft:
        yield Tiny(loaded_target, loaded_draft)


@pytest.fixture(scope="module")
def talkers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """A pair with more to say, so that even greedy answers do not run in circles; it disagrees often."""
    target, draft = tiny.write_pair(
        tmp_path_factory.mktemp("talkers"), vocabulary=tiny.letters(N_LETTERS + 3), noise=0.15
    )
    with tiny.load(target, **TREES) as loaded_target, tiny.load(draft, **TREES) as loaded_draft:
        yield Tiny(loaded_target, loaded_draft)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """The same file loaded twice."""
    path = tiny.write_model(tmp_path_factory.mktemp("twins") / "model.gguf", vocabulary=LETTERS, seed=5)
    with tiny.load(path, n_ctx=512, **TREES) as target, tiny.load(path, n_ctx=512, **TREES) as draft:
        yield Tiny(target, draft)


def test_many_answers_have_the_law_that_enumeration_gives(pair: Tiny) -> None:
    """Everything together: generator, sampler, drafts, rollback in llama.cpp. A bias of a few percent shows here."""
    law = pair.plain_law(FILTERED, 4)
    engine, n_runs = pair.engine(3), 1200
    counts = Counter(answer(engine, FILTERED, RandomChooser(seed), 4) for seed in range(n_runs))
    assert counts.keys() <= law.keys()
    assert not of_law(counts, law).surprising


def test_counting_answers_would_notice_the_drafts_law(pair: Tiny) -> None:
    """A chi-square that anything passes: answers of the draft alone must fail it."""
    law = pair.plain_law(PLAIN, 4)
    assert isinstance(pair.draft, LlamaModel)
    engine, n_runs = Tiny(pair.draft, pair.target).engine(0), 1200
    counts = Counter(answer(engine, PLAIN, RandomChooser(seed), 4) for seed in range(n_runs))
    assert of_law(counts, law).surprising


@pytest.mark.parametrize(
    ("n_max", "rule"), [(1, Rule.TOKEN), (2, Rule.MATCH), (2, Rule.BLOCK), (3, Rule.TOKEN), (3, Rule.BLOCK)]
)
def test_the_enumerated_law_of_the_engine_is_that_of_the_target(pair: Tiny, n_max: int, rule: Rule) -> None:
    """The exact law on real logits; a KV that rolls back wrongly, or logits that depend on what was rejected."""
    require_the_targets_law(pair, n_max, rule)


@pytest.mark.parametrize(
    ("arch", "rollback", "n_max", "rule"),
    [
        *((arch, KEPT if arch in KEEPING else SAVED, 3, Rule.BLOCK) for arch in ARCHITECTURES),
        ("mamba", DEVICE, 3, Rule.BLOCK),
        ("qwen35", SAVED, 3, Rule.BLOCK),
        ("mamba", SAVED, 2, Rule.TOKEN),
        ("mamba", DEVICE, 2, Rule.TOKEN),
        ("qwen35", KEPT, 2, Rule.TOKEN),
        ("qwen35", SAVED, 2, Rule.TOKEN),
    ],
)
def test_the_enumerated_law_of_recurrent_models_is_that_of_the_target(
    tmp_path: Path, arch: str, rollback: str, n_max: int, rule: Rule
) -> None:
    """A state that remembers rejected tokens, in the target or in the draft, by each way back."""
    target, draft = tiny.write_pair(tmp_path, arch=arch, vocabulary=LETTERS)
    with tiny.load(target, rollback=rollback) as loaded_target, tiny.load(draft, rollback=rollback) as loaded_draft:
        assert loaded_target.way_back.way == loaded_draft.way_back.way == rollback
        require_the_targets_law(Tiny(loaded_target, loaded_draft), n_max, rule, LONG_PROMPT)


@pytest.mark.parametrize(("arch", "rollback"), [("mamba", SAVED), ("qwen35", KEPT)])
def test_the_enumerated_law_with_a_translated_recurrent_draft_is_that_of_the_target(
    tmp_path: Path, arch: str, rollback: str
) -> None:
    """A draft behind the adapter, whose states stand within the spelling of a token."""
    target, draft = tiny.write_pair(tmp_path, arch=arch, vocabulary=LETTERS)
    with tiny.load(target, rollback=rollback) as loaded_target, tiny.load(draft, rollback=rollback) as loaded_draft:
        require_the_targets_law(Tiny(loaded_target, doubling(loaded_draft)), 3, Rule.BLOCK, LONG_PROMPT)


def test_the_enumerated_law_with_a_cache_of_the_window_is_that_of_the_target(tmp_path: Path) -> None:
    """Rejected tokens in the cells where the cache begins anew, in the target and in the draft."""
    target, draft = tiny.write_pair(tmp_path, arch="gemma3", vocabulary=LETTERS, sliding_window=8)
    wish = {"rollback": WINDOW, "n_ctx": 512, "n_batch": 128, "max_block": 8}  # 256 cells
    with tiny.load(target, **wish) as loaded_target, tiny.load(draft, **wish) as loaded_draft:
        prompt = tuple(int(token) for token in np.random.default_rng(4).integers(0, 4, 254))
        require_the_targets_law(Tiny(loaded_target, loaded_draft), 3, Rule.BLOCK, prompt)


def require_the_targets_law(pair: Tiny, n_max: int, rule: Rule, prompt: History = PROMPT) -> None:
    def run(choose: Chooser) -> Answer:
        # From an empty KV every time: with the prompt cached, its last tokens would be read in blocks of other widths,
        # and the last bits of the logits depend on the width.
        return answer(pair.engine(n_max, rule), NARROW, choose, 3, prompt)

    found = law_of(run)
    expected = pair.plain_law(NARROW, 3, prompt)
    distance = tv(found, expected)
    print(f"TV {distance:.3g} over {len(expected)} answers")
    assert found.keys() == expected.keys()
    assert distance < 1e-5  # logits may differ in the last bits between blocks of different widths


@pytest.mark.parametrize("n_max", [1, 2, 4, 8])
def test_greedy_answers_are_those_of_plain_decoding(talkers: Tiny, n_max: int) -> None:
    """The smallest form of the promise, over prompts that end in every letter."""
    rng = np.random.default_rng(n_max)
    plain, n_rejected = talkers.engine(0), 0
    prompts = [tuple(rng.integers(0, N_LETTERS, size=int(rng.integers(1, 40))).tolist()) for _ in range(6)]
    expected = [stats_of(plain, prompt, 60)[0] for prompt in prompts]
    engine = talkers.engine(n_max)
    for prompt, tokens in zip(prompts, expected, strict=True):
        found, stats = stats_of(engine, prompt, 60)
        assert found == tokens
        n_rejected += stats.n_rejected
    assert n_rejected > 5, "a pair that always agrees shows nothing"


@pytest.mark.parametrize(("rule", "n_tokens"), [(Rule.TOKEN, 4), (Rule.BLOCK, 4), (Rule.MATCH, 3)])
def test_the_enumerated_law_of_trees_is_that_of_the_target(pair: Tiny, rule: Rule, n_tokens: int) -> None:
    """The same for rows of branches, a KV after any path, and a draft that grows its own tree."""

    def run(choose: Chooser) -> Answer:
        return answer(pair.tree_engine((-1, -1, 0), rule), NARROW, choose, n_tokens)

    found, expected = law_of(run), pair.plain_law(NARROW, n_tokens)
    assert found.keys() == expected.keys()
    assert tv(found, expected) < 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_answers_with_trees_are_those_of_plain_decoding(talkers: Tiny, shape: Sequence[int]) -> None:
    """A losing branch in either KV, after many steps with paths of every kind."""
    rng = np.random.default_rng(len(shape))
    prompts = [tuple(rng.integers(0, N_LETTERS, size=int(rng.integers(1, 40))).tolist()) for _ in range(6)]
    plain = talkers.engine(0)
    expected = [stats_of(plain, prompt, 60)[0] for prompt in prompts]
    engine, paths = talkers.tree_engine(shape), set[tuple[int, ...] | None]()
    for prompt, tokens in zip(prompts, expected, strict=True):
        events = list(engine.generate(prompt, unending(engine), RandomChooser(0), max_tokens=60))
        assert tuple(event.token for event in events if isinstance(event, TokenEvent)) == tokens
        paths |= {event.path for event in events if isinstance(event, StepEvent)}
    assert any(path and path != tuple(range(len(path))) for path in paths), "a path that is not the first"


def test_a_model_that_drafts_trees_for_itself_is_accepted_throughout(twins: Tiny) -> None:
    """A hole or a leftover cell after a tree changes the draft's logits and shows as a rejection."""
    _, stats = stats_of(twins.tree_engine((-1, -1, 0, 0, 2), lookup=False), PROMPT, 120)
    assert (stats.n_rejected, stats.n_accepted) == (0, stats.n_emitted - stats.n_steps)
    assert stats.n_steps == 31, "three of five nodes a step; at the end no more nodes than tokens that are left"


@pytest.mark.parametrize("n_max", [1, 4])
def test_a_model_that_drafts_for_itself_is_accepted_throughout(twins: Tiny, n_max: int) -> None:
    """On the real KV: a hole or a leftover cell changes the draft's logits and shows as a rejection."""
    _, stats = stats_of(twins.engine(n_max), PROMPT, 50 * (n_max + 1))
    assert (stats.n_steps, stats.n_drafted, stats.n_accepted) == (50, 50 * n_max, 50 * n_max)


@pytest.mark.parametrize("seed", range(4))
def test_the_kv_after_any_steps_holds_what_was_committed_and_nothing_else(talkers: Tiny, seed: int) -> None:
    """Rejected tokens that leave a trace. The KV is compared by the logits of four more tokens, with two others:

    one that read the same blocks with other tokens in the rejected places, which must agree to the bit; and one that
    only ever read what was committed, which must agree but for the rounding of blocks of other widths.
    """
    engine, rng = talkers.engine(1 + seed), np.random.default_rng(seed)
    blocks, emitted = some_blocks(engine, int(rng.integers(5, 30)))
    assert any(block.n_accepted < len(block.drafted) for block in blocks)
    tokens = [*PROMPT, *emitted]
    after = [tokens[-1], 0, 3, 2]
    found = talkers.target.eval(after).copy()

    talkers.target.truncate(0)
    reread(talkers.target, blocks, shift=1)
    assert talkers.target.length == len(tokens) - 1
    assert np.array_equal(found, talkers.target.eval(after))

    with tiny.load(talkers.target.path) as fresh:
        reread(fresh, blocks, shift=None)
        assert np.allclose(found, fresh.eval(after), rtol=0.0, atol=1e-4)
        fresh.truncate(0)
        fresh.feed([tokens[0] + 1, *tokens[1:-1]])
        assert not np.allclose(found, fresh.eval(after), rtol=0.0, atol=1e-2), "one wrong token would be seen"


@dataclass(frozen=True)
class Block:
    """What one step read and what came of it."""

    pending: int
    drafted: History
    n_accepted: int


def some_blocks(engine: Engine, n_blocks: int) -> tuple[list[Block], History]:
    """The first `n_blocks` steps of a greedy answer, and the tokens that they emitted."""
    blocks: list[Block] = []
    emitted: list[int] = []
    with closing(engine.generate(PROMPT, unending(engine), RandomChooser(0), max_tokens=200)) as run:  # type: ignore[type-var]
        for event in run:
            if isinstance(event, TokenEvent):
                emitted.append(event.token)
            elif isinstance(event, StepEvent):
                before = [*PROMPT, *emitted][-event.accepted - 2]
                blocks.append(Block(before, event.drafted, event.accepted))
                if len(blocks) == n_blocks:
                    break
    return blocks, tuple(emitted)


def reread(model: LlamaModel, blocks: Sequence[Block], *, shift: int | None) -> None:
    """Read `blocks` into an empty KV, rejected tokens replaced by those `shift` further, or left out where None."""
    model.feed(PROMPT[:-1])
    for block in blocks:
        n_kept = model.length + 1 + block.n_accepted
        rejected = block.drafted[block.n_accepted :] if shift is not None else ()
        others = ((token + (shift or 0)) % N_LETTERS for token in rejected)
        model.eval((block.pending, *block.drafted[: block.n_accepted], *others))
        model.truncate(n_kept)


@pytest.mark.parametrize("n_max", [3])
def test_a_sliding_window_is_rolled_back_too(tmp_path: Path, n_max: int) -> None:
    """An answer longer than the window, a good part of the drafts rejected, equals plain decoding."""
    files = tiny.write_pair(
        tmp_path, arch="gemma3", vocabulary=tiny.letters(N_LETTERS + 3), sliding_window=16, noise=0.2
    )
    with tiny.load(files[0]) as target, tiny.load(files[1]) as draft:
        models = Tiny(target, draft)
        expected, _ = stats_of(models.engine(0), PROMPT, 120)
        found, stats = stats_of(models.engine(n_max), PROMPT, 120)
    assert found == expected
    assert stats.n_rejected > 10


def test_answers_go_on_after_an_abandoned_one(talkers: Tiny) -> None:
    """On the real KV: the reader leaves after three tokens, inside a block; the conversation goes on."""
    whole, _ = stats_of(talkers.engine(0), PROMPT, 40)
    engine = talkers.engine(4)
    for n_read in (1, 2, 3, 7):
        with closing(engine.generate(PROMPT, unending(engine), RandomChooser(0), max_tokens=40)) as run:  # type: ignore[type-var]
            read = [event.token for event in islice(tokens_of(run), n_read)]
        assert engine.target.length == len(PROMPT) + n_read - 1
        going_on, _ = stats_of(engine, (*PROMPT, *read), 40 - n_read)
        assert (*read, *going_on) == whole


def tokens_of(run: Iterator[object]) -> Iterator[TokenEvent]:
    return (event for event in run if isinstance(event, TokenEvent))


def test_the_prompt_is_read_once_whatever_its_length(talkers: Tiny) -> None:
    """A prompt of three times the batch size, read in several calls, answered as in one."""
    prompt = tuple(np.random.default_rng(9).integers(0, N_LETTERS, size=200).tolist())
    expected, _ = stats_of(talkers.engine(0), prompt, 20)
    with tiny.load(talkers.target.path, n_batch=64, n_ubatch=64) as target, tiny.load(talkers.draft.path) as draft:
        found, stats = stats_of(Tiny(target, draft).engine(3), prompt, 20)
    assert found == expected
    assert stats.n_prompt == 200


def test_the_context_may_fill_up_in_the_middle_of_an_answer(talkers: Tiny) -> None:
    """Finish reason `length`, no crash, the session usable."""
    expected, _ = stats_of(talkers.engine(0), PROMPT, 28)
    with tiny.load(talkers.target.path, n_ctx=32) as target, tiny.load(talkers.draft.path, n_ctx=32) as draft:
        n_ctx = target.n_ctx
        models = Tiny(target, draft)
        engine = models.engine(4)
        found, reason = answer(engine, unending(engine), RandomChooser(0), -1)
        assert reason == "length"
        assert len(found) == n_ctx - len(PROMPT) + 1
        assert found[:28] == expected[: len(found)]
        assert stats_of(engine, PROMPT, 10)[0] == expected[:10]


def test_greedy_is_the_same_for_unfiltered_settings(talkers: Tiny) -> None:
    """End tokens included: a greedy answer that ends by itself ends in the same place."""
    expected = answer(talkers.engine(0), GREEDY, RandomChooser(0), 80)
    for n_max in (1, 3, 6):
        assert answer(talkers.engine(n_max), GREEDY, RandomChooser(0), 80) == expected


WORDS_PROMPT = (270, 900, 65, 260, 700, 0)  # 700 and 900 are among the tokens that are cut
RECIPES = [
    Recipe(n_vocab=512),
    Recipe(n_vocab=512, dropped=(1,), quant="Q4_0"),
    Recipe(dropped=(0, 2)),
]


@pytest.fixture(scope="module")
def word_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair that agrees often; the draft has a layer to spare."""
    return tiny.write_pair(tmp_path_factory.mktemp("words"), vocabulary=tiny.word_level(), n_layer=4, noise=0.1)


@contextmanager
def derived_pair(files: tuple[Path, Path], recipe: Recipe, folder: Path) -> Iterator[tuple[Tiny, Path]]:
    """The target with a draft derived by `recipe`, and the draft's file."""
    path = derive.build(files[1], recipe, folder, lambda _what, _share: None)
    tiny.trust(path)
    with tiny.load(files[0], **TREES) as target, tiny.load(path, **TREES) as draft:
        yield Tiny(target, in_target_ids(target, draft)), path


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(("n_max", "shape"), [(1, ()), (3, ()), (3, (-1, -1, 0))])
def test_the_enumerated_law_with_a_derived_draft_is_the_targets(
    word_files: tuple[Path, Path], tmp_path: Path, recipe: Recipe, n_max: int, shape: Sequence[int]
) -> None:
    """Wrongly mapped ids, tokens without a row, a spelling out of place: then q is not the law that was drawn from."""
    with derived_pair(word_files, recipe, tmp_path) as (models, path):

        def run(choose: Chooser) -> Answer:
            engine = models.tree_engine(shape, Rule.TOKEN) if shape else models.engine(n_max, Rule.TOKEN)
            return answer(engine, NARROW, choose, 2, WORDS_PROMPT)

        found, expected = law_of(run), models.plain_law(NARROW, 2, WORDS_PROMPT)
    assert found.keys() == expected.keys()
    assert tv(found, expected) < 1e-5
    if recipe.n_vocab:
        kept = read_vocab_map(llama.read_header(path))
        assert kept is not None
        said = {token for tokens, _ in expected for token in tokens}
        assert said - set(kept.tolist()), "the test needs answers with tokens that the draft lacks"


@pytest.mark.parametrize("shape", [(), (-1, -1, 0, 0, 1)])
def test_greedy_answers_with_a_cut_draft_are_those_of_plain_decoding(
    word_files: tuple[Path, Path], tmp_path: Path, shape: Sequence[int]
) -> None:
    """A draft that loses its place after tokens that it has to spell."""
    with derived_pair(word_files, Recipe(n_vocab=512), tmp_path) as (models, _):
        expected, _ = stats_of(models.engine(0), WORDS_PROMPT, 60)
        engine = models.tree_engine(shape, Rule.TOKEN) if shape else models.engine(3, Rule.TOKEN)
        found, stats = stats_of(engine, WORDS_PROMPT, 60)
    assert found == expected
    assert stats.n_drafted > stats.n_accepted
