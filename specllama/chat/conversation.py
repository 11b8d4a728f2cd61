"""Turns a conversation into the target's tokens: chat template, system prompt, special tokens, begin token.

The history is text. Each turn renders and tokenizes all of it, and the engine keeps the common prefix of the KV cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Protocol

from specllama.base.errors import PromptError, TemplateError
from specllama.base.ranges import sound
from specllama.base.text import counted
from specllama.chat.authorship import Rendering, SpecialTexts, tell_apart
from specllama.chat.named_templates import CHATML
from specllama.chat.template import ChatTemplate, TemplateOverrun

ROLES = ("system", "user", "assistant")

_CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")
_PLAIN = "{% for message in messages %}{{ message.content }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"

_SYSTEM_PROBE, _USER_PROBE = "words of the system prompt", "words of the first message"


class TemplateVocabulary(Protocol):
    """What this package needs of a vocabulary; `llama.Vocabulary` has it."""

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    @property
    def add_bos(self) -> bool: ...  # the model expects `bos` first

    def tokenize(self, text: str, *, special: bool) -> list[int]: ...  # `special`: texts of special tokens become those

    def text(self, token: int) -> str: ...  # as the vocabulary has it

    def special_texts(self) -> Sequence[str]: ...  # those that `special` of `tokenize` is about


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. The role must be one of ROLES, because templates write it as their own text."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise PromptError(f"a message has the role {self.role!r}, expected one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise PromptError(f"a message has the content {self.content!r}, expected text")
        sound("a message", self.content)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What a model reads."""

    text: str
    tokens: list[int]  # with the begin token, which `text` may lack


def _with_bos(vocab: TemplateVocabulary, tokens: list[int]) -> list[int]:
    """`tokens`, with the begin token in front if the model wants one and it is missing."""
    if not vocab.add_bos or vocab.bos is None or tokens[:1] == [vocab.bos]:
        return tokens
    return [vocab.bos, *tokens]


def raw_tokens(vocab: TemplateVocabulary, text: str) -> list[int]:
    """The tokens of a raw prompt (`--raw`), where texts of special tokens become those tokens.

    A begin token is added if the model wants one and it is missing, and nothing else.
    """
    return _with_bos(vocab, vocab.tokenize(sound("the prompt", text), special=True))


def _merge_system(messages: Sequence[Message]) -> list[Message]:
    """`messages` with each system prompt merged into the next user message, with a blank line between."""
    merged: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role == "system":
            waiting.append(message.content)
        elif message.role == "user":
            merged.append(Message("user", "\n\n".join([*waiting, message.content])))
            waiting.clear()
        else:
            merged.append(message)
    if waiting:
        merged.append(Message("user", "\n\n".join(waiting)))
    return merged


class Conversation:
    """Renders and tokenizes conversations for one model file.

    Without a chat template, ChatML is used if the vocabulary has its markers, otherwise the plain text of the messages;
    `notice` is then a sentence for the user. `system_merged`: the last conversation had a system prompt that the
    template does not support, and that was merged into the next user message.
    """

    def __init__(
        self, vocab: TemplateVocabulary, template: str | None, variables: Mapping[str, object] | None = None
    ) -> None:
        """Compile `template` from the model file; `variables` are its switches. Raises TemplateError."""
        self._vocab = vocab
        self._special = SpecialTexts(vocab.special_texts())
        self.notice = ""
        self.system_merged = False
        if not template:
            template = self._fallback()
        bos, eos = ("" if token is None else vocab.text(token) for token in (vocab.bos, vocab.eos))
        self._template = ChatTemplate(template, bos=bos, eos=eos, variables=variables)

    @property
    def template(self) -> str:
        """The template in use: that of the model file, or its replacement."""
        return self._template.source

    def reads(self, variable: str) -> bool:
        """True if the template uses this variable."""
        return variable in self._template.names

    def text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, now: datetime | None = None
    ) -> str:
        """The rendered conversation. Raises as `tokens` does."""
        return self._rendering(messages, add_generation_prompt, now).text

    def tokens(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, now: datetime | None = None
    ) -> list[int]:
        """The tokens of the conversation; with `add_generation_prompt`, up to where the model's answer begins.

        If no message holds the text of a special token, they are those of the whole text tokenized at once, as in
        llama.cpp. `now` is the time that a template may write. Raises TemplateError, and PromptError without messages.
        """
        return self.rendered(messages, add_generation_prompt=add_generation_prompt, now=now).tokens

    def rendered(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, now: datetime | None = None
    ) -> RenderedPrompt:
        """The text of the conversation and its tokens, see `tokens`."""
        rendering = self._rendering(messages, add_generation_prompt, now)
        return RenderedPrompt(rendering.text, _with_bos(self._vocab, self._tokenize(rendering)))

    def _fallback(self) -> str:
        """The template for a model file without one."""
        if all(marker in self._special for marker in _CHATML_MARKERS):
            self.notice = "The model file has no chat template: ChatML is used, because the vocabulary has its markers."
            return CHATML
        self.notice = "The model file has no chat template: the model continues the plain text of the prompt."
        return _PLAIN

    def _rendering(self, messages: Sequence[Message], add_generation_prompt: bool, now: datetime | None) -> Rendering:
        if not messages:
            raise PromptError("the conversation is empty (expected at least one message)", hint="Give a prompt.")
        self.system_merged = any(message.role == "system" for message in messages) and not self._knows_system
        turns = _merge_system(messages) if self.system_merged else list(messages)
        roles = [turn.role for turn in turns]
        moment = now or datetime.now()

        def render(contents: list[str]) -> str:
            return self._render(roles, contents, self._wants_parts, add_generation_prompt, moment)

        return tell_apart(render, [turn.content for turn in turns], self._special, self._template.literals)

    def _tokenize(self, rendering: Rendering) -> list[int]:
        own = self._special.find(rendering.hidden)
        if own == self._special.find(rendering.text):
            return self._vocab.tokenize(rendering.text, special=True)
        # A message holds the text of a special token. As in llama.cpp, the text between special tokens is tokenized
        # piece by piece.
        tokens: list[int] = []
        start = 0
        for special in own:
            tokens += self._vocab.tokenize(rendering.text[start : special.start], special=False)
            tokens += self._vocab.tokenize(special.text, special=True)
            start = special.end
        return tokens + self._vocab.tokenize(rendering.text[start:], special=False)

    def _render(
        self, roles: Sequence[str], contents: Sequence[str], parts: bool, add_generation_prompt: bool, now: datetime
    ) -> str:
        """The template's text for these messages; `parts`: each content is a list with one part of text."""
        messages = [
            {"role": role, "content": [{"type": "text", "text": content}] if parts else content}
            for role, content in zip(roles, contents, strict=True)
        ]
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, now=now)

    def _shows(self, probe: str, roles: Sequence[str], contents: Sequence[str], *, parts: bool) -> bool:
        """True if the template accepts such a conversation and writes `probe`, in any case."""
        try:
            text = self._render(roles, contents, parts, True, datetime.now())
        except TemplateOverrun:
            raise  # another attempt would take as long
        except TemplateError:
            return False
        return probe in text.casefold()

    @cached_property
    def _wants_parts(self) -> bool:
        """True if the template shows a message's text only as a list of parts."""
        turn = (_USER_PROBE, ["user"], [_USER_PROBE])
        return not self._shows(*turn, parts=False) and self._shows(*turn, parts=True)

    @cached_property
    def _knows_system(self) -> bool:
        """True if the template writes a system prompt."""
        roles, contents = ["system", "user"], [_SYSTEM_PROBE, _USER_PROBE]
        return self._shows(_SYSTEM_PROBE, roles, contents, parts=self._wants_parts)


def fitting_prompts(
    vocab: TemplateVocabulary, template: str | None, texts: Mapping[str, str], *, n_known: int, n_room: int
) -> dict[str, list[int]]:
    """The prompts of at most `n_room` tokens whose ids are all below `n_known`. Raises PromptError without any."""
    conversation = Conversation(vocab, template)
    found = {name: conversation.tokens([Message("user", text)]) for name, text in texts.items()}
    fit = {name: tokens for name, tokens in found.items() if 1 < len(tokens) <= n_room and max(tokens) < n_known}
    if not fit:
        raise PromptError(
            f"no built-in prompt fits the models (room for {counted(n_room, 'token')}, {counted(n_known, 'known id')})",
            hint="use a longer context (--ctx-size) or another pair",
        )
    return fit
