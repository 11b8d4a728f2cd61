"""The requests of a batch: read from their file, as tokens, and ready for a pool."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeAlias

from specllama.base.disk import meant
from specllama.base.errors import PromptError, SpecllamaError, UsageError, error_of_request, unreadable
from specllama.base.text import counted
from specllama.batch.request import Done, Request
from specllama.batch.requests import ENDINGS, INPUT_FORMATS, Asked, BadLine, RequestReader
from specllama.chat.conversation import Conversation, Message, raw_tokens
from specllama.chat.format_masks import constraint_of
from specllama.chat.settings import require_known
from specllama.chat.stream import StopWatch
from specllama.llama.vocab import Vocabulary

SPARE = 8  # tokens: a text may be split into more of them inside a prompt than alone
LONG = 1 << 20  # characters: a shorter text is tokenized before its least tokens could be told
# A request and the tokens of its prompt, or what is wrong with it.
ReadPrompt: TypeAlias = tuple[Asked | BadLine, list[int] | SpecllamaError]


@dataclass(frozen=True, slots=True)
class RequestFile:
    """The file with the requests."""

    name: str
    path: Path | None  # None = stdin
    kind: str  # one of INPUT_FORMATS

    @classmethod
    def of(cls, name: str, kind: str | None) -> RequestFile:
        """The file of this name, `-` for stdin. Raises UsageError if `kind` is None and its ending says nothing."""
        path = None if name == "-" else meant(name)
        kind = kind or ENDINGS.get("" if path is None else path.suffix.lower())
        name = name if path else "stdin"
        if kind is None:
            raise UsageError(
                f"{name} has no ending that says its format",
                hint=f"add --input-format {', '.join(INPUT_FORMATS[:-1])} or {INPUT_FORMATS[-1]}",
            )
        return cls(name, path, kind)

    @property
    def can_be_read_twice(self) -> bool:
        return self.path is not None and os.path.isfile(self.path)  # False for a place that cannot be looked at

    def read(self, reader: RequestReader) -> Generator[Asked | BadLine, None, None]:
        """The requests from the beginning. Raises UsageError, as `reader` and for a file that cannot be read."""
        try:
            opened = nullcontext(sys.stdin.buffer) if self.path is None else self.path.open("rb")
        except OSError as error:
            raise unreadable(self.name, error, UsageError) from None
        with opened as file:
            yield from reader.read(file, self.name)


def _require_short(asked: Asked, vocab: Vocabulary, n_ctx: int) -> None:
    """Raises PromptError for a prompt that `n_ctx` tokens cannot hold, before the seconds of tokenizing megabytes.

    Templates may leave out spaces around a message, and parts of those of other roles.
    """
    for message in asked.messages:
        if message.role != "user" or len(message.content) <= LONG:
            continue
        if (least := vocab.least_tokens(message.content.strip())) > n_ctx:
            found = f"the prompt has at least {counted(least, 'token')}, the context holds {n_ctx}"
            raise PromptError(found, hint="shorten it")


def prompts(
    requests: Iterable[Asked | BadLine], vocab: Vocabulary, conversation: Conversation, n_ctx: int
) -> Iterator[ReadPrompt]:
    """The prompts of requests as tokens; an error for those that `n_ctx` tokens clearly cannot hold."""
    for each in requests:
        try:
            if isinstance(each, BadLine):
                raise each.error
            require_known(each.settings.params.logit_bias, vocab.size)
            _require_short(each, vocab, n_ctx)
            yield each, raw_tokens(vocab, each.messages[0].content) if each.raw else conversation.tokens(each.messages)
        except Exception as error:
            yield each, error_of_request(error)


@dataclass(frozen=True, slots=True)
class Survey:
    """What the requests of a file need."""

    n_requests: int = 0
    n_ctx: int = 0  # tokens that hold the longest prompt and its answer
    n_line: int = 0  # of that request

    @classmethod
    def of(
        cls, requests: Iterable[Asked | BadLine], vocab: Vocabulary, conversation: Conversation, usual: int, most: int
    ) -> Survey:
        """`usual`: the context of a request whose answer has no limit. A prompt that `most` cannot hold needs none.

        Messages are counted without rendering each prompt, which takes milliseconds; so the context may have a few
        tokens to spare.
        """

        @cache
        def around(roles: tuple[str, ...]) -> int:
            """Most tokens of a template around messages."""
            return len(conversation.tokens([Message(role, "a") for role in roles])) - len(roles) + SPARE

        count = lru_cache(64)(lambda text: len(vocab.tokenize(text, special=False)))  # a system prompt is in all
        n_requests, longest = 0, (0, 0)  # tokens, and the number of the line, negative: the first one counts
        for each in requests:
            n_requests += 1
            if isinstance(each, BadLine):
                continue
            try:
                _require_short(each, vocab, most)
                n_prompt = sum(count(message.content) for message in each.messages)
                n_prompt += SPARE if each.raw else around(tuple(message.role for message in each.messages))
                if n_prompt <= most:
                    n = each.settings.n_predict
                    needed = n_prompt + n if n > 0 else max(n_prompt + 1, usual)
                    longest = max(longest, (min(needed, most), -each.n_line))
            except Exception as error:  # `prompts` has it again
                error_of_request(error)
        return cls(n_requests, longest[0], -longest[1])


@dataclass(frozen=True, slots=True)
class Put:
    """A request in a pool, or a line that never gets there."""

    asked: Asked | BadLine
    seed: int = -1


def pool_requests(found: Iterable[ReadPrompt], vocab: Vocabulary) -> Iterator[Request | Done]:
    """The requests for a pool, each made when a slot is free."""
    for each, tokens in found:
        if isinstance(tokens, SpecllamaError) or isinstance(each, BadLine):
            yield Done(Put(each), error=each.error if isinstance(each, BadLine) else tokens)  # type: ignore[arg-type]
            continue
        own = each.settings
        seed = secrets.randbits(32) if own.seed < 0 else own.seed
        try:
            yield Request(
                Put(each, seed),
                tokens,
                own.params,
                own.seed_mode.chooser(seed),
                max_tokens=own.n_predict,
                stopper=StopWatch(own.stops, vocab.piece) if own.stops else None,
                constraint=constraint_of(own.format, vocab),
            )
        except Exception as error:
            yield Done(Put(each), error=error_of_request(error))
