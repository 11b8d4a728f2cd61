"""Tuning several kernel paths: which are measured, and what happens when one dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specllama import llama
from specllama.base.child import Tell
from specllama.base.errors import BackendError
from specllama.kernels.library import BUFFER_TYPE
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, OWN
from specllama.pairs.profile import ProfileKey
from specllama.tuning.child import Measured, MeasureJob, Way
from specllama.tuning.kernel_paths import Paths, of_draft, worth_measuring
from specllama.tuning.traces import Trace
from tests import tiny
from tests.tuning.children import EFFORT, SUBJECT, Children, measured, silent

TRACES = (Trace("code", True, (0.9,) * 100, (0.9,) * 100),)
BOTH = Paths((DEFAULT, AS_IN_FILE), (DEFAULT, AS_IN_FILE))


def _measured(job: MeasureJob) -> Measured:
    rows = (1, 4, 16) if job.rows is None else job.rows
    verify = tuple((n, 0.04 * (1 + (n - 1) / 8)) for n in rows)
    return Measured(0.04, verify or None, ((1, 0.008),) if rows else (), TRACES if job.n_tokens else ())


def test_each_path_of_target_and_draft_is_measured_once() -> None:
    """Every path of one model with every path of the other; a path of the shorter list left out."""
    three = Paths((OWN, DEFAULT, AS_IN_FILE), (OWN, AS_IN_FILE))
    assert three.ways == [Way(OWN, OWN), Way(DEFAULT, AS_IN_FILE), Way(AS_IN_FILE, OWN)]
    assert Paths((DEFAULT,), (DEFAULT, AS_IN_FILE)).ways == [Way(DEFAULT, DEFAULT), Way(DEFAULT, AS_IN_FILE)]


def test_in_a_hurry_two_paths_are_measured() -> None:
    """A `tune --quick` that takes minutes."""
    children = Children(_measured)
    paths = Paths((OWN, DEFAULT, AS_IN_FILE), (OWN, DEFAULT, AS_IN_FILE))
    measured(SUBJECT, paths, replace(EFFORT, n_visits=1), silent, children)
    both = [Way(OWN, OWN), Way(DEFAULT, DEFAULT)]
    *jobs, _heard = children.jobs
    assert [(job.way, job.rows == ()) for job in jobs] == [*((way, False) for way in both), (both[0], True)]


def test_of_a_pair_of_paths_that_dies_each_gets_a_chance_of_its_own() -> None:
    """A good path of the target given up because the draft's path crashes."""
    children = Children(_measured, dies=lambda job: job.way.draft == AS_IN_FILE)
    found = measured(SUBJECT, BOTH, EFFORT, silent, children)
    jobs = children.jobs[:-1]
    assert [layout.way for layout in found.layouts] == [Way(DEFAULT, DEFAULT), Way(AS_IN_FILE, DEFAULT)]
    assert found.failures == ("rearranged weights for the target, weights as in the file for the draft: it died",)
    assert [job.way for job in jobs].count(Way(AS_IN_FILE, AS_IN_FILE)) == 1
    assert [job.way for job in jobs].count(Way(DEFAULT, AS_IN_FILE)) == 1
    assert jobs[-1].rows == ()


def test_progress_never_goes_back_where_a_pair_is_divided_or_a_child_begins_anew() -> None:
    """A progress bar that goes back from 60 % to 40 %."""
    shares: list[float] = []
    n_runs = 0

    def run(job: MeasureJob, tell: Tell) -> Measured:
        nonlocal n_runs
        n_runs += 1
        tell("measuring passes", 0.9)
        if job.way.draft == AS_IN_FILE:
            raise BackendError("it died")
        return replace(_measured(job), draft=((1, 0.02), (2, 0.001)) if n_runs == 1 else ((1, 0.008),))  # held up once

    measured(SUBJECT, BOTH, EFFORT, lambda _what, share: shares.append(share), run)
    assert shares == sorted(shares)
    assert len(set(shares)) >= n_runs - 1
    assert 0.9 < shares[-1] <= 1.0


def test_what_the_build_or_the_options_rule_out_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rearranged weights although the crash test forbids them; a draft measured on the target's paths only."""
    target = tiny.write_model(tmp_path / "target.gguf", n_embd=64, n_ff=128, kinds={"ffn_up": "Q4_0"})
    plain = tiny.write_model(tmp_path / "plain.gguf")
    info = replace(llama.build_info(), extra_buffer_types=(BUFFER_TYPE, "CPU_REPACK"))
    monkeypatch.setattr(llama, "build_info", lambda: info)
    options = LoadOptions()
    subject = ProfileKey(target, options, plain, options)
    found = worth_measuring(subject)
    assert (found.target, found.draft) == ((OWN, DEFAULT, AS_IN_FILE), (DEFAULT,))
    assert of_draft(subject, target) == found.target
    without_ours = worth_measuring(ProfileKey(target, replace(options, kernels=False)))
    assert (without_ours.target, without_ours.draft) == ((DEFAULT, AS_IN_FILE), (DEFAULT,))
    as_in_file = worth_measuring(ProfileKey(target, replace(options, use_extra_bufts=False)))
    assert as_in_file.ways == [Way(AS_IN_FILE, AS_IN_FILE)]
