"""The prompt: stdin, file and argument joined and tokenised."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from specllama.base.disk import meant, size_text
from specllama.base.errors import MemoryShort, PromptError, UsageError, unreadable
from specllama.base.text import counted, decoded, figure
from specllama.chat.conversation import Conversation, Message, RenderedPrompt, TemplateVocabulary, raw_tokens
from specllama.chat.named_templates import NAMED
from specllama.cli import templates
from specllama.cli.args.options import PromptOptions
from specllama.cli.screen.output import Output
from specllama.pairs.setup import Setup, longest_context

WAIT_S = 2.0  # after which a silent stdin is mentioned
MAX_BYTES = 16 << 20  # of one text: millions of tokens, more than any context holds


def _read_input(options: PromptOptions, output: Output) -> str:
    """stdin, then the file, then the argument, separated by blank lines; with `--raw` joined unchanged.

    stdin is read if it is not a terminal, or if the prompt or the file is `-`.
    """
    argument = None if options.prompt == "-" else options.prompt
    file = None if options.file == "-" else options.file
    parts = []
    if "-" in (options.prompt, options.file) or not sys.stdin.isatty():
        is_optional = argument is not None or file is not None or options.template is not None
        parts.append(_read_stdin(output, may_be_forgotten=is_optional))
    if file is not None:
        parts.append(_read_file("--file", file))
    if argument is not None:
        parts.append(argument)
    return "".join(parts) if options.raw else "\n\n".join(text for part in parts if (text := _without_end(part)))


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


def _without_end(text: str) -> str:
    """`text` without the newline that ends every text file."""
    return text.removesuffix("\n").removesuffix("\r")


def _read_file(option: str, name: str) -> str:
    """The text of a file that an option names. Raises UsageError."""
    try:
        with meant(name).open("rb") as file:
            return decoded(read_whole(file, name), name, UsageError)
    except OSError as error:
        raise unreadable(f"{option} {name}", error, UsageError) from None


class SystemPromptOptions(Protocol):
    """An option group with both ways to give a system prompt."""

    @property
    def system_prompt(self) -> str | None: ...

    @property
    def system_prompt_file(self) -> str | None: ...


def system_prompt_of(options: SystemPromptOptions) -> str | None:
    """The system prompt, from its option or its file. Raises UsageError."""
    if options.system_prompt_file is None:
        return options.system_prompt
    return _without_end(_read_file("--system-prompt-file", options.system_prompt_file))


def template_of(name: str | None) -> str | None:
    """The chat template of `--chat-template`: a name of `NAMED`, or a file. Raises UsageError."""
    if name is None or name in NAMED:
        return name and NAMED[name]
    if not os.path.exists(meant(name)):
        raise UsageError(
            f"there is no chat template {name} (expected a file, or {', '.join(NAMED)})", hint="check the path"
        )
    template = _read_file("--chat-template", name)
    if not template.strip():
        raise UsageError(f"the chat template {name} is empty", hint="to use none: --raw")
    return template


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Everything that the options give of a prompt."""

    text: str
    system: str | None
    template: str | None  # instead of the model's
    raw: bool


def prompt_parts(options: PromptOptions, output: Output) -> PromptParts:
    """The parts of the prompt, read from their files. Raises UsageError, also for an empty prompt, and ConfigError."""
    system, chat_template = system_prompt_of(options), template_of(options.chat_template)
    values = templates.values_of(options.param or ())
    if options.template is None:
        if values:
            raise UsageError("--param needs a template", hint="specllama run --template NAME --param KEY=VALUE")
        text = _read_input(options, output)
        if not text.strip():
            raise UsageError("there is no prompt", hint='specllama run "PROMPT", --file FILE, or stdin')
        return PromptParts(text, system, chat_template, options.raw)
    template = templates.find(options.template)
    if options.raw and template.system is not None:
        raise UsageError(f"--raw has no system prompt, but template {template.name} has one")
    joint = "" if options.raw else "\n\n"
    text, system = template.filled(_read_input(options, output), values, joint=joint)
    return PromptParts(text, system, chat_template, options.raw)


def rendered(parts: PromptParts, vocab: TemplateVocabulary, template: str | None, output: Output) -> RenderedPrompt:
    """The prompt through the chat template, that of the model by default, or unchanged with `--raw`."""
    if parts.raw:
        return RenderedPrompt(parts.text, raw_tokens(vocab, parts.text))
    conversation = Conversation(vocab, parts.template or template)
    messages = [Message("user", parts.text)]
    if parts.system is not None:
        messages.insert(0, Message("system", parts.system))
    prompt = conversation.rendered(messages)
    if conversation.notice:
        output.note(f"note: {conversation.notice}")
    if conversation.system_merged:
        output.note("note: the chat template has no system prompt: it was put before the prompt")
    return prompt


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
