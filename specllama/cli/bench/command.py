"""`specllama bench`: drafts measured against plain decoding on this machine; and two reports compared."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from specllama import llama
from specllama.base import disk as storage
from specllama.base.errors import Interrupted, ReportError, SpecllamaError, UsageError
from specllama.base.jsonable import parsed, to_plain
from specllama.base.ranges import AUTO
from specllama.base.text import counted, decoded
from specllama.bench import compare as bench_compare
from specllama.bench import machine
from specllama.bench import plots as bench_plots
from specllama.bench import run as core
from specllama.bench.job import BenchEvent, BenchJob, BenchProgress
from specllama.bench.parallel import ParallelReport
from specllama.bench.report import BenchPlan, BenchReport, BenchRun
from specllama.bench.verdict import verdict
from specllama.cli.args.grouping import with_options
from specllama.cli.args.options import FormatOptions
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
from specllama.cli.bench.parallel import bench_parallel, parallel_lines, parallel_text
from specllama.cli.bench.view import comparison_lines, csv_lines, event_line, report_lines
from specllama.cli.errors import told
from specllama.cli.record import versions
from specllama.cli.reports import not_lost, writable, write_report
from specllama.cli.screen.keyboard import silent_keyboard
from specllama.cli.screen.output import Output, open_output, say_error, to_json
from specllama.cli.screen.render import clock
from specllama.cli.screen.status import StatusLine
from specllama.cli.screen.worker import Worker, interruptible
from specllama.core.types import Cancel
from specllama.drafters import TREE
from specllama.drafters.length import AUTO_LENGTH, BENCH, DraftLength
from specllama.llama import build_info
from specllama.prompts.load import BenchPrompt, built_in, read

SHORT_S = 180.0  # below this budget, fewer settings are compared by default
WRITE_ONE = "write a report with: specllama bench --output FILE.json"
COMPARE = "compare"  # in place of a pair's name
GAP_S = 0.5  # between two drawings, which take time from the measuring thread


@with_options
def bench(
    models: BenchModels,
    runs: BenchRuns,
    drafting: BenchDrafting,
    sampling: BenchSampling,
    formats: FormatOptions,
    hardware: BenchHardware,
    options: BenchOutput,
) -> None:
    """Measure the speed of every setting against plain decoding, and give one verdict.

    All settings answer the same prompts in turn, from empty KV caches, so that a machine that slows down affects them
    equally. The runs are fixed before the first one. The best setting is picked on one half of the prompts and
    confirmed on the other. Ctrl-C reports the runs so far.

    `specllama bench compare A.json B.json` compares two reports.
    """
    output = open_output(color=options.color, quiet=options.quiet, verbose=options.verbose)
    if models.pair == COMPARE:
        _compare(models.files or [], options, output)
        return
    if models.files:
        raise UsageError(
            f"got unexpected extra argument ({models.files[0]})",
            hint="to compare reports: specllama bench compare A.json B.json",
        )
    if formats.format is not None and (runs.synthetic is not None or not runs.natural_stop):
        raise UsageError(
            "answers in a format end by themselves, with tokens of the models (expected --natural-stop)",
            hint="add --natural-stop, and omit --synthetic",
        )
    drafting = _with_lengths_of_trees(drafting, runs)
    target = _target(options.output)
    if runs.parallel is not None:
        if options.plots is not None:
            raise UsageError("--parallel has no plots", hint="leave out --plots")
        settings = _settings(models, runs, drafting, sampling, hardware, formats)
        found = bench_parallel(
            models, runs, drafting, sampling, hardware, formats.format, _prompts(runs), settings, output
        )
        _deliver_parallel(found, target, options, output)
        return
    drafting, sampling = _swept(drafting, sampling, runs)
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
        settings=_settings(models, runs, drafting, sampling, hardware, formats),
        versions=versions(build_info()),
        warnings=(subject.without_auto,) if subject.without_auto else (),
    )
    cancel = Cancel()
    with silent_keyboard(output.out) as restore, interruptible(cancel, restore):
        try:
            report, failure = _measure(
                job, Opener(subject, hardware, wishes.loads, cancel, formats.format), cancel, options, output
            )
        except Interrupted as stopped:
            output.note(str(stopped))
            raise
        _deliver(report, failure, target, options, output)
        if failure is not None:
            raise failure


def _settings(
    models: BenchModels,
    runs: BenchRuns,
    drafting: BenchDrafting,
    sampling: BenchSampling,
    hardware: BenchHardware,
    formats: FormatOptions,
) -> dict[str, object]:
    """The values of all options, as in a file."""
    settings: dict[str, object] = {}
    for group in (models, runs, drafting, sampling, hardware):
        settings |= asdict(group)
    settings |= {name: each and each["text"] for name, each in asdict(formats).items()}
    settings["spec_draft_n_max"] = [each.to_json() for each in drafting.spec_draft_n_max or ()]
    found: dict[str, object] = json.loads(to_json(settings))  # tuples become lists
    return found


def _with_lengths_of_trees(drafting: BenchDrafting, runs: BenchRuns) -> BenchDrafting:
    """`--tree` as strategies and lengths; many requests at once are measured with one strategy."""
    if drafting.tree is None:
        return drafting
    spec_type = (AUTO, TREE) if runs.parallel is None else (TREE,)
    return replace(drafting, spec_type=spec_type, spec_draft_n_max=drafting.tree, tree=None)


def _swept(drafting: BenchDrafting, sampling: BenchSampling, runs: BenchRuns) -> tuple[BenchDrafting, BenchSampling]:
    """The options with default lengths and temperatures, fewer for a short budget."""
    is_short = runs.budget is not None and runs.budget < SHORT_S
    if drafting.spec_draft_n_max is None:
        drafting = replace(drafting, spec_draft_n_max=(*map(DraftLength, (0, 4) if is_short else BENCH), AUTO_LENGTH))
    if sampling.temp is None:
        sampling = replace(sampling, temp=(0.0,) if is_short else (0.0, 0.7))
    return drafting, sampling


def _plot(report: BenchReport, folder: str, output: Output) -> None:
    written = bench_plots.write(report, storage.meant(folder))
    output.note(f"wrote {counted(len(written.paths), 'plot')} to {folder}")
    if written.missing:
        output.note(f"note: nothing was measured for the plots {', '.join(written.missing)}")


def _prompts(runs: BenchRuns) -> tuple[BenchPrompt, ...]:
    """The built-in prompts or those of `--prompts`, filtered by `--category`."""
    if runs.prompts is None:
        return built_in(runs.category)
    found = read(Path(runs.prompts))
    if runs.category is None:
        return found
    known = sorted({prompt.category for prompt in found})
    for name in runs.category:
        if name not in known:
            raise UsageError(f"--category {name} is not in {runs.prompts}", hint=f"it has: {', '.join(known)}")
    return tuple(prompt for prompt in found if prompt.category in runs.category)


def _text(report: BenchReport, format: str) -> str:
    """The full report in one of the formats."""
    if format == "json":
        lines = [to_json(to_plain(report))]
    elif format == "jsonl":
        events: list[BenchPlan | BenchRun | BenchReport] = [report.plan, *report.runs, report]
        lines = [event_line(event) for event in events]
    else:
        lines = csv_lines(report) if format == "csv" else report_lines(report, full=True)
    return "\n".join(lines)


def _deliver(
    report: BenchReport, failure: Exception | None, target: Path | None, options: BenchOutput, output: Output
) -> None:
    """Write, print and draw the report. An error in one of them does not keep the others from being done."""

    def show() -> None:
        # A report that was written need not be kept once more.
        kept = nullcontext() if target else not_lost(output, f".{form}", lambda: _text(report, form))
        with kept:
            if form == "md":
                _show(report_lines(report, full=options.verbose, width=output.out.width or None), output)
            elif form != "jsonl":
                output.text(_text(report, form))
            elif failure is not None:  # else its lines were printed during the runs
                raise failure

    form, errors = options.format, list[Exception]()
    steps: list[Callable[[], None]] = [show]
    if target is not None:
        steps.insert(0, lambda: write_report(target, _text(report, _form(target)), output))
    if options.plots is not None:
        steps.append(partial(_plot, report, options.plots, output))
    for step in steps:
        try:
            step()
        except Exception as error:
            errors.append(error)
    for other in errors[:-1]:
        if not isinstance(other, BrokenPipeError):
            say_error(told(other))
    if errors:
        raise errors[-1]


def _deliver_parallel(report: ParallelReport, target: Path | None, options: BenchOutput, output: Output) -> None:
    if target is not None:
        write_report(target, parallel_text(report, _form(target)), output)
    kept = nullcontext() if target else not_lost(output, f".{options.format}", lambda: parallel_text(report, form))
    form = options.format
    with kept:
        if form == "md":
            _show(parallel_lines(report, output.out.width or None), output)
        else:
            output.text(parallel_text(report, form))


def _show(lines: Iterable[str], output: Output) -> None:
    """Markdown. On a terminal prose is wrapped and tables are not."""
    for line in lines:
        (output.line if line.startswith("|") else output.prose)(line)


def _target(name: str | None) -> Path | None:
    """The file of `--output`. Raises UsageError."""
    if name is None:
        return None
    if _form(Path(name)) not in FORMATS:
        raise UsageError(f"--output {name} (expected a name that ends in .md, .csv, .json or .jsonl)")
    return writable("--output", name)


def _form(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()


def _measure(
    job: BenchJob, opener: Opener, cancel: Cancel, options: BenchOutput, output: Output
) -> tuple[BenchReport, Exception | None]:
    """The report and the error that ended it early, if any. Raises an error that came before the report."""
    report: BenchReport | None = None
    failure: Exception | None = None
    try:
        for event in _watched(job, opener, cancel, options, output):
            if isinstance(event, BenchReport):
                report = event
            if options.format == "jsonl" and failure is None and isinstance(event, (BenchPlan, BenchRun, BenchReport)):
                try:
                    output.line(event_line(event))
                except (OSError, SpecllamaError) as error:  # a full disk, or a closed pipe: stop measuring
                    failure = error
                    cancel.set()
    except Exception as error:
        if report is None:
            raise failure or error from None
        return report, error
    assert report is not None, "the last event of a benchmark is its report"
    if failure is not None:
        report = replace(report, partial=f"its lines could not be written ({failure})")
        report = replace(report, verdict=verdict(report))
    return report, failure


def _watched(
    job: BenchJob, opener: Opener, cancel: Cancel, options: BenchOutput, output: Output
) -> Iterator[BenchEvent]:
    """The events of the measuring thread; progress is shown."""
    # No status line among JSON lines on the same terminal.
    moving = replace(output, quiet=True) if options.format == "jsonl" and output.out.is_terminal else output
    with (
        StatusLine(moving, logs=True) as status,
        Worker(core.bench(job, opener, cancel), cancel) as worker,
    ):
        for batch in worker.batches(GAP_S):
            for event in batch:
                if isinstance(event, BenchProgress):
                    left = "" if event.left_s is None else f"{clock(event.left_s)} left"
                    status.show(event.what, event.share, left)
                elif isinstance(event, BenchPlan):
                    status.clear()
                    output.note(f"{event.note}; {counted(event.n_runs, 'run')}, about {clock(event.expected_s)}")
                yield event


def _read(name: str) -> BenchReport:
    """A report written with `--output FILE.json`. Raises ReportError."""
    path = storage.meant(name)
    try:
        data = parsed(decoded(storage.read_bytes(path), name, ReportError))
    except OSError as error:
        raise ReportError(f"{name} cannot be read: {error.strerror}", hint=WRITE_ONE) from None
    except ValueError:
        raise ReportError(f"{name} is not JSON", hint=WRITE_ONE) from None
    try:
        return BenchReport.from_json(data)
    except ReportError as error:
        raise ReportError(f"{name}: {error}", hint=error.hint) from None


def _compare(files: list[str], options: BenchOutput, output: Output) -> None:
    if len(files) != 2:
        raise UsageError(f"compare takes two reports (got {len(files)})", hint="specllama bench compare A.json B.json")
    if options.format not in ("md", "json"):
        raise UsageError(f"--format is {options.format}, expected md or json for a comparison")
    if options.output is not None or options.plots is not None:
        raise UsageError("compare writes only to stdout", hint="redirect it: specllama bench compare ... > FILE")
    found = bench_compare.compare(*map(_read, files))
    if storage.meant(files[0]).resolve() == storage.meant(files[1]).resolve():
        output.warn(f"{files[0]} is compared with itself", "give another report")
    lines = [to_json(to_plain(found))] if options.format == "json" else comparison_lines(found, files)
    for line in lines:
        output.line(line)
