"""`specllama bench --parallel`: many requests at once, with drafts and without."""

from __future__ import annotations

import csv
import io
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import product

from specllama.base.disk import size_text
from specllama.base.errors import Interrupted, UsageError
from specllama.base.jsonable import to_plain
from specllama.base.text import counted
from specllama.batch.open import open_pool
from specllama.batch.request import Request
from specllama.batch.stats import Spread
from specllama.bench import machine
from specllama.bench.job import BenchProgress
from specllama.bench.parallel import (
    PARALLEL_SCHEMA,
    ParallelJob,
    ParallelReport,
    ParallelRow,
    Rounds,
    measured,
    n_requests,
    rows,
    verdict,
)
from specllama.bench.plan import spread
from specllama.bench.report import Condition
from specllama.chat.conversation import Conversation, Message
from specllama.chat.format import AnswerFormat
from specllama.chat.format_masks import constraint_of
from specllama.cli.bench.models import hardware_for, loads_of
from specllama.cli.bench.options import BenchDrafting, BenchHardware, BenchModels, BenchRuns, BenchSampling
from specllama.cli.loading import Said, names_of
from specllama.cli.record import describe_model, versions
from specllama.cli.screen.keyboard import silent_keyboard
from specllama.cli.screen.output import Output, to_json
from specllama.cli.screen.render import percent
from specllama.cli.screen.status import StatusLine
from specllama.cli.screen.tables import fitted_table
from specllama.cli.screen.worker import Worker, interruptible
from specllama.cli.tuned import measured as with_profile
from specllama.core.noise import SeedMode
from specllama.core.types import Cancel, Rule
from specllama.drafters.length import AUTO_LENGTH
from specllama.llama import build_info
from specllama.pairs import setup as pair_setup
from specllama.pairs.ask import Ask, Drafting
from specllama.pairs.setup import Models
from specllama.prompts.filler import notes
from specllama.prompts.load import BenchPrompt

N_PREDICT = (64,)
GAP_S = 0.5  # between two drawings, which take time from the measuring thread


class _Questions:
    """The requests of every cell: prompts of all classes in turn, the same with drafts and without."""

    def __init__(
        self,
        models: Models,
        template: str | None,
        prompts: Sequence[BenchPrompt],
        sampling: BenchSampling,
        form: AnswerFormat | None,
        *,
        natural_stop: bool,
    ) -> None:
        self._vocab, self._prompts, self._sampling, self._form = models.target.vocab, prompts, sampling, form
        self._conversation = Conversation(self._vocab, template)
        self._forbidden = {} if natural_stop else dict.fromkeys(models.target.end_tokens, -math.inf)
        self._tokens: dict[tuple[int, int], list[int]] = {}

    def tokens(self, i: int, n_least: int) -> list[int]:
        """Prompt i, with notes before the question if it is shorter than `n_least` tokens."""
        key = (i % len(self._prompts), n_least)
        if key not in self._tokens:
            text = self._prompts[key[0]].turns[0]
            found = self._conversation.tokens([Message("user", text)])
            if (missing := n_least - len(found)) > 0:
                before = notes(missing, lambda text: len(self._vocab.tokenize(text, special=False)))
                found = self._conversation.tokens([Message("user", before + text)])
            self._tokens[key] = found
        return self._tokens[key]

    def n_ctx(self, condition: Condition, n: int) -> int:
        """Tokens that the longest of the first `n` prompts and its answer take."""
        return max(len(self.tokens(i, condition.n_prompt)) for i in range(n)) + condition.n_predict

    def requests(self, condition: Condition, n: int, drafts: bool, turn: int) -> list[Request]:
        """See `ParallelJob`."""
        params = replace(self._sampling, temp=condition.temperature).params
        params = replace(params, logit_bias={**params.logit_bias, **self._forbidden})
        mode = SeedMode(self._sampling.seed_mode[0])
        return [
            Request(
                i,
                self.tokens(i, condition.n_prompt),
                params,
                mode.chooser(self._sampling.seed + turn * n + i),
                max_tokens=condition.n_predict,
                constraint=constraint_of(self._form, self._vocab),
                drafts=drafts,
            )
            for i in range(n)
        ]


def _refuse_others(
    models: BenchModels, runs: BenchRuns, drafting: BenchDrafting, sampling: BenchSampling, hardware: BenchHardware
) -> None:
    """Raise UsageError for what is not measured with many requests at once."""
    given = {
        "several drafts": len(models.model_draft or ()) > 1,
        "several draft lengths": len(drafting.spec_draft_n_max or ()) > 1,
        "several strategies": len(drafting.spec_type) > 1,
        "several rules": len(drafting.verify_rule) > 1,
        "several seed modes": len(sampling.seed_mode) > 1,
        "several ways to load": len(loads_of(hardware)) > 1,
        "--depth": any(runs.depth),
        "--delay": runs.delay > 0.0,
        "--synthetic": runs.synthetic is not None,
    }
    if found := next((name for name, is_given in given.items() if is_given), None):
        raise UsageError(f"--parallel cannot be measured with {found}", hint="leave it out, or --parallel")


def bench_parallel(
    models: BenchModels,
    runs: BenchRuns,
    drafting: BenchDrafting,
    sampling: BenchSampling,
    hardware: BenchHardware,
    form: AnswerFormat | None,
    prompts: Sequence[BenchPrompt],
    settings: dict[str, object],
    out: Output,
) -> ParallelReport:
    """Measure; returns the cells so far after a signal. Raises UsageError, the errors of loading, and Interrupted."""
    _refuse_others(models, runs, drafting, sampling, hardware)
    listener, lengths = Said(out), drafting.spec_draft_n_max or (AUTO_LENGTH,)
    ask = Ask(
        names=replace(names_of(models), draft=next(iter(models.model_draft or ()), None)),
        drafting=Drafting(
            spec_type=drafting.spec_type[0],
            length=lengths[0],
            p_min=drafting.spec_draft_p_min,
            temperature=drafting.draft_temp,
            rule=Rule(drafting.verify_rule[0]),
            measure=drafting.measure == "auto",
        ),
        hardware=hardware_for(hardware, loads_of(hardware)[0]),
    )
    setup = pair_setup.prepare(pair_setup.choose(ask, listener), listener)
    pair_setup.require_fit(setup, listener)
    conditions = [
        Condition(temperature=temperature, n_prompt=n_prompt, n_predict=n_predict)
        for n_prompt, n_predict, temperature in product(
            runs.prompt_length, sampling.predict or N_PREDICT, sampling.temp or (0.0,)
        )
    ]
    chosen = spread(prompts)[: runs.n_prompts]
    cancel = Cancel()
    with (
        silent_keyboard(out.out) as restore,
        interruptible(cancel, restore),
        pair_setup.load_models(setup, listener, cancel) as loaded,
    ):
        loaded.watch(cancel)
        setup = with_profile(setup, loaded, out)
        questions = _Questions(loaded, setup.target.template, chosen, sampling, form, natural_stop=runs.natural_stop)
        n_most = n_requests(max(runs.parallel))
        n_ctx = max(questions.n_ctx(condition, n_most) for condition in conditions)
        job = ParallelJob(
            parallel=sorted(runs.parallel),
            conditions=conditions,
            n_repetitions=runs.repetitions or (None if runs.budget else 3),
            budget_s=runs.budget,
            open=lambda n: open_pool(loaded, setup, ask.drafting, n_ctx=n_ctx, n_slots=n, cancel=cancel),
            requests=questions.requests,
        )
        found, n_rounds = _watched(job, cancel, out)
        table = rows(found)
        if not table:
            raise Interrupted("nothing was measured")
        draft = loaded.loaded_draft
        return ParallelReport(
            schema=PARALLEL_SCHEMA,
            made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=shlex.join(["specllama", *sys.argv[1:]]),
            settings=settings,
            versions=versions(build_info()),
            target=describe_model(setup.target, loaded.target),
            draft=describe_model(setup.draft, draft) if setup.draft and draft else None,
            machine=machine.look(),
            n_rounds=n_rounds,
            rows=table,
            verdict=verdict(table),
        )


def _watched(job: ParallelJob, cancel: Cancel, out: Output) -> tuple[Rounds, int]:
    """What the measuring thread finds; progress is shown."""
    results: list[tuple[Rounds, int]] = []

    def work() -> Iterator[BenchProgress]:
        results.append((yield from measured(job)))

    with StatusLine(out, logs=True) as status, Worker(work(), cancel) as worker:
        for batch in worker.batches(GAP_S):
            for progress in batch:
                status.show(progress.what, progress.share)
    return results[0]


def parallel_text(report: ParallelReport, form: str) -> str:
    """The report in one of the formats of `bench`."""
    if form == "json":
        return to_json(to_plain(report))
    if form == "jsonl":
        return "\n".join(to_json({"event": "row", **to_plain(row)}) for row in report.rows)
    if form == "csv":
        return "\n".join(_csv_lines(report.rows))
    return "\n".join(parallel_lines(report))


def _csv_lines(table: Sequence[ParallelRow]) -> Iterator[str]:
    """A header and a line for each row; the three figures of a spread have columns of their own."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for i, row in enumerate(table):
        record: dict[str, object] = {}
        for name, value in to_plain(row).items():
            parts = value if isinstance(value, dict) else {"": value}
            record |= {f"{name}_{part}" if part else name: each for part, each in parts.items()}
        if i == 0:
            writer.writerow(record)
        writer.writerow(record.values())
    yield from out.getvalue().splitlines()


LEGEND = {
    "gain": "tokens per second over those without drafts, with the lowest and highest round",
    "rows": "tokens with logits in a pass",
    "TTFT s": "from the start of a request, in its slot, to its first token",
    "TPOT ms": "time of a token after the first",
    "latency s": "from the start of a request, in its slot, to its end",
    "waiting s": "of a request for the others",
}


def parallel_lines(report: ParallelReport, width: int | None = None) -> list[str]:
    """The report as Markdown. `width`: columns of the terminal; None for a file."""
    draft = "no draft model" if report.draft is None else f"with {report.draft.get('file')}"
    made = f"{counted(report.n_rounds, 'round')}; specllama {report.versions.get('specllama')}; {report.made}"
    lines = [f"{report.target.get('file')} {draft}; {report.machine.cpu}; {made}", ""]
    shown: dict[str, None] = {}
    for condition in dict.fromkeys(row.condition for row in report.rows):
        table = [row for row in report.rows if row.condition == condition]
        prompts = f"prompts of {condition.n_prompt} tokens or more" if condition.n_prompt else "prompts as they are"
        length = "at most " * bool(report.settings.get("natural_stop")) + counted(condition.n_predict, "token")
        lines += [f"Temperature {condition.temperature:g}, answers of {length}, {prompts}:", ""]
        for found, spare in ((_speeds(table), SPARE_SPEEDS), (_times(table), SPARE_TIMES)):
            heads, drawn = fitted_table(*found, spare, width)
            lines += [*drawn, ""]
            shown |= dict.fromkeys(heads)
    legend = " ".join(f"{head}: {LEGEND[head]}." for head in shown if head in LEGEND)
    return [*lines, f"{legend} Three figures: 50, 95 and 99 % of the requests.", "", f"**{report.verdict}**"]


# Columns to remove on a narrow terminal, the first ones first.
SPARE_SPEEDS = ("rows", "answers/min", "TPOT ms", "accepted", "TTFT s")
SPARE_TIMES = ("KV", "scheduling", "KV memory", "sampling")


def _speeds(table: Sequence[ParallelRow]) -> tuple[list[str], list[list[str]]]:
    heads = ["at once", "drafts", "answers/min", "t/s", "gain", "accepted", "rows", "TTFT s", "TPOT ms", "latency s"]
    return heads, [
        [
            str(row.n_parallel),
            "yes" if row.drafts else "no",
            f"{60 * row.answers_s:.1f}",
            f"{row.tokens_s:.1f}",
            "" if row.gain is None else f"{row.gain:.2f} ({row.gain_low:.2f}-{row.gain_high:.2f})",
            percent(row.acceptance_rate) if row.acceptance_rate is not None else "",
            "" if row.rows_per_pass is None else f"{row.rows_per_pass:.1f}",
            _three(row.first_s, 1, 2),
            _three(row.token_s, 1000, 0),
            _three(row.latency_s, 1, 1),
        ]
        for row in table
    ]


def _times(table: Sequence[ParallelRow]) -> tuple[list[str], list[list[str]]]:
    heads = [
        "at once",
        "drafts",
        "draft",
        "verify",
        "prompts",
        "KV",
        "sampling",
        "scheduling",
        "waiting s",
        "KV memory",
    ]
    return heads, [
        [
            str(row.n_parallel),
            "yes" if row.drafts else "no",
            *(
                percent(share)
                for share in (
                    row.draft_share,
                    row.verify_share,
                    row.prompt_share,
                    row.kv_share,
                    row.request_share,
                    row.scheduling_share,
                )
            ),
            _three(row.waiting_s, 1, 1),
            size_text(row.kv_bytes),
        ]
        for row in table
    ]


def _three(found: Spread | None, factor: float, digits: int) -> str:
    if found is None:
        return ""
    return " / ".join(f"{factor * seconds:.{digits}f}" for seconds in (found.p50, found.p95, found.p99))
