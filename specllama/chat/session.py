"""A chat over loaded models: its turns, its settings, and answers that read only what the KV does not hold yet.

History is text. Each turn renders and tokenises the whole conversation, and both models keep the longest common prefix
of that and of what they hold (see `KeptPrefix` and `ModelDrafter`).
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Protocol, cast

from specllama.base.errors import PromptError, UsageError
from specllama.chat import conversation
from specllama.chat.conversation import Conversation, Message
from specllama.chat.settings import MAX_SEED, Settings, require_known
from specllama.chat.stream import StopWatch, TextStream
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, Notice, PromptProgress, Reason, StepEvent, TokenEvent
from specllama.core.no_drafter import NoDrafter
from specllama.core.sampling import RandomChooser
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, Drafter, LanguageModel, common_prefix
from specllama.drafters import REGISTRY

ROOM_FOR_ANSWER = 256  # tokens; where less is left, the oldest turns go
# Dropping means reading all of the rest anew, so it makes room for many turns at once.
KEPT_SHARE = 0.5  # of the context
THINK, END_THINK = "<think>", "</think>"
N_PLAIN_PASSES = 5  # behind a median


class ChatVocabulary(conversation.TemplateVocabulary, Protocol):
    """What a chat needs of a vocabulary; `llama.Vocabulary` has it."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token shows."""
        ...


class ChatModel(LanguageModel, Protocol):
    """What a chat needs of its target; `llama.LlamaModel` has it."""

    @property
    def vocab(self) -> ChatVocabulary:
        """Its vocabulary."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Its own chat template, if it has one."""
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """What was asked and what was answered, as far as the answer came."""

    user: str
    answer: str
    seed: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Reuse:
    """How much of a turn's prompt did not have to be read."""

    n_prompt: int  # tokens
    n_target: int  # of them, held by the target already
    n_draft: int | None  # held by the draft already; None where no draft model drafts

    @property
    def n_read(self) -> int:
        """Tokens that the target reads."""
        return self.n_prompt - self.n_target


@dataclass(frozen=True, slots=True)
class KvUse:
    """How full a model's KV is."""

    n_used: int
    n_ctx: int


class ChatSession:
    """A conversation with a target, helped by what its settings say; for one thread at a time.

    Invariant: `turns` alternate by construction, and hold only what was really said. An answer that was stopped stays
    as far as it came; a question that was stopped before any answer leaves no trace.
    """

    def __init__(
        self, target: ChatModel, draft: LanguageModel | None = None, settings: Settings | None = None, system: str = ""
    ) -> None:
        """Raises TemplateError, and UsageError where the settings want what these models cannot do."""
        self.turns: list[Turn] = []
        self.system = system
        self.n_dropped = 0  # turns at the beginning that the model no longer reads
        self.stats = SpecStats()  # of all answers
        self.answers: list[SpecStats] = []  # one each
        self.reuse: Reuse | None = None  # of the last answer
        self._plain_steps_s: list[float] = []  # of passes over one token
        self._drafter: Drafter | None = None
        self._settings = settings or Settings()
        self.attach(target, draft)

    # -------------------------------------------------------------------------------------------- models and settings

    def attach(self, target: ChatModel, draft: LanguageModel | None, settings: Settings | None = None) -> None:
        """Go on with other models, and other settings; the conversation stays, and is read anew.

        Raises as `__init__` does, and then changes nothing.
        """
        settings = settings or self._settings
        conversation = self._conversation_for(target, settings)
        self._require(settings, target, draft)
        self._settings = settings
        self._target, self._draft = target, draft
        self._conversation = conversation
        self._engine = Engine(target)
        self._forget_drafter()
        self._held: list[int] = []  # the last prompt and answer: what the target's KV begins with
        self._plain_steps_s.clear()
        self.n_dropped = 0
        self.reuse = None

    @property
    def settings(self) -> Settings:
        """What decides the next answer."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        """Raises UsageError where these models cannot serve them; then nothing changes."""
        self._require(settings, self._target, self._draft)
        if settings.think != self._settings.think:
            self._conversation = self._conversation_for(self._target, settings)
        self._settings = settings

    def _conversation_for(self, target: ChatModel, settings: Settings) -> Conversation:
        variables = {} if settings.think is None else {"enable_thinking": settings.think}
        return Conversation(target.vocab, target.chat_template, variables)

    def _require(self, settings: Settings, target: ChatModel, draft: LanguageModel | None) -> None:
        """Raise UsageError for settings that these models cannot serve."""
        if REGISTRY[settings.strategy].needs_model and draft is None:
            raise UsageError(
                f"drafter {settings.strategy} needs a draft model, and none is loaded",
                hint="/model PAIR loads a pair; lookup drafts without a model",
            )
        require_known(settings.params.logit_bias, target.vocab_size)
        longest = target.caps.max_block - 1
        if settings.drafter != "none" and settings.drafting.length.longest > longest:
            raise UsageError(
                f"draft-n-max is {settings.drafting.length.longest}, expected a whole number from 0 to {longest}",
                hint="the models were loaded for that; start with --spec-draft-n-max for longer drafts",
            )

    @property
    def can_think(self) -> bool:
        """True where the template has a switch for thinking."""
        return self._conversation.reads("enable_thinking")

    @property
    def template(self) -> str:
        """The chat template in use."""
        return self._conversation.template

    @property
    def template_notes(self) -> list[str]:
        """What the user should know about the template."""
        notes = [self._conversation.notice] if self._conversation.notice else []
        if self._conversation.system_merged:
            notes.append("the template knows no system prompt: it stands in front of the first message")
        return notes

    def _forget_drafter(self) -> None:
        """The next answer gets a new drafter, which knows nothing of what the draft model holds."""
        if self._drafter is not None:
            self._drafter.close()
        self._drafter = None
        self._drafter_key: object = None
        self._draft_held: list[int] = []

    def _drafter_for(self, settings: Settings) -> Drafter:
        """The drafter of these settings. While nothing is drafted the last one is kept, with what it knows."""
        if settings.drafter == "none":
            return NoDrafter()
        key = (settings.drafter, settings.drafting)
        if self._drafter is None or self._drafter_key != key:
            self._forget_drafter()
            drafting = replace(settings.drafting, vocab_size=self._target.vocab_size)
            self._drafter = REGISTRY[settings.drafter].make(self._draft, drafting)
            self._drafter_key = key
        return self._drafter

    # -------------------------------------------------------------------------------------------------- what was said

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, what the model no longer reads included."""
        return self._messages(self.turns)

    def _messages(self, turns: Sequence[Turn], text: str | None = None) -> list[Message]:
        """The system prompt, `turns` and a new message."""
        messages = [Message("system", self.system)] if self.system else []
        for turn in turns:
            messages += [Message("user", turn.user), Message("assistant", turn.answer)]
        return messages if text is None else [*messages, Message("user", text)]

    def undo(self) -> Turn:
        """Take the last turn back; returns it. Raises UsageError where there is none."""
        turn = self._last()
        self.turns.pop()
        self.n_dropped = min(self.n_dropped, len(self.turns))
        return turn

    def clear(self) -> None:
        """Forget all turns; the system prompt and the settings stay."""
        self.turns.clear()
        self.n_dropped = 0

    def restore(self, turns: Sequence[Turn], system: str, settings: Settings) -> None:
        """Go on with another conversation. Raises UsageError where these models cannot serve the settings."""
        self.settings = settings
        self.turns = list(turns)
        self.system = system
        self.n_dropped = 0

    def _last(self) -> Turn:
        if not self.turns:
            raise UsageError("nothing was said yet")
        return self.turns[-1]

    # ---------------------------------------------------------------------------------------------------------- asking

    def ask(self, text: str, cancel: Cancel | None = None) -> Iterator[Event]:
        """The events of the answer to `text`; what was said is in `turns` when they end, however they end.

        The first PromptProgress says how much of the prompt the target held already. Raises TemplateError, PromptError
        and what the engine raises.
        """
        return self._answer(text, cancel or Cancel(), replaced=None)

    def regen(self, cancel: Cancel | None = None) -> Iterator[Event]:
        """Answer the last message once more, with another seed. Raises UsageError where there is none."""
        return self.edit(self._last().user, cancel)

    def edit(self, text: str, cancel: Cancel | None = None) -> Iterator[Event]:
        """Ask `text` in place of the last message, whose turn comes back where no answer comes."""
        return self._answer(text, cancel or Cancel(), replaced=self._last())

    def _answer(self, text: str, cancel: Cancel, replaced: Turn | None) -> Iterator[Event]:
        """See `ask`; `replaced` is the turn that the new one takes the place of."""
        kept = self.turns if replaced is None else self.turns[:-1]
        tokens, first = self._fitting(kept, text)
        settings = self._settings
        seed = secrets.randbits(32) if settings.seed < 0 else settings.seed
        self._engine.drafter = self._drafter_for(settings)
        self._engine.rule = settings.rule
        piece = self._target.vocab.piece
        events = self._engine.generate(
            tokens,
            settings.params,
            RandomChooser(seed),
            max_tokens=settings.n_predict,
            stopper=StopWatch(settings.stops, piece) if settings.stops else None,
            cancel=cancel,
        )
        self.reuse = reuse = self._reuse(tokens)
        answer, reason = TextStream(piece, settings.stops), "cancelled"
        if first > self.n_dropped:
            yield Notice(self._what_went(first))
            self.n_dropped = first
        yield PromptProgress(reuse.n_target, reuse.n_prompt)
        try:
            with closing(cast("Generator[Event, None, None]", events)):
                for event in events:
                    if isinstance(event, TokenEvent):
                        tokens.append(event.token)
                        answer.push(event.token)
                    elif isinstance(event, StepEvent):
                        self._note_plain(event)
                    elif isinstance(event, Finished):
                        reason = event.reason
                        self.answers.append(event.stats)
                        self.stats.merge(event.stats)
                    yield event
        finally:
            self._held = tokens
            if settings.drafter != "none":
                self._draft_held = tokens
            answer.finish()
            if answer.text or reason != "cancelled":
                self.turns = [*kept, Turn(text, answer.text, seed, cast("Reason", reason))]
                if settings.seed >= 0:
                    self._settings = replace(self._settings, seed=min(seed + 1, MAX_SEED))

    def _fitting(self, kept: Sequence[Turn], text: str) -> tuple[list[int], int]:
        """The prompt's tokens and the first turn in it: the oldest go where the context has no room for an answer."""
        n_ctx = self._target.n_ctx
        wanted = self._settings.n_predict if self._settings.n_predict > 0 else ROOM_FOR_ANSWER
        limit = n_ctx - min(wanted, ROOM_FOR_ANSWER, n_ctx // 4)
        first = min(self.n_dropped, len(kept))
        tokens = self._conversation.tokens(self._messages(kept[first:], text))
        if len(tokens) > limit:
            while len(tokens) > KEPT_SHARE * n_ctx and first < len(kept):
                first += 1
                tokens = self._conversation.tokens(self._messages(kept[first:], text))
        if len(tokens) > n_ctx:
            raise PromptError(
                f"the message alone takes {len(tokens)} tokens, the context holds {n_ctx}",
                hint=f"shorten it, or start with --ctx-size {len(tokens) + ROOM_FOR_ANSWER} or more",
            )
        return tokens, first

    def _what_went(self, first: int) -> str:
        """What is dropped when the model reads from turn `first` on."""
        gone = self.turns[self.n_dropped : first]
        turns = "the oldest turn" if len(gone) == 1 else f"the oldest {len(gone)} turns"
        begins = " ".join(gone[0].user.split())[:40]
        return (
            f"the context of {self._target.n_ctx} tokens is full: the model no longer reads {turns} "
            f'(from "{begins}" on); /save still has them'
        )

    def _reuse(self, tokens: Sequence[int]) -> Reuse:
        """What of `tokens` the models hold already; the pending token is read in any case."""

        def held(model: LanguageModel, known: Sequence[int]) -> int:
            return min(common_prefix(known[: model.length], tokens), len(tokens) - 1)

        drafts = self._draft is not None and REGISTRY[self._settings.drafter].needs_model
        n_draft = held(self._draft, self._draft_held) if drafts and self._draft is not None else None
        return Reuse(len(tokens), held(self._target, self._held), n_draft)

    @property
    def starts_thinking(self) -> bool:
        """True where the template itself opens the passage that the model thinks in."""
        if THINK not in self._conversation.template:
            return False
        return self._conversation.text([Message("user", "-")]).rstrip().endswith(THINK)

    # --------------------------------------------------------------------------------------------------------- figures

    def n_tokens(self, text: str) -> int:
        """How many tokens `text` is, by itself."""
        return len(self._target.vocab.tokenize(text, special=False))

    @property
    def target_kv(self) -> KvUse:
        """How full the target's KV is."""
        return KvUse(self._target.length, self._target.n_ctx)

    @property
    def draft_kv(self) -> KvUse | None:
        """How full the draft's KV is; None where no draft model is loaded."""
        return None if self._draft is None else KvUse(self._draft.length, self._draft.n_ctx)

    def _note_plain(self, event: StepEvent) -> None:
        """Passes over one token tell how fast plain decoding would be; the first also reads the prompt."""
        if not event.drafted and event.step > 0:
            self._plain_steps_s.append(event.eval_s + event.sample_s)

    def plain_tok_s(self) -> float | None:
        """Tokens per second without drafts, from passes that had none; measured now where there were too few.

        None before anything was read.
        """
        if len(self._plain_steps_s) < 3:
            self._measure_plain()
        return 1 / median(self._plain_steps_s) if self._plain_steps_s else None

    def _measure_plain(self) -> None:
        """Evaluate the last token a few times, behind what is held; the KV is left as it was."""
        length = self._target.length
        if not 0 < length < self._target.n_ctx or length >= len(self._held):
            return
        for number in range(N_PLAIN_PASSES + 1):
            started = perf_counter()
            self._target.eval((self._held[length],))
            if number:  # the first may compute tokens that were held back
                self._plain_steps_s.append(perf_counter() - started)
            self._target.truncate(length)
