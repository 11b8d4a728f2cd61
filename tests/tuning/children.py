"""Stand-ins for the child processes that measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specllama.base.child import Tell
from specllama.base.errors import BackendError
from specllama.llama import LoadOptions
from specllama.pairs.profile import ProfileKey
from specllama.tuning.child import Measured, MeasureJob, RunMeasureJob
from specllama.tuning.kernel_paths import Paths
from specllama.tuning.tune import Findings, TuneEffort, Tuning

SUBJECT = ProfileKey(Path("target"), LoadOptions(), Path("draft"), LoadOptions())
EFFORT = TuneEffort(seconds=100.0, n_visits=2, n_tokens=10)


def silent(_what: str, _share: float) -> None:
    """A `Tell` that shows nothing."""


class Children:
    """Runs jobs: keeps each one, then dies if `dies` says so, else returns `finds(job)`."""

    def __init__(
        self, finds: Callable[[MeasureJob], Measured], dies: Callable[[MeasureJob], bool] = lambda job: False
    ) -> None:
        self.jobs: list[MeasureJob] = []
        self._finds, self._dies = finds, dies

    def __call__(self, job: MeasureJob, _tell: Tell) -> Measured:
        self.jobs.append(job)
        if self._dies(job):
            raise BackendError("it died")
        return self._finds(job)


def measured(subject: ProfileKey, paths: Paths, effort: TuneEffort, tell: Tell, run: RunMeasureJob) -> Findings:
    """The costs on all paths, and the acceptance of the subject's own draft."""
    tuning = Tuning(subject, effort, tell, run)
    tuning.compare(paths)
    tuning.hear()
    return tuning.findings
