"""The prompt: stdin, file and argument joined and tokenised."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from specllama.base.disk import size_text
from specllama.base.errors import MemoryShort, PromptError, UsageError
from specllama.base.text import counted, decoded, figure
from specllama.chat.conversation import Conversation, Message, TemplateVocabulary, raw_tokens
from specllama.cli.args.options import PromptOptions
from specllama.cli.screen.output import Output
from specllama.pairs.setup import Setup, longest_context

WAIT_S = 2.0  # after which a silent stdin is mentioned
MAX_BYTES = 16 << 20  # of one text: millions of tokens, more than any context holds


def read_prompt(options: PromptOptions, output: Output) -> str:
    """stdin, then the file, then the argument, separated by blank lines; with `--raw` joined unchanged.

    stdin is read if it is not a terminal, or if the prompt or the file is `-`. Raises UsageError for an empty prompt.
    """
    argument = None if options.prompt == "-" else options.prompt
    file = None if options.file == "-" else options.file
    parts = []
    if "-" in (options.prompt, options.file) or not sys.stdin.isatty():
        parts.append(_read_stdin(output, may_be_forgotten=argument is not None or file is not None))
    if file is not None:
        parts.append(_read_file(file))
    if argument is not None:
        parts.append(argument)
    if options.raw:
        prompt = "".join(parts)
    else:
        # The newline that ends every text file is not part of the prompt.
        prompt = "\n\n".join(text for part in parts if (text := part.removesuffix("\n").removesuffix("\r")))
    if not prompt.strip():
        raise UsageError("there is no prompt", hint='specllama run "PROMPT", --file FILE, or stdin')
    return prompt


def _read_stdin(output: Output, *, may_be_forgotten: bool) -> str:
    """All of stdin. A pipe that stays open and silent is mentioned: otherwise the program waits without a reason."""
    if may_be_forgotten and _is_silent():
        output.note("note: waiting for the rest of the prompt on stdin; to skip it, use: < /dev/null")
    return decoded(read_whole(sys.stdin.buffer, "stdin"), "stdin", UsageError)


def read_whole(file: BinaryIO, name: str) -> bytes:
    """All of a file, pipe or device. Raises UsageError if it is longer than MAX_BYTES."""
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{name} holds more than {size_text(MAX_BYTES)} (expected a text that fits a context)",
            hint="pass a part of it",
        )
    return data


def _is_silent() -> bool:
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
        waits = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
        return waits and not select.select([sys.stdin], [], [], WAIT_S)[0]
    except (OSError, ValueError):
        return False


def _read_file(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            return decoded(read_whole(file, name), name, UsageError)
    except OSError as error:
        raise UsageError(f"--file {name} cannot be read: {error.strerror}") from None


def prompt_tokens(
    text: str, options: PromptOptions, vocab: TemplateVocabulary, template: str | None, output: Output
) -> list[int]:
    """The prompt through the chat template, or unchanged with `--raw`."""
    if options.raw:
        return raw_tokens(vocab, text)
    conversation = Conversation(vocab, template)
    messages = [Message("user", text)]
    if options.system_prompt is not None:
        messages.insert(0, Message("system", options.system_prompt))
    tokens = conversation.tokens(messages)
    if conversation.notice:
        output.note(f"note: {conversation.notice}")
    if conversation.system_merged:
        output.note("note: the chat template has no system prompt: it was put before the prompt")
    return tokens


def require_room(tokens: Sequence[int], setup: Setup, n_predict: int) -> None:
    """Raise PromptError for a prompt longer than the context, if its length is known before loading."""
    n_ctx = setup.target_options.n_ctx
    if not n_ctx or len(tokens) <= n_ctx:
        return
    longest = n_ctx
    with suppress(MemoryShort):
        longest = max(n_ctx, longest_context(setup) or setup.target.header.n_ctx_train)
    if len(tokens) < longest:
        hint = f"shorten it, or use --ctx-size {min(len(tokens) + max(n_predict, 256), longest)}"
    else:
        hint = f"shorten it: a context of {figure(longest)} tokens is the longest for this model and the free memory"
    raise PromptError(f"the prompt has {counted(len(tokens), 'token')}, the context holds {n_ctx}", hint=hint)
