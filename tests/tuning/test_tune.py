"""Tuning: which ways of loading are measured, and which one is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from specllama.base.child import Tell
from specllama.base.errors import BackendError
from specllama.core.sampling import SamplingParams
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, KernelPath
from specllama.pairs.profile import LoadSeconds, ProfileKey, Threads
from specllama.tuning import child as tuner_child
from specllama.tuning import kernel_paths as tuner_paths
from specllama.tuning import tune as tuner
from specllama.tuning.child import Bench, Measured, MeasureJob, Way, run_child
from specllama.tuning.costs import READ_ROWS
from specllama.tuning.kernel_paths import Paths
from specllama.tuning.traces import Trace, TracedAnswer
from specllama.tuning.tune import Findings, Layout, MeasuredDraft, TuneEffort, Tuning, by_tokens
from tests import tiny
from tests.exact.translating import WatchedDraft
from tests.tuning.children import EFFORT, SUBJECT, Children, measured, silent

TRACES = (Trace("code", True, (0.9,) * 100, (0.9,) * 100), Trace("code", False, (0.8,) * 100, (0.8,) * 100))
DRAFT_SECONDS = ((1, 0.008), (2, 0.01))
SECONDS = ((1, 0.04), (2, 0.05), (4, 0.055), (16, 0.1))  # by rows
CHEAP = ((1, 1.0), (2, 1.25), (4, 1.4), (16, 2.5))  # in T(1)
STEEP = ((1, 1.0), (2, 2.0), (4, 4.0), (16, 16.0))
FAST, SLOW = ((1, 0.2), (2, 0.25)), ((1, 0.75), (2, 1.0))
ON, OFF = Way(DEFAULT, DEFAULT), Way(AS_IN_FILE, AS_IN_FILE)
BOTH = Paths((DEFAULT, AS_IN_FILE), (DEFAULT, AS_IN_FILE))
ONE = Paths()


def _measured(job: MeasureJob, step_s: float = 0.04) -> Measured:
    verify = tuple(point for point in SECONDS if job.rows is None or point[0] in job.rows)
    found = TRACES if job.n_tokens or job.answers else ()
    said = ("said",) if found else ()
    return Measured(step_s, verify or None, DRAFT_SECONDS if verify else (), found, said)  # type: ignore[arg-type]


def _found(*layouts: Layout, drift: float = 1.0) -> Findings:
    return Findings(layouts, (MeasuredDraft(None, layouts, TRACES),), drift=drift)


def test_ways_are_visited_in_turn_and_answers_recorded_once_on_the_fastest_path() -> None:
    """Paths measured minutes apart while the machine warms up; every child generating the same answers."""
    children = Children(lambda job: _measured(job, 0.04 if len(children.jobs) < 3 else 0.06))
    found = measured(SUBJECT, BOTH, EFFORT, silent, children)
    *jobs, heard = children.jobs
    rows = tuple(n for n, _ in SECONDS)
    assert [(job.way, job.rows) for job in jobs] == [(ON, None), *[(way, rows) for way in (OFF, ON, OFF)], (ON, ())]
    assert [job.n_tokens for job in jobs] == [0] * 5
    assert (heard.way, heard.rows, heard.n_tokens) == (ON, (), 10)
    assert (found.drafts[0].traces, found.failures) == (TRACES, ())
    assert [layout.step_s for layout in found.layouts] == [0.04, 0.04]
    assert found.drift == pytest.approx(1.5)
    assert not found.comparable
    assert jobs[0].most_step_s == math.inf
    assert jobs[1].most_step_s == pytest.approx(0.04 * tuner.SLOWEST_PLAIN)
    children.jobs.clear()
    measured(SUBJECT, ONE, replace(EFFORT, n_visits=1), silent, children)
    assert [job.rows for job in children.jobs] == [None, ()]


def test_a_path_that_kills_its_child_is_left_out_and_told() -> None:
    """A crash of `tune` itself; a second visit to a path that died."""
    children = Children(_measured, dies=lambda job: job.way == ON)
    found = measured(SUBJECT, BOTH, EFFORT, silent, children)
    assert [layout.way for layout in found.layouts] == [OFF]
    assert found.drafts[0].traces == TRACES
    assert found.failures == ("rearranged weights: it died",)
    assert [job.way for job in children.jobs] == [ON, OFF, OFF, OFF]
    with pytest.raises(BackendError, match="it died"):
        measured(SUBJECT, BOTH, EFFORT, silent, Children(_measured, dies=lambda job: True))


def test_paths_without_time_are_reported() -> None:
    """Prevents: a slow machine where nothing says that only the default path was measured."""
    found = measured(SUBJECT, BOTH, replace(EFFORT, seconds=0.0), silent, Children(_measured))
    assert [layout.way for layout in found.layouts] == [ON]
    assert [failure.partition(": ")[2] for failure in found.failures] == [tuner.NO_TIME]
    tried = _tried((DEFAULT, AS_IN_FILE), Children(_measured), seconds=0.0).findings
    assert [failure.partition(": ")[2] for failure in tried.failures] == [tuner.NO_TIME]


def test_blocks_that_took_less_time_than_one_row_are_measured_again_and_never_kept() -> None:
    """A busy machine on which four rows seemed to cost a ninth of one: a profile that promised 23 times the speed."""
    held_up = ((1, 0.4), (2, 0.05), (4, 0.05))

    def once(job: MeasureJob) -> Measured:
        n = len(children.jobs)
        return replace(
            _measured(job), verify=held_up if n == 1 else SECONDS, draft=held_up if n == 2 else DRAFT_SECONDS
        )

    children = Children(once)
    with pytest.raises(BackendError, match="too busy"):  # the target's blocks first, then the draft's
        measured(SUBJECT, ONE, replace(EFFORT, n_visits=1), silent, children)
    assert len(children.jobs) == 2
    found = measured(SUBJECT, ONE, EFFORT, silent, children)
    assert found.layouts[0].verify is not None
    assert found.failures == ()


@pytest.mark.parametrize(("n_held_up", "kept"), [(2, True), (4, False)])
def test_a_default_path_that_was_held_up_is_not_given_up_for_another(n_held_up: int, kept: bool) -> None:
    """Weights kept as in the file because a backup ran while the default path was measured."""
    n_runs = 0

    def run(job: MeasureJob, _tell: Tell) -> Measured:
        nonlocal n_runs
        n_runs += job.way == ON
        held_up = job.way == ON and n_runs <= n_held_up
        found = _measured(job)
        return replace(found, verify=((1, 0.4), (2, 0.05))) if held_up and found.verify else found

    if kept:
        found = measured(SUBJECT, BOTH, EFFORT, silent, run)
        assert [layout.way for layout in found.layouts] == [ON, OFF]
        assert tuner.choose(found, quick=False).target_path == DEFAULT
    else:
        for effort in (EFFORT, replace(EFFORT, n_visits=1)):
            n_runs = 0
            with pytest.raises(BackendError, match="too busy"):
                measured(SUBJECT, BOTH, effort, silent, run)


def test_target_and_draft_get_the_path_that_is_best_for_each() -> None:
    """The target's path used for the draft, for which it is four times slower."""
    profile = tuner.choose(_found(Layout(ON, 0.04, CHEAP, SLOW), Layout(OFF, 0.041, STEEP, FAST)), quick=False)
    assert (profile.target_path, profile.draft_path) == (DEFAULT, AS_IN_FILE)
    assert profile.costs.draft_cost() == pytest.approx(0.2 * 0.041 / 0.04)
    greedy, sampled = profile.classes
    assert (greedy.greedy, greedy.acceptance, sampled.acceptance) == (True, pytest.approx(0.9), pytest.approx(0.8))
    assert greedy.speedup > sampled.speedup > 1.2
    assert greedy.n_max >= 3


@pytest.mark.parametrize(
    ("on", "off", "drift", "path"),
    [
        (Layout(ON, 0.04, STEEP, FAST), Layout(OFF, 0.044, CHEAP, FAST), 1.0, DEFAULT),  # plain decoding is slow there
        (Layout(ON, 0.04, CHEAP, FAST), Layout(OFF, 0.99 * 0.04, CHEAP, FAST), 1.0, DEFAULT),  # no clear gain
        (Layout(ON, 0.04, CHEAP, FAST), Layout(OFF, 0.8 * 0.04, CHEAP, FAST), 1.0, AS_IN_FILE),
        (Layout(ON, 0.2, STEEP, SLOW), Layout(OFF, 0.04, CHEAP, FAST), 1.2, DEFAULT),  # a busy machine
        (Layout(ON, 0.2, STEEP, SLOW), Layout(OFF, 0.04, CHEAP, FAST), 1.05, AS_IN_FILE),
    ],
)
def test_another_path_is_chosen_only_for_a_clear_gain(on: Layout, off: Layout, drift: float, path: KernelPath) -> None:
    """Noise, a busy machine or a path on which a single row is slow, deciding how models are loaded."""
    profile = tuner.choose(_found(on, off, drift=drift), quick=True)
    assert (profile.target_path, profile.draft_path) == (path, path)


def test_the_profile_names_the_path_on_which_plain_decoding_is_fastest() -> None:
    """Drafts compared with plain decoding on a path that slows plain decoding down."""
    for factor, plain in ((0.96, DEFAULT), (0.995, AS_IN_FILE), (1.2, AS_IN_FILE)):
        layouts = Layout(ON, factor * 0.04, STEEP, FAST), Layout(OFF, 0.04, CHEAP, FAST)
        profile = tuner.choose(_found(*layouts), quick=False)
        assert (profile.target_path, profile.plain_path) == (AS_IN_FILE, plain), factor
    busy = replace(_found(*layouts), drift=1.2)
    assert tuner.choose(busy, quick=False).plain_path == DEFAULT


DERIVED = Path("draft+q4_0.gguf")


def _tried(paths: Sequence[KernelPath], children: Children, seconds: float = 1.0) -> Tuning:
    """A pair and a derived draft, measured."""
    tuning = Tuning(SUBJECT, EFFORT, silent, children)
    tuning.compare(ONE)
    tuning.hear()
    with tuning.attempt("derived", 1.0):
        tuning.try_draft(DERIVED, paths, seconds, silent)
    return tuning


@pytest.mark.parametrize(("n_held_up", "n_found"), [(1, 1), (2, 0)])
def test_a_derived_draft_whose_passes_were_held_up_is_measured_again_or_left_out(n_held_up: int, n_found: int) -> None:
    """A draft chosen because it seemed to read two tokens in a third of the time of one."""

    def child(job: MeasureJob) -> Measured:
        n = sum(each.subject.draft == DERIVED for each in children.jobs)
        found = _measured(job)
        return replace(found, draft=((1, 0.03), (2, 0.01))) if 0 < n <= n_held_up else found

    children = Children(child)
    found = _tried([DEFAULT], children).findings
    assert len(found.drafts) == 1 + n_found
    assert [job.subject.draft for job in children.jobs].count(DERIVED) == 2
    assert [text.partition(":")[0] for text in found.failures] == ["derived"] * (1 - n_found)


def test_derived_drafts_are_judged_once_by_the_same_answers_and_measured_alone() -> None:
    """Answers generated again for every draft; the target's curve measured again; other threads."""
    threads = Threads(2, 1, 2)
    children = Children(lambda job: replace(_measured(job), threads=threads))
    paths = (DEFAULT, AS_IN_FILE)
    found = _tried(paths, children).findings
    jobs = [job for job in children.jobs if job.subject.draft == DERIVED]
    assert [job.way for job in jobs] == [Way(DEFAULT, path) for path in paths]
    assert [(job.threads, job.answers, job.rows) for job in jobs] == [(threads, ("said",), (1,)), (threads, (), (1,))]
    assert (children.jobs[0].threads, children.jobs[0].answers) == (None, ())
    assert found.threads == threads
    _, draft = found.drafts
    assert (draft.path, draft.traces) == (DERIVED, TRACES)
    assert draft.layouts[0].draft == ((1, pytest.approx(0.2)), (2, pytest.approx(0.25)))


@pytest.mark.parametrize(
    ("dead", "alive", "failures"),
    [
        ({DEFAULT, AS_IN_FILE}, [], ("derived: it died",)),
        ({DEFAULT}, [AS_IN_FILE], ("draft+q4_0, rearranged weights: it died",)),
    ],
)
def test_a_derived_draft_that_dies_is_reported_and_nothing_else_is_lost(
    dead: set[KernelPath], alive: list[KernelPath], failures: tuple[str, ...]
) -> None:
    """Minutes of tuning lost because a cached file is damaged; a draft given up because one layout crashes."""
    children = Children(_measured, dies=lambda job: job.subject.draft == DERIVED and job.way.draft in dead)
    found = _tried((DEFAULT, AS_IN_FILE), children).findings
    assert [layout.way.draft for draft in found.drafts[1:] for layout in draft.layouts] == alive
    assert all(draft.traces == TRACES for draft in found.drafts)
    assert found.failures == failures
    assert found.layouts


def _with_variant(points: tuple[tuple[int, float], ...]) -> Findings:
    published = Layout(ON, 0.04, CHEAP, SLOW)
    derived = MeasuredDraft(DERIVED, (Layout(ON, 0.04, None, points),), TRACES, loads=LoadSeconds(3.0, 2.0))
    found = _found(published)
    return replace(found, drafts=(*found.drafts, derived), threads=Threads(1, 2, 1))


def test_the_profile_names_the_derived_draft_where_it_is_clearly_faster() -> None:
    """A derived draft that is never used, or one chosen for a gain within the noise."""
    better = tuner.choose(_with_variant(FAST), quick=False)
    assert (better.derived, better.threads) == (DERIVED, Threads(1, 2, 1))
    assert better.loads == LoadSeconds(3.0, 2.0)
    assert better.costs.draft_cost() == pytest.approx(0.2)
    same = tuner.choose(_with_variant(tuple((n, 0.99 * cost) for n, cost in SLOW)), quick=False)
    assert same.derived is None
    own, derived = tuner.judged(_with_variant(FAST), same)
    assert (own.path, derived.path, derived.cost) == (None, DERIVED, pytest.approx(0.2))
    assert derived.speed > own.speed == tuner.mean_speed(same.classes)


def test_a_cut_vocabulary_must_be_worth_the_languages_that_it_lacks() -> None:
    """A draft that is 5 % faster in English and drafts next to nothing in Chinese."""
    found = _with_variant(FAST)
    own, derived = found.drafts
    whole = replace(derived, path=Path("whole.gguf"))
    slightly = tuple((n, 0.8 * cost) for n, cost in FAST)
    cut = replace(derived, layouts=(replace(derived.layouts[0], draft=slightly),), is_cut=True)
    assert tuner.choose(replace(found, drafts=(own, whole, replace(cut, is_cut=False))), quick=False).derived == DERIVED
    for order in ((own, whole, cut), (own, cut, whole)):
        assert tuner.choose(replace(found, drafts=order), quick=False).derived == whole.path
    assert tuner.choose(replace(found, drafts=(own, cut)), quick=False).derived == DERIVED


def test_on_a_busy_machine_a_derived_draft_is_told_as_it_was_chosen_by() -> None:
    """The figures of a path that is not loaded."""
    busy = replace(_with_variant(SLOW), drift=1.2)
    own, derived = busy.drafts
    two = (*derived.layouts, Layout(Way(DEFAULT, AS_IN_FILE), 0.04, None, FAST))
    busy = replace(busy, drafts=(own, replace(derived, layouts=two)))
    _, told = tuner.judged(busy, tuner.choose(busy, quick=False))
    assert told.cost == pytest.approx(0.75)


def test_a_draft_that_is_spelled_is_charged_for_its_spelling() -> None:
    """A draft with another tokenizer that seems cheaper than it is: some target tokens are several of its own."""
    cells = ((1, 0.2), (2, 0.3), (8, 0.9), (32, 3.3))
    expected = ((1, 0.25), (2, 0.4), (8, 1.3), (32, 4.9))
    assert [n for n, _ in by_tokens(cells, 1.5)] == [n for n, _ in expected]
    assert [cost for _, cost in by_tokens(cells, 1.5)] == pytest.approx([cost for _, cost in expected])
    assert by_tokens(cells, 1.0) == cells
    draft = WatchedDraft(6, n_ctx=400)
    bench = object.__new__(Bench)
    bench.draft, bench.rest, bench.before = draft, [1, 4, 0, 5, 3, 1, 4, 4] * 16, [0] * 128
    draft.feed(bench.before)
    assert bench.n_spelled([TracedAnswer("code", (), (0, 1, 4, 5), 6, SamplingParams(), (), ())]) == 2.0
    assert bench.n_spelled([]) == pytest.approx((128 + 16 * (2 + 3 + 1 + 2 + 1 + 2 + 3 + 3)) / 256)
    for n_rows in READ_ROWS:
        draft.fake.calls.clear()
        bench.reading(n_rows)()
        assert sum(len(call.tokens) for call in draft.fake.calls if call.name in ("feed", "eval")) == n_rows


def test_each_draft_is_charged_for_its_own_spelling_in_what_the_target_says() -> None:
    """A spelling counted in the prompts; one spelling for all derived drafts."""

    def child(job: MeasureJob) -> Measured:
        n_spelled = 1.5 if job.subject.draft == DERIVED else 1.25
        return replace(_measured(job), n_spelled=n_spelled if job.n_tokens or job.answers else 1.0)

    found = replace(_tried((DEFAULT, AS_IN_FILE), Children(child)).findings, strategy="draft-tli")
    assert [draft.n_spelled for draft in found.drafts] == [1.25, 1.5]
    own, derived = (found.costs(found.layouts[0], draft) for draft in found.drafts)
    assert (own.draft_cost(), derived.draft_cost()) == (pytest.approx(0.2125), pytest.approx(0.225))
    assert tuner.choose(found, quick=False).strategy == "draft-tli"
    assert tuner.choose(_found(Layout(ON, 0.04, CHEAP, FAST)), quick=False).strategy == "draft-simple"


class _Threaded:
    """A `Bench` whose passes take a time that depends on the threads."""

    def __init__(self, seconds: dict[int, float], clock: list[float]) -> None:
        self.draft, self.used, self._seconds, self._clock = object(), Threads(0, 0, 0), seconds, clock

    def default_threads(self) -> Threads:
        return Threads(4, 4, 4)

    def use(self, threads: Threads) -> None:
        self.used = threads

    def verifying(self, n_rows: int) -> object:
        return lambda: self._pass(self.used.decode if n_rows == 1 else 4 * self.used.verify)

    def reading(self, _n_rows: int) -> object:
        return lambda: self._pass(self.used.draft)

    def _pass(self, n: int) -> None:
        self._clock[0] += self._seconds[n]


def test_each_kind_of_pass_gets_the_threads_that_are_clearly_best_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of threads for all passes; another number for a gain of one percent."""
    clock = [0.0]
    timed = partial(tuner_child.interleaving, clock=lambda: clock[0])
    monkeypatch.setattr(tuner_child, "interleaving", timed)
    monkeypatch.setattr(tuner_child, "thread_choices", lambda: (4, 2, 8))
    bench = _Threaded({4: 1.0, 2: 0.5, 8: 0.99, 16: 1.0, 32: 0.7}, clock)
    assert tuner_child.find_threads(bench, 1.0, lambda share: None) == Threads(2, 8, 2)  # type: ignore[arg-type]
    bench = _Threaded({4: 1.0, 2: 1.2, 8: 0.99, 16: 1.0, 32: 0.7}, clock)
    assert tuner_child.find_threads(bench, 1.0, lambda share: None) == Threads(4, 8, 4)  # type: ignore[arg-type]


@pytest.mark.slow
def test_real_children_measure_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defects that the stand-ins hide, such as data that cannot be sent to a child."""
    options = {"vocabulary": tiny.byte_level(), "chat_template": tiny.CHATML, "n_ctx": 4096}
    target, draft = tiny.write_pair(tmp_path, **options)
    one_thread = LoadOptions(n_threads=1)
    subject = ProfileKey(target, one_thread, draft, replace(one_thread, max_block=1))
    told: list[str] = []
    effort = TuneEffort(seconds=60.0, n_visits=1, n_tokens=4)
    monkeypatch.setattr(tuner_child, "LEAST_COST", 0.0)  # any other program disturbs passes this short
    paths = tuner_paths.worth_measuring(subject)
    assert (paths.target, paths.draft) == ((DEFAULT,), (DEFAULT,))  # nothing of F32 is rearranged
    found = measured(subject, paths, effort, lambda what, share: told.append(f"{what} {share <= 1.0}"), run_child)
    assert found.failures == ()
    assert [n for n, _ in found.layouts[0].draft] == list(READ_ROWS)
    assert {trace.name for trace in found.drafts[0].traces} == {"code", "summary", "story", "question"}
    assert {"loading True", "measuring passes True", "recording answers True"} <= set(told)
    profile = tuner.choose(found, quick=True)
    assert profile.step_s > 0
    assert profile.loads.both > profile.loads.target > 0
