"""The commands of a chat, in a table that help and completion use."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from rich.cells import cell_len, set_cell_size

from specllama.base.disk import meant, size_text
from specllama.base.errors import ConversationError, UsageError
from specllama.base.ranges import whole
from specllama.base.text import counted
from specllama.chat import saved as chat_file
from specllama.chat.saved import Saved
from specllama.chat.settings import SETTINGS, find, value_text
from specllama.cli.chat import reading
from specllama.cli.chat.answering import ChatState, steered
from specllama.cli.chat.input import Editor, bare, unquoted
from specllama.cli.chat.shelf import KeptChat, Taken, kept_chats, kept_files
from specllama.cli.chat.stats import stats_json, stats_lines
from specllama.cli.screen.clipboard import copy_to_clipboard
from specllama.cli.screen.editor import edited, editor
from specllama.cli.screen.look import LOOKS
from specllama.cli.screen.markdown import AnswerText
from specllama.cli.screen.render import palette_of
from specllama.cli.screen.visible import Raw, in_one_line, wrapped
from specllama.cli.tuned import length_text
from specllama.drafters import TREE
from specllama.drafters.length import DraftLength
from specllama.files.catalog import load_catalog

SHOWN = ("info", "parameters", "system", "template", "stats")
LENGTH = "spec-draft-n-max"
MOST_LISTED = 20  # kept conversations


Act = Callable[[ChatState, str], None]
Decorator = Callable[[Act], Act]


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """One command. `more` is in its own help only; `takes` selects the completion of its argument."""

    names: tuple[str, ...]
    usage: str
    help: str
    more: str
    act: Act
    takes: str


COMMANDS: list[SlashCommand] = []  # in the order of /help


def _command(usage: str, help: str, more: str = "", *, takes: str = "", also: tuple[str, ...] = ()) -> Decorator:
    """Adds a function to COMMANDS, with the first word of `usage` as its name."""

    def add(act: Act) -> Act:
        COMMANDS.append(SlashCommand((usage.split()[0][1:], *also), usage, help, more, act, takes))
        return act

    return add


KEYS = (
    ("Ctrl-C", "Stop the answer."),
    ("Ctrl-D", "Leave the chat."),
    ("Ctrl-G", "Edit the line in $VISUAL or $EDITOR."),
    ('"""', "Begin or end a message of several lines; Alt-Enter makes a new line."),
)


@_command("/help [COMMAND]", "Explain the commands.", takes="command", also=("?",))
def _help(chat: ChatState, rest: str) -> None:
    name = rest.strip().lstrip("/")
    if name:
        command = _find(name)
        chat.say("\n".join([command.usage, *_wrapped(f"{command.help} {command.more}".strip(), chat.width)]))
        return
    lines: list[str] = []
    for left, right in (*((command.usage, command.help) for command in COMMANDS), *KEYS):
        lines += _entry(left, right, chat.width)
    chat.say("\n".join(lines))


def _entry(left: str, right: str, width: int) -> list[str]:
    """One row of help; on a narrow terminal the explanation is below."""
    if width >= 60:
        first, *more = _wrapped(right, width - 24)
        return [f"{left:<23} {first}", *(" " * 24 + line for line in more)]
    return [left, *("  " + line for line in _wrapped(right, width - 2))]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width - 1, 20))


@_command("/exit", "Leave the chat; also /bye, /quit and Ctrl-D.", also=("bye", "quit"))
def _exit(chat: ChatState, rest: str) -> None:
    raise EOFError


@_command("/regen", "Answer the last message again, with another seed.")
def _regen(chat: ChatState, rest: str) -> None:
    chat.cancel.clear()
    chat.answer(chat.session.regen(chat.cancel))


@_command("/undo", "Remove the last message and its answer.")
def _undo(chat: ChatState, rest: str) -> None:
    turn = chat.session.undo()
    chat.note(f"removed: {_short(turn.user)}")


@_command("/clear", "Clear the conversation.", "The system prompt and the settings stay.")
def _clear(chat: ChatState, rest: str) -> None:
    chat.session.clear()
    chat.attached.clear()
    chat.shelf.begin()
    chat.note("the conversation is empty; the system prompt and the settings stay")


@_command(
    "/edit [TEXT]",
    "Replace the last message with TEXT and answer it.",
    "Without TEXT, edit the message in $VISUAL or $EDITOR, or in the input line.",
)
def _edit(chat: ChatState, rest: str) -> None:
    last = chat.session.last_turn().user
    text = unquoted(rest)
    if not text:
        if editor():
            lent = nullcontext() if chat.keyboard is None else chat.keyboard.lent()
            with lent, edited(last, "message.md") as written:
                text = written.removesuffix("\n")
        elif chat.source is not None and chat.source.edits:
            chat.prefilled, chat.edits_last = last, True
            return
        else:
            raise UsageError("there is no editor", hint="write /edit NEW TEXT, or set VISUAL or EDITOR")
    if not text.strip() or text == last:
        chat.note("the message is unchanged; nothing was sent")
        return
    chat.edits_last = True
    chat.message(text)


@_command(
    "/read FILE...",
    "Put text files in front of your next message.",
    "Also folders and patterns: /read src, /read src/**/*.py README.md. Hidden files of a folder are left out.",
    takes="path",
)
def _read(chat: ChatState, rest: str) -> None:
    _path(rest, "/read FILE")
    found = reading.find(rest)
    files, n_ctx = found.files, chat.session.target_kv.n_ctx
    n_tokens = chat.session.n_tokens("\n".join(file.text for file in files))
    what = files[0].name if len(files) == 1 else counted(len(files), "file")
    said = f"{what}: {size_text(found.n_bytes)}, {counted(n_tokens, 'token')}"
    if found.n_skipped:
        said += f" ({counted(found.n_skipped, 'file')} skipped: not text)"
    if n_tokens >= n_ctx:
        raise UsageError(f"{said}; the context holds {n_ctx}", hint="read a part of it, or use a longer context")
    chat.attached += [file.fenced for file in files]
    goes = "it goes" if len(files) == 1 else "they go"
    chat.note(f"{said}; {goes} in front of your next message; /unread takes back")


@_command("/unread", "Take back what /read put in front of your next message.")
def _unread(chat: ChatState, rest: str) -> None:
    chat.note(f"took back {counted(len(chat.attached), 'file')}")
    chat.attached.clear()


@_command(
    "/copy [code [N]]",
    "Copy the last answer, or one of its code blocks.",
    "The terminal puts it on its clipboard if it allows that (OSC 52). Without N, the first code block.",
    takes="copy",
)
def _copy(chat: ChatState, rest: str) -> None:
    answer = AnswerText.of(chat.session.last_turn().answer, starts_thinking=chat.session.starts_thinking)
    what, _, number = rest.partition(" ")
    if what == "code":
        blocks = answer.blocks
        if not blocks:
            raise UsageError("the last answer has no code block", hint="/copy copies all of it")
        n = whole(1, len(blocks))("code block", number.strip() or 1)
        text, name = blocks[n - 1], f"code block {n} of {len(blocks)}"
    elif not what:
        text, name = answer.text, "the last answer"
    else:
        raise UsageError(f"/copy {rest} is unknown", hint="/copy, /copy code, or /copy code 2")
    if chat.output.format != "human" or not copy_to_clipboard(text, chat.output.out):
        raise UsageError("stdout is no terminal with a clipboard", hint="/save FILE")
    chat.note(f"sent {name} to the terminal's clipboard: {counted(len(text), 'character')}")


@_command(
    "/save FILE",
    "Save the conversation as JSON.",
    "The file has the settings and seeds. Asks before it replaces a file that this chat has not saved or loaded.",
    takes="path",
)
def _save(chat: ChatState, rest: str) -> None:
    path = _path(rest or chat.file, "/save FILE")
    is_own = chat.file and os.path.realpath(chat.file) == os.path.realpath(path)
    if not is_own and os.path.isfile(path) and not chat.agrees(f"{path} exists. Replace it?"):
        raise ConversationError(f"{path} exists; nothing was saved", hint=f"to replace it: /save! {path}")
    _write(chat, path)


@_command("/save! FILE", "Save the conversation, and replace an existing file.", takes="path")
def _save_anyway(chat: ChatState, rest: str) -> None:
    _write(chat, _path(rest or chat.file, "/save! FILE"))


def _write(chat: ChatState, path: Path) -> None:
    chat_file.save(path, chat.session, chat.opened.names)
    chat.file = str(path)
    chat.note(f"saved {counted(len(chat.session.turns), 'turn')} to {path}")


@_command(
    "/load FILE",
    "Continue a saved conversation.",
    "A damaged file changes nothing; the error names the place.",
    takes="path",
)
def _load(chat: ChatState, rest: str) -> None:
    for words in load(chat, _path(rest or chat.file, "/load FILE")):
        chat.note(words)


def load(chat: ChatState, path: Path) -> list[str]:
    """Continue a saved conversation in place of the current one; returns what to say. Raises ConversationError."""
    saved = chat_file.load(path)
    told = _restore(chat, saved)
    chat.shelf.begin()
    chat.file = str(path)
    told.append(f"loaded {counted(len(saved.turns), 'turn')}, the system prompt and the settings from {path}")
    return told + [f"last message: {_short(turn.user)}" for turn in saved.turns[-1:]]


@_command(
    "/chats [N or WORDS]",
    "List the kept conversations, or those with WORDS; continue number N.",
    "They are kept unless --no-history or /set nohistory is given. `specllama chat --continue` continues the last one.",
)
def _chats(chat: ChatState, rest: str) -> None:
    files = {path: changed_s for path, changed_s in kept_files().items() if path != chat.shelf.path}
    if rest.isdecimal():
        chat.listed = chat.listed or list(islice(kept_chats(files), MOST_LISTED))
        if not chat.listed:
            raise UsageError("no other conversation is kept")
        chosen = chat.listed[whole(1, len(chat.listed))("the number", rest) - 1]
        taken = chat.shelf.take(chosen.path)
        for words in [*open_elsewhere(taken), *go_on(chat, taken)]:
            chat.note(words)
        return
    found = kept_chats(files, rest)
    chat.listed = list(islice(found, MOST_LISTED))
    rows = [_row(number, kept, chat.width) for number, kept in enumerate(chat.listed, 1)]
    if not rest and len(files) > MOST_LISTED:
        rows.append(f"{len(files) - MOST_LISTED} older ones: /chats WORDS")
    elif rest and next(found, None) is not None:
        rows.append(f"older ones: /chats {rest} MORE WORDS")
    chat.say("\n".join(rows) or f"no other conversation {f'with {rest} ' if rest else ''}is kept")


def _row(number: int, kept: KeptChat, width: int) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.changed_s))
    begin = f"{number:>2}  {when}  {counted(kept.n_turns, 'turn'):<8}  "
    row = begin + in_one_line(kept.title)
    return row if cell_len(row) <= width else set_cell_size(row, width - 3) + "..."


def open_elsewhere(taken: Taken) -> list[str]:
    """What to say about a conversation that another chat has as well."""
    return ["note: this conversation is open in another chat; each goes on in a file of its own"] * taken.is_open


def go_on(chat: ChatState, taken: Taken) -> list[str]:
    """Continue a kept conversation in place of the current one; returns what to say."""
    saved = taken.saved
    told = _restore(chat, saved)
    chat.shelf.begin(taken.path)
    chat.listed, chat.file = [], ""
    last = f", the last: {_short(saved.turns[-1].user)}" if saved.turns else ""
    return [*told, f"continued: {counted(len(saved.turns), 'turn')}{last}"]


def _restore(chat: ChatState, saved: Saved) -> list[str]:
    """Take over turns, system prompt and, as far as these models support them, settings; returns what to say."""
    settings = saved.settings
    with suppress(UsageError):  # of a pair without a draft; `restore` says it
        chat.open_for(settings.strategy)
    own = chat.session.settings
    if settings.drafting.length.is_auto and not own.drafting.length.is_auto:
        # The policy belongs to the loaded models, not to the conversation.
        settings = replace(settings, drafting=replace(settings.drafting, length=own.drafting.length))
    try:
        chat.session.restore(saved.turns, saved.system, steered(settings, chat.opened, own))
    except UsageError as error:
        settings = replace(settings, strategy=own.strategy, drafting=own.drafting)
        chat.session.restore(saved.turns, saved.system, settings)
        return [f"note: the settings of drafting are kept: {error}"]
    return []


def _path(text: str, usage: str) -> Path:
    name = bare(text)
    if not name:
        raise UsageError("the file is missing", hint=usage)
    return meant(name)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


def _value(chat: ChatState, name: str) -> str:
    """A setting's value; for auto, also what it is now."""
    settings = chat.session.settings
    is_auto = name == LENGTH and settings.drafting.length.is_auto
    return length_text(chat.opened.setup) if is_auto else value_text(settings, name)


def _parameters(chat: ChatState) -> str:
    rows = {name: _value(chat, name) for name in SETTINGS}
    if not chat.session.can_think:
        del rows["think"]
    rows.update({name: getattr(chat.look, name) for name in LOOKS})
    return _table(chat, rows.items(), 18)


def _table(chat: ChatState, rows: Iterable[tuple[str, str]], n_left: int) -> str:
    """Names and values in two columns; on a terminal, long values are wrapped in theirs."""
    width = max(chat.width - n_left - 1, 20) if chat.output.out.is_terminal else 0
    lines = []
    for name, value in rows:
        first, *rest = wrapped(value, width).split("\n")
        lines += [f"{name:<{n_left}} {first}", *(" " * (n_left + 1) + line for line in rest)]
    return "\n".join(lines)


def _remember(chat: ChatState, wanted: bool) -> None:
    if wanted and not sys.stdin.isatty():
        raise UsageError("a conversation on a pipe is not kept", hint="/save FILE")
    what = "conversations"
    if isinstance(chat.source, Editor):
        chat.source.remember(wanted=wanted)
        what = "messages and conversations"
    chat.shelf.wanted = wanted
    chat.note(f"{what} are {'' if wanted else 'not '}kept from now on")


# What `/set` takes besides SETTINGS.
OWN_WORDS = {
    TREE: "draft trees of so many nodes, auto: where they pay, off: chains",
    "system": "the system prompt",
    "history": "keep messages and conversations",
    "nohistory": "keep no messages and conversations",
    **{name: look.help for name, look in LOOKS.items()},
}


def _set_parameter(chat: ChatState, name: str, value: str) -> None:
    name = "spec-type" if name == TREE else find(name, OWN_WORDS)
    if not value:
        chat.say(wrapped(f"{name} is {_value(chat, name)}: {SETTINGS[name].help}", chat.output.out.width))
        return
    if name == "think" and not chat.session.can_think:
        raise UsageError("the chat template has no switch for thinking", hint="/show template shows it")
    was_auto = chat.session.settings.drafting.length.is_auto
    chat.change_setting(name, bare(value))
    chat.note(f"{name} is {_value(chat, name)}")
    after = chat.session.settings
    if name in ("spec-type", "spec") and after.spec and "none" == after.drafter != after.strategy:
        chat.note(f"nothing is drafted: {LENGTH} is 0")
    if was_auto and name != LENGTH and not chat.session.settings.drafting.length.is_auto:
        chat.note(f"{LENGTH} is {_value(chat, LENGTH)}")


@_command(
    "/set NAME VALUE",
    "Change a setting; /set alone lists them.",
    '/set parameter temp 0.5; /set system "Be brief."; /set spec on,off; /set spec-type lookup; '
    "/set verify-rule block; /set spec-draft-n-max 8, or auto (by the measured costs); "
    "/set tree 8, auto or off; "
    "/set colors marks,full,off (the origin of tokens); /set strip brief,full (live figures); "
    "/set fold on,off (hide thinking); /set think on,off; "
    "/set nohistory.",
    takes="set",
)
def _set(chat: ChatState, rest: str) -> None:
    name, _, value = rest.strip().partition(" ")
    if name in ("parameter", "param"):
        name, _, value = value.strip().partition(" ")
    value = value.strip()
    if not name:
        chat.say(_parameters(chat))
    elif name == "system":
        chat.session.system = bare(value)
        chat.note("the system prompt is set" if chat.session.system else "the system prompt is removed")
    elif name in LOOKS:
        if not value:
            chat.say(f"{name} is {getattr(chat.look, name)}: {LOOKS[name].help}")
            return
        setattr(chat.look, name, LOOKS[name].check(name, value))
        chat.note(f"{name} is {value}; for all chats: specllama config {name} {value}")
    elif name == TREE and value:
        if value == "off":
            chains = "chain" if chat.session.settings.strategy == TREE else chat.session.settings.strategy
            _set_parameter(chat, "spec-type", chains)
            return
        DraftLength.check(TREE, value)
        _set_parameter(chat, "spec-type", TREE)
        _set_parameter(chat, LENGTH, value)
    elif name in ("history", "nohistory"):
        _remember(chat, name == "history")
    else:
        _set_parameter(chat, name, value)


@_command("/show WHAT", f"Show {', '.join(SHOWN)}.", takes="show")
def _show(chat: ChatState, rest: str) -> None:
    what = rest.strip() or "info"
    if what == "info":
        chat.say(_info(chat))
    elif what == "parameters":
        chat.say(_parameters(chat))
    elif what == "system":
        chat.say(chat.session.system or "no system prompt")
    elif what == "template":
        chat.say(chat.session.template)
    elif what == "stats":
        _stats(chat, "")
    else:
        raise UsageError(f"/show {what} is unknown (expected one of {', '.join(SHOWN)})")


def _info(chat: ChatState) -> str:
    opened, session = chat.opened, chat.session
    target, draft = opened.models.target, opened.models.loaded_draft
    rows = [("target", f"{target.path.name} ({target.description})")]
    if draft is not None:
        rows.append(("draft", f"{draft.path.name} ({draft.description})"))
    rows.append(("context", f"{session.target_kv.n_used} of {target.n_ctx} tokens"))
    dropped = f", {session.n_dropped} of them dropped" if session.n_dropped else ""
    rows.append(("turns", f"{len(session.turns)}{dropped}"))
    rows.append(("spec-type", session.settings.drafter))
    if session.turns:
        rows.append(("last seed", str(session.turns[-1].seed)))
    return _table(chat, rows, 10)


@_command(
    "/stats",
    "Show figures of the session and the last answer.",
    "Acceptance rate overall and per position, accepted lengths, speed with and without drafts, times, KV caches.",
)
def _stats(chat: ChatState, rest: str) -> None:
    chat.cancel.clear()
    if chat.output.format == "jsonl":
        chat.output.data(stats_json(chat.session))
        return
    lines = stats_lines(chat.session, min(chat.width, 100), palette_of(chat.output.out))
    chat.output.out.line(Raw("\n").join(lines))


@_command("/think", "Show the last thinking of the model.")
def _think(chat: ChatState, rest: str) -> None:
    chat.say(chat.thought or "no thinking yet")


@_command("/model [PAIR]", "Load another pair, or list the pairs; keeps the conversation.", takes="pair")
def _model(chat: ChatState, rest: str) -> None:
    name, catalog = bare(rest), load_catalog()
    if not name:
        chat.say(_table(chat, ((name, pair.summary) for name, pair in catalog.pairs.items()), 20))
        return
    if name not in catalog.pairs:
        near = get_close_matches(name, catalog.pairs, 1)
        raise UsageError(f"there is no pair {name}", hint=f"did you mean {near[0]}?" if near else "/model lists them")
    chat.change_pair(name)
    chat.note(f"{chat.opened.names['target']} is loaded; it evaluates the conversation with the next message")


BY_NAME = {name: command for command in COMMANDS for name in command.names}


def _find(name: str) -> SlashCommand:
    if name in BY_NAME:
        return BY_NAME[name]
    near = get_close_matches(name, BY_NAME, 1)
    hint = f"did you mean /{near[0]}?" if near else "/help lists the commands; begin a message with a space"
    raise UsageError(f"unknown command /{name}", hint=hint)


def is_command(line: str) -> bool:
    """True for `/word ...`; a path such as /usr/bin/env is a message."""
    return line.startswith("/") and "/" not in line[1:].partition(" ")[0].partition("\n")[0]


def perform(chat: ChatState, line: str) -> None:
    """Run a command line. Raises EOFError to leave, and what the command raises."""
    chat.edits_last = False  # the last message may be another one after the command
    name, _, rest = line[1:].partition(" ")
    _find(name.strip().lower()).act(chat, rest.strip())
