"""The library in a few lines: `load` a pair of models, then `stream`, `answer` or `chat`."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, cast
from weakref import WeakSet

from specllama.base.errors import ModelBusy, SpecllamaError, UsageError, error_of_request
from specllama.base.ranges import AUTO, either, whole, word
from specllama.batch.in_thread import in_thread
from specllama.batch.open import caveat_of, open_pool
from specllama.batch.request import Done, Request
from specllama.chat.conversation import Conversation, Message, raw_tokens
from specllama.chat.format import AnswerFormat, given_format
from specllama.chat.format_masks import constraint_of
from specllama.chat.session import ChatSession
from specllama.chat.settings import MAX_SEED, SETTINGS, Settings, require_known, strategies
from specllama.chat.stream import StopWatch, TextStream
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, Notice, Reason, TokenEvent
from specllama.core.kept_prefix import KeptPrefix
from specllama.core.no_drafter import NoDrafter
from specllama.core.noise import SeedMode
from specllama.core.sampling import SamplingParams
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, Drafter, DraftPolicy, PieceOf, Rule
from specllama.drafters.length import DraftLength
from specllama.pairs.ask import Ask, Drafting, Hardware, Names
from specllama.pairs.learning import Lesson
from specllama.pairs.setup import Listener, Models, Setup, choose, load_models, prepare, require_fit
from specllama.tuning.expectation import unused_draft
from specllama.tuning.first_use import FirstUse

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
OnNote: TypeAlias = Callable[[str], None]
OnProgress: TypeAlias = Callable[[str, float], None]  # the activity, and the share of it that is done
Events: TypeAlias = Generator[Event, None, None]
Texts: TypeAlias = Generator[str, None, None]
BatchAnswers: TypeAlias = Generator["BatchAnswer", None, None]
Prompt: TypeAlias = str | Sequence[Mapping[str, str]]  # a text, or messages with "role" and "content"


class SamplingKeywords(TypedDict, total=False):
    """The fields of `SamplingParams`, with its defaults."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    logit_bias: Mapping[int, float]


class AnswerKeywords(SamplingKeywords, total=False):
    """The keywords of one answer."""

    system: str  # system prompt
    raw: bool  # True = no chat template: the model continues the text of the prompt
    seed: int  # of the random draws; -1 = a new one
    seed_mode: SeedMode | str  # "same": one seed gives one text with any drafts; "draws" does not
    max_tokens: int  # -1 = until the answer ends or the context is full
    stop: str | Sequence[str]  # texts that end the answer and are not part of it
    json_schema: str | Mapping[str, object]  # the answer is JSON that fits it
    grammar: str  # the answer is a text of this GBNF or Lark grammar
    regex: str  # the answer is a text that this expression matches as a whole
    drafts: bool  # False = plain decoding


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; `str` gives the text."""

    text: str
    tokens: tuple[int, ...]  # without the end token
    reason: Reason  # why it ended: "stop", "length" or "cancelled"
    seed: int  # -1 = a chat's answer that was cancelled before its first word
    stats: SpecStats
    fits_format: bool | None = None  # False = cut before it fits json_schema, grammar or regex; None = free text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to one prompt of many; `str` gives the text."""

    index: int  # of the prompt, from 0
    text: str
    tokens: tuple[int, ...]  # without the end token
    reason: Reason | None  # as in `Answer`; None = `error`
    error: SpecllamaError | None  # why this prompt has no whole answer
    seed: int
    stats: SpecStats
    fits_format: bool | None = None  # as in `Answer`

    def __str__(self) -> str:
        return self.text


def load(
    pair: str | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    spec_type: str = "auto",
    n_max: int | Literal["auto"] = "auto",
    p_min: float = 0.0,
    draft_temperature: float | None = None,
    rule: Rule | str = Rule.BLOCK,
    measure: Literal["auto", "never"] = "auto",
    n_ctx: int | None = None,
    n_threads: int | None = None,
    n_gpu_layers: int | Literal["auto", "all"] | None = None,
    hardware: Hardware | None = None,
    offline: bool = False,
    on_note: OnNote | None = None,
    on_progress: OnProgress | None = None,
) -> Pair:
    """Load a target and a draft as `specllama run` does. Models that are not on this machine are fetched.

    Args:
        pair: name of a pair; `specllama models list` shows them. Without any name: the default pair.
        target, draft: instead of `pair`, a file, a model's name, or "user/repo[:quant]" of the Hugging Face Hub.
            With a target alone, only lookups draft.
        spec_type: strategies that may draft: "auto", or names such as "draft-simple,lookup".
        n_max: longest draft; "auto" = chosen at every step by the measured costs.
        p_min: stop drafting when the draft's likeliest token is less likely than this.
        draft_temperature: temperature of the draft; None = that of the answer.
        rule: how drafted tokens are accepted: "block", "token" or "match". None of them changes the distribution.
        measure: "auto" measures an untuned pair at its first use, in the time of 12 to 20 tokens; "never": only
            lookups draft until it is tuned.
        n_ctx: tokens of context; 0 = the target's training context, as far as memory allows; None = the pair's, or
            up to 4096.
        n_threads, n_gpu_layers: override the fields of `hardware`.
        hardware: the other settings of loading.
        offline: use only what is on this machine.
        on_note: called with messages for the user.
        on_progress: called with the activity and the share of it that is done, 0 to 1.

    Raises:
        SpecllamaError, with a `hint`: UsageError, ConfigError, DownloadError, ModelFileError, PairError if the draft
        does not fit, MemoryShort, UnsupportedModel and BackendError.
    """
    if pair is not None and not (target is None and draft is None):
        raise UsageError("a pair and a target or draft are given (expected one of them)", hint="leave the pair out")
    names = Names(
        pair=_name("pair", pair), target=_name("target", target), draft=_name("draft", draft), offline=offline
    )
    for name, callback in (("on_note", on_note), ("on_progress", on_progress)):
        if callback is not None and not callable(callback):
            raise UsageError(f"{name} is {callback!r}, expected a function")
    given = {"n_ctx": n_ctx, "n_threads": n_threads, "n_gpu_layers": n_gpu_layers}
    settings = Hardware() if hardware is None else _typed("hardware", hardware, Hardware, "a Hardware")
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    ask = Ask(
        names=names,
        drafting=Drafting(
            spec_type=strategies("spec_type", _typed("spec_type", spec_type, str, "text")),
            length=DraftLength.check("n_max", n_max),
            p_min=SETTINGS["spec-draft-p-min"].check("p_min", p_min),
            temperature=SETTINGS["draft-temp"].check("draft_temperature", draft_temperature),
            rule=rule if isinstance(rule, Rule) else Rule(SETTINGS["verify-rule"].check("rule", rule)),
            measure=word("auto", "never")("measure", measure) == "auto",
        ),
        hardware=replace(settings, **changes),
    )
    listener = _Callbacks(on_note or (lambda _text: None), on_progress or (lambda _what, _share: None))
    setup = prepare(choose(ask, listener), listener)
    require_fit(setup, listener)
    models = load_models(setup, listener, Cancel())
    try:
        setup = FirstUse(setup, models).finish(lambda share: listener.on_progress("measuring", share))
    except BaseException:
        models.close()
        raise
    if unused := unused_draft(setup, names):
        listener.on_note(unused)
    return Pair(models, setup, ask.drafting, listener.on_note)


def _typed(name: str, value: object, kind: type[T], expected: str) -> T:
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {value!r}, expected {expected}")
    return value


def _name(what: str, model: object) -> str | None:
    """An absolute path is never taken for a name of the catalog; an empty name never for the default pair."""
    if isinstance(model, Path):
        return str(model.absolute())
    if model is None:
        return None
    if model == "":
        raise UsageError(f"{what} is empty, expected a name or path")
    return _typed(what, model, str, "a name or path")


@dataclass(frozen=True, slots=True)
class _How:
    """The keywords of an answer, checked."""

    system: str
    raw: bool
    seed: int
    mode: SeedMode
    params: SamplingParams
    max_tokens: int
    stops: tuple[str, ...]
    form: AnswerFormat | None
    drafts: bool

    def stopper(self, piece: PieceOf) -> StopWatch | None:
        return StopWatch(self.stops, piece) if self.stops else None


class _Callbacks(Listener):
    """Calls the callbacks of `load`. Also a `FetchWatch`."""

    def __init__(self, on_note: OnNote, on_progress: OnProgress) -> None:
        self.on_note = on_note
        self.on_progress = on_progress
        self._work: list[tuple[str, int | None]] = []  # in progress: the activity and its bytes
        self._n_done = 0

    def note(self, text: str) -> None:
        self.on_note(text.removeprefix("note: "))

    def warn(self, text: str, hint: str = "") -> None:
        self.on_note(f"{text}; {hint}" if hint else text)

    @contextmanager
    def fetching(self) -> Iterator[_Callbacks]:
        yield self

    @contextmanager
    def loading(self) -> Iterator[Callable[[float, int], None]]:
        yield lambda share, _n_bytes: self.on_progress("loading", share)

    def begin(self, what: str, total: int | None) -> None:
        self._work.append((what, total))
        self._n_done = 0

    def advance(self, n_bytes: int) -> None:
        self._n_done += n_bytes
        what, total = self._work[-1]
        if total:
            self.on_progress(what, min(self._n_done / total, 1.0))

    def end(self) -> None:
        self._work.pop()


class Pair:
    """A loaded target and draft, from `load`. A context manager; `close` frees the models.

    One answer at a time: during an answer, another raises ModelBusy. An answer ends when its iterator is exhausted,
    closed or deleted, or raises an exception such as KeyboardInterrupt. Not thread-safe, except `cancel`.
    """

    def __init__(self, models: Models, setup: Setup, drafting: Drafting, on_note: OnNote) -> None:
        self._models = models
        self._kept = KeptPrefix.of(models.target)  # kept between answers: a common beginning is read only once
        self._setup = setup
        self._drafting = drafting
        self._on_note = on_note
        self._noted: set[str] = set()
        self._cancel = Cancel()
        self._answers: WeakSet[Generator[Any, None, None]] = WeakSet()  # those that may be in progress
        self._drafters: dict[bool, Drafter] = {}  # for greedy and other answers; they keep what they learned
        self._policies: dict[bool, DraftPolicy | None] = {}  # of these
        self._stats = SpecStats()
        self._closed = False
        models.watch(self._cancel)

    @property
    def target(self) -> Path:
        """The target's file."""
        return self._setup.target.path

    @property
    def draft(self) -> Path | None:
        """The draft's file; None without a draft model."""
        return None if self._setup.draft is None else self._setup.draft.path

    @property
    def spec_type(self) -> str:
        """The strategy that drafts; "none" = plain decoding."""
        return self._setup.strategy

    @property
    def n_ctx(self) -> int:
        """Tokens of context, for prompt and answer together."""
        return self._models.target.n_ctx

    @property
    def stats(self) -> SpecStats:
        """Counters and times of the last answer that was read to its end; zeros before the first."""
        return self._stats

    def stream(self, prompt: Prompt, **options: Unpack[AnswerKeywords]) -> Texts:
        """The answer's text as it comes. Raises as `events` does."""
        stop = _stops(options.get("stop", ()))
        return self._texts(self.events(prompt, **options), TextStream(self._models.target.vocab.piece, stop))

    def answer(self, prompt: Prompt, **options: Unpack[AnswerKeywords]) -> Answer:
        """The whole answer. Raises as `events` does."""
        asked = options.get("seed", -1)
        seed = options["seed"] = _seed(asked)
        text = TextStream(self._models.target.vocab.piece, _stops(options.get("stop", ())))
        events, form = self._events(prompt, seeded=seed == asked, **options)
        return self._answered(events, text, seed, form)

    def events(self, prompt: Prompt, **options: Unpack[AnswerKeywords]) -> Events:
        """The engine's events: the tokens and their origin, the steps, the end.

        Raises UsageError, PromptError and TemplateError in this call; ModelBusy, NumericsError and BackendError when
        the events are read.
        """
        return self._events(prompt, seeded=options.get("seed", -1) != -1, **options)[0]

    def _events(
        self, prompt: Prompt, *, seeded: bool, **options: Unpack[AnswerKeywords]
    ) -> tuple[Events, AnswerFormat | None]:
        how, target = self._how(**options), self._models.target
        drafter = self._drafter(how.params) if how.drafts else NoDrafter()
        engine = Engine(target, drafter, rule=self._drafting.rule, cost=self._setup.cost)
        events = engine.generate(
            self._tokens(prompt, how.system, how.raw),
            how.params,
            how.mode.chooser(_seed(how.seed)),
            max_tokens=how.max_tokens,
            stopper=how.stopper(target.vocab.piece),
            cancel=self._cancel,
            constraint=constraint_of(how.form, target.vocab),
        )
        policy = self._policies[how.params.greedy] if how.drafts else None
        alone = how.form is not None or (seeded and how.mode is SeedMode.DRAWS)
        return self._followed(events, policy, greedy=how.params.greedy, seeded=alone), how.form

    def _how(
        self,
        *,
        system: str = "",
        raw: bool = False,
        seed: int = -1,
        seed_mode: SeedMode | str = SeedMode.DRAWS,
        max_tokens: int = -1,
        stop: str | Sequence[str] = (),
        json_schema: str | Mapping[str, object] | None = None,
        grammar: str | None = None,
        regex: str | None = None,
        drafts: bool = True,
        **sampling: Unpack[SamplingKeywords],
    ) -> _How:
        """Raises UsageError."""
        form, mode = given_format({"json_schema": json_schema, "grammar": grammar, "regex": regex}), _mode(seed_mode)
        params = SamplingParams(**sampling)
        require_known(params.logit_bias, self._models.target.vocab_size)
        return _How(system, raw, seed, mode, params, _max_tokens(max_tokens), _stops(stop), form, drafts)

    def batch(
        self,
        prompts: Iterable[Prompt],
        *,
        parallel: int | Literal["auto"] = "auto",
        in_order: bool = False,
        n_ctx: int | None = None,
        **options: Unpack[AnswerKeywords],
    ) -> BatchAnswers:
        """Answers to many prompts, several at once, as they end.

        Args:
            prompts: read lazily, when a slot is free.
            parallel: prompts at once; "auto" = as many as pay by the pair's profile, and as memory allows.
            in_order: give the answers in the order of the prompts; finished ones wait for those before them.
            n_ctx: most tokens of one prompt with its answer; None = `self.n_ctx`. Less takes less memory.
            options: as for `answer`, for all prompts. With a `seed`, prompt i has the seed `seed + i`.

        An answer that fails has its `error`; the others go on. Raises UsageError in this call; ModelBusy, MemoryShort
        and BackendError when the answers are read, and what `prompts` raises after the answers before it.
        """
        self._require_open()
        n_slots = either(AUTO, None, whole(1))("parallel", parallel)
        length = self.n_ctx if n_ctx is None else whole(2, self.n_ctx)("n_ctx", n_ctx)
        if isinstance(prompts, str):
            raise UsageError("prompts is one text, expected several", hint="put it into a list")
        answers = self._batched(prompts, self._how(**options), n_slots, length, in_order=in_order)
        self._answers.add(answers)
        return answers

    def _batched(
        self, prompts: Iterable[Prompt], how: _How, n_slots: int | None, n_ctx: int, *, in_order: bool
    ) -> BatchAnswers:
        self._require_open()
        vocab, n_requests = self._models.target.vocab, len(prompts) if isinstance(prompts, Sized) else None
        seeds = dict[int, int]()

        def requests() -> Iterator[Request | Done]:
            for index, prompt in enumerate(prompts):
                seeds[index] = secrets.randbits(32) if how.seed < 0 else (how.seed + index) % (MAX_SEED + 1)
                try:
                    yield Request(
                        index,
                        self._tokens(prompt, how.system, how.raw),
                        how.params,
                        how.mode.chooser(seeds[index]),
                        max_tokens=how.max_tokens,
                        stopper=how.stopper(vocab.piece),
                        constraint=constraint_of(how.form, vocab),
                        drafts=how.drafts,
                    )
                except Exception as error:
                    yield Done(index, error=error_of_request(error))

        with self._kept.lease():
            self._cancel.clear()
            if caveat := caveat_of(how.params, how.seed, how.mode, own_kernels=self._models.target.plan.kernels):
                self._note_once(caveat)
            with open_pool(
                self._models,
                self._setup,
                self._drafting,
                n_ctx=n_ctx,
                n_slots=n_slots,
                n_requests=n_requests,
                cancel=self._cancel,
                on_note=self._note_once,
            ) as pool:
                for done in pool.run(requests(), in_order=in_order):
                    for notice in done.notices:
                        self._note_once(notice)
                    text = TextStream(vocab.piece, how.stops)
                    for token in done.tokens:
                        text.push(token)
                    text.finish()
                    index = cast(int, done.id)
                    self._stats = pool.stats.spec
                    yield BatchAnswer(
                        index,
                        text.text,
                        tuple(text.tokens),
                        done.reason,
                        done.error,
                        seeds.pop(index),
                        done.stats,
                        None if how.form is None else how.form.fits(text.text),
                    )

    async def abatch(
        self,
        prompts: Iterable[Prompt],
        *,
        parallel: int | Literal["auto"] = "auto",
        in_order: bool = False,
        n_ctx: int | None = None,
        **options: Unpack[AnswerKeywords],
    ) -> AsyncGenerator[BatchAnswer, None]:
        """`batch` for `async for`; another thread computes and reads `prompts`. A cancelled task ends the batch."""
        answers = self.batch(prompts, parallel=parallel, in_order=in_order, n_ctx=n_ctx, **options)
        async with aclosing(in_thread(answers, self.cancel)) as found:
            async for answer in found:
                yield answer

    def chat(
        self,
        system: str = "",
        *,
        seed: int = -1,
        seed_mode: SeedMode | str = SeedMode.DRAWS,
        max_tokens: int = -1,
        stop: str | Sequence[str] = (),
        json_schema: str | Mapping[str, object] | None = None,
        grammar: str | None = None,
        regex: str | None = None,
        think: bool | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Chat:
        """A conversation of several turns. Each turn reads only the new tokens.

        `think` sets the template's switch for thinking, if it has one; None = the template's default.
        """
        self._require_open()
        params = SamplingParams(**sampling)
        settings = Settings(
            params=params,
            strategy=self._setup.strategy,
            drafting=self._setup.settings(self._drafting, greedy=params.greedy),
            rule=self._drafting.rule,
            seed=SETTINGS["seed"].check("seed", seed),
            seed_mode=_mode(seed_mode),
            n_predict=_max_tokens(max_tokens),
            stops=_stops(stop),
            format=given_format({"json_schema": json_schema, "grammar": grammar, "regex": regex}),
            think=think,
        )
        return Chat(
            self, ChatSession(self._models.target, self._models.draft, settings, _typed("system", system, str, "text"))
        )

    def cancel(self) -> None:
        """End the answer in progress after the current step, with reason "cancelled". Thread-safe."""
        self._cancel.set()

    def close(self) -> None:
        """Free the models and end an answer in progress. A second call does nothing."""
        self._closed = True
        self._cancel.set()
        for answer in list(self._answers):
            with suppress(ValueError):  # another thread reads it; there the cancel flag ends it
                answer.close()
        for drafter in self._drafters.values():
            drafter.close()
        self._drafters.clear()
        self._models.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the pair was closed", hint="load it again")

    @cached_property
    def _conversation(self) -> Conversation:
        return Conversation(self._models.target.vocab, self._setup.target.template)

    def _tokens(self, prompt: Prompt, system: str, raw: bool) -> list[int]:
        self._require_open()
        if raw:
            if system or not isinstance(prompt, str):
                raise UsageError(
                    "a raw prompt has a system prompt or messages (expected one text)", hint="leave raw out"
                )
            return raw_tokens(self._models.target.vocab, prompt)
        messages = [Message("system", system)] if system else []
        if isinstance(prompt, str):
            messages.append(Message("user", prompt))
        else:
            messages += _messages(prompt)
        tokens = self._conversation.tokens(messages)
        if self._conversation.notice:
            self._note_once(self._conversation.notice)
        if self._conversation.system_merged:
            self._note_once("the template has no system prompt: it is put before the first message")
        return tokens

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._on_note(text)

    def _drafter(self, params: SamplingParams) -> Drafter:
        if params.greedy not in self._drafters:
            settings = self._setup.settings(self._drafting, greedy=params.greedy)
            self._policies[params.greedy] = settings.policy
            self._drafters[params.greedy] = self._models.drafter(self._setup.strategy, settings)
        return self._drafters[params.greedy]

    def _followed(self, events: Iterator[Event], policy: DraftPolicy | None, *, greedy: bool, seeded: bool) -> Events:
        """`events`, registered for `close`; keeps the stats, passes notices on and teaches the profile."""
        answer = self._reading(events, lambda: Lesson(self._setup, policy, greedy=greedy, seeded=seeded))
        self._answers.add(answer)
        return answer

    def _reading(self, events: Iterator[Event], begin_lesson: Callable[[], Lesson]) -> Events:
        self._require_open()
        with self._kept.lease():  # raises ModelBusy before anything of the running answer changes
            self._cancel.clear()
            lesson = begin_lesson()
        with closing(cast("Events", events)):
            for event in events:
                lesson.take(event)
                if isinstance(event, Finished):
                    self._setup = lesson.learned()
                    self._stats = event.stats
                elif isinstance(event, Notice):
                    self._on_note(event.text)
                yield event

    def _texts(self, events: Events, text: TextStream) -> Texts:
        with closing(events):
            for event in events:
                if isinstance(event, TokenEvent):
                    yield from (piece.text for piece in text.push(event.token))
        yield from (piece.text for piece in text.finish())

    def _answered(self, events: Events, text: TextStream, seed: int, form: AnswerFormat | None) -> Answer:
        for event in events:
            if isinstance(event, TokenEvent):
                text.push(event.token)
        assert isinstance(event, Finished), "the engine's last event is always Finished"
        text.finish()
        fits = None if form is None else form.fits(text.text)
        return Answer(text.text, tuple(text.tokens), event.reason, seed, event.stats, fits)


class Chat:
    """A conversation with a pair, from `Pair.chat`. The history is text."""

    def __init__(self, pair: Pair, session: ChatSession) -> None:
        self._pair = pair
        self._session = session
        self._answers: WeakSet[Events] = WeakSet()

    @property
    def messages(self) -> list[Message]:
        """The history, with the system prompt."""
        return self._session.messages

    def stream(self, text: str) -> Texts:
        """Send `text`; the answer's text as it comes. The turn joins the history when the answer ends."""
        return self._pair._texts(self.events(text), self._text())

    def send(self, text: str) -> Answer:
        """Send `text`; the whole answer."""
        before = self._session.turns
        answer = self._pair._answered(self.events(text), self._text(), -1, self._session.settings.format)
        kept = self._session.turns is not before
        return replace(answer, seed=self._session.turns[-1].seed) if kept else answer

    def events(self, text: str) -> Events:
        """Send `text`; the engine's events. Raises as `Pair.events`, when the events are read."""
        self._pair._require_open()
        events = self._session.ask(_typed("text", text, str, "text"), self._pair._cancel)
        settings = self._session.settings
        self._session.cost = self._pair._setup.cost
        seeded, greedy = settings.seeded or settings.format is not None, settings.params.greedy
        answer = self._pair._followed(events, settings.drafting.policy, greedy=greedy, seeded=seeded)
        self._answers.add(answer)
        return answer

    def undo(self) -> None:
        """Remove the last message and its answer. Raises UsageError for an empty chat, ModelBusy during an answer."""
        self._require_idle()
        self._session.undo()

    def clear(self) -> None:
        """Remove everything except the system prompt. Raises ModelBusy during an answer."""
        self._require_idle()
        self._session.clear()

    def _require_idle(self) -> None:
        if any(getgeneratorstate(each) in (GEN_RUNNING, GEN_SUSPENDED) for each in self._answers):
            raise ModelBusy("an answer of this chat is in progress", hint="read it to its end, or call close() on it")

    def _text(self) -> TextStream:
        return TextStream(self._pair._models.target.vocab.piece, self._session.settings.stops)


def _messages(prompt: Sequence[Mapping[str, str]]) -> list[Message]:
    try:
        return [Message(each["role"], each["content"]) for each in prompt]
    except (KeyError, TypeError):
        raise UsageError('the prompt is neither a text nor a list of {"role": ..., "content": ...}') from None


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops: tuple[str, ...] = SETTINGS["stop"].check("stop", [stop] if isinstance(stop, str) else stop)
    return stops


def _max_tokens(n: int) -> int:
    value: int = SETTINGS["predict"].check("max_tokens", n)
    return value


def _mode(mode: SeedMode | str) -> SeedMode:
    return mode if isinstance(mode, SeedMode) else SeedMode(SETTINGS["seed-mode"].check("seed_mode", mode))


def _seed(seed: int) -> int:
    seed = SETTINGS["seed"].check("seed", seed)
    return secrets.randbits(32) if seed < 0 else seed
