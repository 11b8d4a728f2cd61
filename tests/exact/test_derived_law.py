"""The promise with derived drafts on the real llama.cpp: whatever is done to a draft, the law is the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specllama import llama
from specllama.core.engine import Engine
from specllama.core.sampling import SamplingParams
from specllama.core.types import Chooser
from specllama.derive import make as derive
from specllama.drafters.model import ModelDrafter
from specllama.llama import LlamaModel
from specllama.pairs.derived import Recipe
from specllama.pairs.draft_in_target_ids import in_target_ids, read_vocab_map
from tests import tiny
from tests.enumeration import law_of, tv
from tests.exact.reference import Answer, History, TokenLaw, answer_law, token_law
from tests.exact.test_tiny_llama import answer, stats_of

pytestmark = pytest.mark.slow

WORDS = tiny.word_level()
PROMPT = (270, 900, 65, 260, 700, 0)  # 700 and 900 are among what is cut
NARROW = SamplingParams(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, repeat_penalty=1.4, repeat_last_n=4)
RECIPES = [
    Recipe(n_vocab=512),
    Recipe(n_vocab=512, dropped=(1,), quant="Q4_0"),
    Recipe(dropped=(0, 2)),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair that agrees often; the draft has a layer to spare."""
    return tiny.write_pair(tmp_path_factory.mktemp("pair"), vocabulary=WORDS, n_layer=4, noise=0.1)


@pytest.fixture(scope="module")
def target(files: tuple[Path, Path]) -> Iterator[LlamaModel]:
    with tiny.load(files[0]) as loaded:
        yield loaded


def _derived(files: tuple[Path, Path], recipe: Recipe, folder: Path) -> Path:
    return derive.build(files[1], recipe, folder, lambda _what, _share: None)


def _plain_law(target: LlamaModel, n_max: int) -> dict[Answer, float]:
    def law_at(history: History) -> TokenLaw:
        target.truncate(0)
        target.feed(history[:-1])
        return token_law(target.eval(history[-1:])[0].tolist(), history, NARROW)

    return answer_law(law_at, PROMPT, n_max, end_tokens=target.end_tokens)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("n_max", [1, 3])
def test_the_enumerated_law_with_a_derived_draft_is_the_targets(
    files: tuple[Path, Path], target: LlamaModel, tmp_path: Path, recipe: Recipe, n_max: int
) -> None:
    """Ids that are mapped wrongly, tokens without a row, a spelling out of its place: q is not what was drawn from."""
    path = _derived(files, recipe, tmp_path)
    with tiny.load(path) as loaded:
        draft = in_target_ids(target, loaded)

        def run(choose: Chooser) -> Answer:
            target.truncate(0)
            draft.truncate(0)
            return answer(
                Engine(target, ModelDrafter(draft, n_max=n_max, vocab_size=target.vocab_size)),
                NARROW,
                choose,
                2,
                PROMPT,
            )

        found, expected = law_of(run), _plain_law(target, 2)
    assert found.keys() == expected.keys()
    assert tv(found, expected) < 1e-5
    if recipe.n_vocab:
        kept = read_vocab_map(llama.read_header(path))
        assert kept is not None
        said = {token for tokens, _ in expected for token in tokens}
        assert said - set(kept.tolist()), "an answer that the draft could say whole shows less"


def test_greedy_answers_with_a_cut_draft_are_those_of_plain_decoding(
    files: tuple[Path, Path], target: LlamaModel, tmp_path: Path
) -> None:
    """A draft that drifts: after tokens that it has to spell, it must still foresee something."""
    target.truncate(0)
    expected, _ = stats_of(Engine(target, None), PROMPT, 60)
    with tiny.load(_derived(files, Recipe(n_vocab=512), tmp_path)) as loaded:
        draft = in_target_ids(target, loaded)
        target.truncate(0)
        found, stats = stats_of(Engine(target, ModelDrafter(draft, n_max=3, vocab_size=target.vocab_size)), PROMPT, 60)
    assert found == expected
    assert stats.n_drafted > stats.n_accepted
