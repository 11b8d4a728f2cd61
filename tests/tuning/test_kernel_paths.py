"""Tuning many kernel paths: which are asked for, which are measured in full, and what happens when one dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specllama import llama
from specllama.base.child import Tell
from specllama.base.errors import BackendError
from specllama.llama import LoadOptions
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, KernelPath
from specllama.pairs.profile import ProfileKey
from specllama.tuning import kernel_paths as tuner_paths
from specllama.tuning import tune as tuner
from specllama.tuning.child import Measured, MeasureJob, Way, child
from specllama.tuning.kernel_paths import Paths
from specllama.tuning.traces import Trace
from tests import tiny
from tests.tuning.children import EFFORT, SUBJECT, Children, silent

TRACES = (Trace("code", True, (0.9,) * 100, (0.9,) * 100),)
REPACKED = KernelPath(placed=(("q4_K", "CPU_REPACK"),))
Q6_ALONE, Q4_ALONE = KernelPath(False, (("q6_K", "AMX"),)), KernelPath(False, (("q4_K", "AMX"),))
MANY = Paths((DEFAULT, AS_IN_FILE, REPACKED, Q6_ALONE, Q4_ALONE), (DEFAULT, AS_IN_FILE))
WORTH = {DEFAULT: 1.0, AS_IN_FILE: 1.3, REPACKED: 0.7, Q6_ALONE: 1.02, Q4_ALONE: 0.98}  # of a block, by target path


def _measured(job: MeasureJob, block: float = 1.0) -> Measured:
    """A child's result if blocks of the target cost `block` times the usual."""
    verify = tuple((n, 0.04 * (1 + block * (n - 1) / 8)) for n in job.rows)
    return Measured(0.04, None if job.checks else verify, ((1, 0.008),), TRACES if job.n_tokens else ())


def _worth(job: MeasureJob) -> Measured:
    return _measured(job, WORTH[job.way.target])


def test_target_and_draft_have_paths_of_their_own_and_each_is_measured() -> None:
    """The draft measured on the target's tensor types only; every path of one model with every path of the other."""
    assert MANY.ways == [
        Way(DEFAULT, DEFAULT),
        Way(AS_IN_FILE, AS_IN_FILE),
        Way(REPACKED, DEFAULT),
        Way(Q6_ALONE, DEFAULT),
        Way(Q4_ALONE, DEFAULT),
    ]
    assert Paths((DEFAULT,), (DEFAULT, REPACKED)).ways == [Way(DEFAULT, DEFAULT), Way(DEFAULT, REPACKED)]


def test_of_many_paths_the_best_few_of_a_coarse_look_are_measured_in_full() -> None:
    """Half an hour of tuning for a file with four tensor types; the best path left out unmeasured."""
    children, shares = Children(_worth), list[float]()
    found = tuner.measure(SUBJECT, MANY, EFFORT, lambda _what, share: shares.append(share), children)
    jobs = children.jobs
    coarse, full = jobs[:6], jobs[6:]
    assert [job.way for job in coarse] == [*MANY.ways, MANY.ways[0]]
    assert {job.rows for job in coarse} == {tuner.COARSE_ROWS}
    assert coarse[-1].checks
    assert all(job.seconds < EFFORT.seconds and job.n_tokens == 0 for job in coarse)
    assert [job.way.target for job in full] == [*[DEFAULT, REPACKED, Q4_ALONE] * 2, DEFAULT]
    assert full[-1].checks
    assert {job.threads_s for job in jobs} == {tuner.THREADS_SHARE * EFFORT.seconds}
    assert shares == sorted(shares)
    assert [layout.way.target for layout in found.layouts] == [DEFAULT, REPACKED, Q4_ALONE]
    profile = tuner.choose(found, quick=False)
    assert (profile.target_path, profile.draft_path) == (REPACKED, DEFAULT)


def test_the_path_that_plain_decoding_is_fastest_on_is_always_measured_in_full() -> None:
    """The fastest path of plain decoding left out because its blocks are slow."""

    def child(job: MeasureJob) -> Measured:
        return replace(_measured(job, 2.6), step_s=0.036) if job.way.target == AS_IN_FILE else _worth(job)

    children = Children(child)
    found = tuner.measure(SUBJECT, MANY, EFFORT, silent, children)
    assert [job.way.target for job in children.jobs[6:9]] == [DEFAULT, REPACKED, AS_IN_FILE]
    assert tuner.choose(found, quick=False).plain_path == AS_IN_FILE


def test_a_busy_machine_decides_nothing_in_a_coarse_look() -> None:
    """Only the path that was measured in a quiet moment measured in full."""
    children = Children(lambda job: replace(_worth(job), step_s=0.06 if job.checks else 0.04))
    tuner.measure(SUBJECT, MANY, EFFORT, silent, children)
    assert [job.way.target for job in children.jobs[6:]] == [*[DEFAULT, AS_IN_FILE, REPACKED] * 2, DEFAULT]


def test_in_a_hurry_all_or_nothing_is_rearranged() -> None:
    """A `tune --quick` that takes minutes."""
    children = Children(_measured)
    tuner.measure(SUBJECT, MANY, replace(EFFORT, n_visits=1), silent, children)
    assert [(job.way, job.checks) for job in children.jobs] == [(w, False) for w in MANY.ways[:2]] + [
        (MANY.ways[0], True)
    ]


def test_of_a_pair_of_paths_that_dies_each_gets_a_chance_of_its_own() -> None:
    """A good path of the target given up because the draft's path crashes."""
    children = Children(_measured, dies=lambda job: job.way.draft == AS_IN_FILE)
    both = Paths((DEFAULT, AS_IN_FILE), (DEFAULT, AS_IN_FILE))
    found = tuner.measure(SUBJECT, both, EFFORT, silent, children)
    jobs = children.jobs
    assert [layout.way for layout in found.layouts] == [Way(DEFAULT, DEFAULT), Way(AS_IN_FILE, DEFAULT)]
    assert found.failures == ("rearranged weights for the target, weights as in the file for the draft: it died",)
    assert [job.way for job in jobs].count(Way(AS_IN_FILE, AS_IN_FILE)) == 1
    assert [job.way for job in jobs].count(Way(DEFAULT, AS_IN_FILE)) == 1
    assert jobs[-1].checks


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

    both = Paths((DEFAULT, AS_IN_FILE), (DEFAULT, AS_IN_FILE), ((Path("derived"), (DEFAULT,)),))
    tuner.measure(SUBJECT, both, EFFORT, lambda _what, share: shares.append(share), run)
    assert shares == sorted(shares)
    assert len(set(shares)) >= n_runs - 1
    assert 0.9 < shares[-1] <= 1.0


def test_a_path_that_died_in_the_coarse_look_is_not_visited_again() -> None:
    """A crash in every visit; the dead path chosen."""
    children = Children(_worth, dies=lambda job: job.way.target == REPACKED)
    found = tuner.measure(SUBJECT, MANY, EFFORT, silent, children)
    assert [job.way.target for job in children.jobs].count(REPACKED) == 1
    assert found.failures == (f"{Way(REPACKED, DEFAULT).name}: it died",)
    assert tuner.choose(found, quick=False).target_path != REPACKED


def _abort(files: Sequence[Path], _tell: Tell) -> list[tuple[KernelPath, ...]]:
    os.kill(os.getpid(), signal.SIGABRT)
    raise AssertionError(f"alive, with {files}")


def test_a_question_that_kills_the_child_leaves_the_two_plain_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `tune` that ends because asking for kernel paths crashes."""
    info = replace(llama.build_info(), extra_buffer_types=("CPU_REPACK",), devices=())
    monkeypatch.setattr(llama, "build_info", lambda: info)
    monkeypatch.setattr(tuner_paths, "_ask", _abort)
    paths = tuner_paths.worth_measuring(SUBJECT, [Path("derived")])
    assert paths.target == paths.draft == (DEFAULT, AS_IN_FILE)
    assert paths.variants == ((Path("derived"), (DEFAULT, AS_IN_FILE)),)
    assert f"code {-signal.SIGABRT}" in paths.failure
    told = tuner.measure(SUBJECT, paths, EFFORT, silent, Children(_measured)).failures
    assert told == (f"kernel paths by tensor type: {paths.failure}",)


def test_what_the_build_or_the_options_rule_out_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rearranged weights although the crash test forbids them; weights moved off a GPU."""

    def ask(_files: Sequence[Path]) -> list[tuple[KernelPath, ...]]:
        raise AssertionError("asked for kernel paths")

    info = llama.build_info()
    without = replace(SUBJECT, target_options=LoadOptions(use_extra_bufts=False))
    assert tuner_paths.worth_measuring(without, [], ask).ways == [Way(AS_IN_FILE, AS_IN_FILE)]
    monkeypatch.setattr(llama, "build_info", lambda: replace(info, extra_buffer_types=()))
    assert tuner_paths.worth_measuring(SUBJECT, [], ask).ways == [Way(DEFAULT, DEFAULT)]
    gpu = llama.Device("CUDA0", "gpu", "a GPU", 1, 1)
    monkeypatch.setattr(llama, "build_info", lambda: replace(info, extra_buffer_types=("AMX",), devices=(gpu,)))
    assert tuner_paths.worth_measuring(SUBJECT, [], ask).target == (DEFAULT, AS_IN_FILE)


def test_what_stays_off_the_gpu_is_placed_by_type_and_what_goes_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """`-ngl 0` on a machine with a GPU tuned as if the layers were on it; a draft's weights moved off the GPU."""
    gpu = llama.Device("CUDA0", "gpu", "a GPU", 1, 1)
    info = replace(llama.build_info(), extra_buffer_types=("CPU_REPACK",), devices=(gpu,))
    monkeypatch.setattr(llama, "build_info", lambda: info)
    on_cpu, derived, asked = LoadOptions(n_gpu_layers=0), Path("derived"), list[Path]()

    def ask(files: Sequence[Path]) -> list[tuple[KernelPath, ...]]:
        asked.extend(files)
        return [(DEFAULT, REPACKED)] * len(files)

    both = replace(SUBJECT, target_options=on_cpu, draft_options=on_cpu)
    paths = tuner_paths.worth_measuring(both, [derived], ask)
    assert (paths.target, paths.draft, paths.variants[0][1]) == ((DEFAULT, REPACKED),) * 3
    assert asked == [Path("target"), Path("draft"), derived]
    asked.clear()
    one = tuner_paths.worth_measuring(replace(both, draft_options=LoadOptions()), [derived], ask)
    assert (one.target, one.draft) == ((DEFAULT, REPACKED), (DEFAULT, AS_IN_FILE))
    assert one.variants == ((derived, (DEFAULT, AS_IN_FILE)),)
    assert asked == [Path("target")]
    other = tuner_paths.worth_measuring(replace(both, target_options=LoadOptions()), [], ask)
    assert (other.target, other.draft) == ((DEFAULT, AS_IN_FILE), (DEFAULT, REPACKED))


def test_a_placed_path_is_what_a_child_loads(tmp_path: Path) -> None:
    """A path that is lost on its way to the child."""
    kinds = {"ffn_up": "Q4_0", "ffn_down": "IQ4_NL", "output": "Q8_0"}
    wide = {"vocabulary": tiny.byte_level(), "chat_template": tiny.CHATML, "n_ctx": 4096, "n_embd": 64, "n_ff": 512}
    target = tiny.write_model(tmp_path / "target.gguf", kinds=kinds, **wide)  # type: ignore[arg-type]
    subject = ProfileKey(target, LoadOptions(n_threads=1))
    if not all(matrix.fits for matrix in llama.matrices(target) if matrix.kind in ("q4_0", "iq4_nl")):
        pytest.skip("this CPU, or this build, rearranges no Q4_0 and IQ4_NL weights")
    paths = tuner_paths.worth_measuring(subject, [], lambda files: tuner_paths._ask(files, silent))
    placed = [path for path in paths.target if path.placed]
    assert {path.placed[0][0] for path in placed} == {"q4_0", "iq4_nl"}
    assert paths.draft == paths.target[:1]
    found = child(MeasureJob(subject, Way(placed[0]), 0.05, 0, rows=(1, 4)), silent)
    assert [n for n, _ in found.verify or ()] == [1, 4]
    elsewhere = KernelPath(placed=(("q4_0", "NO_SUCH_BUFFER"),))
    with pytest.raises(BackendError, match="NO_SUCH_BUFFER"):
        child(MeasureJob(subject, Way(elsewhere), 0.05, 0), silent)
