"""Errors as messages and exit codes, and typer's usage errors in our words."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import SequenceMatcher, get_close_matches
from typing import Any

from specllama.base.errors import SpecllamaError, UsageError, error_of_request
from specllama.cli.codes import FAILED, USAGE
from specllama.cli.screen.output import say_error, stream_of

ALIKE = 0.7  # least similarity of a suggestion; 1 = equal
# Commands of ollama, llm, hf and pip, and what does the same here.
_ELSEWHERE = {
    "list": "models list",
    "ls": "models list",
    "ps": "models list",
    "show": "models show",
    "pull": "models pull",
    "download": "models pull",
    "install": "models pull",
    "rm": "models remove",
    "remove": "models remove",
    "prompt": "run",
    "generate": "run",
    "version": "--version",
    "help": "--help",
}
_PROMPT_FLAGS = ("-p", "--prompt")  # of llama.cpp; here the prompt is an argument


def report(error: Exception) -> int:
    """Print the error, with its traceback under SPECLLAMA_DEBUG, and return the exit code."""
    known = told(error)
    if os.environ.get("SPECLLAMA_DEBUG", "") not in ("", "0"):
        stream_of(sys.stderr).write("".join(traceback.format_exception(known)))
    say_error(known)
    return USAGE if isinstance(known, UsageError) else FAILED


def told(error: Exception) -> SpecllamaError:
    """Any exception as one of ours: a failed system call is a failure, anything else is a bug to report."""
    from specllama.base.disk import NO_ROOM, working_folder

    if isinstance(error, SpecllamaError):
        return error
    if isinstance(error, FileNotFoundError) and working_folder() is None:
        known = SpecllamaError("the working directory is gone", hint="cd to a folder that exists")
    elif isinstance(error, OSError) and error.errno in NO_ROOM:
        where = f"the disk of {error.filename}" if error.filename else "a disk"
        known = SpecllamaError(f"{where} is full: {error.strerror}", hint="free some space")
    elif isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        known = SpecllamaError(f"a system call failed: {where}{error.strerror}")
    elif isinstance(error, MemoryError):
        known = SpecllamaError("there is not enough memory", hint="close other programs, or use smaller models")
    else:
        return error_of_request(error)
    known.__cause__ = error
    return known


def misused(error: Any, words: Sequence[str], root: Any) -> UsageError:
    """A usage error of typer as one of ours. `root` is the whole program, `words` its command line."""
    message = str(error.format_message()).partition(" (Possible options")[0].rstrip(".").replace("(s)", "")
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path if context else _command_of(words, root)} --help`"
    option = getattr(error, "option_name", "")
    near = [name for name in sorted(getattr(error, "possibilities", None) or ()) if _resembles(option, name)]
    if option in _PROMPT_FLAGS:
        hint = 'the prompt is an argument: specllama run "..."'
    elif option == "--pair" and context:  # an argument of commands that can run without it
        hint = f"give the pair as an argument: {context.command_path} {shlex.quote(_pair_of(words))}"
    elif near:
        hint = f"did you mean {' or '.join(near)}?"
    elif message.startswith("Got unexpected extra argument") and context is not None:
        hint = _of_extra_words(context, message) or hint
    elif message.startswith("No such command"):
        word = message.partition("'")[2].partition("'")[0]
        close = get_close_matches(word, root.list_commands(None))
        if ours := _ELSEWHERE.get(word):
            hint = f"write `specllama {ours}`"
        else:
            hint = f"did you mean `specllama {close[0]}`?" if close else f'{hint}; for a prompt: `specllama run "..."`'
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def _of_extra_words(context: Any, message: str) -> str:
    """The hint for `run NAME ...` and `chat NAME`, which take a pair as an option; else for an unquoted prompt."""
    from specllama.files.catalog import load_catalog

    options = {name for param in context.command.params for name in param.opts}
    first = context.params.get("prompt") or message.rpartition("(")[2].rstrip(")").partition(" ")[0]
    with suppress(SpecllamaError):
        catalog = load_catalog()
        if "--pair" in options and first in catalog.pairs:
            return f"a pair is an option: {context.command_path} --pair {first}"
        if "--pair" in options and (first in catalog.models or first.endswith(".gguf")):
            return f"a model is an option: {context.command_path} -m {shlex.quote(first)}"
    return "put a prompt of several words in quotes" if "prompt" in context.params else ""


def _pair_of(words: Sequence[str]) -> str:
    for i, word in enumerate(words):
        if word == "--pair":
            return words[i + 1] if i + 1 < len(words) else "PAIR"
        if word.startswith("--pair="):
            return word.removeprefix("--pair=")
    return "PAIR"


def _command_of(words: Sequence[str], root: Any) -> str:
    """The command that these words call; not every error of typer has it."""
    named = ["specllama"]
    command = root
    for word in words:
        command = command.get_command(None, word) if hasattr(command, "get_command") else None
        if command is None:
            break
        named.append(word)
    return " ".join(named)


def _resembles(typed: str, name: str) -> bool:
    """True if `name` may have been meant; dashes do not count."""
    typed, name = typed.strip("-"), name.strip("-")
    return name.startswith(typed) or SequenceMatcher(None, typed, name).ratio() >= ALIKE
