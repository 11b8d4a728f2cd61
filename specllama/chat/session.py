"""A chat with loaded models: its turns, its settings, and answers that evaluate only tokens new to the KV cache.

The history is text. Each turn renders and tokenizes the whole conversation, and both models keep the longest common
prefix of it and of their KV cache (see `KeptPrefix` and `ModelDrafter`).
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol, cast

from specllama.base.errors import PromptError, UsageError
from specllama.base.text import counted
from specllama.chat import conversation
from specllama.chat.conversation import Conversation, Message
from specllama.chat.format_masks import FormatVocabulary, constraint_of
from specllama.chat.settings import MAX_SEED, Settings, require_known
from specllama.chat.stream import StopWatch, TextStream
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, Notice, PromptProgress, Reason, TokenEvent
from specllama.core.gain import Cost, unmeasured
from specllama.core.no_drafter import NoDrafter
from specllama.core.stats import SpecStats
from specllama.core.types import Cancel, Drafter, LanguageModel, common_prefix, resume_at
from specllama.drafters import REGISTRY

ROOM_FOR_ANSWER = 256  # tokens; with less, the oldest turns are dropped
KEPT_SHARE = 0.5  # of the context, after dropping: the rest is read anew, so many turns go at once
THINK, END_THINK = "<think>", "</think>"


class ChatVocabulary(conversation.TemplateVocabulary, FormatVocabulary, Protocol):
    """What a chat needs of a vocabulary; `llama.Vocabulary` has it."""

    def piece(self, token: int) -> bytes: ...


class ChatModel(LanguageModel, Protocol):
    """What a chat needs of its target; `llama.LlamaModel` has it."""

    @property
    def vocab(self) -> ChatVocabulary: ...

    @property
    def chat_template(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its answer, which may be incomplete."""

    user: str
    answer: str
    seed: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Reuse:
    """How much of a turn's prompt the KV caches held already."""

    n_prompt: int  # tokens
    n_target: int  # of them, in the target's KV cache
    n_draft: int | None  # in the draft's KV cache; None if no draft model drafts

    @property
    def n_read(self) -> int:
        """Tokens that the target has to evaluate."""
        return self.n_prompt - self.n_target


@dataclass(frozen=True, slots=True)
class KvUse:
    """How full a KV cache is, in tokens."""

    n_used: int
    n_ctx: int


class ChatSession:
    """A conversation with a target, for one thread at a time.

    Invariant: each of `turns` has a message and what was said of its answer. An answer that was stopped stays as it is;
    a message that was stopped before its answer began is not kept.
    """

    def __init__(
        self,
        target: ChatModel,
        draft: LanguageModel | None = None,
        settings: Settings | None = None,
        system: str = "",
        template: str | None = None,
    ) -> None:
        """`template`: a chat template instead of the model's, also after `attach`.

        Raises TemplateError, and UsageError for settings that these models do not support.
        """
        self.turns: list[Turn] = []
        self.system = system
        self.n_dropped = 0  # turns at the beginning that are no longer in the prompt
        self.stats = SpecStats()  # of all answers
        self.answers: list[SpecStats] = []  # one each
        self.reuse: Reuse | None = None  # of the last answer
        self.cost: Cost = unmeasured  # of the target's passes, for the gain of the next answer
        self._drafter: Drafter | None = None
        self._settings = settings or Settings()
        self._template = template
        self.attach(target, draft)

    def attach(self, target: ChatModel, draft: LanguageModel | None, settings: Settings | None = None) -> None:
        """Continue the conversation with other models and settings. Raises as `__init__` does; then nothing changes."""
        settings = settings or self._settings
        conversation = self._conversation_for(target, settings)
        self._require(settings, target, draft)
        self._settings = settings
        self._target, self._draft = target, draft
        self._conversation = conversation
        self._engine = Engine(target)
        self._forget_drafter()
        self._held: list[int] = []  # the last prompt and answer: the beginning of the target's KV cache
        self.n_dropped = 0
        self.reuse = None

    def use(self, draft: LanguageModel | None, settings: Settings) -> None:
        """Continue with another draft and settings, and the same target. Raises UsageError; then nothing changes."""
        self._require(settings, self._target, draft)
        if draft is not self._draft:
            self._forget_drafter()
            self._draft = draft
        self.settings = settings

    @property
    def settings(self) -> Settings:
        """The settings of the next answer."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        """Raises UsageError if these models do not support them; then nothing changes."""
        self._require(settings, self._target, self._draft)
        if settings.think != self._settings.think:
            self._conversation = self._conversation_for(self._target, settings)
        self._settings = settings

    def _conversation_for(self, target: ChatModel, settings: Settings) -> Conversation:
        variables = {} if settings.think is None else {"enable_thinking": settings.think}
        return Conversation(target.vocab, self._template or target.chat_template, variables)

    def _require(self, settings: Settings, target: ChatModel, draft: LanguageModel | None) -> None:
        if REGISTRY[settings.strategy].needs_model and draft is None:
            raise UsageError(
                f"the strategy {settings.strategy} needs a draft model, but none is loaded",
                hint="load a pair with /model PAIR, or use lookup, which needs no model",
            )
        require_known(settings.params.logit_bias, target.vocab_size)
        longest = target.caps.max_block - 1
        if settings.drafter != "none" and settings.drafting.length.longest > longest:
            raise UsageError(
                f"spec-draft-n-max is {settings.drafting.length.longest}, expected a whole number from 0 to {longest}",
                hint="the models were loaded for that length; start with --spec-draft-n-max for longer drafts",
            )

    @property
    def can_think(self) -> bool:
        """True if the template has a switch for thinking."""
        return self._conversation.reads("enable_thinking")

    @property
    def template(self) -> str:
        return self._conversation.template

    @property
    def template_notes(self) -> list[str]:
        """Notes on the template for the user."""
        notes = [self._conversation.notice] if self._conversation.notice else []
        if self._conversation.system_merged:
            notes.append("the template has no system prompt: it is merged into the first message")
        return notes

    def _forget_drafter(self) -> None:
        """Close the drafter, and with it the record of what the draft model's KV cache holds."""
        if self._drafter is not None:
            self._drafter.close()
        self._drafter = None
        self._drafter_key: object = None
        self._draft_held: list[int] = []

    def _drafter_for(self, settings: Settings) -> Drafter:
        """The drafter of these settings. Plain decoding keeps the last drafter and its state for later."""
        if settings.drafter == "none":
            return NoDrafter()
        key = (settings.drafter, settings.drafting)
        if self._drafter is None or self._drafter_key != key:
            self._forget_drafter()
            drafting = replace(
                settings.drafting, vocab_size=self._target.vocab_size, n_leaves=self._target.caps.max_leaves
            )
            self._drafter = REGISTRY[settings.drafter].make(self._draft, drafting)
            self._drafter_key = key
        return self._drafter

    @property
    def messages(self) -> list[Message]:
        """The whole conversation, with the turns that are no longer in the prompt."""
        return self._messages(self.turns)

    def _messages(self, turns: Sequence[Turn], text: str | None = None) -> list[Message]:
        """The system prompt, `turns` and the new message `text`."""
        messages = [Message("system", self.system)] if self.system else []
        for turn in turns:
            messages += [Message("user", turn.user), Message("assistant", turn.answer)]
        return messages if text is None else [*messages, Message("user", text)]

    def undo(self) -> Turn:
        """Remove and return the last turn. Raises UsageError for an empty conversation."""
        turn = self.last_turn()
        self.turns.pop()
        self.n_dropped = min(self.n_dropped, len(self.turns))
        return turn

    def clear(self) -> None:
        """Remove all turns; the system prompt and the settings stay."""
        self.turns.clear()
        self.n_dropped = 0

    def restore(self, turns: Sequence[Turn], system: str, settings: Settings) -> None:
        """Continue another conversation. Raises UsageError if these models do not support the settings."""
        self.settings = settings
        self.turns = list(turns)
        self.system = system
        self.n_dropped = 0

    def last_turn(self) -> Turn:
        """The last turn. Raises UsageError for an empty conversation."""
        if not self.turns:
            raise UsageError("the conversation is empty (expected at least one message)")
        return self.turns[-1]

    def ask(self, text: str, cancel: Cancel | None = None) -> Iterator[Event]:
        """The events of the answer to `text`. When they end, in any way, `turns` has the new turn.

        The first PromptProgress has the prompt tokens in the target's KV cache. Raises TemplateError, PromptError and
        what the engine raises.
        """
        return self._answer(text, cancel or Cancel(), replaced=None)

    def regen(self, cancel: Cancel | None = None) -> Iterator[Event]:
        """Answer the last message again, with another seed. Raises UsageError for an empty conversation."""
        return self.edit(self.last_turn().user, cancel)

    def edit(self, text: str, cancel: Cancel | None = None) -> Iterator[Event]:
        """Ask `text` in place of the last message. The old turn stays if no answer comes."""
        return self._answer(text, cancel or Cancel(), replaced=self.last_turn())

    def _answer(self, text: str, cancel: Cancel, replaced: Turn | None) -> Iterator[Event]:
        """See `ask`; the new turn takes the place of `replaced`."""
        kept = self.turns if replaced is None else self.turns[:-1]
        tokens, first = self._fitting(kept, text)
        settings = self._settings
        seed = secrets.randbits(32) if settings.seed < 0 else settings.seed
        self._engine.drafter = self._drafter_for(settings)
        self._engine.rule, self._engine.cost = settings.rule, self.cost
        piece = self._target.vocab.piece
        events = self._engine.generate(
            tokens,
            settings.params,
            settings.seed_mode.chooser(seed),
            max_tokens=settings.n_predict,
            stopper=StopWatch(settings.stops, piece) if settings.stops else None,
            cancel=cancel,
            constraint=constraint_of(settings.format, self._target.vocab),
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
        """The prompt's tokens and its first turn: the oldest are dropped if the context has no room for an answer."""
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
                f"the message has {counted(len(tokens), 'token')}, the context holds {n_ctx}",
                hint="shorten it, or use a longer context if the model was trained for one",
            )
        return tokens, first

    def _what_went(self, first: int) -> str:
        """The notice that the turns before `first` are dropped."""
        gone = self.turns[self.n_dropped : first]
        turns = f"the oldest {counted(len(gone), 'turn')}"
        begins = " ".join(gone[0].user.split())[:40]
        return (
            f"the context of {self._target.n_ctx} tokens is full: {turns} (from "
            f'"{begins}" on) left the prompt; the conversation keeps them'
        )

    def _reuse(self, tokens: Sequence[int]) -> Reuse:
        """How many of `tokens` the KV caches hold; the last token is always evaluated."""

        def held(model: LanguageModel, known: Sequence[int]) -> int:
            return resume_at(model, min(common_prefix(known[: model.length], tokens), len(tokens) - 1))

        drafts = self._draft is not None and REGISTRY[self._settings.drafter].needs_model
        n_draft = held(self._draft, self._draft_held) if drafts and self._draft is not None else None
        return Reuse(len(tokens), held(self._target, self._held), n_draft)

    @property
    def starts_thinking(self) -> bool:
        """True if the template itself writes THINK at the beginning of an answer."""
        if THINK not in self._conversation.template:
            return False
        return self._conversation.text([Message("user", "-")]).rstrip().endswith(THINK)

    def n_tokens(self, text: str) -> int:
        return len(self._target.vocab.tokenize(text, special=False))

    @property
    def target_kv(self) -> KvUse:
        return KvUse(self._target.length, self._target.n_ctx)

    @property
    def draft_kv(self) -> KvUse | None:
        """None without a draft model."""
        return None if self._draft is None else KvUse(self._draft.length, self._draft.n_ctx)
