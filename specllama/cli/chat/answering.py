"""The state of a chat: its loaded models, its settings, and its answers from the first event to the summary."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import InitVar, asdict, dataclass, field, replace
from types import FrameType

import typer

from specllama.base.errors import Interrupted, SpecllamaError
from specllama.base.ranges import AUTO
from specllama.base.text import counted
from specllama.chat.format import AnswerFormat
from specllama.chat.session import ChatSession
from specllama.chat.settings import Settings, changed
from specllama.chat.stream import TextStream
from specllama.cli.chat.input import MessageSource
from specllama.cli.chat.shelf import KeptChat, Shelf
from specllama.cli.chat.view import ChatView
from specllama.cli.loading import Said
from specllama.cli.record import CHAT_SCHEMA, Record, begin
from specllama.cli.screen.ending import handling, leave_at_once
from specllama.cli.screen.keyboard import Keyboard, silent_keyboard
from specllama.cli.screen.look import AnswerLook
from specllama.cli.screen.output import Output, say_error
from specllama.cli.screen.render import Figures
from specllama.cli.screen.terminal import size_of
from specllama.cli.screen.view import EventView, View, say_summary
from specllama.cli.screen.worker import Worker
from specllama.cli.tuned import measure, say_measured, say_profile
from specllama.core.events import Event, Finished
from specllama.core.types import Cancel
from specllama.drafters import REGISTRY, TREE
from specllama.drafters.length import AUTO_LENGTH, CHAT, UNTUNED, DraftLength
from specllama.pairs import setup as pair_setup
from specllama.pairs.ask import Ask, Names
from specllama.pairs.learning import Lesson
from specllama.pairs.profile import Profile
from specllama.pairs.setup import Choice, Models, Setup, choose
from specllama.tuning.first_use import FirstUse

PATIENCE = 3  # the number of Ctrl-C in one answer that ends the program at once


@dataclass(frozen=True, slots=True)
class Opened:
    """Loaded models and how they were chosen."""

    ask: Ask  # `/model` changes the pair in it
    choice: Choice
    setup: Setup
    models: Models

    @property
    def names(self) -> dict[str, object]:
        """The names of the model files."""
        draft = self.setup.draft
        return {"target": self.setup.target.path.name, "draft": draft.path.name if draft else None}


def open_models(ask: Ask, output: Output, cancel: Cancel, keyboard: Keyboard | None = None) -> Opened:
    """Choose, fetch, check and load the models. Raises as `pairs.setup` does, as early as possible."""
    listener = Said(output)
    choice = choose(ask, listener)
    setup = pair_setup.prepare(choice, listener)
    options = setup.target_options
    setup = replace(setup, target_options=replace(options, max_block=max(options.max_block, CHAT + 1)))
    pair_setup.require_fit(setup, listener)
    with stoppable(cancel, (lambda: None) if keyboard is None else keyboard.restore):
        models = pair_setup.load_models(setup, listener, cancel)
    models.watch(cancel)
    return Opened(ask, choice, setup, models)


def fitted(settings: Settings, opened: Opened) -> Settings:
    """`settings` with the drafting that fits these models: strategy, length, and the policy of their profile."""
    setup = opened.setup
    longest = setup.length.longest if setup.strategy != "none" and setup.length.longest else UNTUNED
    length = DraftLength(longest, is_auto=setup.length.is_auto)
    p_min = 0.0 if length.is_auto else settings.drafting.p_min
    drafting = replace(settings.drafting, length=length, p_min=p_min, policy=None)
    return steered(replace(settings, strategy=setup.strategy, drafting=drafting), opened)


def steered(settings: Settings, opened: Opened, before: Settings | None = None) -> Settings:
    """`settings` with the policy of these models' profile, if the draft length is auto.

    The policy of `before` is kept, with what it has learned, if sampling and draft temperature allow it.
    """
    if not settings.drafting.length.is_auto:
        return settings
    greedy, draft_temp = settings.params.greedy, settings.drafting.temperature
    drafting = replace(settings.drafting, length=DraftLength.auto(opened.setup.length.longest))
    key = (greedy, draft_temp, settings.strategy == TREE)
    if (
        before is not None
        and before.drafting.length.is_auto
        and key == (before.params.greedy, before.drafting.temperature, before.strategy == TREE)
    ):
        policy = before.drafting.policy
    else:
        policy = opened.setup.policy(greedy=greedy, strategy=settings.strategy)
    return replace(settings, drafting=replace(drafting, policy=policy))


@contextlib.contextmanager
def stoppable(cancel: Cancel, restore: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C only sets `cancel`, so that a second press does not end the chat; see PATIENCE."""
    n_pressed = 0

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal n_pressed
        n_pressed += 1
        cancel.set()
        if n_pressed >= PATIENCE:
            leave_at_once(signal.SIGINT, restore)

    with handling([signal.SIGINT], press):
        yield


@dataclass
class ChatState:
    """The state of one `specllama chat`, on which the commands act."""

    output: Output
    opened: Opened
    settings: InitVar[Settings]
    system: InitVar[str]
    cancel: Cancel
    keyboard: Keyboard | None = None
    template: InitVar[str | None] = None  # instead of the model's
    live: bool = False
    look: AnswerLook = field(default_factory=AnswerLook)
    source: MessageSource | None = None
    shelf: Shelf = field(default_factory=lambda: Shelf(wanted=False))
    listed: list[KeptChat] = field(default_factory=list)  # by `/chats`, with their numbers
    attached: list[str] = field(default_factory=list)  # files that `/read` puts in front of the next message
    file: str = ""  # of the last save or load
    thought: str = ""  # the last thinking of the model
    n_failed: int = 0
    answering: bool = False
    ended: int = 0  # exit code, once the terminal is closed or a signal ends the process
    interrupted: bool = False  # the last answer was stopped
    kept: bool = False  # the last answer is in the conversation
    prefilled: str = ""  # the beginning of the next line
    edits_last: bool = False  # the next message replaces the last one
    _told: set[str] = field(default_factory=set)
    _decides: Profile | None = None  # the profile that the record names last
    _measuring: threading.Thread | None = None
    _used: FirstUse | None = None  # whose result was taken over
    _ended: threading.Event = field(default_factory=threading.Event)  # the wait in which it measures
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self, settings: Settings, system: str, template: str | None) -> None:
        models = self.opened.models
        self.session = ChatSession(models.target, models.draft, settings, system, template)
        self._stack.enter_context(self.opened.models)
        self.first_use = FirstUse(self.opened.setup, self.opened.models)

    def close(self) -> None:
        """Free the models."""
        self.cancel.set()  # ends a pass that two Ctrl-C left running
        self._stop_measuring()
        self._stack.close()

    def keep(self) -> None:
        """Keep the conversation so far on disk. A full disk does not end the chat."""
        if told := self.shelf.keep(self.session, self.opened.names):
            self.output.warn(told)

    def say(self, text: str) -> None:
        """Print the result of a command, on stdout."""
        if self.output.format == "jsonl":
            self.output.data({"event": "reply", "text": text})
        else:
            self.output.text(text)

    def note(self, text: str) -> None:
        """Print what a command did, on stderr."""
        if self.output.format == "jsonl":
            self.output.data({"event": "reply", "text": text})
        else:
            self.output.note(text)

    def fail(self, error: SpecllamaError) -> None:
        """Print an error; the chat continues."""
        self.n_failed += 1
        if self.output.format == "jsonl":
            self.output.data({"event": "error", "message": str(error), "hint": error.hint})
        else:
            say_error(error, self.output.err)

    def agrees(self, question: str) -> bool:
        """True if a person at the terminal says yes; on a pipe and with JSON lines False, without a question."""
        if not sys.stdin.isatty() or self.output.format != "human":
            return False
        with nullcontext() if self.keyboard is None else self.keyboard.lent():
            try:
                self.output.confirm(question)
            except typer.Abort:
                return False
        return True

    @property
    def width(self) -> int:
        return size_of(self.output.out)[0]

    @contextlib.contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Measures a pair without a profile in a second thread while the block waits for a line."""
        self._stop_measuring()  # of a line whose wait was interrupted twice
        if not self.first_use.done:
            self.cancel.clear()  # a last Ctrl-C was for an answer
            self._ended.clear()
            self._measuring = threading.Thread(target=self._measure, name="measuring", daemon=True)
            self._measuring.start()
        try:
            yield
        finally:
            self._stop_measuring()
        self.use_measured()

    def _measure(self) -> None:
        with contextlib.suppress(Interrupted):  # by a signal that ends the chat
            for _ in self.first_use:
                if self._ended.is_set():
                    return

    def _stop_measuring(self) -> None:
        """Wait for one pass at most: the thread must not compute while an answer does."""
        if self._measuring is not None:
            self._ended.set()
            self._measuring.join()
            self._measuring = None

    def measure(self) -> None:
        """Measure a pair without a profile now, where no person types and an answer waits."""
        self.first_use = FirstUse(self.opened.setup, self.opened.models, hurried=True)
        measure(self.first_use, self.output)
        self.use_measured()

    def use_measured(self) -> None:
        """Decide by a profile that was just made or completed, unless a setting decides meanwhile."""
        work, opened, settings = self.first_use, self.opened, self.session.settings
        if work.noise is None or work is self._used:
            return
        self._used = work
        before, new = opened.setup, work.setup
        is_auto = settings.drafting.length.is_auto
        if is_auto and settings.strategy == before.strategy and (before.profile is None or new.draft is None):
            self._adopt(new)
        elif is_auto or before.profile is not None:
            setup = replace(before, profile=new.profile, measures=False, completes=False)
            self.opened = replace(opened, setup=setup)
        else:
            self.opened = replace(opened, setup=replace(before, measured=new.profile))
        if before.profile is None:
            say_measured(work, self.output, opened.ask.names)

    def _adopt(self, setup: Setup) -> None:
        """Draft as `setup` says, with the loaded models."""
        models = self.opened.models
        self.opened = replace(self.opened, setup=setup)
        self.session.use(models.draft if setup.draft else None, fitted(self.session.settings, self.opened))
        if setup.draft is None:
            models.drop_draft()

    def message(self, text: str, form: AnswerFormat | None = None) -> None:
        """Ask `text`, after the attached files; replaces the last message if `edits_last`. `form`: of this answer."""
        whole = "\n\n".join([*self.attached, text])
        self.cancel.clear()
        replaces, self.edits_last = self.edits_last, False
        session = self.session
        usual = session.settings.format
        session.settings = replace(session.settings, format=form or usual)
        try:
            self.answer(session.edit(whole, self.cancel) if replaces else session.ask(whole, self.cancel))
        finally:
            session.settings = replace(session.settings, format=usual)
        if self.kept:
            self.attached.clear()

    def answer(self, events: Iterator[Event]) -> None:
        """Show an answer while it runs. Raises what the engine raises; the part so far is kept."""
        output, session = self.output, self.session
        self.interrupted = False
        self.kept = False
        turns = session.turns
        session.cost = self.opened.setup.cost
        answer = TextStream(self.opened.models.target.vocab.piece, session.settings.stops)
        drafts = session.settings.drafter != "none"
        figures = Figures(self.opened.models.target.n_ctx, drafts=drafts, look=self.look)
        record = self._record()
        self._tell_profile()
        settings = session.settings
        greedy, seeded = settings.params.greedy, settings.seeded or settings.format is not None
        lesson = Lesson(self.opened.setup, settings.drafting.policy, greedy=greedy, seeded=seeded)
        finished: Finished | None = None
        keyboard = self.keyboard
        with silent_keyboard(output.out) as restore, stoppable(self.cancel, keyboard.restore if keyboard else restore):
            view = self._view(answer, figures, record)
            self.answering = True
            with Worker(events, self.cancel) as worker:
                try:
                    for batch in worker.batches(view.gap_s):
                        for event in batch:
                            for take in (record.take, lesson.take, view.take):
                                take(event)
                            if isinstance(event, Finished):
                                finished = event
                        view.refresh()
                finally:
                    self.answering = False
                    view.close()
        if isinstance(view, ChatView) and view.reading.thought:
            self.thought = view.reading.thought
        assert finished is not None, "the engine's last event is always Finished"
        self.interrupted = finished.reason == "cancelled"
        self.kept = session.turns is not turns
        self.opened = replace(self.opened, setup=lesson.learned())
        self._after(finished)

    def _view(self, answer: TextStream, figures: Figures, record: Record) -> View:
        if self.output.format == "jsonl":
            return EventView(self.output, answer, record)
        starts_thinking = self.session.starts_thinking
        return ChatView(self.output, answer, figures, live=self.live, starts_thinking=starts_thinking)

    def _after(self, finished: Finished) -> None:
        """Print notes and the summary of an answer."""
        reuse = self.session.reuse
        assert reuse is not None
        if self.output.format == "jsonl":
            seed = self.session.turns[-1].seed if self.kept else None
            self.output.data({"event": "turn", "kept": self.kept, "seed": seed, "reuse": asdict(reuse)})
            return
        for notice in self.session.template_notes:
            if notice not in self._told:
                self._told.add(notice)
                self.output.note(f"note: {notice}")
        if not self.kept:
            self.output.note("note: stopped before the answer began; the message is not kept (press Up to get it back)")
        else:
            end = {"cancelled": "stopped", "length": "cut off", "stop": ""}[finished.reason]
            form = self.session.settings.format
            if form and not form.fits(self.session.turns[-1].answer):
                end = f"{end or 'cut by a stop text'}: no {form.kind}"
            say_summary(self.output, finished.stats, end)

    def start_record(self) -> None:
        """Write the header of all answers."""
        self._decides = self.opened.setup.profile
        self.output.data({"event": "start", **self._record().header})

    def _tell_profile(self) -> None:
        """Name the profile in the record again, if what decides in it has changed since."""
        last, now = ((each and (each.costs, each.habits)) for each in (self._decides, self.opened.setup.profile))
        self._decides = self.opened.setup.profile
        if self.output.format == "jsonl" and last != now:
            told = {"source": None} if self._decides is None else self._decides.to_json()
            self.output.data({"event": "profile", **told})

    def _record(self) -> Record:
        """The beginning of an answer's record."""
        opened = self.opened
        return begin(self.session.settings, opened.setup, opened.models, opened.ask.names, schema=CHAT_SCHEMA)

    def change_setting(self, name: str, value: str) -> None:
        """Change a setting from the next answer on. Raises UsageError, and as `open_models` if that is needed."""
        wanted = changed(self.session.settings, name, value)
        self.open_for(wanted.strategy)
        before, opened = self.session.settings, self.opened
        settings = changed(before, name, value)
        length, was = settings.drafting.length, before.drafting.length
        if length.is_auto and not was.is_auto:
            self._decide_by_profile()
            return
        measures = opened.setup.measures and settings.strategy != TREE
        if was.is_auto and not length.is_auto and measures:  # the number is for the draft model
            settings = replace(settings, strategy=opened.setup.model_strategy)
        self.session.settings = steered(settings, opened, before)
        if not length.is_auto and length != was:
            drafting = replace(opened.ask.drafting, length=length)
            self.opened = replace(opened, ask=replace(opened.ask, drafting=drafting))  # also for the next pair

    def open_for(self, strategy: str) -> None:
        """Load the models for trees, if `strategy` drafts them and they are not. Raises as `open_models`."""
        opened = self.opened
        if strategy != TREE or opened.setup.target_options.max_leaves > 1:
            return
        ask = replace(opened.ask, drafting=replace(opened.ask.drafting, spec_type=TREE, p_min=0.0))
        choose(ask, Said(self.output))  # a pair without a draft fails before the models are freed
        self._reopen(ask)

    def _decide_by_profile(self) -> None:
        """Set the draft length to auto.

        Models that were loaded for a number are loaded again: their profile may need another kernel path.
        """
        opened, settings = self.opened, self.session.settings
        asked = opened.ask.drafting
        strategies = AUTO if asked.spec_type == "none" else asked.spec_type
        ask = replace(opened.ask, drafting=replace(asked, length=AUTO_LENGTH, p_min=0.0, spec_type=strategies))
        choice = choose(ask, Said(self.output))
        if opened.setup.profile is None and not opened.setup.measures:
            self._reopen(ask)
            return
        self.opened = replace(opened, ask=ask, choice=choice)
        if opened.setup.profile is None:
            self._adopt(self.first_use.setup)
            return
        drafting = replace(settings.drafting, length=AUTO_LENGTH, p_min=0.0)
        self.session.settings = steered(replace(settings, drafting=drafting), self.opened)

    def change_pair(self, name: str) -> None:
        """Load another pair and continue with it; if that fails, load the old pair again and raise."""
        before = self.opened.ask
        ask = replace(before, names=Names(pair=name, offline=before.names.offline))
        choose(ask, Said(self.output))  # a wrong name fails before the models are freed
        self._reopen(ask)
        if self.first_use.noise is None:  # else it was said
            say_profile(self.opened.setup, ask.names, self.output)

    def _reopen(self, ask: Ask) -> None:
        """Load the models of `ask`; if that fails, load the old ones again and raise."""
        before = self.opened.ask
        self._stack.close()  # first: there may not be memory for both
        try:
            self._open(ask)
        except (SpecllamaError, KeyboardInterrupt):
            self._stack.close()  # they may be loaded but not fit the settings
            self._open(before)
            raise

    def _open(self, ask: Ask) -> None:
        self.cancel.clear()
        opened = open_models(ask, self.output, self.cancel, self.keyboard)
        self._stack.enter_context(opened.models)
        settings = fitted(self.session.settings, opened)
        self.session.attach(opened.models.target, opened.models.draft, settings)
        self.opened, self.first_use = opened, FirstUse(opened.setup, opened.models)
        if not (self.source and self.source.edits):
            self.measure()


def greeting(opened: Opened, settings: Settings, *, measuring: bool) -> list[str]:
    """The first lines of a chat for a person."""
    lines = [f"target: {opened.names['target']}"]
    if measuring:
        lines.append(f"draft: {opened.names['draft']}, measured while you type")
    elif settings.drafter == "none":
        lines.append("draft: none (plain decoding)")
    elif REGISTRY[settings.drafter].needs_model:
        lines.append(f"draft: {opened.names['draft']}")
    return [*lines, f"context: {counted(opened.models.target.n_ctx, 'token')}; /help lists the commands"]
