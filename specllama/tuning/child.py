"""The child process of `tune`: costs of passes of target and draft, and traces of the draft's acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from specllama import llama
from specllama.base import child as children
from specllama.base.child import Tell, TellShare
from specllama.base.errors import BackendError
from specllama.chat.conversation import fitting_prompts
from specllama.drafters.controller import LEAST_COST, Points
from specllama.drafters.translated import TranslatedModel
from specllama.llama import LlamaModel, LoadOptions
from specllama.llama.kernel_path import DEFAULT, KernelPath
from specllama.llama.load_plan import thread_choices
from specllama.pairs.draft_in_target_ids import in_target_ids
from specllama.pairs.profile import LoadSeconds, ProfileKey, Threads
from specllama.prompts.load import sample_prompts
from specllama.tuning import traces
from specllama.tuning.costs import (
    READ_ROWS,
    VERIFY_ROWS,
    Curve,
    Pass,
    affordable,
    attention,
    finished,
    interleaving,
    known,
    n_cells,
    reading,
    spread,
    verifying,
)
from specllama.tuning.traces import Trace, TracedAnswer

N_CTX = 1024  # of the children
N_BEFORE = 128  # tokens in the KV while passes are measured
# Attention: the same passes after up to DEEP tokens, or after as many as half of the time allows. With fewer than
# LEAST_DEEP the difference is within the noise.
DEEP, LEAST_DEEP, DEEP_ROWS = 2048, 1024, (1, 4, 8)

THREAD_MARGIN = 1.03  # another number of threads must be faster than the default by this factor
# Share of a child's work that is done after loading, after trying threads, and after T(1) alone.
LOADED, TRIED, STEPPED = 0.2, 0.3, 0.35
THREADS_SHARE, STEP_SHARE = 0.15, 0.1  # of a child's time: for trying threads, and for T(1) alone
JUDGED_SHARE = 0.2  # of the time for answers, for the draft's reading of them
LEAST_TOKENS = 16  # of an answer, on a machine too slow for more
TELL_S = 1.0  # between two reports of progress
N_VERIFIED = 5  # rows of the pass that decides the threads for blocks


@dataclass(frozen=True, slots=True)
class Way:
    """A way of loading a pair: the kernel paths of target and draft."""

    target: KernelPath = DEFAULT
    draft: KernelPath = DEFAULT

    @property
    def name(self) -> str:
        if self.target == self.draft:
            return self.target.name
        return f"{self.target.name} for the target, {self.draft.name} for the draft"


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """What one child measures: T(1), then the passes that `rows` asks for, then answers and the draft's traces."""

    subject: ProfileKey
    way: Way
    seconds: float  # for all of it, with loading
    rows: tuple[int, ...] | None = None  # the target's blocks; None = what there is time for; () = T(1) and no passes
    n_tokens: int = 0  # of each answer to record, at most; 0 = none
    answers: tuple[TracedAnswer, ...] = ()  # of another child, for judging the draft
    threads: Threads | None = None  # of another child; None = find them, unless the user fixed them
    most_step_s: float = math.inf  # if T(1) is longer, only T(1) is measured
    deep: bool = False  # measure T(1) and the target's attention, and nothing else


@dataclass(frozen=True, slots=True)
class Measured:
    """What one child found. Costs are seconds by rows."""

    step_s: float  # T(1), measured before everything else
    verify: Points | None = None  # None = only T(1) was measured
    draft: Points = ()  # by the draft's own tokens; empty without a draft
    traces: tuple[Trace, ...] = ()
    answers: tuple[TracedAnswer, ...] = ()  # of the traces
    threads: Threads | None = None  # used here; None = those of the subject
    noise: float = 0.0  # `costs.spread`, the median over the passes
    n_spelled: float = 1.0  # draft tokens for one target token, in the answers, or without answers in the prompts
    loads: LoadSeconds = field(default_factory=LoadSeconds)  # of target and draft, one after the other
    attention: float | None = None  # see `costs.attention`; None = not asked for, or no time for a long context


def _median_points(rows: Sequence[int], samples: Sequence[Sequence[float]]) -> Points:
    return tuple((n, median(each)) for n, each in zip(rows, samples, strict=True))


class Bench:
    """The loaded target and draft of one child, and the text to measure with."""

    def __init__(self, job: MeasureJob, target: LlamaModel, draft: LlamaModel | None, loads: LoadSeconds) -> None:
        self.job = job
        self.target = target
        self.loads = loads
        self.draft: LlamaModel | TranslatedModel | None = None
        self._own_draft = draft
        if draft is not None:
            self.put(draft)
        n_known = target.vocab_size if self.draft is None else min(target.vocab_size, self.draft.vocab_size)
        self.prompts = fitting_prompts(
            target.vocab,
            target.chat_template,
            sample_prompts(),
            n_known=n_known,
            n_room=target.n_ctx - job.n_tokens,
        )
        text = [token for tokens in self.prompts.values() for token in tokens]
        text *= -(-(N_BEFORE + max(READ_ROWS)) // len(text))
        self.before, self.rest = text[:N_BEFORE], text[N_BEFORE:]

    def put(self, draft: LlamaModel) -> None:
        self.draft, self._own_draft = in_target_ids(self.target, draft, strategy=self.job.subject.strategy), draft

    def judge(self, by: TracedAnswer) -> tuple[Trace, Trace]:
        assert self.draft is not None
        return traces.judged(self.draft, by)

    def read(self) -> None:
        """Both models read the text that precedes every pass."""
        for model in (self.target, self.draft):
            if model is not None:
                model.truncate(0)
                model.feed(self.before)

    def verifying(self, n_rows: int) -> Pass:
        return verifying(self.target, N_BEFORE, self.rest[:n_rows])

    def reading(self, n_rows: int) -> Pass:
        assert self.draft is not None
        return reading(self.draft, N_BEFORE, known(self.draft, self.rest)[:n_rows])

    def n_spelled(self, answers: Sequence[TracedAnswer]) -> float:
        """Draft tokens for one target token, in the target's answers."""
        if self.draft is None:
            return 1.0
        said = [token for each in answers for token in each.tokens] or [*self.before, *self.rest]
        return n_cells(self.draft, said) / len(said)

    def use(self, threads: Threads) -> None:
        self.target.set_threads(threads.decode, threads.verify)
        if self._own_draft is not None:
            self._own_draft.set_threads(threads.draft, threads.draft)

    def default_threads(self) -> Threads:
        """The threads that the models were loaded with."""
        plan, other = self.target.plan, (self._own_draft or self.target).plan
        return Threads(plan.n_threads, plan.n_threads_batch, other.n_threads)


def _part(tell: Tell, what: str, begin: float, end: float) -> TellShare:
    """Reports the progress of a part that spans `begin` to `end` of the whole."""
    return lambda share: tell(what, begin + share * (end - begin))


def _seldom(tell: Tell) -> Tell:
    """`tell`, at most once in TELL_S and for each new part: drawing on another core slows the next pass."""
    last_s, last = -math.inf, ""

    def told(what: str, share: float) -> None:
        nonlocal last_s, last
        now_s = perf_counter()
        if what != last or now_s - last_s >= TELL_S:
            last_s, last = now_s, what
            tell(what, share)

    return told


def find_threads(bench: Bench, seconds: float, progress: TellShare) -> Threads:
    """The best number of threads for each kind of pass: one row of the target, several rows, one row of the draft."""
    default = bench.default_threads()
    choices = [n for n in thread_choices() if n != default.decode]
    if not choices:
        return default

    def at(n_threads: int, work: Pass) -> Pass:
        def run() -> None:
            bench.use(Threads(n_threads, n_threads, n_threads))
            work()

        return run

    passes = [bench.verifying(1), bench.verifying(N_VERIFIED)]
    passes += [bench.reading(1)] if bench.draft is not None else []
    tried = [default.decode, *choices]
    samples = finished(interleaving([at(n, work) for work in passes for n in tried], seconds=seconds), progress)
    medians = [median(each) for each in samples]
    best = [_best_of(tried, medians[index * len(tried) : (index + 1) * len(tried)]) for index in range(len(passes))]
    return Threads(best[0], best[1], best[2] if bench.draft is not None else default.draft)


def _best_of(choices: Sequence[int], times: Sequence[float]) -> int:
    """The fastest choice, or the first one if none is clearly faster."""
    fastest = min(range(len(choices)), key=lambda index: times[index])
    return choices[fastest] if THREAD_MARGIN * times[fastest] < times[0] else choices[0]


def _may_choose_threads(subject: ProfileKey) -> bool:
    """True unless the user fixed the thread count."""
    several = (subject.target_options, *([subject.draft_options] if subject.draft_options else []))
    return all(options.n_threads is None and options.n_threads_batch is None for options in several)


def _measure(bench: Bench, tell: Tell, left: Callable[[], float]) -> Measured:
    """T(1) first, then the passes, then the traces. `left`: seconds until the job's end."""
    job, tell = bench.job, _seldom(tell)
    bench.read()
    threads = None
    if _may_choose_threads(job.subject):
        threads = job.threads
        if threads is None:
            part = _part(tell, "trying numbers of threads", LOADED, TRIED)
            threads = find_threads(bench, THREADS_SHARE * left(), part)
        bench.use(threads)
    part = _part(tell, "measuring passes", TRIED, STEPPED)
    step_s = median(finished(interleaving([bench.verifying(1)], seconds=STEP_SHARE * left()), part)[0])
    if job.deep:
        return Measured(step_s, threads=threads, attention=_attention(bench, tell, left))
    rows = _rows(job, step_s, left(), bench.target.caps.max_block)
    read = READ_ROWS if bench.draft is not None and job.rows != () else ()
    samples = list[list[float]]()
    if passes := [*map(bench.verifying, rows), *map(bench.reading, read)]:
        seconds = left() * (1.0 - JUDGED_SHARE) if job.answers else left()
        samples = finished(interleaving(passes, seconds=seconds), _part(tell, "measuring passes", STEPPED, 1.0))
    answers = job.answers or _hear(bench, step_s, tell, left)
    return Measured(
        step_s,
        verify=_median_points(rows, samples[: len(rows)]) if rows else None,
        draft=_median_points(read, samples[len(rows) :]),
        traces=tuple(trace for each in answers for trace in bench.judge(each)) if bench.draft is not None else (),
        answers=answers,
        threads=threads,
        noise=median(map(spread, samples)) if samples else 0.0,
        n_spelled=bench.n_spelled(answers),
        loads=bench.loads,
    )


def _attention(bench: Bench, tell: Tell, left: Callable[[], float]) -> float | None:
    """See `costs.attention`; None if half of the time is too short for LEAST_DEEP tokens."""
    target, half_s = bench.target, left() / 2
    most = min(DEEP, target.n_ctx - max(DEEP_ROWS))

    def curve(seconds: float) -> Curve:
        n_before = target.length
        passes = [verifying(target, n_before, bench.rest[:n]) for n in DEEP_ROWS]
        one_s, *others = map(median, finished(interleaving(passes, seconds=seconds)))
        return Curve(n_before, {n: each / one_s for n, each in zip(DEEP_ROWS[1:], others, strict=True)})

    shallow = curve(half_s / 4)
    while target.length + len(bench.before) <= most and left() > half_s:
        target.feed(bench.before)
        tell("measuring passes in a long context", STEPPED + (1.0 - STEPPED) * target.length / DEEP)
    return attention(shallow, curve(left())) if target.length >= LEAST_DEEP else None


def _rows(job: MeasureJob, step_s: float, seconds: float, most: int) -> tuple[int, ...]:
    """The target's blocks to measure, of `most` rows at most."""
    if step_s > job.most_step_s:
        return ()
    wanted = VERIFY_ROWS if job.rows is None else job.rows
    rows = tuple(n for n in wanted if n <= most)
    return affordable(rows, step_s, seconds) if job.rows is None else rows


def _hear(bench: Bench, step_s: float, tell: Tell, left: Callable[[], float]) -> tuple[TracedAnswer, ...]:
    """New answers, as long as there is time for; empty if the job asks for none."""
    found, n_prompts = list[TracedAnswer](), len(bench.prompts) if bench.job.n_tokens else 0
    for i, (name, tokens) in enumerate(list(bench.prompts.items())[:n_prompts]):
        part = _part(tell, "recording answers", *(STEPPED + (1.0 - STEPPED) * n / n_prompts for n in (i, i + 1)))
        seconds = (1.0 - JUDGED_SHARE) * left() / (n_prompts - i)
        n_tokens = min(bench.job.n_tokens, max(int(seconds / step_s), LEAST_TOKENS))
        found.append(traces.answer(bench.target, name, tokens, n_tokens=n_tokens, progress=part))
    return tuple(found)


def _open(path: Path, options: LoadOptions, kernels: KernelPath, n_ctx: int, progress: TellShare) -> LlamaModel:
    def goes_on(share: float) -> bool:
        progress(share)
        return True

    wish = replace(kernels.applied(options), n_ctx=n_ctx, max_block=max(VERIFY_ROWS))
    return llama.load(path, wish, progress=goes_on)


def open_draft(job: MeasureJob, path: Path, progress: TellShare = lambda share: None) -> LlamaModel:
    """Load a draft with the job's options and kernel path. Raises what `llama.load` raises."""
    assert job.subject.draft_options is not None
    return _open(path, job.subject.draft_options, job.way.draft, N_CTX, progress)


def load(job: MeasureJob, tell: Tell = lambda what, share: None) -> Bench:
    """Load the job's models. Raises what `llama.load` raises."""
    subject, n_ctx = job.subject, DEEP + max(DEEP_ROWS) if job.deep else N_CTX
    both = LOADED if subject.draft is None else LOADED / 2
    progress, began_s = _part(tell, "loading", 0.0, both), perf_counter()
    target = _open(subject.target, subject.target_options, job.way.target, n_ctx, progress)
    loads = LoadSeconds(target=perf_counter() - began_s)
    draft = None
    if subject.draft is not None:
        draft = open_draft(job, subject.draft, _part(tell, "loading", both, LOADED))
        loads = replace(loads, both=perf_counter() - began_s)
    return Bench(job, target, draft, loads)


def child(job: MeasureJob, tell: Tell) -> Measured:
    """Entry point of the child process."""
    end = perf_counter() + job.seconds
    tell("loading", 0.0)
    return _measure(load(job, _seldom(tell)), tell, lambda: end - perf_counter())


RunMeasureJob = Callable[[MeasureJob, Tell], Measured]


def run_child(job: MeasureJob, tell: Tell) -> Measured:
    """Measure in a child process. Raises BackendError if it dies, and what the child raises."""
    return children.run(partial(child, job), tell)


def _plausible(found: Measured) -> bool:
    """True if every block takes about as long as one row, or longer."""
    measured = [points for points in (found.verify, found.draft) if points]
    return all(cost >= LEAST_COST * points[0][1] for points in measured for _, cost in points)


class HeldUp(BackendError):
    """Two measurements in turn were implausible."""


def steady(run: RunMeasureJob, job: MeasureJob, tell: Tell) -> Measured:
    """Measure, and once more if the result is implausible. Raises HeldUp, and what the child raises."""
    for _ in range(2):
        if _plausible(found := run(job, tell)):
            return found
    raise HeldUp(
        "the machine is too busy to measure: one row took longer than several, twice",
        hint="run `specllama tune` again when nothing else runs",
    )
