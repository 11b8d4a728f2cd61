"""The prompt: what stands on stdin, in a file and on the command line, put together and tokenised."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from specllama.base.disk import size_text
from specllama.base.errors import PromptError, UsageError
from specllama.chat.conversation import Conversation, Message, TemplateVocabulary, raw_tokens
from specllama.cli.args.options import PromptOptions
from specllama.cli.screen.output import Output

WAIT_S = 2.0  # stdin that stays silent for longer is mentioned
MAX_BYTES = 16 << 20  # of one text: millions of tokens, more than any context holds


def read_prompt(options: PromptOptions, output: Output) -> str:
    """stdin, then the file, then the argument, with blank lines between them; a raw prompt is joined as it stands.

    stdin is read where it is no terminal, or where the prompt or the file is `-`. Raises UsageError where there is
    nothing to ask.
    """
    argument = None if options.prompt == "-" else options.prompt
    file = None if options.file == "-" else options.file
    parts = []
    if "-" in (options.prompt, options.file) or _stdin_is_redirected():
        parts.append(_read_stdin(output, may_be_forgotten=argument is not None or file is not None))
    if file is not None:
        parts.append(_read_file(file))
    if argument is not None:
        parts.append(sound(argument, "the prompt"))
    if options.raw:
        prompt = "".join(parts)
    else:
        prompt = "\n\n".join(text for part in parts if (text := _without_last_newline(part)))
    if not prompt.strip():
        raise UsageError(
            "there is no prompt",
            hint='give it as an argument: specllama run "..."; with --file, or on stdin',
        )
    return prompt


def sound(text: str, what: str) -> str:
    """`text` of the command line. Bytes that are not UTF-8 came as lone surrogates: that is no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not UTF-8 text", hint="check the encoding where it comes from") from None
    return text


def _without_last_newline(text: str) -> str:
    """`text` without the newline that ends every text file."""
    return text.removesuffix("\n").removesuffix("\r")


def _stdin_is_redirected() -> bool:
    """True where stdin is a pipe or a file; a terminal is not waited for, and a closed stdin holds nothing."""
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


def _read_stdin(output: Output, *, may_be_forgotten: bool) -> str:
    """All of stdin. A pipe that nobody writes to nor closes is mentioned, or one would wait without knowing why."""
    if sys.stdin is None or sys.stdin.closed:
        return ""
    if may_be_forgotten and _is_silent():
        output.note("note: waiting for the rest of the prompt on stdin; with nothing to come, use: < /dev/null")
    return _decoded(read_whole(sys.stdin.buffer, "stdin"), "stdin")


def read_whole(file: BinaryIO, name: str) -> bytes:
    """All of a file, which may be a pipe or a device. Raises UsageError where it does not end within reason."""
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(
            f"{name} holds more than {size_text(MAX_BYTES)}, expected a text that a model can read",
            hint="give a part of it; if it was meant to end, see what writes it",
        )
    return data


def _is_silent() -> bool:
    """True where stdin is a pipe or socket on which nothing arrives for a while."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
        waits = stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)
        return waits and not select.select([sys.stdin], [], [], WAIT_S)[0]
    except (OSError, ValueError):
        return False


def _read_file(name: str) -> str:
    """The text of a prompt file."""
    try:
        with Path(name).open("rb") as file:
            return _decoded(read_whole(file, name), name)
    except OSError as error:
        raise UsageError(f"--file {name} cannot be read: {error.strerror}") from None


def _decoded(data: bytes, where: str) -> str:
    """UTF-8 text, with or without a byte order mark."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}",
            hint="convert it first, for example: iconv -f LATIN1 -t UTF-8",
        ) from None


def prompt_tokens(
    text: str, options: PromptOptions, vocab: TemplateVocabulary, template: str | None, output: Output
) -> list[int]:
    """The prompt as the model reads it: through its chat template, or as it stands with `--raw`."""
    if options.raw:
        return raw_tokens(vocab, text)
    conversation = Conversation(vocab, template)
    messages = [Message("user", text)]
    if options.system_prompt is not None:
        messages.insert(0, Message("system", sound(options.system_prompt, "--system-prompt")))
    tokens = conversation.tokens(messages)
    if conversation.notice:
        output.note(f"note: {conversation.notice}")
    if conversation.system_merged:
        output.note("note: the template knows no system prompt: it was put in front of the prompt")
    return tokens


def require_room(tokens: Sequence[int], n_ctx: int, n_predict: int) -> None:
    """Raise PromptError for a prompt longer than the context; 0 is a context that only the loader will know."""
    if n_ctx and len(tokens) > n_ctx:
        raise PromptError(
            f"the prompt has {len(tokens)} tokens, the context holds {n_ctx}",
            hint=f"shorten it, or use --ctx-size {len(tokens) + max(n_predict, 256)} or more",
        )
