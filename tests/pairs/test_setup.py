"""From an `Ask` to loaded models: what is chosen, what is refused before loading, what a listener receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from specllama import llama
from specllama.base.disk import size_text
from specllama.base.errors import Interrupted, MemoryShort, PairError, UsageError
from specllama.chat.settings import strategies
from specllama.core.types import Cancel
from specllama.drafters.controller import Controller, CostProfile
from specllama.drafters.length import NO_DRAFTS, TUNED, DraftLength
from specllama.files.catalog import load_catalog
from specllama.llama import Header, LlamaModel, LoadOptions
from specllama.llama.kernel_path import DEFAULT
from specllama.llama.open import LoadProgress
from specllama.llama.rollback import WINDOW
from specllama.pairs import profile as profiles
from specllama.pairs import setup
from specllama.pairs.ask import Ask, Drafting, Hardware, Names
from specllama.pairs.profile import LOOK_AFTER, ClassFigures, Evidence, LoadSeconds, Profile
from specllama.pairs.setup import Choice, Listener, Setup, choose, for_short_answer, load_models, prepare, require_fit
from tests import tiny
from tests.headers import QWEN

pytestmark = pytest.mark.usefixtures("sound_build")
CHEAP = CostProfile(verify=((1, 1.0), (17, 1.2)), draft=((1, 0.01),))
DEAR = CostProfile(verify=((1, 1.0), (17, 1.2)), draft=((1, 5.0),))
PROFILE = Profile(
    made="2026-01-02T03:04:05+00:00", target_path=DEFAULT, draft_path=DEFAULT, step_s=0.1, costs=CHEAP,
    classes=(ClassFigures("code", True, 0.9, 0.9, 5, 1.6),),
)  # fmt: skip


class Heard(Listener):
    def __init__(self) -> None:
        self.details: list[str] = []
        self.shares: list[float] = []

    def detail(self, text: str) -> None:
        self.details.append(text)

    @contextmanager
    def loading(self) -> Iterator[Callable[[float, int], None]]:
        yield lambda share, n_bytes: self.shares.append(share)


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    target, draft = tiny.write_pair(tmp_path)
    return Ask(names=Names(target=str(target), draft=str(draft)), hardware=Hardware(n_ctx=256, n_threads=1))


def prepared(ask: Ask) -> Setup:
    return prepare(choose(ask, Listener()), Listener())


def test_both_files_are_tried_with_their_weights(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: two child processes for one new file; a draft that ends the program."""
    tried = list[Path]()
    monkeypatch.setattr(llama, "prove", lambda *headers: tried.extend(header.path for header in headers))
    prepared(ask)
    assert set(map(str, tried)) == {ask.names.target, ask.names.draft}


def test_the_default_pair_and_its_settings_are_taken_where_nothing_is_named() -> None:
    """Prevents: defaults of a pair that are ignored."""
    pair = load_catalog().pair(None)
    choice = choose(Ask(), Listener())
    assert (choice.target, choice.draft, choice.strategy) == (pair.target, pair.draft, "draft-simple")
    assert choice.length == DraftLength.auto(TUNED)
    assert choice.n_ctx == pair.defaults.n_ctx
    assert choice.recommended
    chosen = choose(Ask(drafting=Drafting(length=DraftLength(7)), hardware=Hardware(n_ctx=99)), Listener())
    assert (chosen.length, chosen.n_ctx) == (DraftLength(7), 99)
    assert choose(Ask(drafting=Drafting(spec_type="none")), Listener()).draft is None


def test_the_draft_of_a_recommended_pair_is_known_to_be_good(ask: Ask) -> None:
    """Prevents: a first answer whose draft waits for a probe, although models.toml recommends the pair."""
    assert not choose(ask, Listener()).recommended
    for recommended in (False, True):
        policy = replace(prepared(ask), length=DraftLength.auto(TUNED), recommended=recommended).policy(greedy=True)
        assert isinstance(policy, Controller)
        assert policy.calibration.blind != recommended


def test_lookup_and_a_draft_together_are_the_chain() -> None:
    """Prevents: a list whose first word alone counts."""
    for listed in ("lookup,draft-simple", "draft-simple,ngram,none", "lookup,draft-tli"):
        names = strategies("--spec-type", listed)
        choice = choose(Ask(drafting=Drafting(spec_type=names)), Listener())
        assert choice.strategy == "chain"
        assert choice.model_strategy == ("draft-tli" if "draft-tli" in names else "draft-simple")


@pytest.mark.parametrize(
    "ask",
    [
        Ask(names=Names(draft="draft.gguf")),
        Ask(names=Names(target="target.gguf"), drafting=Drafting(spec_type="draft-simple")),
        Ask(names=Names(target="target.gguf"), drafting=Drafting(spec_type="lookup,chain")),
    ],
)
def test_half_a_pair_is_refused(ask: Ask) -> None:
    """Prevents: a strategy without its draft model, or a draft for the default pair's target."""
    with pytest.raises(UsageError):
        choose(ask, Listener())


@pytest.mark.parametrize(
    ("drafting", "costs", "strategy", "has_draft", "steered"),
    [
        (Drafting(), CHEAP, "chain", True, True),
        (Drafting(), DEAR, "lookup", False, True),
        (Drafting(spec_type="draft-simple"), DEAR, "draft-simple", True, True),
        (Drafting(length=DraftLength(3)), CHEAP, "draft-simple", True, False),
        (Drafting(p_min=0.5), CHEAP, "draft-simple", True, False),
        (Drafting(spec_type="none"), CHEAP, "none", False, False),
    ],
)
def test_a_profile_decides_with_what_and_how_far_unless_that_was_asked_for(
    ask: Ask, drafting: Drafting, costs: CostProfile, strategy: str, has_draft: bool, steered: bool
) -> None:
    """Prevents: a draft loaded although it cannot pay; an explicit length that is overruled."""
    profiles.save(prepared(ask).subject, replace(PROFILE, costs=costs))
    found = prepared(replace(ask, drafting=drafting))
    assert (found.strategy, found.draft is not None, found.profile is not None) == (strategy, has_draft, steered)
    settings = found.settings(drafting, greedy=True)
    assert (settings.policy is not None, settings.p_min) == (steered, drafting.p_min)


@pytest.mark.parametrize(
    ("loads", "n_predict", "n_prompt", "costs", "is_loaded"),
    [
        (LoadSeconds(both=4.0, target=2.0), 32, 10, CHEAP, False),
        (LoadSeconds(both=4.0, target=2.0), 96, 10, CHEAP, True),
        (
            LoadSeconds(both=4.0, target=2.0),
            96,
            90,
            CostProfile(verify=CHEAP.verify, draft=((1, 0.01), (2, 1.0))),
            False,
        ),
        (LoadSeconds(both=4.0, target=2.0), -1, 10, CHEAP, True),
        (LoadSeconds(both=1.1, target=1.0), 32, 10, CHEAP, True),
        (LoadSeconds(both=3.0), 8, 10, CHEAP, False),  # by the draft's share of the bytes
        (LoadSeconds(), 1, 10, CHEAP, True),
    ],
    ids=["short", "long", "long prompt", "no end", "fast disk", "target never alone", "never seen"],
)
def test_a_draft_is_not_loaded_for_an_answer_that_is_shorter_than_its_loading_is_worth(
    ask: Ask, loads: LoadSeconds, n_predict: int, n_prompt: int, costs: CostProfile, is_loaded: bool
) -> None:
    """Prevents: a short answer that takes longer with a draft than without."""
    profiles.save(prepared(ask).subject, replace(PROFILE, loads=loads, costs=costs))
    before = prepared(ask)
    found = for_short_answer(before, n_predict=n_predict, n_prompt=n_prompt, greedy=True)
    assert (found.draft is not None, found.strategy) == ((True, "chain") if is_loaded else (False, "lookup"))
    assert (found == before) is is_loaded
    assert bool(found.too_short) is not is_loaded
    assert found.subject == before.subject


@pytest.mark.parametrize("drafting", [Drafting(spec_type="draft-simple"), Drafting(length=DraftLength(3)), Drafting()])
def test_a_draft_that_was_asked_for_or_is_to_be_measured_is_loaded_for_any_answer(ask: Ask, drafting: Drafting) -> None:
    """Prevents: a strategy or a length of the user that is not used; costs that are never measured again."""
    profile = replace(PROFILE, loads=LoadSeconds(both=4.0, target=2.0), evidence=Evidence(n_answers=LOOK_AFTER))
    profiles.save(prepared(ask).subject, profile)
    found = prepared(replace(ask, drafting=drafting))
    assert for_short_answer(found, n_predict=1, n_prompt=10, greedy=True) == found


def test_a_stale_profile_is_named_and_not_used(ask: Ask) -> None:
    """Prevents: costs of one file used for another."""
    profiles.save(prepared(ask).subject, PROFILE)
    assert ask.names.target is not None
    tiny.write_model(Path(ask.names.target), seed=2)
    found = prepared(ask)
    assert (found.profile, found.stale) == (None, "the target's file changed since")


def test_a_pair_tuned_by_text_is_translated_without_being_asked(ask: Ask) -> None:
    """Prevents: 'does not fit' for two tokenizers that were tuned; or a translation that was not asked for."""
    assert prepared(ask).model_strategy == "draft-simple"
    subject = replace(prepared(ask).subject, model_strategy="draft-tli")
    profiles.save(subject, replace(PROFILE, strategy="draft-tli"))
    assert (prepared(ask).model_strategy, prepared(ask).strategy) == ("draft-tli", "chain")
    named = prepared(replace(ask, drafting=Drafting(spec_type="draft-simple")))
    assert (named.model_strategy, named.profile) == ("draft-simple", None)


def test_memory_and_fit_are_looked_at_before_loading(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: gigabytes loaded before the refusal."""
    foreign = tiny.write_model(tmp_path / "foreign.gguf", n_vocab=14)
    with pytest.raises(PairError):
        require_fit(prepared(replace(ask, names=replace(ask.names, draft=str(foreign)))), Listener())
    require_fit(prepared(ask), Listener())
    if not llama.build_info().gpu_offload:
        monkeypatch.setattr(llama, "memory_free", lambda: 1000)
        with pytest.raises(MemoryShort):
            prepared(ask)


@pytest.mark.parametrize(("trained", "asked", "n_ctx"), [(512, None, 512), (9000, None, 4096), (512, 600, 600)])
def test_the_usual_context_is_no_longer_than_the_training_context(
    tmp_path: Path, trained: int, asked: int | None, n_ctx: int
) -> None:
    """Prevents: a warning about a context that the user did not ask for."""
    target, draft = tiny.write_pair(tmp_path, n_ctx=trained)
    wish = Ask(names=Names(target=str(target), draft=str(draft)), hardware=Hardware(n_ctx=asked, n_threads=1))
    assert prepared(wish).target_options.n_ctx == n_ctx


@pytest.mark.parametrize(
    ("trained", "n_ctx", "n_wanted", "context"),
    [
        (2048, None, 2176, 2048),
        (9000, None, 2176, 4096),
        (9000, None, 7000, 7000),
        (9000, None, 12_000, 9000),
        (9000, 512, 2176, 2176),  # the pair's
        (2048, 3000, 2176, 3000),
        (0, None, 7000, 7000),  # the file does not say
    ],
)
def test_long_runs_get_the_context_that_they_need_and_that_was_trained(
    trained: int, n_ctx: int | None, n_wanted: int, context: int
) -> None:
    """Prevents: prompts without room; a context beyond the trained one that the user did not ask for."""
    choice = Choice(Path("target.gguf"), None, "none", n_ctx, NO_DRAFTS, n_wanted=n_wanted)
    assert choice.context(replace(QWEN, n_ctx_train=trained)) == context


def test_a_context_of_zero_is_the_longest_that_both_models_have_memory_for(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a target that takes all the memory, so that the draft cannot be loaded."""
    if llama.build_info().gpu_offload:
        pytest.skip("the loader decides on a GPU")
    longest = replace(ask, hardware=Hardware(n_ctx=0, n_threads=1))
    found = prepared(longest)
    assert found.target_options.n_ctx == found.target.header.n_ctx_train
    free = found.memory_needed(512) / setup.FREE_SHARE
    monkeypatch.setattr(llama, "memory_free", lambda: int(free) + 1)
    assert prepared(longest).target_options.n_ctx == 512
    monkeypatch.setattr(llama, "memory_free", lambda: 1000)
    with pytest.raises(MemoryShort):
        prepared(longest)


@pytest.mark.parametrize("n_ctx", [2048, 0])
def test_a_pair_that_does_not_fit_whole_keeps_its_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_ctx: int
) -> None:
    """Prevents: an error, or a shorter context, for a pair whose windows fit; a profile for each free memory."""
    if llama.build_info().gpu_offload:
        pytest.skip("the loader decides on a GPU")
    target, draft = tiny.write_pair(tmp_path, arch="gemma3", n_layer=8, n_embd=64, sliding_window=8, n_ctx=2048)
    wish = Ask(names=Names(target=str(target), draft=str(draft)), hardware=Hardware(n_ctx=n_ctx, n_threads=1))
    whole = prepared(wish)
    needed = whole.memory_needed(2048)
    assert (whole.target_options.rollback, whole.target_options.n_ctx) == ("auto", 2048)
    free = needed - 1 if n_ctx else int(needed / setup.FREE_SHARE) - 2
    monkeypatch.setattr(llama, "memory_free", lambda: free)
    windows = prepared(wish)
    assert (windows.target_options.rollback, windows.target_options.n_ctx) == (WINDOW, 2048)
    assert windows.draft_options(2048).rollback == WINDOW
    assert windows.subject == whole.subject
    with load_models(windows, Listener(), Cancel()) as models:
        assert models.loaded_draft is not None
        assert models.target.way_back.way == models.loaded_draft.way_back.way == WINDOW
        assert size_text(free) in models.target.way_back.why


def test_a_way_back_that_no_model_has_is_refused(ask: Ask) -> None:
    """Prevents: `--rollback` without effect, and without a word."""
    with pytest.raises(UsageError, match="truncation"):
        prepared(replace(ask, hardware=replace(ask.hardware, rollback="saved")))
    prepared(replace(ask, hardware=replace(ask.hardware, rollback="truncation")))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_target_and_draft_are_loaded_at_once_on_the_cpu(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, *, on_gpu: bool
) -> None:
    """Prevents: a short answer that waits for the draft; two models planned for the same memory of a GPU."""
    ready, load, calls = prepared(ask), llama.load_together, list[int]()
    build = replace(llama.build_info(), gpu_offload=on_gpu)

    def loading(models: Sequence[tuple[Header, LoadOptions]], *, progress: LoadProgress) -> list[LlamaModel]:
        calls.append(len(models))
        return load(models, progress=progress)

    monkeypatch.setattr(llama, "load_together", loading)
    monkeypatch.setattr(llama, "build_info", lambda: build)
    with load_models(ready, Listener(), Cancel()) as models:
        assert models.loaded_draft is not None
    assert calls == ([1, 1] if on_gpu else [2])


def test_loading_reports_progress_over_both_files_and_can_be_stopped(ask: Ask) -> None:
    """Prevents: a bar that starts again with the second file; models that stay in memory after Ctrl-C."""
    heard = Heard()
    with load_models(prepared(ask), heard, Cancel()) as models:
        assert models.draft is models.loaded_draft is not None
    assert heard.shares == sorted(heard.shares)
    assert heard.shares[-1] == 1.0
    assert [text.split(":")[0] for text in heard.details] == ["target", "draft"]
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Interrupted):
        load_models(prepared(ask), heard, cancel)
