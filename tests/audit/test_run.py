"""The audit: a correct program passes, every fault is caught, and near-ties are no bugs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from specllama.audit import greedy as audit_greedy
from specllama.audit import kv as audit_kv
from specllama.audit import run as audit
from specllama.audit import self_test as audit_self_test
from specllama.audit.faults import FAULTS, Fault, Miscounting
from specllama.audit.kv import Along
from specllama.audit.law import END, Distance, distance
from specllama.audit.models import Recorded, Remembered, Undecided, again, n_dropped
from specllama.audit.parts import AuditEffort, AuditPrompt, AuditSubject, Combination, Parts
from specllama.audit.reference import target_law
from specllama.audit.report import KV_BOUND, LAW_BOUND, AuditReport, LawRow
from specllama.audit.sampling import AuditedContext
from specllama.base.errors import DraftLawError
from specllama.cli.audit.view import markdown
from specllama.core.arrays import FloatArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import SamplingParams, law
from specllama.core.types import Caps, Draft, Observation, Rule, Verdict, room_after
from specllama.drafters import DraftSettings
from specllama.drafters.length import DraftLength
from tests.exact.harness import agreeing
from tests.exact.reference import token_law
from tests.exact.test_constraint import FakeConstraint
from tests.exact.translating import WatchedDraft
from tests.fakes import FakeModel, History, RandomTable, Table

N_VOCAB = 6
TINY = AuditEffort(
    n_prompts=2, n_tokens=12, n_contexts=2, most_branches=150, n_enumerated=2, n_draws=60, n_runs=3, n_steps=6
)
LEAST = replace(TINY, n_prompts=1, n_draws=1, n_runs=1)
PROMPTS = (AuditPrompt("first", (0, 1, 2, 3, 0, 1, 4)), AuditPrompt("second", (3, 3, 1)))


def alternating(said: History) -> tuple[int, ...]:
    """3 first, then what depends on the sum of all tokens."""
    return (3,) if not said else ((0, 1, 2, 5), (1, 3, 4, 5), (0, 2, 4, 5))[sum(said) % 3]


def subject(table: Table | None = None, **changes: object) -> AuditSubject:
    """A pair that often agrees, with few tokens; the last token ends an answer."""
    table = table or RandomTable(N_VOCAB, 1)
    ends = frozenset({N_VOCAB - 1})
    made = AuditSubject(
        target=FakeModel(table, N_VOCAB, 600, ends),
        draft=FakeModel(agreeing(table, N_VOCAB, 7), N_VOCAB, 600, ends),
        prompts=PROMPTS,
        params=SamplingParams(temperature=1.0, top_k=3, min_p=0.02),
        strategies=("draft-simple", "lookup", "chain", "tree"),
        rules=tuple(Rule),
        drafting=DraftSettings(length=DraftLength(4)),
        seed=3,
        piece=lambda token: bytes([97 + token]),
        constraint=lambda: FakeConstraint(alternating, end=N_VOCAB - 1, strict=False),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def report_of(what: AuditSubject, effort: AuditEffort = TINY, *, self_test: bool = False) -> AuditReport:
    *progress, report = audit.run(what, effort, {"seed": what.seed}, self_test=self_test)
    assert isinstance(report, AuditReport)
    shares = [each.share for each in progress if isinstance(each, audit.AuditProgress)]
    assert shares == sorted(shares)
    assert report.partial or shares[-1] == pytest.approx(1.0)
    return report


@pytest.fixture(scope="module")
def healthy() -> AuditReport:
    """The audit of a correct program, with its self-test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_self_test, "MOST", replace(audit_self_test.MOST, n_draws=400))
        return report_of(subject(), self_test=True)


@pytest.mark.slow
def test_a_correct_program_passes(healthy: AuditReport) -> None:
    """Prevents: false alarms, and an audit that measures nothing."""
    assert healthy.passed, healthy.bugs
    assert not healthy.partial
    assert {(row.strategy, row.rule) for row in healthy.laws} == {
        (strategy, rule.value) for strategy in ("draft-simple", "lookup", "chain", "tree") for rule in Rule
    }
    assert all(row.n_contexts == 3 and row.n_masked == 1 and row.n_open == 3 for row in healthy.laws)
    assert all(row.n_drafted_in >= 1 and row.longest >= 2 for row in healthy.laws)
    assert max(row.distance.tv for row in healthy.laws) < 1e-12
    assert {run.n_max for run in healthy.greedy} == {1, 2, 3, 4}
    assert sum(run.n_drafted for run in healthy.greedy) > sum(run.n_accepted for run in healthy.greedy) > 0
    assert {row.model for row in healthy.kv} == {"target", "draft"}
    assert all(row.difference == 0.0 < row.wrong and row.n_dropped for row in healthy.kv if row.strategy != "lookup")
    assert {run.kind for run in healthy.greedy} == {"greedy", "same seed", "in a format"}
    assert all(row.test.n_draws == 180 for row in healthy.draws)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(healthy: AuditReport, fault: Fault) -> None:
    assert healthy.faults is not None
    (row,) = (each for each in healthy.faults if each.fault == fault.name)
    assert row.caught, row.figure


@pytest.mark.slow
def test_the_settings_and_the_pair_hide_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: "not caught" with one file as target and draft, at temperature 0, or with a p-min that stops drafts."""
    monkeypatch.setattr(audit_self_test, "MOST", replace(audit_self_test.MOST, n_draws=400))
    table = RandomTable(N_VOCAB, 1)
    same = subject(
        table,
        draft=FakeModel(table, N_VOCAB, 600, frozenset({N_VOCAB - 1})),
        params=SamplingParams(temperature=0.0, logit_bias={1: 100.0}),
        drafting=DraftSettings(length=DraftLength(4), p_min=1.0, temperature=0.0),
    )
    assert [row.fault for row in audit_self_test.catch_all(same, FAULTS) if not row.caught] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_broken_program_does_not_pass(fault: Fault) -> None:
    """Prevents: faults that the self-test catches and the audit itself does not."""
    broken = subject(parts=fault.parts, strategies=(fault.strategy,), rules=(fault.rule,))
    effort = replace(
        LEAST,
        n_draws=1 if fault.section == "law" or not (fault.section == "draws" or fault.needs_format) else 500,
        n_contexts=6 if fault.needs_tree or fault.needs_format else 2,
    )
    with suppress(DraftLawError):  # a draft that the engine refuses is no answer
        assert not report_of(broken, effort).passed


def test_a_fault_without_a_comparison_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: an error of Python reported as a fault that was caught."""
    fault = next(fault for fault in FAULTS if fault.section == "kv")
    monkeypatch.setattr(audit_kv, "check", lambda *_: iter(()))
    assert [row.caught for row in audit_self_test.catch_all(subject(), (fault,))] == [False]


@pytest.mark.slow
def test_a_fault_that_is_not_caught_fails_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = replace(FAULTS[0], parts=Parts())
    monkeypatch.setattr("specllama.audit.self_test.FAULTS", (harmless,))
    one = subject(strategies=("draft-simple",), rules=(Rule.TOKEN,))
    report = report_of(one, replace(LEAST, n_contexts=1), self_test=True)
    assert report.bugs == [f"self-test: not caught: {harmless.name}"]


def test_a_fault_that_one_context_cannot_show_is_looked_for_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: "not caught" for a draft that the target rarely accepts."""
    measured: list[str] = []

    def measure(self: AuditedContext, combination: Combination, effort: AuditEffort) -> LawRow:
        measured.append(self.context.name)
        tv = 0.1 if len(measured) % 3 == 0 else 0.0
        return LawRow("draft-simple", "block", 1, 0, 1, 1, 2, 0, 9, Distance(tv, tv, tv, tv))

    monkeypatch.setattr(AuditedContext, "measure", measure)
    fault = next(each for each in FAULTS if each.section == "law")
    assert [row.caught for row in audit_self_test.catch_all(subject(), (fault,))] == [True]
    assert len(set(measured)) == 3


def test_without_a_draft_model_lookups_are_audited_and_the_faults_that_they_can_show() -> None:
    """Prevents: a self-test that fails without a draft model."""
    alone = subject(draft=None, strategies=("lookup",))
    report = report_of(alone, LEAST, self_test=True)
    assert report.passed, report.bugs
    assert 5 <= len(report.faults or ()) < len(FAULTS)
    assert {row.model for row in report.kv} == {"target"}


def test_what_could_not_be_measured_is_reported() -> None:
    """Prevents: a proof without data: laws with too many branches, or a lookup that never drafts."""
    one = subject(strategies=("draft-simple",), rules=(Rule.TOKEN,))
    report = report_of(one, replace(LEAST, most_branches=1))
    assert report.passed
    assert [row.n_wide for row in report.laws] == [3]
    assert report.gaps == [
        "draft-simple, token: every context has too many branches; use a smaller --top-k",
        "formats: no context of an answer in a format was measured",
    ]
    silent = subject(
        strategies=("lookup",), rules=(Rule.MATCH,), drafting=DraftSettings(length=DraftLength(2), p_min=1.0)
    )
    assert report_of(silent, LEAST).gaps == ["lookup, match: nothing was drafted in any context"]


def test_a_pair_without_end_tokens_is_audited_without_formats() -> None:
    """Prevents: an error where no answer in a format can end; faults that cannot show."""
    report = report_of(subject(constraint=None, strategies=("draft-simple",), rules=(Rule.TOKEN,)), LEAST)
    assert report.passed
    assert report.gaps == ["formats: no context of an answer in a format was measured"]
    assert {run.kind for run in report.greedy} == {"greedy", "same seed"}
    assert not any(fault.needs_format for fault in audit_self_test.faults_for(subject(constraint=None)))


@pytest.mark.slow
def test_an_interrupted_audit_reports_what_was_done() -> None:
    """Prevents: no result after Ctrl-C, or a part that is taken for the whole."""
    for n_seen, parts in ((3, ["greedy"]), (15, ["greedy", "laws"])):
        what = subject()
        items = []
        for item in audit.run(what, TINY, {}):
            items.append(item)
            if len(items) == n_seen:
                what.cancel.set()
        report = items[-1]
        assert isinstance(report, AuditReport)
        assert report.partial
        assert [name for name in ("greedy", "laws", "kv") if getattr(report, name)] == parts


@pytest.mark.slow
def test_the_report_is_json_with_its_schema(healthy: AuditReport) -> None:
    """Prevents: numbers that JSON does not have, or a file without a schema."""
    data = json.loads(json.dumps(healthy.to_json(), allow_nan=False))
    assert (data["schema"]["name"], data["schema"]["version"]) == ("specllama.audit", 1)
    assert (data["passed"], data["partial"], data["bugs"], data["seed"]) == (True, False, [], 3)
    assert {"greedy", "laws", "draws", "along", "kv", "self_test", "bounds"} <= set(data)
    assert data["laws"][0]["distance"]["tv"] <= data["bounds"]["law"] == LAW_BOUND


class Jittery(FakeModel):
    """The last bits of the logits depend on the block size, as on some builds of llama.cpp."""

    def eval(self, tokens: Sequence[int], parents: Sequence[int] | None = None) -> FloatArray:
        rows = super().eval(tokens, parents).copy()
        rows += 1e-3 * np.random.default_rng([len(tokens), self.length]).standard_normal(rows.shape)
        return rows


def test_a_near_tie_is_reported_and_is_no_bug() -> None:
    """Prevents: an audit that fails because of rounding, or that hides where texts differ."""
    table = RandomTable(N_VOCAB, 5, ties=True, spread=0.8)  # two largest logits are often equal, and the jitter decides
    jittery = subject(table, target=Jittery(table, N_VOCAB, 600))
    runs = tuple(audit_greedy.compare(jittery, TINY))
    parted = [run.difference for run in runs if run.difference]
    assert parted
    assert all(each.near_tie and each.moved > 0.0 for each in parted)
    assert all(run.difference.gap < 0.01 for run in runs if run.difference and not run.same_seed)
    assert all(each.reread <= 0.0 for each in parted), "the same blocks say the same without a draft"
    assert AuditReport(about={}, greedy=runs).passed


def test_the_distance_of_a_law_is_that_of_the_documents() -> None:
    """Prevents: a distance that misses moved mass; the law is that of a known mistake (docs/design.md)."""
    found = distance({(0,): 0.550, (1,): 0.171, (2,): 0.279}, lambda _: {0: 0.5, 1: 0.3, 2: 0.2})
    assert (found.first_error, found.error) == pytest.approx((0.129, 0.129))
    assert (found.first_tv, found.tv) == pytest.approx((0.129, 0.129))


def test_blocks_of_different_lengths_are_completed_by_p() -> None:
    """Prevents: a short block taken for a whole text; impossible or missing tokens that are not counted."""
    p = {0: 0.5, 1: 0.5}
    exact = {(0, 0): 0.125, (0,): 0.25, (0, 1): 0.125, (1,): 0.5}
    assert distance(exact, lambda _: p).tv == pytest.approx(0.0, abs=1e-15)
    assert distance({(0, 0): 0.25, (0,): 0.25, (1,): 0.5}, lambda _: p).tv == pytest.approx(0.125)
    assert distance({(0,): 1.0}, lambda _: p).tv == pytest.approx(0.5)
    assert distance({(0,): 0.5, (7,): 0.5}, lambda _: p).tv == pytest.approx(0.5)
    assert distance({(0,): 0.5, (END,): 0.5}, lambda _: {0: 0.5, END: 0.5}).tv == 0.0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, repeat_penalty=1.3),
        SamplingParams(temperature=1.7, top_k=3, top_p=0.6, min_p=0.0, logit_bias={2: 1.5, 4: -np.inf}),
        SamplingParams(temperature=0.7, top_k=0, top_p=0.9, min_p=0.1, repeat_penalty=1.4, presence_penalty=0.3,
                       frequency_penalty=0.2, repeat_last_n=-1),
        SamplingParams(repeat_penalty=1.4, repeat_last_n=0),
    ],
)  # fmt: skip
def test_the_audits_own_sampler_is_that_of_the_definitions(params: SamplingParams) -> None:
    """Prevents: a reference with the same mistake as the sampler, or with one of its own."""
    table, history = RandomTable(40, 11), (1, 2, 3, 2, 2, 4)
    for n in range(len(history)):
        row = table(history[: n + 1])
        found = target_law(row, history, params)
        expected = token_law(row.tolist(), history, params)
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, abs=1e-14)
        ids, probs = law(row, history, params).items()
        assert found == pytest.approx(dict(zip(ids.tolist(), probs.tolist(), strict=True)), abs=1e-14)


def test_a_remembered_model_reads_every_text_once() -> None:
    """Prevents: rows of another text, or a pass of the real model for every branch."""
    table = RandomTable(N_VOCAB, 3)
    inner = FakeModel(table, N_VOCAB)
    model = Remembered(inner)
    model.feed((0, 1))
    rows = model.eval((2, 3))
    assert np.array_equal(rows, [table((0, 1, 2)), table((0, 1, 2, 3))])
    n_calls = inner.count("eval")
    model.keep(3, ())
    assert model.length == 3
    assert np.array_equal(model.eval((3,))[0], table((0, 1, 2, 3)))
    assert inner.count("eval") == n_calls == 1
    model.truncate(1)
    assert np.array_equal(model.eval((5, 4, 3))[2], table((0, 5, 4, 3)))
    assert np.array_equal(model.row((0, 5, 1)), table((0, 5, 1)))
    model.forget()
    assert np.array_equal(model.row((0, 1, 2)), table((0, 1, 2)))


def test_a_remembered_model_has_the_rows_of_every_path_of_a_tree() -> None:
    """Prevents: a row of another branch, or a text that goes on from a node that was not kept."""
    table = RandomTable(N_VOCAB, 3)
    inner = FakeModel(table, N_VOCAB)
    model = Remembered(inner)
    model.feed((0,))
    rows = [*model.eval((1, 2, 3), (-1, -1)), *model.grow((4, 5), (1, 0)), *model.grow((2,), (2,))]
    texts = [(0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 3, 4), (0, 1, 2, 5), (0, 1, 3, 4, 2)]
    assert np.array_equal(rows, [table(text) for text in texts])
    assert model.length == 7
    model.keep(2, (1, 2))
    assert np.array_equal(model.eval((0, 5)), [table((0, 1, 3, 4, 0)), table((0, 1, 3, 4, 0, 5))])
    assert np.array_equal(model.grow((1,), (-1,))[0], table((0, 1, 3, 4, 0, 1)))
    model.truncate(4)
    assert np.array_equal(model.eval((1,))[0], table((0, 1, 3, 4, 1)))


def test_an_undecided_draft_changes_a_row_by_its_text() -> None:
    """Prevents: the rows of a tree changed otherwise than those of the same path as a chain."""
    table = RandomTable(N_VOCAB, 5)
    tree, chain = (Undecided(FakeModel(table, N_VOCAB)) for _ in range(2))
    rows = [*tree.eval((0, 1, 2), (-1, -1)), *tree.grow((3, 4), (1, 2))]
    assert np.array_equal([rows[0], rows[2], rows[3], rows[4]], chain.eval((0, 2, 3, 4)))


def test_faults_of_trees_are_left_out_where_a_model_evaluates_none() -> None:
    """Prevents: a fault that is not caught because the pair drafts chains."""
    both, target, none = (
        {fault.name for fault in audit_self_test.faults_for(what) if fault.needs_tree}
        for what in (
            subject(),
            subject(draft=FakeModel(RandomTable(N_VOCAB, 7), N_VOCAB, caps=Caps())),
            subject(target=FakeModel(RandomTable(N_VOCAB, 1), N_VOCAB, caps=Caps())),
        )
    )
    assert both > target > none == set()


def test_a_recorded_kv_is_made_again_without_what_was_dropped() -> None:
    """Prevents: a replay that keeps rejected tokens and so never differs."""
    table = RandomTable(N_VOCAB, 4)
    model = Recorded(FakeModel(table, N_VOCAB))
    model.feed((0, 1, 2))
    model.eval((3, 4, 5))
    model.keep(4, (0,))
    model.eval((1, 1))
    model.truncate(5)
    assert n_dropped(model.ops) == 3
    fresh = FakeModel(table, N_VOCAB)
    row = again(fresh, model.ops, stale=lambda _, token: (token + 1) % N_VOCAB, want=4)
    assert fresh.tokens == (0, 1, 2, 3, 4)
    assert row is not None
    assert np.array_equal(row, table((0, 1, 2, 3, 4)))
    read = [call.tokens for call in fresh.calls if call.name in ("feed", "eval")]
    assert read == [(0, 1, 2), (3, 4, 0), (2, 2)]
    again(fresh, model.ops, kept=lambda position, token: 5 if position == 1 else token)
    assert fresh.tokens == (0, 5, 2, 3, 4)


def test_places_in_laws_notice_tokens_that_lean_and_tokens_that_cannot_be() -> None:
    p, q = Distribution.dense((0.5, 0.3, 0.2)), Distribution.dense((0.15, 0.25, 0.6))
    random = np.random.default_rng(2)

    def places(law: Sequence[float]) -> Along:
        along = Along(frozenset(), np.random.default_rng(0))
        for token in random.choice(3, size=600, p=law):
            along.see(Observation((), Draft((0,), (q,)), Verdict((), int(token)), "", laws=(p, p)))
        return along

    healthy, biased = places((0.5, 0.3, 0.2)), places((0.3, 0.3, 0.4))
    assert healthy.test().n_draws == 600
    assert not healthy.test().surprising
    assert biased.test().surprising
    cannot = Along(frozenset(), np.random.default_rng(0))
    cannot.see(Observation((), Draft(), Verdict((), 9), "", laws=(p,)))
    assert cannot.impossible == 1


def test_tokens_after_an_end_token_are_not_counted() -> None:
    p = Distribution.dense((0.5, 0.5))
    along = Along(frozenset({1}), np.random.default_rng(0))
    along.see(Observation((), Draft((0, 1, 0), (p, p, p)), Verdict((0, 1, 2), 0), "", laws=(p, p, p, p)))
    assert len(along.places) == 2


@pytest.mark.slow
def test_history_is_part_of_every_law(healthy: AuditReport) -> None:
    """Prevents: penalties that look at the wrong tokens."""
    assert healthy.passed
    params = SamplingParams(temperature=1.0, top_k=3, repeat_penalty=1.7, repeat_last_n=3)
    report = report_of(subject(params=params), LEAST)
    assert report.passed, report.bugs


def test_a_miscounted_kv_is_neither_a_near_tie_nor_a_sound_kv() -> None:
    """Prevents: a cache with a rejected token that is compared with a replay of the same token."""
    broken = subject(parts=Parts(engine=Miscounting), strategies=("draft-simple",), rules=(Rule.TOKEN,))
    parted = [run.difference for run in audit_greedy.compare(broken, TINY) if run.difference]
    assert parted
    assert not any(each.near_tie for each in parted)
    along = Along(broken.target.end_tokens, np.random.default_rng(0))
    rows = [row for rows in audit_kv.check(broken, TINY, along) for row in rows if row.strategy != "random trees"]
    assert all(row.n_foreign > 0 == row.difference and not row.sound for row in rows if row.model == "target")
    assert all(row.n_foreign == 0 and row.sound for row in rows if row.model == "draft")


def test_a_draft_that_spells_is_audited_up_to_its_own_last_cell() -> None:
    """Prevents: a bug reported for a draft whose context is full or that masks unknown tokens."""
    table = RandomTable(N_VOCAB, 1)
    for n_ctx in (40, 60, 90):
        what = subject(table, draft=WatchedDraft(N_VOCAB, n_ctx=n_ctx), strategies=("draft-tli",), rules=(Rule.BLOCK,))
        *_, report = audit.run(what, LEAST, {})
        assert isinstance(report, AuditReport)
        assert report.passed, report.bugs
    assert report.laws[0].n_drafted_in
    of_trees, *rows = report.kv
    assert (of_trees.model, of_trees.strategy) == ("target", "random trees")
    assert [row.model for row in rows] == ["target", "draft"]
    assert rows[1].wrong > rows[1].difference == 0.0


def test_what_only_one_of_two_rows_masks_is_a_difference_that_json_can_hold() -> None:
    """Prevents: a masked token that passes, or a bug that JSON cannot hold."""
    masked, other = np.array([[0.0, -np.inf, 1.0]]), np.array([[0.0, 2.0, 1.0]])
    assert audit_kv._apart(masked, masked) == 0.0
    for a, b in ((masked, other), (other, masked), (other, other * np.nan)):
        assert KV_BOUND < audit_kv._apart(a, b) < np.inf


@pytest.mark.parametrize("n_ctx", [9, 14, 64])
def test_a_remembered_draft_has_the_room_of_the_draft_after_the_same_text(n_ctx: int) -> None:
    """Prevents: cells counted after the last text of the enumeration, not after the current one."""
    model = Remembered(WatchedDraft(N_VOCAB, n_ctx=n_ctx))
    model.eval((4, 1, 0, 2)) if n_ctx > 9 else model.feed((4,))
    for text in ((4, 3), (0,), (4, 1)):
        model.truncate(0)
        model.feed(text)
        fresh = WatchedDraft(N_VOCAB, n_ctx=n_ctx)
        fresh.feed(text)
        for more in ((), (1,), (4, 4, 0)):
            assert room_after(model, more) == room_after(fresh, more)


@pytest.mark.slow
def test_every_pass_moves_the_bar_and_no_unit_moves_it_back() -> None:
    """Prevents: a bar that does not move for a minute during an enumeration."""
    seen: list[audit.AuditProgress] = []
    items = list(audit.run(subject(), LEAST, {}, tell=seen.append))
    shares = [each.share for each in seen]
    assert shares == sorted(shares)
    items_of = [each for each in items if isinstance(each, audit.AuditProgress)]
    for section in audit.SHARES:
        if section != "self-test":
            n_units = sum(each.doing == section for each in items_of)
            within = {each.share for each in seen if each.doing == section}
            assert len(within) > 10 * n_units, section
    last = [each.left_s for each in seen if each.left_s is not None]
    assert last
    assert min(last) >= 0.0
    assert isinstance(items[-1], AuditReport)


@pytest.mark.parametrize("n_ctx", [24, 32])
def test_a_full_draft_whose_logits_were_not_compared_is_reported(n_ctx: int) -> None:
    """Prevents: a clean verdict on a draft that was not compared; an error where other tokens need more cells."""
    table = RandomTable(N_VOCAB, 1)
    what = subject(table, draft=WatchedDraft(N_VOCAB, n_ctx=n_ctx), strategies=("draft-tli",), rules=(Rule.BLOCK,))
    *_, report = audit.run(what, LEAST, {})
    assert isinstance(report, AuditReport)
    (row,) = (row for row in report.kv if row.model == "draft")
    assert row.full
    assert row.n_foreign == 0
    assert report.passed
    (gap,) = (gap for gap in report.gaps if gap.startswith("KV cache of the draft"))
    assert "draft-tli: full after 1 of 1 runs" in gap
    text = markdown(report)
    assert "| full |" in " ".join(text.split())
    assert gap in " ".join(text.split())
