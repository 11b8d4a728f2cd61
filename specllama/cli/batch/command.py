"""`specllama batch`: answer the requests of a file, many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TypeGuard

import typer

from specllama import llama
from specllama.base.disk import stamp_of
from specllama.base.errors import (
    BackendError,
    ContextFull,
    DiskFull,
    Interrupted,
    PromptError,
    SpecllamaError,
    UsageError,
    error_of_request,
)
from specllama.base.jsonable import parsed
from specllama.base.ranges import AUTO, MAX_CTX, MIN_CTX
from specllama.base.text import counted
from specllama.batch.answers import ANSWER, ERROR, SCHEMA, START, AnswerFile, Kept, already_there, kept_in
from specllama.batch.open import MAX_ROWS, open_pool
from specllama.batch.pool import Pool
from specllama.batch.request import Done, Request
from specllama.batch.requests import Asked, BadLine, RequestReader
from specllama.chat.conversation import Conversation
from specllama.chat.settings import require_known
from specllama.chat.settings import to_json as settings_json
from specllama.chat.stream import TextStream
from specllama.cli.args.grouping import with_options
from specllama.cli.args.options import DraftOptions, FormatOptions, ModelOptions
from specllama.cli.batch.options import AnswerOptions, BatchHardware, BatchSampling, RequestOptions
from specllama.cli.batch.source import Put, RequestFile, Survey, pool_requests, prompts
from specllama.cli.batch.view import BatchTally, report_lines
from specllama.cli.codes import FAILED
from specllama.cli.loading import Said, ask_of, settings_of
from specllama.cli.prompting import system_prompt_of, template_of
from specllama.cli.record import acceptance, describe_model, timings, versions
from specllama.cli.reports import writable
from specllama.cli.screen.keyboard import silent_keyboard
from specllama.cli.screen.output import Output, open_output, to_json
from specllama.cli.screen.status import StatusLine
from specllama.cli.screen.worker import Worker, interruptible
from specllama.cli.tuned import measured, say_profile
from specllama.core.types import Cancel, PieceOf
from specllama.llama import LlamaModel, build_info
from specllama.llama.header import has_states
from specllama.llama.vocab import Vocabulary
from specllama.pairs import setup as pair_setup
from specllama.pairs.ask import Ask
from specllama.pairs.setup import Models, Setup

GAP_S = 0.2  # between two writings: answers that end together wait for the disk once
# Settings that change nothing but the speed, or that no request has.
_NOT_DECISIVE = ("spec_type", "spec_draft_n_max", "spec_draft_p_min", "draft_temp", "verify_rule", "spec", "think")


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What is to be answered, and where the answers go."""

    source: RequestFile
    reader: RequestReader
    template: str | None  # the chat template instead of the model's
    path: Path | None  # of the answers; None = stdout
    kept: Kept
    settings: Mapping[str, object]  # those that decide what the answers are

    def conversation(self, vocab: Vocabulary, setup: Setup) -> Conversation:
        return Conversation(vocab, self.template or setup.target.template)


@with_options
def batch(
    requests: RequestOptions,
    answers: AnswerOptions,
    models: ModelOptions,
    drafting: DraftOptions,
    sampling: BatchSampling,
    formats: FormatOptions,
    hardware: BatchHardware,
) -> None:
    """Answer the requests of a file, many at once in one model.

    A JSON line is a text, or an object with prompt or messages, and id, system, raw and settings as in the Python API:
    temperature, seed, max_tokens, stop, json_schema and so on. A line that is no request gives an error in the answers
    and exit code 1; the others are answered, except rows of CSV after a quote that is not closed. Ctrl-C keeps the
    finished answers, and --resume goes on after any end.
    """
    out = open_output(color=answers.color, format="jsonl", quiet=answers.quiet, verbose=answers.verbose)
    llama.set_log((lambda level, line: None if level == "debug" else out.detail(line)) if out.verbose else None)
    source, path = RequestFile.of(requests.prompts, requests.input_format), _place(answers)
    system, template = system_prompt_of(requests), template_of(requests.chat_template)
    settings = settings_of(sampling, formats.format)
    reader = RequestReader(source.kind, settings, system, requests.raw, requests.row_template)
    read = source.read(reader)
    cancel = Cancel()
    first = next(read, None)
    if first is None:
        raise PromptError(f"{source.name} has no requests")
    kept = Kept() if path is None or not path.exists() else kept_in(path)
    ask, listener = ask_of(models, drafting, hardware), Said(out)
    setup = pair_setup.prepare(pair_setup.choose(ask, listener), listener)
    require_known(settings.params.logit_bias, setup.target.header.n_vocab)
    stamp = stamp_of(setup.target.path)
    decisive = {
        **{name: value for name, value in settings_json(settings).items() if name not in _NOT_DECISIVE},
        "system_prompt": system,
        "template": requests.row_template and requests.row_template.text,
        "chat_template": template,
        "raw": requests.raw,
        "target": [stamp.n_bytes, stamp.sample],
    }
    work = BatchWork(source, reader, template, path, kept, parsed(to_json(decisive)))  # as in a file
    kept.require(work.settings)
    survey, n_ctx = None, setup.target_options.n_ctx
    if source.can_be_read_twice:
        read.close()
        with (
            silent_keyboard(out.out) as restore,
            interruptible(cancel, restore),
            closing(llama.load_vocabulary(setup.target.header)) as vocab,
            listener.working("reading the requests"),
        ):
            conversation, most = work.conversation(vocab, setup), setup.target.header.n_ctx_train or MAX_CTX
            waiting = _until(cancel, filter(kept.waits, source.read(reader)))
            survey = Survey.of(waiting, vocab, conversation, n_ctx, most)
        if not survey.n_requests:
            out.note(f"{path} holds all answers" + (f", {kept.n_errors} of them errors" if kept.n_errors else ""))
            _end(kept.n_errors, path, out)
            return
        if hardware.ctx_size is None:
            n_ctx = max(survey.n_ctx, MIN_CTX)
            # A recurrent target's own KV is that of the requests. That of another is used to measure costs alone, so it
            # stays short, and its passes narrow.
            own = replace(setup.target_options, n_ctx=n_ctx)
            if not has_states(setup.target.header):
                own = replace(own, n_ctx=min(n_ctx, setup.target_options.n_ctx), n_ubatch=MAX_ROWS)
            setup = replace(setup, target_options=own)
    pair_setup.require_fit(setup, listener)
    say_profile(setup, ask.names, out)
    tally = BatchTally(None if survey is None else survey.n_requests)
    with ExitStack() as stack:
        restore = stack.enter_context(silent_keyboard(out.out))
        stack.enter_context(interruptible(cancel, restore))
        loaded = stack.enter_context(pair_setup.load_models(setup, listener, cancel))
        loaded.watch(cancel)
        setup = measured(setup, loaded, out, ask.names)
        n_slots = None if hardware.parallel == AUTO else hardware.parallel
        opened = open_pool(
            loaded,
            setup,
            ask.drafting,
            n_ctx=n_ctx,
            n_slots=n_slots,
            n_requests=tally.total,
            cancel=cancel,
            on_note=lambda text: out.note(f"note: {text}"),
        )
        pool = stack.enter_context(opened)
        at_once = f"{counted(pool.stats.n_slots, 'request')} at once, {counted(pool.n_ctx, 'token')} of context each"
        out.note(at_once + (f" (line {survey.n_line} is the longest)" if survey and survey.n_line else ""))
        header = {"event": START, "schema": SCHEMA, "settings": work.settings, **_about(loaded, setup, ask, pool)}
        put = _opened(work, out, stack)
        if not kept.header:
            put([to_json(header)])
        asked = source.read(reader) if source.can_be_read_twice else chain([first], read)
        vocab = loaded.target.vocab
        conversation = work.conversation(vocab, setup)
        if conversation.notice:
            out.note(f"note: {conversation.notice}")
        found = pool_requests(prompts(filter(kept.waits, asked), vocab, conversation, n_ctx), vocab)
        goes_on = True
        try:
            _answer(pool, found, put, tally, loaded.target, out, in_order=answers.in_order)
        except Exception as error:
            goes_on = isinstance(error, (Interrupted, DiskFull))
            raise
        finally:
            if path is not None and goes_on and cancel.is_set():
                out.note(f"{path} has {counted(tally.n_answers, 'new answer')}; to go on: --resume")
        if conversation.system_merged:
            out.note("note: the chat template has no system prompt: it was put before the prompts")
        for line in report_lines(tally, pool.stats):
            out.note(line)
        if answers.json:
            figures = {
                **tally.to_json(),
                "parallel": pool.stats.n_slots,
                "n_ctx": pool.n_ctx,
                "stats": pool.stats.to_json(),
            }
            out.data({**header, "event": "report", **figures})
    _end(kept.n_errors + tally.n_errors, path, out)


def _until(cancel: Cancel, requests: Iterable[Asked | BadLine]) -> Iterator[Asked | BadLine]:
    """The requests. Raises Interrupted after `cancel`."""
    for each in requests:
        if cancel.is_set():
            raise Interrupted("reading was stopped on request")
        yield each


def _answer(
    pool: Pool,
    requests: Iterable[Request | Done],
    put: Callable[[list[str]], None],
    tally: BatchTally,
    target: LlamaModel,
    out: Output,
    *,
    in_order: bool,
) -> None:
    """Answer in a second thread; the answers go to `put` as they come. Raises the error of a shared pass."""
    tally.begin()
    with (
        StatusLine(out, logs=True) as status,
        Worker(pool.run(requests, in_order=in_order), pool.cancel) as worker,
    ):
        for ended in worker.batches(GAP_S):
            own = [done for done in ended if done.reason != "cancelled" and not _is_shared(done.error)]
            lines = [line_of(done, target.vocab.piece) for done in own]
            if lines:
                put([line for line, _ in lines])
            for text in tally.take([done for _, done in lines]):
                status.clear()
                out.warn(text)
            for text in tally.caveats([done for _, done in lines], own_kernels=target.plan.kernels):
                status.clear()
                out.note(f"note: {text}")
            for done in ended:
                if _is_shared(done.error) and not isinstance(done.error, Interrupted):
                    raise done.error
            status.show("answering", tally.share, tally.detail(pool.stats))


def _end(n_errors: int, path: Path | None, out: Output) -> None:
    if not n_errors:
        return
    if path is not None:
        out.note(f"hint: to try the requests with errors again, remove their lines from {path} and use --resume")
    raise typer.Exit(FAILED)


def _place(options: AnswerOptions) -> Path | None:
    """The file for the answers; None for stdout. Raises UsageError."""
    if options.output is None:
        needing = "--resume" if options.resume else "--json" if options.json else ""
        if needing:
            hint = f"specllama batch PROMPTS -o FILE {needing}"
            raise UsageError(f"{needing} needs a file for the answers", hint=hint)
        return None
    path = writable("--output", options.output)
    if path.is_symlink() and not path.exists():
        raise UsageError(f"--output {options.output} is a link to a file that does not exist", hint="use another file")
    if path.exists() and not path.is_file():
        raise UsageError(f"--output {options.output} is no regular file", hint="without -o, answers go to stdout")
    if path.exists() and not options.resume:
        raise already_there(path)
    return path


def _opened(work: BatchWork, out: Output, stack: ExitStack) -> Callable[[list[str]], None]:
    """What takes the lines of answers: a file, which `stack` closes, or stdout."""
    if work.path is None:
        return lambda lines: out.out.write("".join(f"{line}\n" for line in lines))
    return stack.enter_context(AnswerFile(work.path, work.kept if work.path.exists() else None)).add


def _about(models: Models, setup: Setup, ask: Ask, pool: Pool) -> dict[str, object]:
    """What the first line of the answers says of the models and the drafts. The context is that of a request."""
    draft = None
    if setup.draft is not None and models.loaded_draft is not None:
        draft = {**describe_model(setup.draft, models.loaded_draft), "n_ctx": pool.n_ctx_draft}
    return {
        "versions": versions(build_info()),
        "drafting": {"strategy": setup.strategy, "length": setup.length.to_json(), "rule": ask.drafting.rule.value},
        "models": {
            "target": {**describe_model(setup.target, models.target), "n_ctx": pool.n_ctx},
            "draft": draft,
        },
    }


def _is_shared(error: SpecllamaError | None) -> TypeGuard[SpecllamaError]:
    """True for the error of a pass for many requests: it says nothing of this one, which is to be answered again."""
    return isinstance(error, BackendError) and not isinstance(error, ContextFull)


def line_of(done: Done, piece: PieceOf) -> tuple[str, Done]:
    """The line of a request that has ended, and its end: an error if its answer cannot be written."""
    try:
        return to_json(_entry(done, piece)), done
    except Exception as error:
        failed = replace(done, error=error_of_request(error), reason=None)
        return to_json(_entry(failed, piece)), failed


def _entry(done: Done, piece: PieceOf) -> dict[str, object]:
    put, error = done.id, done.error
    assert isinstance(put, Put)
    asked = put.asked
    about = {
        "event": ANSWER if error is None else ERROR,
        "id": asked.id,
        "line": asked.n_line,
        "request": asked.digest,
    }
    if error is not None:
        return {**about, "error": {"kind": type(error).__name__, "message": str(error), "hint": error.hint}}
    assert isinstance(asked, Asked)
    answer = TextStream(piece, asked.settings.stops)
    for token in done.tokens:
        answer.push(token)
    answer.finish()
    times = done.times
    return {
        **about,
        "text": answer.text,
        "tokens": answer.tokens,
        "finish_reason": done.reason,
        "fits_format": None if asked.settings.format is None else asked.settings.format.fits(answer.text),
        "seed": put.seed,
        "timings": timings(done.stats),
        "acceptance": acceptance(done.stats),
        "times": times
        and {
            "first_token_s": None if times.first is None else times.first - times.started,
            "waited_s": times.waited_s,
            "total_s": times.ended - times.started,
        },
    }
