"""`specllama bench`: what drafting gains on this machine, measured against plain decoding; or two reports compared."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from tempfile import NamedTemporaryFile

import typer

from specllama import llama
from specllama.base import disk as storage
from specllama.base.errors import Interrupted, ReportError, SpecllamaError, UsageError
from specllama.base.jsonable import parsed, to_plain
from specllama.bench import compare as bench_compare
from specllama.bench import machine
from specllama.bench import plots as bench_plots
from specllama.bench import run as core
from specllama.bench.job import BenchEvent, BenchJob, BenchProgress
from specllama.bench.report import BenchPlan, BenchReport, BenchRun
from specllama.bench.verdict import verdict
from specllama.cli.args.grouping import with_options
from specllama.cli.bench.models import Opener, prepare, wishes_of
from specllama.cli.bench.options import (
    FORMATS,
    BenchDrafting,
    BenchHardware,
    BenchModels,
    BenchOutput,
    BenchRuns,
    BenchSampling,
)
from specllama.cli.bench.view import clock, comparison_lines, csv_lines, event_lines, report_lines
from specllama.cli.codes import INTERRUPTED
from specllama.cli.record import versions
from specllama.cli.screen.keyboard import silent_keyboard
from specllama.cli.screen.output import Output, open_output, to_json
from specllama.cli.screen.status import StatusLine
from specllama.cli.screen.worker import Worker, interruptible
from specllama.core.types import Cancel
from specllama.drafters.length import AUTO_LENGTH, BENCH, DraftLength
from specllama.llama import build_info
from specllama.prompts.load import BenchPrompt, built_in, read

SHORT_S = 180.0  # a budget for fewer settings than usual
WRITE_ONE = "write a report with: specllama bench --output FILE.json"
COMPARE = "compare"  # in the place of a pair's name
GAP_S = 0.5  # between two looks at what the measuring thread says: drawing takes time from it


@with_options
def bench(
    models: BenchModels,
    runs: BenchRuns,
    drafting: BenchDrafting,
    sampling: BenchSampling,
    hardware: BenchHardware,
    options: BenchOutput,
) -> None:
    """Measure what drafting gains here: every setting against plain decoding, prompt by prompt, one verdict.

    All settings answer the same prompts in turn, from empty caches, so that a machine that slows down slows all of
    them alike. The matrix is fixed before the first run; the best setting is picked on one half of the prompts and
    confirmed on the other. Ctrl-C keeps and reports what was measured.

    `specllama bench compare A.json B.json` sets two reports side by side.
    """
    output = open_output(color=options.color, quiet=options.quiet, verbose=options.verbose)
    if models.pair == COMPARE:
        _compare(models.files or [], options, output)
        return
    if models.files:
        raise UsageError(
            f"got unexpected extra argument ({models.files[0]})", hint="`specllama bench compare A.json B.json`?"
        )
    drafting, sampling = _swept(drafting, sampling, runs)
    target = _Target.of(options)
    if options.plots is not None:
        bench_plots.prepare(storage.meant(options.plots))
    prompts = _prompts(runs)
    subject = prepare(models, drafting, sampling, hardware, runs, output)
    wishes = wishes_of(subject, drafting, sampling, hardware, runs)
    llama.set_log(None)
    job = BenchJob(
        wishes=wishes,
        prompts=prompts,
        params=replace(sampling, temp=0.0).params,
        p_min=drafting.spec_draft_p_min,
        draft_temperature=drafting.draft_temp,
        seed=sampling.seed,
        synthetic=runs.synthetic,
        machine=machine.look(),
        made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["specllama", *sys.argv[1:]]),
        settings=_settings(
            models,
            runs,
            replace(drafting, spec_draft_n_max=[each.to_json() for each in drafting.spec_draft_n_max]),
            sampling,
            hardware,
        ),
        versions=versions(build_info()),
        warnings=(subject.without_auto,) if subject.without_auto else (),
    )
    cancel = Cancel()
    try:
        found = _measure(job, Opener(subject, hardware, wishes.loads, cancel), cancel, options, output)
    except Interrupted as stopped:
        output.note(str(stopped))
        raise typer.Exit(INTERRUPTED) from None
    report = found.report
    with ExitStack() as each:  # what cannot be shown is written all the same, and drawn
        each.callback(_plot, report, options, output)
        each.callback(target.write, report, output)
        if options.format == "md":
            _show(report, output, full=options.verbose)
        elif options.format != "jsonl":  # its lines are out already
            for line in _lines(report, options.format):
                output.line(line)
    if found.failure is not None:
        raise found.failure
    if report.partial and cancel.is_set():
        raise typer.Exit(INTERRUPTED)


def _swept(drafting: BenchDrafting, sampling: BenchSampling, runs: BenchRuns) -> tuple[BenchDrafting, BenchSampling]:
    """The options with the default lengths and temperatures: fewer where the budget is small."""
    is_short = runs.budget is not None and runs.budget < SHORT_S
    if drafting.spec_draft_n_max is None:
        drafting = replace(drafting, spec_draft_n_max=(*map(DraftLength, (0, 4) if is_short else BENCH), AUTO_LENGTH))
    if sampling.temp is None:
        sampling = replace(sampling, temp=(0.0,) if is_short else (0.0, 0.7))
    return drafting, sampling


def _plot(report: BenchReport, options: BenchOutput, output: Output) -> None:
    """The plots as files, where a folder was named."""
    if options.plots is None:
        return
    written = bench_plots.write(report, storage.meant(options.plots))
    output.note(f"{len(written.paths)} plots are in {options.plots}")
    if written.missing:
        output.note(f"note: nothing was measured for the plots {', '.join(written.missing)}")


def _settings(*groups: object) -> dict[str, object]:
    """Every option's value."""
    found: dict[str, object] = {}
    for group in groups:
        found.update(asdict(group))  # type: ignore[call-overload]  # every group is a dataclass
    return json.loads(to_json(found))  # type: ignore[no-any-return]  # tuples become lists, as in a file


def _prompts(runs: BenchRuns) -> tuple[BenchPrompt, ...]:
    """Our own prompts, or those of a file; of the classes that were asked for."""
    if runs.prompts is None:
        return built_in(runs.category)
    found = read(Path(runs.prompts))
    if runs.category is None:
        return found
    known = sorted({prompt.category for prompt in found})
    for name in runs.category:
        if name not in known:
            raise UsageError(f"--category {name} is not in {runs.prompts}", hint=f"there are: {', '.join(known)}")
    return tuple(prompt for prompt in found if prompt.category in runs.category)


def _lines(report: BenchReport, format: str) -> list[str]:
    """The full report in one of the formats, as a file holds it."""
    if format == "json":
        return [to_json(to_plain(report))]
    if format == "jsonl":
        events: list[BenchPlan | BenchRun | BenchReport] = [report.plan, *report.runs, report]
        return [line for event in events for line in event_lines(event)]
    return csv_lines(report) if format == "csv" else report_lines(report, full=True)


def _show(report: BenchReport, output: Output, *, full: bool) -> None:
    """The report for a person: on a terminal, prose is broken between words, and tables never."""
    for line in report_lines(report, full=full, width=output.out.width or None):
        (output.line if line.startswith("|") else output.prose)(line)


@dataclass(frozen=True, slots=True)
class _Target:
    """The file of `--output`, found writable before minutes are spent."""

    path: Path | None
    format: str

    @classmethod
    def of(cls, options: BenchOutput) -> _Target:
        """Raises UsageError for a name that does not say how to write, ReportError where nothing can be written."""
        if options.output is None:
            return cls(None, "")
        path = storage.meant(options.output)
        format = path.suffix.removeprefix(".").lower()
        if format not in FORMATS:
            raise UsageError(
                f"--output {options.output} does not say in which form",
                hint="let its name end in .md, .csv, .json or .jsonl",
            )
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ReportError(f"{options.output} cannot be written: there is no such folder", hint="make it first")
        return cls(path, format)

    def write(self, report: BenchReport, output: Output) -> None:
        """The full report, in one step."""
        if self.path is None:
            return
        text = "\n".join(_lines(report, self.format)) + "\n"
        try:
            storage.write_text(self.path, text)
        except OSError as error:
            place = _rescued(text, f".{self.format}")
            if place is None:  # what took minutes is not thrown away
                output.line(text)
            raise ReportError(
                f"{self.path} cannot be written: {error.strerror}",
                hint=f"the full report is {'above' if place is None else f'in {place}'}; make room, then move it",
            ) from error
        output.note(f"the full report is in {self.path}")


def _rescued(text: str, suffix: str) -> Path | None:
    """`text` in a new temporary file; None where that cannot be written either."""
    try:
        with NamedTemporaryFile("w", encoding="utf-8", prefix="specllama-", suffix=suffix, delete=False) as file:
            path = Path(file.name)
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink(missing_ok=True)
                raise
    except OSError:
        return None
    return path


@dataclass(frozen=True, slots=True)
class _Found:
    """What was measured, and what ended it before its time, if anything did."""

    report: BenchReport
    failure: Exception | None = None


def _measure(job: BenchJob, opener: Opener, cancel: Cancel, options: BenchOutput, output: Output) -> _Found:
    """Measure in a second thread, and show how far it is. Raises what ended it before anything was measured."""
    report: BenchReport | None = None
    failure: Exception | None = None
    try:
        for event in _watched(job, opener, cancel, options, output):
            if isinstance(event, BenchReport):
                report = event
            if options.format == "jsonl" and failure is None and isinstance(event, (BenchPlan, BenchRun, BenchReport)):
                try:
                    for line in event_lines(event):
                        output.line(line)
                except (
                    OSError,
                    SpecllamaError,
                ) as error:  # a full disk, a reader that left: measuring more for it would be in vain
                    failure = error
                    cancel.set()
    except Exception as error:
        if report is None:
            raise failure or error from None
        return _Found(report, error)
    assert report is not None, "the last event of a benchmark is its report"
    if failure is not None:
        reason = f"its lines could not be written ({failure})"
        report = replace(report, partial=reason)
        report = replace(report, verdict=verdict(report))
    return _Found(report, failure)


def _watched(
    job: BenchJob, opener: Opener, cancel: Cancel, options: BenchOutput, output: Output
) -> Iterator[BenchEvent]:
    """What the measuring thread says; how far it is is shown."""
    # Lines of data and a line that moves would tear each other apart on one terminal.
    moving = replace(output, quiet=True) if options.format == "jsonl" and output.out.is_terminal else output
    with (
        silent_keyboard(output.out) as restore,
        interruptible(cancel, restore),
        StatusLine(moving) as status,
        Worker(core.bench(job, opener, cancel), cancel) as worker,
    ):
        for batch in worker.batches(GAP_S):
            for event in batch:
                if isinstance(event, BenchProgress):
                    status.show(event.what, event.share, "" if event.left_s is None else _left(event.left_s))
                elif isinstance(event, BenchPlan):
                    status.clear()
                    output.note(f"{event.note}; {event.n_runs} runs, about {clock(event.expected_s)}")
                yield event


def _left(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02} left"


# -------------------------------------------------------------------------------------------------------------- compare


def _read(name: str) -> BenchReport:
    """A report that was written with `--output FILE.json`. Raises ReportError."""
    path = storage.meant(name)
    try:
        data = parsed(storage.read_bytes(path))
    except OSError as error:
        hint = WRITE_ONE if path.is_dir() or path.exists() else f"is the name right? {WRITE_ONE}"
        raise ReportError(f"{name} cannot be read: {error.strerror}", hint=hint) from None
    except ValueError:
        raise ReportError(f"{name} is not JSON", hint=WRITE_ONE) from None
    try:
        return BenchReport.from_json(data)
    except ReportError as error:
        raise ReportError(f"{name}: {error}", hint=error.hint) from None


def _compare(files: list[str], options: BenchOutput, output: Output) -> None:
    if len(files) != 2:
        raise UsageError(f"compare takes two reports, not {len(files)}", hint="specllama bench compare A.json B.json")
    if options.format not in ("md", "json"):
        raise UsageError(f"--format {options.format} is none of a comparison", hint="there are: md, json")
    if options.output is not None or options.plots is not None:
        raise UsageError("a comparison goes to stdout alone", hint="redirect it: specllama bench compare ... > FILE")
    found = bench_compare.compare(*map(_read, files))
    if storage.meant(files[0]).resolve() == storage.meant(files[1]).resolve():
        output.warn(f"{files[0]} is compared with itself", "name another report to learn something")
    lines = [to_json(to_plain(found))] if options.format == "json" else comparison_lines(found, files)
    for line in lines:
        output.line(line)
