"""Turns a conversation into the target's tokens: chat template, system prompt, special tokens, begin token.

History is text: every turn is rendered and tokenised anew, and the engine keeps of the KV what the two have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Protocol

from specllama.base.errors import PromptError, TemplateError
from specllama.chat.authorship import Rendering, SpecialTexts, tell_apart
from specllama.chat.template import ChatTemplate, TemplateOverrun

ROLES = ("system", "user", "assistant")

_CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_PLAIN = "{% for message in messages %}{{ message.content }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"

_SYSTEM_PROBE, _USER_PROBE = "words of the system prompt", "words of the first message"


class TemplateVocabulary(Protocol):
    """What this room needs of a vocabulary; `llama.Vocabulary` has it."""

    @property
    def bos(self) -> int | None:
        """The token that begins a text, if there is one."""
        ...

    @property
    def eos(self) -> int | None:
        """The token that ends a text, if there is one."""
        ...

    @property
    def add_bos(self) -> bool:
        """True where the model is used to see `bos` first."""
        ...

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """The tokens of `text` and nothing else; with `special`, the text of a control token becomes that token."""
        ...

    def text(self, token: int) -> str:
        """The raw vocabulary text of a token."""
        ...

    def special_texts(self) -> Sequence[str]:
        """The texts that `tokenize` turns into one token with `special` and reads as plain text without."""
        ...


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. The role is one of ROLES: templates write it among their own text."""

    role: str
    content: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            hint = f"The roles are {', '.join(ROLES)}."
            raise PromptError(f"a message has the role {self.role!r}, which is none of a conversation's", hint=hint)


def _with_bos(vocab: TemplateVocabulary, tokens: list[int]) -> list[int]:
    """`tokens`, with the begin token in front where the model wants one and they do not bring it."""
    if not vocab.add_bos or vocab.bos is None or tokens[:1] == [vocab.bos]:
        return tokens
    return [vocab.bos, *tokens]


def raw_tokens(vocab: TemplateVocabulary, text: str) -> list[int]:
    """The tokens of a raw prompt (`--raw`). Its markers are the user's own work, so they become special tokens.

    A begin token comes first where the model wants one, but never a second one. Nothing else is added.
    """
    return _with_bos(vocab, vocab.tokenize(text, special=True))


def _merge_system(messages: Sequence[Message]) -> list[Message]:
    """`messages` with each system prompt in front of the user message that follows it, a blank line between them."""
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
    """Renders and tokenises conversations for one model file.

    `notice` is a sentence for the user where the file has no chat template, else empty: ChatML is used where the
    vocabulary has its markers, else the messages stand as they are, to be continued. `system_merged` says whether the
    last conversation had a system prompt that the template does not know, so that the first user message carries it.
    """

    def __init__(
        self, vocab: TemplateVocabulary, template: str | None, variables: Mapping[str, object] | None = None
    ) -> None:
        """Compile `template`, the model file's own; `variables` are its switches. Raises TemplateError."""
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
        """The template in use: the model file's own, or what stands in for it."""
        return self._template.source

    def reads(self, variable: str) -> bool:
        """True if the template looks at this variable."""
        return variable in self._template.names

    def text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, now: datetime | None = None
    ) -> str:
        """The conversation as the template writes it. Raises as `tokens` does."""
        return self._rendering(messages, add_generation_prompt, now).text

    def tokens(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, now: datetime | None = None
    ) -> list[int]:
        """The tokens of the conversation, with `add_generation_prompt` up to where the model's answer begins.

        Where no message holds the text of a special token they are those of the whole text tokenised at once, as in
        llama.cpp. `now` is the time that a template may write. Raises TemplateError, and PromptError without messages.
        """
        rendering = self._rendering(messages, add_generation_prompt, now)
        return _with_bos(self._vocab, self._tokenize(rendering))

    def _fallback(self) -> str:
        """The template for a model file that has none."""
        if all(marker in self._special for marker in _CHATML_MARKERS):
            self.notice = "The model file has no chat template: ChatML is used, whose markers its vocabulary has."
            return _CHATML
        self.notice = "The model file has no chat template: the model continues the prompt as it stands."
        return _PLAIN

    def _rendering(self, messages: Sequence[Message], add_generation_prompt: bool, now: datetime | None) -> Rendering:
        if not messages:
            raise PromptError("a conversation needs at least one message", hint="Give a prompt.")
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
        # Somebody wrote the text of a special token. llama.cpp, too, tokenises what lies between special tokens apart.
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
        """The template's text for messages of these roles; `parts`: each content as a list with one part of text."""
        messages = [
            {"role": role, "content": [{"type": "text", "text": content}] if parts else content}
            for role, content in zip(roles, contents, strict=True)
        ]
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, now=now)

    def _shows(self, probe: str, roles: Sequence[str], contents: Sequence[str], *, parts: bool) -> bool:
        """True if the template takes such a conversation and writes `probe`, in whatever case."""
        try:
            text = self._render(roles, contents, parts, True, datetime.now())
        except TemplateOverrun:
            raise  # waiting for it again would not help
        except TemplateError:
            return False
        return probe in text.casefold()

    @cached_property
    def _wants_parts(self) -> bool:
        """True if the template shows a message's text only where it comes as a list of parts."""
        turn = (_USER_PROBE, ["user"], [_USER_PROBE])
        return not self._shows(*turn, parts=False) and self._shows(*turn, parts=True)

    @cached_property
    def _knows_system(self) -> bool:
        """True if the template takes a system prompt and writes it."""
        roles, contents = ["system", "user"], [_SYSTEM_PROBE, _USER_PROBE]
        return self._shows(_SYSTEM_PROBE, roles, contents, parts=self._wants_parts)
