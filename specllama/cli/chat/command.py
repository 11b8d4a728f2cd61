"""`specllama chat`: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import typer
from platformdirs import user_state_path

from specllama import llama
from specllama.base.disk import meant
from specllama.base.errors import Interrupted, SpecllamaError, UsageError
from specllama.base.jsonable import parsed
from specllama.base.ranges import sound
from specllama.chat import saved as chat_file
from specllama.chat.format import AnswerFormat, given_format
from specllama.chat.settings import SETTINGS, Settings, changed
from specllama.cli.args.grouping import Option, typed, with_options
from specllama.cli.args.options import (
    CHAT_TEMPLATE,
    SYSTEM_PROMPT,
    SYSTEM_PROMPT_FILE,
    DraftOptions,
    FormatOptions,
    HardwareOptions,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
)
from specllama.cli.chat.answering import ChatState, fitted, greeting, open_models, steered
from specllama.cli.chat.commands import go_on, is_command, load, open_elsewhere, perform
from specllama.cli.chat.complete import complete
from specllama.cli.chat.input import Editor, Lines, MessageSource, bare, unquoted
from specllama.cli.chat.rescue import kept_on_hangup, tell_of_kept
from specllama.cli.chat.shelf import Shelf, kept_chats, kept_files
from specllama.cli.codes import FAILED, HUNG_UP, INTERRUPTED
from specllama.cli.config import look
from specllama.cli.errors import told
from specllama.cli.loading import ask_of, settings_of
from specllama.cli.prompting import system_prompt_of, template_of
from specllama.cli.screen.ending import is_hung_up
from specllama.cli.screen.keyboard import Keyboard, held_keyboard
from specllama.cli.screen.output import Output, open_output
from specllama.cli.tuned import hint_at_tuning, say_profile
from specllama.core.types import Cancel
from specllama.drafters import DraftSettings
from specllama.files import hub
from specllama.files.catalog import load_catalog
from specllama.pairs.ask import Drafting


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation begins and is remembered."""

    title: ClassVar[str] = "Chat"

    named: Annotated[
        str | None,
        typer.Argument(metavar="PAIR", help="A pair by name. [the default pair; asks if several are on this machine]"),
    ] = None
    system_prompt: Annotated[str | None, SYSTEM_PROMPT] = None
    system_prompt_file: Annotated[str | None, SYSTEM_PROMPT_FILE] = None
    chat_template: Annotated[str | None, CHAT_TEMPLATE] = None
    load: Annotated[str | None, Option("--load FILE", "Continue a saved conversation.")] = None
    resume: Annotated[bool, Option("--continue", "Continue the last conversation.")] = False
    history: Annotated[
        bool, Option("--history/--no-history", "Keep messages and conversations in files that only you can read.")
    ] = True


@with_options
def chat(
    ctx: typer.Context,
    conversation: ChatOptions,
    models: ModelOptions,
    drafting: DraftOptions,
    sampling: SamplingOptions,
    formats: FormatOptions,
    hardware: HardwareOptions,
    output: OutputOptions,
) -> None:
    """Chat with the target, with speculative decoding. /help lists the commands. On a pipe, each line is a message."""
    if output.json:
        raise UsageError("--json does not work with chat, which has no single result", hint="use --jsonl")
    out = open_output(color=output.color, format=output.format, quiet=output.quiet, verbose=output.verbose)
    llama.set_log((lambda level, line: out.detail(line) if level != "debug" else None) if out.verbose else None)
    models = replace(models, pair=conversation.named or models.pair or _picked(models, out))
    ask = ask_of(models, drafting, hardware)
    settings = _settings(sampling, formats, ask.drafting)
    system, template = system_prompt_of(conversation) or "", template_of(conversation.chat_template)
    file = meant(bare(conversation.load)) if conversation.load else None
    if file is not None:
        chat_file.load(file)  # a bad file fails before models are loaded
    last = next(kept_chats(kept_files()), None) if conversation.resume else None
    if conversation.resume and last is None:
        raise UsageError("no conversation is kept here", hint="start one: specllama chat")
    shelf, taken = Shelf(wanted=conversation.history and sys.stdin.isatty()), None
    if last is not None:
        taken = shelf.take(last.path)  # now: another chat may take it while the models load
        shelf.begin(taken.path)
        for words in open_elsewhere(taken):
            out.note(words)
    with held_keyboard(sys.stdin, out.out) if _has_editor(out) else nullcontext() as keyboard:
        early = keyboard.early() if keyboard is not None else ""
        cancel = Cancel()
        try:
            opened = open_models(ask, out, cancel, keyboard)
        except Interrupted:
            raise typer.Exit(INTERRUPTED) from None
        settings = fitted(settings, opened)
        say_profile(opened.setup, ask.names, out)
        if opened.choice.length.is_auto and out.out.is_terminal:
            hint_at_tuning(opened.setup, ask.names, out)
        talk = ChatState(out, opened, settings, system, cancel, keyboard, template, look=look(), shelf=shelf)
        try:
            talk.live = out.live and out.format != "jsonl" and output.live is not False and out.out.is_terminal
            told_first: list[str] = []
            if file is not None:
                told_first = load(talk, file)
            elif taken is not None:
                told_first = go_on(talk, taken)
            if told_first:
                _prefer(typed(ctx), talk, settings, system)
            source = _source(out, conversation, keyboard, early)
            if not source.edits:
                talk.measure()
            with kept_on_hangup(talk):
                code = _converse(talk, source, told_first)
        finally:
            talk.close()
    if code:
        raise typer.Exit(code)


def _picked(models: ModelOptions, out: Output) -> str | None:
    """The pair that a person picks; None if a model is named, or without a choice on this machine."""
    if models.model or models.hf_repo or models.model_draft or models.hf_repo_draft or not _has_editor(out):
        return None
    catalog = load_catalog()
    here = [pair for pair in catalog.pairs.values() if hub.find(pair.target) and hub.find(pair.draft)]
    if len(here) < 2:
        return None
    names = sorted((pair.name for pair in here), key=lambda name: name != catalog.default)  # the default first
    for number, name in enumerate(names, 1):
        out.err.line(f"{number}  {name}  {catalog.pairs[name].summary}")
    while True:
        text: str = typer.prompt("Which pair", default="1", err=True).strip()
        if text in names:
            return text
        if text.isdecimal() and 1 <= int(text) <= len(names):
            return names[int(text) - 1]
        out.err.line(f"expected a number from 1 to {len(names)}, or a name")


def _settings(sampling: SamplingOptions, formats: FormatOptions, drafting: Drafting) -> Settings:
    """The first settings, from the options."""
    draft = DraftSettings(p_min=drafting.p_min, temperature=drafting.temperature)
    return replace(settings_of(sampling, formats.format), drafting=draft, rule=drafting.rule)


def _prefer(names: frozenset[str], talk: ChatState, settings: Settings, system: str) -> None:
    """Give the typed options among `names` their values, where a continued conversation has other ones."""
    session = talk.session
    restored = session.settings
    wanted = restored
    for name, setting in SETTINGS.items():
        if name.replace("-", "_") in names:
            wanted = changed(wanted, name, setting.get(settings))
    if settings.format is not None:
        wanted = replace(wanted, format=settings.format)
    if wanted != restored:
        session.settings = steered(wanted, talk.opened, settings)
    if names & {"system_prompt", "system_prompt_file"}:
        session.system = system


def _has_editor(out: Output) -> bool:
    """True for a person at a terminal that understands escape sequences."""
    return sys.stdin.isatty() and out.out.steerable and out.format == "human"


def _source(out: Output, options: ChatOptions, keyboard: Keyboard | None, early: str) -> MessageSource:
    """An editor that begins with what was typed `early`, or lines of stdin."""
    if _has_editor(out):
        path = user_state_path("specllama") / "chat_history"
        editor = Editor(path, complete, keyboard, kept=options.history)
        editor.type(early)
        return editor
    at_terminal = sys.stdin.isatty()
    return Lines(sys.stdin, out if at_terminal and out.format == "human" and not out.quiet else None)


def _converse(talk: ChatState, source: MessageSource, told_first: Iterable[str]) -> int:
    """Read and answer messages until the end; returns the exit code."""
    talk.source = source
    out = talk.output
    piped = not sys.stdin.isatty()
    if out.format == "jsonl":
        talk.start_record()
    elif not piped:
        for words in greeting(talk.opened, talk.session.settings, measuring=not talk.first_use.done):
            out.note(words)
        tell_of_kept(talk)
    for words in told_first:
        talk.note(words)
    while True:
        try:
            talk.keep()
            start, talk.prefilled = talk.prefilled, ""
            if source.edits:
                with talk.meanwhile():
                    line = source.read(start)
            else:
                line = source.read(start)
            _survived(talk, line)
        except EOFError:
            if is_hung_up(0):
                raise SystemExit(HUNG_UP) from None
            break
        except KeyboardInterrupt:
            talk.edits_last = False
            if piped:
                return INTERRUPTED
            out.note("(Ctrl-D or /exit leaves; Ctrl-C stops an answer)")
        except SpecllamaError as error:
            talk.fail(error)
        except OSError:  # from a terminal that was closed during the read
            if not is_hung_up(0):
                raise
            talk.ended = HUNG_UP
        if talk.ended:
            raise SystemExit(talk.ended)
        if piped and talk.interrupted:
            return INTERRUPTED
    return FAILED if piped and talk.n_failed else 0


def _take(talk: ChatState, line: str) -> None:
    """Handle one line: a message or a command."""
    form = None
    if talk.output.format == "jsonl":
        line, form = _from_json(line)
    if not line.strip():
        talk.edits_last = False
        return
    if is_command(line):
        perform(talk, line.strip())
    else:
        talk.message(unquoted(line).strip("\n") if line[0] != " " else line.strip(), form)
    if talk.output.out.is_terminal and talk.output.format == "human":
        talk.output.note("")


def _survived(talk: ChatState, line: str) -> None:
    """`_take`, with unexpected exceptions as SpecllamaError: they cost one line, not the conversation."""
    try:
        _take(talk, line)
    except (SpecllamaError, EOFError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and not error.filename:  # from the terminal or a pipe
            raise
        raise told(error) from error


def _from_json(line: str) -> tuple[str, AnswerFormat | None]:
    """The message or command of a line of JSON, and the format of the answer: text, or an object with these fields."""
    if not line.strip():
        return "", None
    hint = 'write {"message": "..."} or {"command": "/undo"}'
    try:
        data = parsed(line)
    except ValueError:
        raise UsageError("a line of stdin is not JSON", hint=hint) from None
    fields = data if isinstance(data, dict) else {"message": data}
    if isinstance(message := fields.get("message"), str):
        return f" {sound('a message', message)}", given_format(fields)  # the space: never a command
    if isinstance(command := fields.get("command"), str) and is_command(command):
        return command, None
    raise UsageError("a line of stdin has neither message nor command", hint=hint)
