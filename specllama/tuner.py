"""Tuning: measure the ways of loading a pair, each in a child process, and keep what promises to be fastest.

A child for each way, because a build can die of a kernel path, and because weights arranged twice need memory twice.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from statistics import fmean, median
from typing import Any

from specllama import llama, traces
from specllama.conversation import Conversation, Message
from specllama.errors import BackendError, PromptError, SpecllamaError
from specllama.llama import LlamaModel, LoadOptions
from specllama.measure import READ_ROWS, VERIFY_ROWS, interleaved, reading, verifying
from specllama.profiles import ClassFigures, Profile, Subject
from specllama.sample_prompts import sample_prompts
from specllama.traces import Trace
from specllama.tuning import CostProfile, Points

# A kernel path on which plain decoding is slower by more than this cannot be chosen, however well drafts do there:
# whenever drafting pauses, that would be the speed.
SLOWEST_PLAIN = 1.05
# Another path than the default one must promise so much more: measurements of one machine differ by as much.
PATH_MARGIN = 1.03
# Where visits of the same path differ by more than this, the machine was busy with something else, and paths that were
# measured one after the other cannot be compared.
MOST_DRIFT = 1.1

N_CTX = 1024  # of the children
N_BEFORE = 128  # tokens in the KV while passes are measured

Tell = Callable[[str, float], None]  # what is being done, and the share of it that is done


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much time to spend."""

    seconds: float  # for the passes of one child
    n_visits: int  # children for each way of loading, in turn, so that a drift of the machine strikes all alike
    n_tokens: int  # generated for each class of prompts


QUICK = Effort(seconds=5.0, n_visits=1, n_tokens=24)
THOROUGH = Effort(seconds=30.0, n_visits=2, n_tokens=96)


@dataclass(frozen=True, slots=True)
class Job:
    """What one child does."""

    subject: Subject
    extra_bufts: bool  # of target and draft
    seconds: float
    n_tokens: int  # for traces; 0 = none are wanted
    most_step_s: float = math.inf  # a target whose T(1) is longer is out: nothing more of it is measured
    checks: bool = False  # T(1) alone, to see whether the machine is as fast as it was


@dataclass(frozen=True, slots=True)
class Measured:
    """What one child found: seconds by rows."""

    step_s: float  # T(1), measured before everything else
    verify: Points | None  # None: T(1) alone was reason enough, or all that was asked for
    draft: Points  # empty where there is none
    traces: tuple[Trace, ...]


# ------------------------------------------------------------------------------------------------------ in the child


def _prompts(target: LlamaModel, n_tokens: int, n_known: int) -> Mapping[str, list[int]]:
    """The prompts that leave room for an answer, in tokens that both models know. Raises PromptError if none does."""
    conversation = Conversation(target.vocab, target.chat_template)
    prompts = {name: conversation.tokens([Message("user", text)]) for name, text in sample_prompts().items()}
    fit = {
        name: tokens
        for name, tokens in prompts.items()
        if 1 < len(tokens) <= target.n_ctx - n_tokens and max(tokens) < n_known
    }
    if not fit:
        raise PromptError("no prompt fits these models, so there is nothing to measure with")
    return fit


def _median_points(rows: Sequence[int], samples: Sequence[Sequence[float]]) -> Points:
    return tuple((n, median(each)) for n, each in zip(rows, samples, strict=True))


def _measure(job: Job, target: LlamaModel, draft: LlamaModel | None, tell: Tell) -> Measured:
    """Everything one child is for."""
    n_known = target.vocab_size if draft is None else min(target.vocab_size, draft.vocab_size)
    prompts = _prompts(target, job.n_tokens, n_known)
    text = [token for tokens in prompts.values() for token in tokens]
    text *= -(-(N_BEFORE + max(READ_ROWS)) // len(text))
    before, rest = text[:N_BEFORE], text[N_BEFORE:]
    for model in (target, draft):
        if model is not None:
            model.feed(before)

    step = interleaved([verifying(target, N_BEFORE, rest[:1])], seconds=job.seconds / 10)
    step_s = median(step[0])
    if job.checks:
        return Measured(step_s, None, (), ())
    rows = [n for n in VERIFY_ROWS if n <= target.caps.max_block] if step_s <= job.most_step_s else []
    read = READ_ROWS if draft is not None else ()
    passes = [verifying(target, N_BEFORE, rest[:n]) for n in rows]
    if draft is not None:
        passes += [reading(draft, N_BEFORE, rest[:n]) for n in read]
    samples = interleaved(passes, seconds=job.seconds, progress=lambda share: tell("measuring passes", share))
    verify = _median_points(rows, samples[: len(rows)]) if rows else None
    reads = _median_points(read, samples[len(rows) :])
    return Measured(step_s, verify, reads, _record(job, target, draft, prompts, tell))


def _record(
    job: Job, target: LlamaModel, draft: LlamaModel | None, prompts: Mapping[str, list[int]], tell: Tell
) -> tuple[Trace, ...]:
    """Traces of every class, where they are wanted."""
    if draft is None or not job.n_tokens:
        return ()
    found: list[Trace] = []
    for i, (name, tokens) in enumerate(prompts.items()):
        tell("recording answers", i / len(prompts))
        found += traces.record(target, draft, name, tokens, n_tokens=job.n_tokens)
    return tuple(found)


def child(job: Job, connection: Connection) -> None:
    """A child's whole life: load, measure, and send what came of it. Whoever started it ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        subject = job.subject

        def load(path: Any, options: LoadOptions) -> LlamaModel:
            wish = replace(options, n_ctx=N_CTX, use_extra_bufts=job.extra_bufts)
            return llama.load(path, replace(wish, max_block=max(VERIFY_ROWS)))

        def tell(what: str, share: float) -> None:
            connection.send((what, share))

        tell("loading", 0.0)
        target = load(subject.target, subject.target_options)
        draft = None
        if subject.draft is not None and subject.draft_options is not None:
            draft = load(subject.draft, subject.draft_options)
        connection.send(_measure(job, target, draft, tell))
    except SpecllamaError as error:
        connection.send((str(error), error.hint, type(error).__name__))
    except BrokenPipeError:
        pass  # nobody is listening any more


# ----------------------------------------------------------------------------------------------------- in the parent


@contextmanager
def _shielded() -> Iterator[None]:
    """A child that starts now leaves Ctrl-C to its parent from its first moment on."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_child(job: Job, tell: Tell) -> Measured:
    """Measure in a child process. Raises BackendError where it dies or cannot."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(job, theirs), daemon=True)
    with _shielded():
        process.start()
    theirs.close()
    try:
        while True:
            message = ours.recv()
            if isinstance(message, Measured):
                return message
            if len(message) == 3:
                raise BackendError(message[0], hint=message[1])
            tell(*message)
    except EOFError:
        process.join()
        raise BackendError(f"the process that measured ended with code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()


@dataclass(frozen=True, slots=True)
class Layout:
    """One kernel path, that is one layout of the weights, as one or more children measured it."""

    extra_bufts: bool
    step_s: float  # T(1), in the fastest visit
    verify: Points | None  # in units of T(1) in the same visit: a machine that is slow for a while does not matter
    draft: Points


@dataclass(frozen=True, slots=True)
class Findings:
    """What all children together found."""

    layouts: tuple[Layout, ...]
    traces: tuple[Trace, ...]
    failures: tuple[str, ...]  # paths that cannot be used, and why
    drift: float  # by how much visits of the same path differ; 1 = not at all

    @property
    def comparable(self) -> bool:
        """Was the machine quiet enough to compare paths that were measured one after the other?"""
        return self.drift <= MOST_DRIFT


def _scaled(points: Points, factor: float) -> Points:
    return tuple((n, cost * factor) for n, cost in points)


def _mean_points(several: Sequence[Points]) -> Points:
    """The mean of several measurements of the same rows."""
    return tuple((points[0][0], fmean(cost for _, cost in points)) for points in zip(*several, strict=True))


def _merged(extra_bufts: bool, visits: Sequence[Measured]) -> Layout:
    """What several children found about one path."""
    # Both were measured in the same rounds, so the first point of one is the unit of the other.
    units = [each.verify[0][1] if each.verify else each.step_s for each in visits]
    curves = [_scaled(each.verify, 1.0 / unit) for each, unit in zip(visits, units, strict=True) if each.verify]
    drafts = [_scaled(each.draft, 1.0 / unit) for each, unit in zip(visits, units, strict=True) if each.draft]
    step_s = min(each.step_s for each in visits)
    return Layout(extra_bufts, step_s, _mean_points(curves) if curves else None, _mean_points(drafts))


def _schedule(ways: Sequence[bool], n_visits: int) -> list[tuple[bool, bool]]:
    """(path, whether it is only a check) of every child, in turn; the first path is seen twice if others are at all."""
    turns = [(way, False) for _ in range(n_visits) for way in ways]
    return [*turns, (ways[0], True)] if len(ways) > 1 and n_visits == 1 else turns


def measure(
    subject: Subject, ways: Sequence[bool], effort: Effort, tell: Tell, run: Callable[[Job, Tell], Measured] = run_child
) -> Findings:
    """Measure every path of `ways` (values of use_extra_bufts, the default first).

    Raises BackendError if none works.
    """
    visits: dict[bool, list[Measured]] = {way: [] for way in ways}
    failures: dict[bool, BackendError] = {}
    recorded: tuple[Trace, ...] = ()
    fastest = math.inf
    schedule = _schedule(ways, effort.n_visits)
    for i, (way, checks) in enumerate(schedule):
        if way in failures:
            continue
        n_tokens = 0 if recorded or checks else effort.n_tokens
        job = Job(subject, way, effort.seconds, n_tokens, fastest * SLOWEST_PLAIN, checks)

        def tell_all(what: str, share: float, i: int = i) -> None:
            tell(what, (i + share) / len(schedule))

        try:
            found = run(job, tell_all)
        except BackendError as error:
            failures[way] = error
            continue
        visits[way].append(found)
        recorded = recorded or found.traces
        fastest = min(fastest, found.step_s)
    merged = [_merged(way, found) for way, found in visits.items() if found and way not in failures]
    if not any(layout.verify for layout in merged):
        raise next(iter(failures.values()), BackendError("nothing could be measured"))
    steps = [[each.step_s for each in found] for found in visits.values() if found]
    drift = max(max(each) / min(each) for each in steps)
    return Findings(
        tuple(merged), recorded, tuple(f"{path_name(way)}: {error}" for way, error in failures.items()), drift
    )


def path_name(extra_bufts: bool) -> str:
    """What people call a kernel path."""
    return "rearranged weights" if extra_bufts else "weights as in the file"


def _costs(target: Layout, draft: Layout) -> CostProfile:
    """In units of the target's T(1)."""
    assert target.verify is not None
    points = _scaled(draft.draft, draft.step_s / target.step_s)
    # Without a draft nothing is ever asked of its costs; they have to be something.
    return CostProfile(verify=((1, 1.0), *target.verify[1:]), draft=points or ((1, 1.0),))


def _figures(recorded: Sequence[Trace], costs: CostProfile, slowdown: float) -> tuple[ClassFigures, ...]:
    """What to expect by class; `slowdown`: plain decoding's time here over that on its fastest path."""
    found = []
    for name, greedy in dict.fromkeys((trace.name, trace.greedy) for trace in recorded):
        seen = [trace for trace in recorded if (trace.name, trace.greedy) == (name, greedy)]
        n_max, rate = traces.best_length(seen, costs)
        sure = traces.confidence(seen)
        found.append(ClassFigures(name, greedy, traces.acceptance(seen), sure, n_max, rate / slowdown))
    return tuple(found)


def _cheapest_draft(layouts: Sequence[Layout]) -> Layout:
    """The path for the draft: its price is all that matters of it. The first one unless another is clearly cheaper."""
    best = layouts[0]
    for layout in layouts[1:]:
        if layout.draft and PATH_MARGIN * layout.draft[0][1] * layout.step_s < best.draft[0][1] * best.step_s:
            best = layout
    return best


def choose(found: Findings, *, quick: bool) -> Profile:
    """The profile of the best kernel paths, the target's by the geometric mean of the classes' predicted speeds.

    Where the machine was too busy to compare them, the default ones.
    """
    layouts = found.layouts if found.comparable else found.layouts[:1]
    fastest = min(layout.step_s for layout in layouts)
    measured = [layout for layout in layouts if layout.verify is not None]
    usable = [layout for layout in measured if layout.step_s <= SLOWEST_PLAIN * fastest] or measured
    draft = _cheapest_draft(layouts)
    best: Profile | None = None
    best_score = 0.0
    for target in usable:
        costs = _costs(target, draft)
        profile = Profile(
            made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            quick=quick,
            target_extra_bufts=target.extra_bufts,
            draft_extra_bufts=draft.extra_bufts,
            step_s=target.step_s,
            costs=costs,
            classes=_figures(found.traces, costs, target.step_s / fastest),
        )
        score = _score(profile, fastest)
        if best is None or score > PATH_MARGIN * best_score:
            best, best_score = profile, score
    assert best is not None, "at least one path was measured"
    return best


def _score(profile: Profile, fastest: float) -> float:
    """Speed over plain decoding on its fastest path."""
    if not profile.classes:
        return fastest / profile.step_s
    return math.exp(fmean(math.log(each.speedup) for each in profile.classes))
