"""`specllama chat`: a conversation in the terminal, or over a pipe."""

from __future__ import annotations

import secrets
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from platformdirs import user_state_path

from specllama import llama
from specllama.base.disk import meant
from specllama.base.errors import Interrupted, SpecllamaError, UsageError
from specllama.base.jsonable import parsed
from specllama.chat import saved as chat_file
from specllama.chat.settings import Settings
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import (
    SYSTEM_PROMPT,
    DraftOptions,
    HardwareOptions,
    ModelOptions,
    OutputOptions,
    SamplingOptions,
)
from specllama.cli.chat.answering import ChatState, fitted, greeting, open_models, said_to_leave
from specllama.cli.chat.commands import is_command, perform
from specllama.cli.chat.complete import complete
from specllama.cli.chat.input import Editor, Lines, MessageSource, bare, unquoted
from specllama.cli.chat.rescue import HUNG_UP, is_gone, kept_on_hangup, tell_of_kept
from specllama.cli.codes import FAILED, INTERRUPTED
from specllama.cli.errors import told
from specllama.cli.loading import ask_of
from specllama.cli.prompting import sound
from specllama.cli.screen.keyboard import Keyboard, held_keyboard
from specllama.cli.screen.output import Output, open_output
from specllama.cli.tuned import hint_at_tuning, say_profile
from specllama.core.types import Cancel
from specllama.drafters import DraftSettings
from specllama.pairs.ask import Drafting


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The conversation."""

    title: ClassVar[str] = "Chat"

    system_prompt: Annotated[
        str | None,
        replace(SYSTEM_PROMPT, help="What the model is told before everything."),
    ] = None
    load: Annotated[str | None, Option("--load FILE", "Go on with a saved conversation.")] = None
    history: Annotated[
        bool, Option("--history/--no-history", "Remember messages in a file that only you can read.")
    ] = True


@with_options
def chat(
    conversation: ChatOptions,
    models: ModelOptions,
    drafting: DraftOptions,
    sampling: SamplingOptions,
    hardware: HardwareOptions,
    output: OutputOptions,
) -> None:
    """Talk with the target while the draft drafts: /help inside lists the commands. On a pipe, a message a line."""
    if output.json:
        raise UsageError("--json is one object at the end, and a chat has no end", hint="use --jsonl")
    out = open_output(color=output.color, format=output.format, quiet=output.quiet, verbose=output.verbose)
    llama.set_log((lambda level, line: out.detail(line) if level != "debug" else None) if out.verbose else None)
    ask = ask_of(models, drafting, hardware)
    settings = _settings(sampling, ask.drafting)
    if conversation.load:
        chat_file.load(meant(bare(conversation.load)))  # before models are loaded in vain
    with held_keyboard(sys.stdin, out.out) if _has_editor(out) else nullcontext() as keyboard:
        early = keyboard.early() if keyboard is not None else ""
        cancel = Cancel()
        try:
            opened = open_models(ask, out, cancel, keyboard)
        except Interrupted:
            raise typer.Exit(INTERRUPTED) from None
        settings = fitted(settings, opened)
        say_profile(opened.setup, out)
        if opened.choice.length.is_auto and out.out.is_terminal:
            hint_at_tuning(opened.setup, ask.names, out)
        talk = ChatState(out, opened, settings, conversation.system_prompt or "", cancel, keyboard)
        try:
            talk.live = out.live and out.format != "jsonl" and output.live is not False and out.out.is_terminal
            if conversation.load:
                perform(talk, f"/load {conversation.load}")
            source = _source(out, conversation, keyboard, early)
            with kept_on_hangup(talk, wanted=conversation.history and sys.stdin.isatty()):
                code = _converse(talk, source)
        finally:
            talk.close()
    if code:
        raise typer.Exit(code)


def _settings(sampling: SamplingOptions, drafting: Drafting) -> Settings:
    """The options as the first settings."""
    return Settings(
        params=sampling.params,
        drafting=DraftSettings(p_min=drafting.p_min, temperature=drafting.temperature),
        rule=drafting.rule,
        seed=sampling.seed if sampling.seed >= 0 else secrets.randbits(32),
        n_predict=sampling.predict,
        stops=tuple(sampling.stop or ()),
    )


def _has_editor(out: Output) -> bool:
    """True where a person sits at a terminal that can be steered."""
    at_terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    return at_terminal and out.out.steerable and out.format == "human"


def _source(out: Output, options: ChatOptions, keyboard: Keyboard | None, early: str) -> MessageSource:
    """An editor, which begins with what was typed `early`, or lines."""
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("stdin is closed, so nothing can be asked", hint="start it in a terminal, or pipe messages in")
    if _has_editor(out):
        path: Path | None = user_state_path("specllama") / "chat_history" if options.history else None
        editor = Editor(path, complete, keyboard)
        editor.type(early)
        return editor
    at_terminal = sys.stdin.isatty()
    return Lines(sys.stdin, out if at_terminal and out.format == "human" and not out.quiet else None)


def _converse(talk: ChatState, source: MessageSource) -> int:
    """Read, answer, and again; returns the exit code."""
    talk.source = source
    out = talk.output
    piped = not sys.stdin.isatty()
    if out.format == "jsonl":
        out.data({"event": "start", **talk.header()})
    elif not piped:
        for words in greeting(talk.opened, talk.session.settings):
            out.note(words)
        tell_of_kept(out)
    while True:
        try:
            start, talk.prefilled = talk.prefilled, ""
            line = source.read(start)
            _survived(talk, line)
        except EOFError:
            if not piped and is_gone():
                raise SystemExit(HUNG_UP) from None
            break
        except KeyboardInterrupt:
            talk.edits_last = False
            if piped:
                return INTERRUPTED
            said_to_leave(out)
        except SpecllamaError as error:
            talk.fail(error)
        except OSError:  # of a terminal that was closed while it was asked
            if piped or not is_gone():
                raise
            talk.ended = HUNG_UP
        if talk.ended:
            raise SystemExit(talk.ended)
        if piped and talk.interrupted:
            return INTERRUPTED
    return FAILED if piped and talk.n_failed else 0


def _take(talk: ChatState, line: str) -> None:
    """One line: a message, or a command."""
    if talk.output.format == "jsonl":
        line = _from_json(line)
    if not line.strip():
        talk.edits_last = False
        return
    if is_command(line):
        perform(talk, line.strip())
    else:
        talk.message(unquoted(line).strip("\n") if line[0] != " " else line.strip())
    if talk.output.out.is_terminal and talk.output.format == "human":
        talk.output.note("")


def _survived(talk: ChatState, line: str) -> None:
    """`_take`, but what nobody foresaw is an error like others: it costs one line, and no conversation."""
    try:
        _take(talk, line)
    except (SpecllamaError, EOFError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and not error.filename:  # of the terminal, or of a pipe
            raise
        raise told(error) from error


def _from_json(line: str) -> str:
    """The message or command of a line of JSON: text, or an object with `message` or `command`."""
    if not line.strip():
        return ""
    try:
        data = parsed(line)
    except ValueError:
        raise UsageError(
            "a line of stdin is no JSON", hint='write {"message": "..."} or {"command": "/undo"}'
        ) from None
    if isinstance(data, str):
        return f" {sound(data, 'a message')}"  # never a command
    if isinstance(data, dict) and isinstance(data.get("message"), str):
        return f" {sound(data['message'], 'a message')}"
    if isinstance(data, dict) and isinstance(data.get("command"), str) and is_command(data["command"]):
        return str(data["command"])
    raise UsageError("a line of stdin has neither message nor command", hint='write {"message": "..."}')
