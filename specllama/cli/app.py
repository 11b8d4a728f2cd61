"""The program: its commands and `main`."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from specllama.cli.args.completing import rejoin, whole_words
from specllama.cli.codes import FAILED, HUNG_UP, INTERRUPTED, OK, READER_GONE, USAGE
from specllama.cli.command import CONTEXT, Group, adopt, write_commands
from specllama.cli.errors import misused, report
from specllama.cli.screen.ending import is_hung_up
from specllama.cli.screen.output import TerminalGone, forget_stdout, prepare_streams, stream_of
from specllama.cli.screen.visible import Raw


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is imported when it is used: `specllama --help` imports none."""

    module: str
    attribute: str  # a typer app, or a function
    summary: str


COMMANDS = {
    "run": LazyCommand("specllama.cli.run", "run", "Answer one prompt."),
    "batch": LazyCommand("specllama.cli.batch.command", "batch", "Answer a file of prompts, many at once."),
    "chat": LazyCommand("specllama.cli.chat.command", "chat", "Chat with the target; the drafts are shown."),
    "check": LazyCommand("specllama.cli.check.command", "check", "Check whether a draft fits its target."),
    "tune": LazyCommand("specllama.cli.tune", "tune", "Measure a pair and store the fastest draft settings."),
    "audit": LazyCommand("specllama.cli.audit.command", "audit", "Check that drafting does not change the output."),
    "draft": LazyCommand("specllama.cli.draft.command", "app", "Make smaller drafts from local models."),
    "bench": LazyCommand("specllama.cli.bench.command", "bench", "Compare drafting with plain decoding."),
    "export": LazyCommand("specllama.cli.export", "export", "Write a pair for vLLM, SGLang and other engines."),
    "models": LazyCommand("specllama.cli.models.command", "app", "List, fetch and describe models and pairs."),
    "config": LazyCommand("specllama.cli.config", "config", "Show and change settings that stay."),
    "templates": LazyCommand("specllama.cli.templates", "templates", "List, show and edit prompt templates."),
    "logs": LazyCommand("specllama.cli.logs", "logs", "Show the answers that `run --log` kept."),
    "doctor": LazyCommand("specllama.cli.doctor", "doctor", "Check the installed llama.cpp build."),
}


CONFIGURED = ("run", "chat", "batch")  # other commands measure, with options that a report must name


@cache  # typer takes tens of milliseconds for a command's options, and the message of a wrong use needs them again
def _load(name: str) -> Any:
    """Import the command `name`."""
    entry = COMMANDS[name]
    found = getattr(import_module(entry.module), entry.attribute)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name, context_settings=CONTEXT)(found)
        found = single
    adopt(found)
    return get_command(found)


class LazyGroup(Group):
    """The commands of the table; each is imported on first use, and none for the help text."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        write_commands([(name, entry.summary) for name, entry in COMMANDS.items()], formatter)


app = typer.Typer(
    name="specllama",
    cls=LazyGroup,
    context_settings=CONTEXT,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Exact speculative decoding of GGUF models: faster answers, the same output.",
    epilog="Every option has an environment variable, such as SPECLLAMA_CTX_SIZE. SPECLLAMA_DEBUG=1 shows tracebacks.",
)


def _show_version(wanted: bool) -> None:
    """Print the versions that determine an answer, and exit."""
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version  # here: it takes a tenth of the time of --help

    parts = []
    for package in ("specllama", "llama-cpp-python"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} (not installed)")
    stream_of(sys.stdout).line(", ".join(parts))
    raise typer.Exit


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if ctx.invoked_subcommand in CONFIGURED:
        from specllama.cli.config import defaults

        ctx.default_map = {ctx.invoked_subcommand: defaults}  # called with the options, not for help


# Typer's usage error: the parent of the one kind that typer exports.
_TyperUsageError: Any = typer.BadParameter.__bases__[0]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code, see `codes`."""
    code = _run(list(sys.argv[1:] if args is None else args) or ["--help"])
    if code >= HUNG_UP:  # a signal ended it, maybe in the middle of a write
        forget_stdout()
    return code


def _run(words: list[str]) -> int:
    try:
        prepare_streams()
        if os.environ.get("_SPECLLAMA_COMPLETE") == "complete_bash":
            rejoin(os.environ)
        with whole_words(os.environ):
            code = get_command(app).main(words, prog_name="specllama", standalone_mode=False)
        if code != INTERRUPTED:  # typer's return value after Ctrl-C, maybe in the middle of a write that blocks
            sys.stdout.flush()
        return code if isinstance(code, int) else OK
    except _TyperUsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the message is the group's help
            stream_of(sys.stderr).line(Raw(error.format_message()))
            return USAGE
        return report(misused(error, words, get_command(app)))
    except typer.Abort as answer:  # the answer to a question was no, Ctrl-C, or the end of stdin
        if isinstance(answer.__context__, KeyboardInterrupt):
            return INTERRUPTED
        return HUNG_UP if is_hung_up(0) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as leaving:  # from shell completion, or from typer after a BrokenPipeError
        if isinstance(leaving.__context__, BrokenPipeError):
            return READER_GONE
        return leaving.code if isinstance(leaving.code, int) else FAILED
    except TerminalGone:
        return HUNG_UP
    except BrokenPipeError:
        return READER_GONE
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EIO and is_hung_up(0):  # while reading stdin
            return HUNG_UP
        return report(error)
