"""The progress and the report of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specllama.base.clock import perf_counter
from specllama.base.text import counted, figure
from specllama.batch.open import caveat_of
from specllama.batch.request import Done
from specllama.batch.requests import Asked
from specllama.batch.stats import BatchStats, Spread
from specllama.cli.batch.source import Put
from specllama.cli.screen.render import clock, percent, rate

SHOWN = 3  # errors on stderr; all are in the answers


@dataclass(slots=True)
class BatchTally:
    """What a batch has done so far."""

    total: int | None  # requests of this run; None = not known
    n_answers: int = 0
    n_errors: int = 0
    n_cut: int = 0  # answers that -n or the context cut
    seconds: float = 0.0  # since the beginning
    _began_s: float = field(default_factory=perf_counter)
    _noted: set[str] = field(default_factory=set)

    def to_json(self) -> dict[str, object]:
        counts = {"answers": self.n_answers, "errors": self.n_errors, "cut": self.n_cut}
        return {"requests": self.total, **counts, "seconds": self.seconds}

    def begin(self) -> None:
        """The pool begins now."""
        self._began_s = perf_counter()

    def take(self, ended: Sequence[Done]) -> Iterator[str]:
        """Count requests that have ended; gives sentences for the user."""
        self.seconds = perf_counter() - self._began_s
        for done in ended:
            self.n_answers += done.error is None
            self.n_cut += done.reason == "length"
            self.n_errors += done.error is not None
            if done.error is not None and self.n_errors <= SHOWN:
                assert isinstance(done.id, Put)
                more = " (other errors are only in the answers)" if self.n_errors == SHOWN else ""
                yield f"line {done.id.asked.n_line}: {done.error}{more}"
            yield from filter(self._is_new, done.notices)

    def caveats(self, ended: Sequence[Done], *, own_kernels: bool) -> Iterator[str]:
        """`caveat_of` the requests that have answers, each sentence once."""
        for done in ended:
            if done.error is None:
                assert isinstance(done.id, Put)
                assert isinstance(done.id.asked, Asked)
                own = done.id.asked.settings
                text = caveat_of(own.params, own.seed, own.seed_mode, own_kernels=own_kernels)
                if text and self._is_new(text):
                    yield text

    def _is_new(self, text: str) -> bool:
        known = text in self._noted
        self._noted.add(text)
        return not known

    @property
    def n_done(self) -> int:
        return self.n_answers + self.n_errors

    @property
    def share(self) -> float | None:
        return self.n_done / self.total if self.total else None

    def detail(self, stats: BatchStats) -> str:
        """The figures beside a progress bar, the most important first."""
        of = "" if self.total is None else f"/{figure(self.total)}"
        parts = [f"{figure(self.n_done)}{of}"]
        if stats.spec.n_emitted:
            parts.append(rate(stats.spec.n_emitted / self.seconds, "t/s"))
        if stats.spec.n_drafted:
            parts.append(f"{percent(stats.spec.acceptance_rate)} accepted")
        if self.total is not None and self.n_done:
            parts.append(f"{clock(self.seconds / self.n_done * (self.total - self.n_done))} left")
        return ", ".join(parts)


def report_lines(tally: BatchTally, stats: BatchStats) -> Iterator[str]:
    """The report as sentences."""
    errors = f", {counted(tally.n_errors, 'error')}" if tally.n_errors else ""
    cut = f", {figure(tally.n_cut)} cut by -n or the context" if tally.n_cut else ""
    yield f"{counted(tally.n_answers, 'answer')}{cut}{errors} in {_duration(tally.seconds)}"
    spec = stats.spec
    if not tally.n_answers:
        return
    accepted = f", {percent(spec.acceptance_rate, 1)} of the drafted tokens accepted" if spec.n_drafted else ""
    rows = f", {stats.rows_per_pass:.1f} rows in a pass" if stats.rows_per_pass else ""
    yield (
        f"{_figure(60 * tally.n_answers / tally.seconds)} a minute, "
        f"{rate(spec.n_emitted / tally.seconds, 't/s')}, "
        f"{figure(stats.n_slots)} at once{accepted}{rows}"
    )
    spreads = (("latency", stats.latency_s), ("first token", stats.first_s), ("per token", stats.token_s))
    known = [f"{name} {_spread_text(found)}" for name, each in spreads if (found := Spread.of(each))]
    if known:
        yield f"{', '.join(known)} (median, 95 %, 99 %)"
    parts = (
        ("draft", stats.draft_s),
        ("verify", stats.verify_s),
        ("prompts", stats.prompt_s),
        ("KV", stats.kv_s),
        ("sampling", stats.request_s),
        ("scheduling", stats.scheduling_s),
        ("other", max(tally.seconds - stats.elapsed_s, 0.0)),
    )
    yield "time: " + ", ".join(f"{name} {percent(part / tally.seconds)}" for name, part in parts)


def _spread_text(found: Spread) -> str:
    """The three figures in the unit of the first."""
    factor, digits, unit = (1000, 0, "ms") if found.p50 < 1 else (1, 1, "s") if found.p50 < 10 else (1, 0, "s")
    return "/".join(f"{factor * seconds:.{digits}f}" for seconds in (found.p50, found.p95, found.p99)) + f" {unit}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else clock(seconds)


def _figure(number: float) -> str:
    return f"{number:.1f}" if number < 100 else figure(round(number))
