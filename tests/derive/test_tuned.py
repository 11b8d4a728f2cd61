"""All of `specllama tune` without its models: what is measured, which draft stays, and when it ends early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specllama import llama
from specllama.base.child import Tell
from specllama.base.errors import BackendError, DiskFull
from specllama.cli.tune import expected
from specllama.derive import make as derive
from specllama.derive import tuned as derive_tuned
from specllama.derive.candidates import least_cost, pass_bytes
from specllama.derive.tuned import Tuned
from specllama.drafters.controller import CostProfile
from specllama.llama import Header, LoadOptions
from specllama.llama.kernel_path import DEFAULT
from specllama.llama.quantize import QUANTS
from specllama.pairs import derived as drafts
from specllama.pairs import profile as profiles
from specllama.pairs.derived import Recipe
from specllama.pairs.profile import Profile, ProfileKey
from specllama.tuning.child import Measured, MeasureJob
from specllama.tuning.kernel_paths import Paths
from specllama.tuning.traces import Trace
from specllama.tuning.tune import TuneEffort
from tests import tiny
from tests.tuning.children import silent

N_CUT = 640
CHEAP = ((1, 0.040), (2, 0.042), (4, 0.044), (8, 0.050))
DEAR = ((1, 0.040), (2, 0.080), (4, 0.160), (8, 0.320))
Q4, CUT, BOTH = "q4_0", f"v{N_CUT}", f"q4_0+v{N_CUT}"
ATTENTION = 1e-4
EFFORT = TuneEffort(seconds=100.0, n_visits=2, n_tokens=10)


@pytest.fixture
def subject(home: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileKey:
    home.mkdir()
    (home / "target.gguf").write_bytes(b"target")
    draft = tiny.write_model(home / "draft.gguf", vocabulary=tiny.word_level())
    monkeypatch.setattr(derive_tuned, "cut_vocabulary", lambda _header: N_CUT)
    monkeypatch.setattr(derive_tuned, "worth_measuring", lambda _subject: Paths())
    monkeypatch.setattr(derive_tuned, "of_draft", lambda _subject, _path: (DEFAULT,))
    return ProfileKey(home / "target.gguf", LoadOptions(n_threads=1), draft, LoadOptions(n_threads=1))


Tune = Callable[..., Tuned]


@pytest.fixture
def tune(subject: ProfileKey, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Tunes with children that report the (cost, acceptance) that `worth` holds for a recipe's name."""
    jobs: list[str] = []

    def make(_parent: Header, recipe: Recipe, path: Path, _tell: Tell) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe.name)

    monkeypatch.setattr(derive, "make", make)

    def run(
        worth: dict[str, tuple[float, float]], verify: object = CHEAP, effort: TuneEffort = EFFORT, deaf: bool = False
    ) -> Tuned:
        def child(job: MeasureJob, _tell: Tell) -> Measured:
            if job.deep:
                return Measured(0.04, attention=ATTENTION)
            assert job.subject.draft is not None
            name = "" if job.subject.draft == subject.draft else job.subject.draft.read_text()
            jobs.append(name)
            if name not in worth or (deaf and job.n_tokens):
                raise BackendError("it died")
            cost, accepted = worth[name]
            traces = tuple(Trace("code", greedy, (accepted,) * 50, (accepted,) * 50) for greedy in (True, False))
            points = tuple(point for point in verify if job.rows is None or point[0] in job.rows)  # type: ignore[attr-defined]
            draft = ((1, cost * 0.04), (2, cost * 0.05)) if points else ()
            heard = job.n_tokens or job.answers
            return Measured(0.04, points or None, draft, traces if heard else (), ("said",) if heard else ())  # type: ignore[arg-type]

        others = derive_tuned.others_of(subject, quick=effort.n_visits == 1)
        return derive_tuned.tune(subject, others, effort, silent, run=child)

    run.jobs = jobs  # type: ignore[attr-defined]
    return run


def _kept() -> list[str]:
    return [path.read_text() for path in drafts.paths()]


def test_the_fastest_draft_stays_and_the_others_are_removed(tune: Tune) -> None:
    """Prevents: gigabytes of drafts that lost; a profile of a draft that was removed."""
    tuned = tune({"": (0.6, 0.9), Q4: (0.5, 0.89), BOTH: (0.06, 0.88), CUT: (0.58, 0.9)})
    assert _kept() == [BOTH]
    assert tuned.profile.derived == next(drafts.paths())
    assert tuned.profile.costs.draft_cost() == pytest.approx(0.06)
    assert tuned.removed == ("draft+q4_0",)
    assert (tuned.before.derived, tuned.before.costs.draft_cost()) == (None, pytest.approx(0.6))
    assert tuned.profile.classes[0].speedup > tuned.before.classes[0].speedup > 1.0


def test_drafts_that_lose_leave_nothing(tune: Tune) -> None:
    """Prevents: a draft kept for a gain within the noise."""
    tuned = tune({"": (0.2, 0.9), Q4: (0.198, 0.9), BOTH: (0.197, 0.9), CUT: (0.2, 0.9)})
    assert (_kept(), tuned.profile.derived) == ([], None)
    assert set(tuned.removed) <= {"draft+q4_0", f"draft+{BOTH}", f"draft+{CUT}"}
    assert not list(drafts.folder().iterdir())


def test_a_draft_that_cannot_win_is_not_made(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: half a minute for a cut vocabulary whose bytes save too little."""
    monkeypatch.setattr(derive_tuned, "cut_vocabulary", lambda header: header.n_vocab - 64)
    tune({"": (0.4, 0.9), Q4: (0.2, 0.9)})
    assert set(tune.jobs) == {"", Q4}  # type: ignore[attr-defined]


def test_tuning_ends_early_when_no_draft_can_pay(tune: Tune) -> None:
    """Prevents: minutes of recording answers for a draft that is too slow at 100 % acceptance."""
    tuned = tune({"": (0.9, 1.0)}, DEAR)
    assert tune.jobs == ["", ""]  # type: ignore[attr-defined]  # two visits, no answers
    assert 0.0 < tuned.findings.best_case() < tuned.best_case <= 1.02
    assert (tuned.profile.classes, tuned.profile.draft_can_pay) == ((), False)


def test_costs_are_kept_if_the_child_that_records_answers_dies(tune: Tune) -> None:
    """Prevents: minutes of measurement lost; a report that says that no draft can pay."""
    tuned = tune({"": (0.2, 0.9)}, deaf=True)
    assert tune.jobs == ["", "", ""]  # type: ignore[attr-defined]
    assert tuned.findings.failures == ("answers: it died",)
    assert (tuned.profile.classes, tuned.profile.draft_can_pay) == ((), True)
    assert tuned.profile.costs.draft_cost() == pytest.approx(0.2)
    assert "No draft can pay" not in expected(tuned)


def test_a_draft_that_cannot_be_made_is_reported_and_the_rest_is_there(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a user with a full disk who gets no profile."""

    def full(*_: object) -> None:
        raise DiskFull("the disk has 1 MB left")

    monkeypatch.setattr(derive, "make", full)
    tuned = tune({"": (0.2, 0.9)})
    assert tuned.profile.classes[0].speedup > 1.0
    assert tuned.findings.failures[0] == "weights in Q4_0: the disk has 1 MB left"
    assert (tuned.removed, _kept()) == ((), [])


def test_ctrl_c_leaves_nothing_of_what_was_made(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a draft in the cache that was never judged."""
    make, n_made = derive.make, 0

    def then_stop(*args: object) -> None:
        nonlocal n_made
        make(*args)  # type: ignore[arg-type]
        n_made += 1
        if n_made == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(derive, "make", then_stop)
    with pytest.raises(KeyboardInterrupt):
        tune({"": (0.6, 0.9), Q4: (0.5, 0.89)})
    assert (n_made, _kept()) == (2, [])


def test_drafts_from_before_are_measured_and_stay(tune: Tune, subject: ProfileKey) -> None:
    """Prevents: a draft of the user removed because another one is faster; the same draft made twice."""
    assert subject.draft is not None
    for recipe in (Recipe(quant="Q8_0"), Recipe(quant="Q4_0")):
        path = drafts.place(subject.draft, recipe)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(subject.draft.read_bytes())
        drafts.record(path, recipe, subject.draft)
    quick = derive_tuned.others_of(subject, quick=True)
    whole = derive_tuned.others_of(subject, quick=False)
    assert quick is not None
    assert whole is not None
    assert (len(quick.known), quick.recipes) == (1, ())
    used = next(path for path in whole.known if path not in quick.known)
    costs = CostProfile(verify=((1, 1.0),), draft=((1, 0.2),))
    kept = Profile(made="", target_path=DEFAULT, draft_path=DEFAULT, step_s=0.1, costs=costs, derived=used)
    profiles.save(subject, kept)
    again = derive_tuned.others_of(subject, quick=True)
    assert again is not None
    assert again.known == (used,), "the draft in use is measured, not a smaller one"
    assert [path.stem for path in whole.known] == ["draft+q4_0", "draft+q8_0"]
    assert whole.recipes == (Recipe(quant="Q4_0", n_vocab=N_CUT), Recipe(n_vocab=N_CUT))


def test_a_thorough_tuning_measures_what_a_long_context_costs(tune: Tune) -> None:
    """Prevents: drafts of the length that pays in a short context, in a long one where each row costs more."""
    worth = {"": (0.2, 0.9), Q4: (0.2, 0.9), BOTH: (0.2, 0.9), CUT: (0.2, 0.9)}
    costs = tune(worth).profile.costs
    assert costs.attention == pytest.approx(ATTENTION)
    assert costs.verify_cost(8, 4000) > costs.verify_cost(8)
    assert tune(worth, effort=TuneEffort(seconds=50.0, n_visits=1, n_tokens=10)).profile.costs.attention == 0.0


def test_a_target_alone_has_no_drafts(subject: ProfileKey) -> None:
    """Prevents: a draft derived of nothing."""
    assert derive_tuned.others_of(ProfileKey(subject.target, subject.target_options), quick=False) is None


def test_the_least_cost_follows_the_bytes_of_a_pass(subject: ProfileKey) -> None:
    """Prevents: drafts that are made in vain, or not made although they win."""
    assert subject.draft is not None
    header = llama.read_header(subject.draft)
    tensors = {tensor.name: tensor for file in header.files for tensor in file.tensors}
    assert pass_bytes(header) == sum(each.n_bytes for each in tensors.values()) - tensors["token_embd.weight"].n_bytes
    saved = tensors["output.weight"].n_bytes * (1 - N_CUT / header.n_vocab)
    assert pass_bytes(header, Recipe(n_vocab=N_CUT)) == pytest.approx(pass_bytes(header) - saved)
    assert least_cost(header, Recipe(n_vocab=N_CUT)) == pytest.approx(1 - saved / pass_bytes(header))
    n_weights = header.n_params - tensors["token_embd.weight"].n_elements
    assert least_cost(header, Recipe(quant="Q4_0")) < n_weights * QUANTS["Q4_0"].bits / 8 / pass_bytes(header)
