"""How far an audit is, pass by pass; and a draft's KV that was too full to be looked at."""

from __future__ import annotations

import pytest

from specllama.audit import run as audit
from specllama.audit.report import AuditReport
from specllama.cli.audit.view import markdown
from specllama.core.types import Rule
from tests.audit.test_run import LEAST, N_VOCAB, RandomTable, subject
from tests.exact.translating import WatchedDraft


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
