"""Many requests in one model: each in its own greenlet with an engine of its own, their passes shared."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, Protocol, cast

from greenlet import GreenletExit, getcurrent, greenlet

from specllama.base.clock import perf_counter
from specllama.base.errors import Interrupted, ModelBusy, SpecllamaError, UsageError, error_of_request
from specllama.batch.request import Done, Request, Times
from specllama.batch.slot_view import SlotView, Want
from specllama.batch.stats import BatchStats
from specllama.core.arrays import FloatArray
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, Notice, TokenEvent
from specllama.core.kept_prefix import KeptPrefix
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, Part, SlotModel, common_prefix

# Unread tokens in a pass beside rows that requests wait for. With the default target on two cores they make a pass of 8
# rows 2.3 times as long, and a prompt takes 13 % longer than in passes of 128 tokens.
SLICE = 32
FEW = 8  # so many unread tokens go before the prompts of others: they belong to a step
LEAST_SHARED = 16  # a shorter common beginning is not worth a pass of its own


class EngineMaker(Protocol):
    """Makes the engine of every request, and hears of the passes that it may learn from."""

    def begin(self, target: SlotView, draft: SlotView | None, request: Request) -> Engine:
        """A request begins in the slot of the views."""

    def end(self, slot: int) -> None:
        """The request of the slot has ended."""

    def passed(self, parts: Sequence[Part], n_drafting: int) -> None:
        """The target has computed `parts`; before that, `n_drafting` requests had the draft model evaluated.

        Called before a request of these parts goes on.
        """


@dataclass(slots=True, eq=False)
class _Task:
    """A request in a slot, and what there is of its answer."""

    number: int  # in the order of the caller's requests
    slot: int
    request: Request
    started: float
    first: float | None = None
    waited_s: float = 0.0
    want: Want | None = None  # None = it runs, has not begun, or has ended
    thread: Any = None  # its greenlet; None = it has not begun
    tokens: list[int] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    finished: Finished | None = None
    error: SpecllamaError | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.first = self.first or perf_counter()
            self.tokens.append(event.token)
        elif isinstance(event, Notice):
            self.notices.append(event.text)
        elif isinstance(event, Finished):
            self.finished = event

    def done(self) -> Done:
        reason, stats = (None, SpecStats()) if self.finished is None else (self.finished.reason, self.finished.stats)
        stats.passes.clear()  # the times of shared passes say nothing of plain decoding
        times = Times(self.started, self.first, perf_counter(), self.waited_s)
        return Done(self.request.id, tuple(self.tokens), reason, self.error, tuple(self.notices), stats, times)


class _Source:
    """The caller's requests, numbered. After an exception there are no more; `finish` raises it."""

    def __init__(self, requests: Iterable[Request | Done]) -> None:
        self._left: Iterator[tuple[int, Request | Done]] | None = enumerate(requests)
        self._error: Exception | None = None

    def take(self) -> tuple[int, Request | Done] | None:
        try:
            found = None if self._left is None else next(self._left, None)
        except Exception as error:
            found, self._error = None, error
        if found is None:
            self._left = None
        return found

    def finish(self) -> None:
        if self._error is not None:
            raise self._error


class _Ended:
    """The ends that the caller has not seen."""

    def __init__(self, *, in_order: bool) -> None:
        self._in_order, self._due, self._waiting = in_order, 0, dict[int, Done]()

    def add(self, number: int, done: Done) -> None:
        self._waiting[number] = done

    def take(self) -> Done | None:
        """The next one; None = it has not ended yet."""
        number = self._due if self._in_order else next(iter(self._waiting), -1)
        done = self._waiting.pop(number, None)
        self._due += done is not None
        return done


def planned(wants: Sequence[Want], most: int, most_outputs: int) -> list[tuple[Want, Part]]:
    """What one pass computes of `wants`, which stand in the order of their turn.

    It has at most `most` tokens, `most_outputs` of them with logits.
    """
    reading = min(SLICE, most) if any(len(want.unread) <= FEW for want in wants) else most
    chosen = list[tuple[Want, Part]]()
    for want in sorted(wants, key=lambda want: len(want.unread) > FEW):
        n_unread = len(want.unread)
        n_outputs = len(want.tokens)
        fits = n_unread <= reading and n_unread + n_outputs <= most and n_outputs <= most_outputs
        if fits and (want.is_chain or not n_unread):
            part = want.whole()
        elif n_unread := min(n_unread, reading, most):
            part = want.reading(n_unread)
        else:
            continue
        chosen.append((want, part))
        reading -= n_unread
        most -= len(part.tokens)
        most_outputs -= part.n_rows
    return chosen


class Pool:
    """Answers requests with `target` and `draft`, as many at once as they have slots. Not thread-safe, except `cancel`.

    Every request runs the ordinary `Engine`, which waits in its greenlet whenever it wants logits. The pool then
    computes one pass for all that wait: first those of the draft, until every request waits for the target. The slot of
    an ended request is free for the next one; its tokens stay in the KV, so a common beginning is not read again.

    A request depends only on the passes of others that came before its own step, so its law is that of it alone.
    """

    def __init__(
        self, target: SlotModel, draft: SlotModel | None, maker: EngineMaker, *, cancel: Cancel | None = None
    ) -> None:
        """`cancel` ends all requests at the next step. The caller closes the models."""
        self._target, self._draft, self._maker = target, draft, maker
        self.cancel = cancel or Cancel()
        self.stats = BatchStats(n_slots=target.n_slots)
        slots = range(target.n_slots)
        self._views = [SlotView(target, slot, self._wait) for slot in slots]
        self._draft_views = [None if draft is None else SlotView(draft, slot, self._wait) for slot in slots]
        # The record of a view is kept by its users only.
        self._kept = [KeptPrefix.of(view) for view in (*self._views, *self._draft_views) if view is not None]
        self._tasks: list[_Task] = []  # in the order of their turn
        self._drafting = set[int]()  # slots whose request used the draft since the last pass of the target
        self._running, self._thread = False, 0
        for model in (target, draft):
            if model is not None:
                model.watch(self.cancel)

    @property
    def n_ctx(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return self._target.n_ctx

    @property
    def n_ctx_draft(self) -> int | None:
        """Most tokens of a request in the draft model, counted in its own tokens; None = no draft model."""
        return None if self._draft is None else self._draft.n_ctx

    def run(self, requests: Iterable[Request | Done], *, in_order: bool = False) -> Iterator[Done]:
        """The ends of all requests, as they come or in the order of the requests.

        A request is taken when a slot is free. The error of a request is in its Done. An exception that `requests`
        raises is raised when the requests before it have ended. Raises ModelBusy while another `run` is open.
        """
        if self._running:
            raise ModelBusy("the pool answers other requests (one run at a time)", hint="read it to its end first")
        self._running, self._thread = True, get_ident()
        source, ended = _Source(requests), _Ended(in_order=in_order)
        try:
            while True:
                goes_on = self._fill(source, ended) or self._step(ended)
                while (done := ended.take()) is not None:
                    yield done
                    if get_ident() != self._thread:
                        raise UsageError("the answers are read in two threads, expected one")
                if not goes_on:
                    break
            source.finish()
        finally:
            if get_ident() == self._thread:  # a greenlet cannot leave its thread
                self._abandon()
                self._running = False

    def _fill(self, source: _Source, ended: _Ended) -> bool:
        """Take one request if a slot is free; False = nothing was taken."""
        free = set(range(self.stats.n_slots)).difference(task.slot for task in self._tasks)
        if not free or self.cancel.is_set() or (taken := source.take()) is None:
            return False
        number, request = taken
        if isinstance(request, Done):
            self.stats.add(request)
            ended.add(number, request)
        else:
            self._tasks.append(_Task(number, min(free), request, perf_counter()))
            self.stats.n_active = len(self._tasks)
        return True

    def _step(self, ended: _Ended) -> bool:
        """One pass of a model, or of both if the draft only reads; False = no request is left."""
        if not self._tasks:
            return False
        began_s, stats = perf_counter(), self.stats
        self._share()
        for task in [each for each in self._tasks if each.thread is None]:
            self._begin(task, ended)
        for task in self._tasks[:]:
            if task.want is not None and (self.cancel.is_set() or task.request.cancel.is_set()):
                self._throw(task, Interrupted("the request was cancelled"), ended)
        drafting = [task for task in self._tasks if task.want is not None and task.want.view.slots is self._draft]
        rest = [task for task in self._tasks if task not in drafting]
        if not (drafting and self._pass(drafting, ended)) and rest:
            self._pass(rest, ended)
        stats.n_active = len(self._tasks)
        stats.kv_s = sum(view.kv_s for view in (*self._views, *self._draft_views) if view is not None)
        stats.elapsed_s += perf_counter() - began_s
        return True

    def _share(self) -> None:
        """Read the common beginning of the first requests once."""
        if len(self._tasks) < 2 or any(self._target.length(slot) for slot in range(self.stats.n_slots)):
            return
        first, *others = (task.request.tokens for task in self._tasks)
        n_shared = min(min(common_prefix(first, other), len(first) - 1, len(other) - 1) for other in others)
        if not LEAST_SHARED <= n_shared <= self._target.n_ctx:
            return
        began_s, shared = perf_counter(), tuple(first[:n_shared])
        try:
            self._target.share(shared)
        except SpecllamaError:  # every slot is empty: each request reads it, and hears what fails
            return
        for view in self._views:
            KeptPrefix.of(view).hold([*shared, shared[-1]])
        self.stats.count_pass(0, n_shared, perf_counter() - began_s)

    def _pass(self, tasks: Sequence[_Task], ended: _Ended) -> bool:
        """One pass for `tasks`, which want logits of the same model; True if it gave some of them theirs."""
        by_want = {task.want: task for task in tasks if task.want is not None}
        model, stats = next(iter(by_want)).view.slots, self.stats
        chosen = planned(list(by_want), model.max_rows, model.max_outputs)
        parts = [part for _, part in chosen]
        n_rows = sum(part.n_rows for part in parts)
        n_read = sum(len(part.tokens) for part in parts) - n_rows
        began_s = perf_counter()
        try:
            rows = model.run(parts)
        except SpecllamaError as error:
            self._end_emptied(model, error, ended)
            return True
        seconds = perf_counter() - began_s
        for want, part in chosen:
            want.in_passes_s += seconds
            del want.unread[: len(part.tokens) - part.n_rows]
        given = [
            (by_want[want], part, logits) for (want, part), logits in zip(chosen, rows, strict=True) if part.n_rows
        ]
        if model is self._target:
            stats.count_pass(n_rows, n_read, seconds)
            self._maker.passed(parts, len(self._drafting))
            self._drafting.difference_update(task.slot for task, _, _ in given)
        else:
            stats.count_draft_pass(n_rows, n_read, seconds)
            self._drafting.update(task.slot for task, _, _ in given)
        for task, _, logits in given:
            if task.want is not None:  # else it ended with the failure of another one
                self._go_on(task, partial(task.thread.switch, logits), ended)
        return bool(given)

    def _end_emptied(self, model: SlotModel, error: SpecllamaError, ended: _Ended) -> None:
        """Every slot of `model` is empty: end the requests that would go on from what it held.

        A request that waits for the target has its draft read again what is missing.
        """
        for task in self._tasks[:]:
            if task.want is not None and (model is self._target or task.want.view.slots is model):
                self._throw(task, error, ended)

    def _begin(self, task: _Task, ended: _Ended) -> None:
        task.thread = greenlet(self._answer)
        self._go_on(task, partial(task.thread.switch, task), ended)

    def _throw(self, task: _Task, error: SpecllamaError, ended: _Ended) -> None:
        self._go_on(task, partial(task.thread.throw, error), ended)

    def _go_on(self, task: _Task, switch: Callable[[], object], ended: _Ended) -> None:
        """The turn of a task, until it wants logits or ends."""
        thread, want = task.thread, task.want
        began_s = perf_counter()
        if want is not None:
            task.waited_s += began_s - want.asked_s - want.in_passes_s
        thread.parent = getcurrent()  # the caller may read on in another greenlet
        task.want = None
        found = switch()
        self.stats.turns_s += perf_counter() - began_s
        self._tasks.remove(task)
        if thread.dead:
            done = task.done()
            self._end(task)
            self.stats.add(done)
            ended.add(task.number, done)
        else:
            task.want = cast(Want, found)
            self._tasks.append(task)
        for view in (self._views[task.slot], self._draft_views[task.slot]):
            if view is not None and view.failure is not None:
                error, view.failure = view.failure, None
                self._end_emptied(view.slots, error, ended)

    def _answer(self, task: _Task) -> None:
        """Runs in the greenlet of the task."""
        request, slot = task.request, task.slot
        try:
            engine = self._maker.begin(self._views[slot], self._draft_views[slot], request)
            events = engine.generate(
                request.tokens,
                request.params,
                request.choose,
                max_tokens=request.max_tokens,
                stopper=request.stopper,
                cancel=request.cancel,
                constraint=request.constraint,
            )
            with closing(cast("Generator[Event, None, None]", events)):
                for event in events:
                    task.take(event)
        except Exception as error:
            task.error = error_of_request(error)

    @staticmethod
    def _wait(want: Want) -> FloatArray:
        """Leave the greenlet of a task until a pass has computed `want`.  (len(want.tokens), V)"""
        rows: FloatArray = getcurrent().parent.switch(want)
        return rows

    def _end(self, task: _Task) -> None:
        self._drafting.discard(task.slot)
        self._maker.end(task.slot)

    def _abandon(self) -> None:
        """End what is in progress: each engine leaves its KV as after a cancelled answer."""
        with ExitStack() as stack:
            stack.callback(self._forget_failures)
            for task in self._tasks:
                if task.thread is not None:
                    stack.callback(self._end, task)
                    if not task.thread.dead:  # else its error is what ends the others
                        task.thread.parent = getcurrent()
                        stack.callback(task.thread.throw, GreenletExit)
            self._tasks = []
            self.stats.n_active = 0

    def _forget_failures(self) -> None:
        """No request is left that a failed change of the KV would end."""
        for view in (*self._views, *self._draft_views):
            if view is not None:
                view.failure = None
