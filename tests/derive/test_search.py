"""The search for the fastest derived draft: what is tried and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specllama import llama
from specllama.base.child import Tell
from specllama.base.errors import BackendError
from specllama.cli.draft import view as draft_view
from specllama.derive import make as derive
from specllama.derive import search as derive_search
from specllama.derive.search import SearchOutcome, Space
from specllama.llama import Header, LoadOptions
from specllama.llama.kernel_path import KernelPath
from specllama.pairs import derived as drafts
from specllama.pairs.derived import Recipe
from specllama.pairs.profile import ProfileKey
from specllama.tuning.child import Measured, MeasureJob
from specllama.tuning.traces import Trace
from tests import tiny

CHEAP = ((1, 0.040), (2, 0.042), (4, 0.044), (8, 0.050))


@pytest.fixture
def parent(home: Path) -> Header:
    home.mkdir()
    return llama.read_header(tiny.write_model(home / "draft.gguf", vocabulary=tiny.word_level(), n_layer=8))


@pytest.fixture
def search(parent: Header, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SearchOutcome]:
    """Searches whose children report the (cost, acceptance) that `worth` holds for a recipe's name."""
    (parent.path.parent / "target.gguf").write_bytes(b"target")

    def make(_parent: Header, recipe: Recipe, path: Path, _tell: Tell) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe.name)

    monkeypatch.setattr(derive, "make", make)
    subject = ProfileKey(parent.path.parent / "target.gguf", LoadOptions(), parent.path, LoadOptions())

    def run(space: Space, worth: dict[str, tuple[float, float]], **options: object) -> SearchOutcome:
        def child(job: MeasureJob, _tell: Tell) -> Measured:
            assert job.subject.draft is not None
            name = "" if job.subject.draft == parent.path else job.subject.draft.read_text()
            if name not in worth:
                raise BackendError("it died")
            cost, accepted = worth[name]
            traces = tuple(Trace("code", greedy, (accepted,) * 50, (accepted,) * 50) for greedy in (True, False))
            verify = tuple(point for point in CHEAP if job.rows is None or point[0] in job.rows)
            draft = ((1, cost * 0.04), (2, cost * 0.05)) if verify else ()
            return Measured(0.04, verify or None, draft, traces, ("said",))  # type: ignore[arg-type]

        silent: Tell = lambda _what, _share: None  # noqa: E731
        return derive_search.search(parent, subject, space, silent, path=KernelPath(), run=child, **options)  # type: ignore[arg-type]

    return run


def _kept() -> list[str]:
    return [path.stem for path in drafts.paths()]


def test_each_change_is_tried_on_the_best_so_far_and_only_the_best_stays(search: Callable[..., SearchOutcome]) -> None:
    """Prevents: gigabytes of candidates left behind, or two harmful changes combined."""
    worth = {"": (0.4, 0.9), "q4_0": (0.2, 0.89), "q2_k": (0.19, 0.5), "q4_0+v512": (0.12, 0.88)}
    found = search(Space(("Q4_0", "Q2_K"), 512), worth)
    assert [trial.recipe.name for trial in found.trials] == ["q4_0", "q2_k", "q4_0+v512"]
    assert found.best is not None
    assert found.best.recipe == Recipe(quant="Q4_0", n_vocab=512)
    assert _kept() == ["draft+q4_0+v512"]
    record = drafts.read(next(drafts.paths()))
    assert record is not None
    (measurement,) = record.measurements
    assert (measurement.cost, measurement.parent_cost) == (pytest.approx(0.12), pytest.approx(0.4))
    assert measurement.speed == pytest.approx(found.best.speed)
    assert measurement.speed > measurement.parent_speed > 1.0
    assert draft_view.verdict(found).startswith("Weights in Q4_0, 512 tokens: ")


def test_a_draft_that_is_not_clearly_faster_is_not_kept(search: Callable[..., SearchOutcome]) -> None:
    """Prevents: a draft kept for noise, or a search without a result in words."""
    found = search(Space(("Q4_0",)), {"": (0.4, 0.9), "q4_0": (0.395, 0.9)})
    assert (found.best, found.kept, _kept()) == (None, None, [])
    assert "No derived draft is clearly faster" in draft_view.verdict(found)
    hopeless = search(Space(("Q4_0",)), {"": (2.0, 0.3), "q4_0": (1.5, 0.3)})
    assert hopeless.best is not None  # the better of two slow ones
    assert "plain decoding is faster" in draft_view.verdict(hopeless)


def test_layers_are_left_out_one_by_one_as_long_as_that_pays(
    search: Callable[..., SearchOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: important layers left out first, or more layers although the speed falls."""
    harm = {0: 0.1, 1: 0.8, 2: 0.85, 3: 0.7, 4: 0.6, 5: 0.5, 6: 0.4, 7: 0.2}
    monkeypatch.setattr(derive_search.child, "run", lambda _work, _tell: [harm[n] for n in range(8)])
    worth = {"": (0.4, 0.9), "drop2": (0.33, 0.89), "drop1.2": (0.3, 0.4), "drop1.2.3": (0.1, 0.9)}
    found = search(Space(finds_layers=True), worth)
    assert [trial.recipe.name for trial in found.trials] == ["drop2", "drop1.2"]
    assert _kept() == ["draft+drop2"]


def test_a_candidate_that_fails_is_reported_and_the_search_goes_on(search: Callable[..., SearchOutcome]) -> None:
    """Prevents: all results lost because one weight type crashes the process."""
    found = search(Space(("Q2_K", "Q4_0")), {"": (0.4, 0.9), "q4_0": (0.2, 0.9)})
    assert found.failures == ("weights in Q2_K: it died",)
    assert _kept() == ["draft+q4_0"]


def test_an_explicit_recipe_is_kept_at_any_speed(search: Callable[..., SearchOutcome]) -> None:
    """Prevents: an explicit draft that vanishes."""
    found = search(Space(), {"": (0.4, 0.9), "q2_k": (0.5, 0.2)}, only=Recipe(quant="Q2_K"))
    assert found.best is None
    assert found.kept is not None
    assert _kept() == ["draft+q2_k"]
    with pytest.raises(BackendError, match="it died"):
        search(Space(), {"": (0.4, 0.9)}, only=Recipe(quant="Q8_0"))


def test_what_was_there_before_is_used_and_stays(search: Callable[..., SearchOutcome], parent: Header) -> None:
    """Prevents: an older draft removed by a search that found a better one."""
    mine = drafts.place(parent.path, Recipe(quant="Q2_K"))
    mine.parent.mkdir(parents=True)
    mine.write_text("q2_k")
    drafts.record(mine, Recipe(quant="Q2_K"), parent.path)
    found = search(Space(("Q2_K", "Q4_0")), {"": (0.4, 0.9), "q2_k": (0.3, 0.8), "q4_0": (0.2, 0.9)})
    assert found.best is not None
    assert _kept() == ["draft+q2_k", "draft+q4_0"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_stale_draft_is_made_again_and_stays(
    search: Callable[..., SearchOutcome], parent: Header, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Prevents: a draft of the user removed because it is stale and slow, or cannot be made again."""

    def fail(*_args: object) -> None:
        raise BackendError("it died")

    mine = drafts.place(parent.path, Recipe(quant="Q2_K"))
    mine.parent.mkdir(parents=True)
    mine.write_text("q2_k")
    drafts.record(mine, Recipe(quant="Q2_K"), parent.path)
    mine.write_text("changed")
    if fails:
        monkeypatch.setattr(derive, "make", fail)
    search(Space(("Q2_K",)), {"": (0.4, 0.9), "q2_k": (0.9, 0.1)})
    assert mine.read_text() == ("changed" if fails else "q2_k")


def test_ctrl_c_leaves_nothing_of_what_was_made(
    search: Callable[..., SearchOutcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: files of half a search in the cache."""
    make = derive.make

    def then_stop(*args: object) -> None:
        make(*args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(derive, "make", then_stop)
    with pytest.raises(KeyboardInterrupt):
        search(Space(("Q4_0",)), {"": (0.4, 0.9)})
    assert _kept() == []


def test_the_default_space_suits_the_parent(parent: Header) -> None:
    """Prevents: a small vocabulary cut, or layers of a model with sliding windows left out."""
    assert derive_search.everything(parent) == Space(derive_search.QUANTS, 0, finds_layers=True)
    windowed = replace(parent, n_swa=512)
    assert not derive_search.everything(windowed).finds_layers
    assert derive_search.everything(replace(parent, n_vocab=150_000)).n_vocab == derive_search.N_VOCAB
