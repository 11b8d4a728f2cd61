"""Stand-ins for the child processes that measure."""

from __future__ import annotations

from collections.abc import Callable

from specllama.base.child import Tell
from specllama.base.errors import BackendError
from specllama.tuning.child import Measured, MeasureJob


def silent(_what: str, _share: float) -> None:
    """Progress that is not shown."""


class Children:
    """Runs jobs: keeps each one, then dies where `dies` says so, else returns what `finds` says."""

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
