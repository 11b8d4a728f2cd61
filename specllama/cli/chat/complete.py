"""Completion with Tab in a chat: commands, settings and their values, pairs, files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specllama.base.disk import meant
from specllama.base.errors import UsageError
from specllama.chat.format import GRAMMAR, JSON_SCHEMA
from specllama.chat.settings import OTHER_NAMES, SETTINGS
from specllama.cli.chat.commands import BY_NAME, OWN_WORDS, SHOWN
from specllama.cli.screen.look import LOOKS
from specllama.files.catalog import load_catalog


def complete(line: str) -> Iterable[tuple[str, int, str]]:
    """Completions at the end of `line`: (text, its start relative to the end, its meaning)."""
    if not line.startswith("/") or "\n" in line:
        return
    name, space, rest = line[1:].partition(" ")
    if not space:
        yield from ((f"/{known}", -len(line), c.help) for known, c in BY_NAME.items() if known.startswith(name))
        return
    command = BY_NAME.get(name)
    if command is None:
        return
    if command.takes == "path":
        yield from list(_paths(rest)) or _paths(rest.rpartition(" ")[2])
        return
    words = rest.split(" ")
    if command.takes == "set" and words[:-1][-2:] in (["format", JSON_SCHEMA], ["format", GRAMMAR]):
        yield from _paths(words[-1])
        return
    yield from ((offer, -len(words[-1]), meaning) for offer, meaning in _offers(command.takes, words))


def _offers(takes: str, words: list[str]) -> Iterator[tuple[str, str]]:
    """Completions of the last of `words`, with their meanings."""
    begun = words[-1]
    if takes == "set":
        rows = _set_words(words[:-1])
    elif len(words) > 1:
        return
    elif takes == "copy":
        rows = {"code": "a code block of the last answer"}
    elif takes == "show":
        rows = dict.fromkeys(SHOWN, "")
    elif takes == "command":
        rows = {name: command.help for name, command in BY_NAME.items()}
    elif takes == "pair":
        catalog = load_catalog()
        rows = {name: catalog.pair(name).summary for name in catalog.pairs}
    else:
        return
    yield from ((text, meaning) for text, meaning in rows.items() if text.startswith(begun))


def _set_words(before: list[str]) -> dict[str, str]:
    """The words that can follow `/set` and the words `before`."""
    named = {name: setting.help for name, setting in SETTINGS.items()}
    if before[:1] == ["parameter"]:
        before = before[1:]
    elif not before:
        return {"parameter": "a setting by name", **OWN_WORDS, **named}
    if not before:
        return named
    if len(before) > 1:
        return {}
    if before[0] in LOOKS:
        return dict.fromkeys(LOOKS[before[0]].words, "")
    name = OTHER_NAMES.get(before[0], before[0])
    return dict.fromkeys(SETTINGS[name].words, "") if name in SETTINGS else {}


def _paths(begun: str) -> Iterator[tuple[str, int, str]]:
    """Files and folders that begin with `begun`."""
    folder, slash, name = begun.rpartition("/")
    try:
        entries = sorted(meant(folder + slash or ".").iterdir())
    except (OSError, UsageError):
        return
    for entry in entries:
        if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith(".")):
            yield entry.name + ("/" if entry.is_dir() else ""), -len(name), ""
