"""The audit on real weights: a small model as its own draft, and a broken rule on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from specllama.audit import run as audit
from specllama.audit.faults import FAULTS
from specllama.audit.parts import AuditEffort, AuditPrompt, AuditSubject
from specllama.audit.report import AuditReport
from specllama.audit.self_test import catch_all
from specllama.chat.conversation import fitting_prompts
from specllama.chat.format import format_of
from specllama.chat.format_masks import FormatConstraint
from specllama.cli.audit.command import FORMAT
from specllama.core.sampling import SamplingParams
from specllama.core.types import Rule
from specllama.drafters import DraftSettings
from specllama.drafters.length import DraftLength
from specllama.llama import LlamaModel
from specllama.prompts.load import short_prompts
from tests.real.conftest import SMALL

pytestmark = pytest.mark.model
OpenModel = Callable[..., LlamaModel]
LITTLE = AuditEffort(
    n_prompts=1, n_tokens=8, n_contexts=2, most_branches=100, n_enumerated=2, n_draws=30, n_runs=2, n_steps=5
)


def subject_of(open_model: OpenModel) -> AuditSubject:
    """A draft that is hotter than its target, so that it is often wrong."""
    target, draft = open_model(SMALL), open_model(SMALL, n_ctx=4095)  # other options: a second copy
    prompts = fitting_prompts(
        target.vocab, target.chat_template, short_prompts(1), n_known=target.vocab_size, n_room=2000
    )
    return AuditSubject(
        target=target,
        draft=draft,
        prompts=[AuditPrompt(name, tuple(tokens)) for name, tokens in prompts.items()],
        params=SamplingParams(top_k=6),
        strategies=("draft-simple", "chain"),
        rules=(Rule.TOKEN, Rule.BLOCK),
        drafting=DraftSettings(length=DraftLength(3), temperature=1.6),
        seed=1,
        piece=target.vocab.piece,
        constraint=partial(FormatConstraint, format_of("regex", FORMAT), target.vocab),
    )


def test_a_real_model_passes(open_model: OpenModel) -> None:
    """An audit that only understands fakes, or that takes the rounding of real kernels for a bug."""
    *_, report = audit.run(subject_of(open_model), LITTLE, {})
    assert isinstance(report, AuditReport)
    assert report.passed, report.bugs
    assert all(row.n_contexts == row.n_drafted_in == row.n_open == 3 and row.n_masked == 1 for row in report.laws)
    assert max(row.distance.tv for row in report.laws) < 1e-12
    assert sum(row.n_dropped for row in report.kv) > 0
    assert min(row.wrong for row in report.kv) > 0.01


@pytest.mark.parametrize(
    "name",
    [
        "the first correction is drawn from p, not from the residual",
        "a rejected token stays in the target's KV",
        *(fault.name for fault in FAULTS if fault.needs_format),
    ],
)
def test_a_fault_shows_on_a_real_model(open_model: OpenModel, name: str) -> None:
    """An audit that passes whatever runs."""
    faults = [fault for fault in FAULTS if fault.name == name]
    assert [row.caught for row in catch_all(subject_of(open_model), faults)] == [True]
