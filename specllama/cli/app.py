"""The program: its commands, `main`, and the one table from errors to messages and exit codes."""

from __future__ import annotations

import os
import shlex
import sys

try:
    import traceback
    from collections.abc import Sequence
    from dataclasses import dataclass
    from difflib import SequenceMatcher, get_close_matches
    from importlib import import_module
    from typing import Annotated, Any

    import typer
    from typer.main import get_command

    from specllama.base.errors import SpecllamaError, UsageError
    from specllama.cli.codes import FAILED, INTERRUPTED, OK, READER_GONE, USAGE
    from specllama.cli.command import CONTEXT, Group, adopt, write_commands
    from specllama.cli.screen.ending import ending_in_order
    from specllama.cli.screen.output import forget_stdout, prepare_streams, say_error
except KeyboardInterrupt:  # imports take a tenth of a second, and Ctrl-C then is no defect either
    sys.exit(130)


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is imported when it is used, so that `specllama --help` imports none."""

    module: str
    attribute: str  # a typer app, or a function
    summary: str


COMMANDS = {
    "run": LazyCommand("specllama.cli.run", "run", "Answer one prompt, fast and exactly as the target would."),
    "chat": LazyCommand(
        "specllama.cli.chat.command", "chat", "Talk with the target, its drafts shown while it answers."
    ),
    "check": LazyCommand("specllama.cli.check.command", "check", "Check whether a draft fits its target, and why not."),
    "tune": LazyCommand(
        "specllama.cli.tune", "tune", "Measure what pays on this machine, and keep it for later answers."
    ),
    "audit": LazyCommand("specllama.cli.audit.command", "audit", "Prove on this machine that drafts change nothing."),
    "draft": LazyCommand("specllama.cli.draft.command", "app", "Make cheaper drafts out of models that are here."),
    "bench": LazyCommand(
        "specllama.cli.bench.command", "bench", "Measure what drafting gains here, against plain decoding."
    ),
    "models": LazyCommand("specllama.cli.models.command", "app", "List, fetch and describe models and pairs."),
    "doctor": LazyCommand("specllama.cli.doctor", "doctor", "Check the installed llama.cpp build."),
}


def _load(name: str) -> Any:
    """The command `name`, imported now."""
    entry = COMMANDS[name]
    found = getattr(import_module(entry.module), entry.attribute)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False)
        single.command(name, context_settings=CONTEXT)(found)
        found = single
    adopt(found)
    return get_command(found)


class LazyGroup(Group):
    """The commands of the table; each is imported when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or None where there is none of that name."""
        return _load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The table itself, without importing a command."""
        write_commands([(name, entry.summary) for name, entry in COMMANDS.items()], formatter)


app = typer.Typer(
    name="specllama",
    cls=LazyGroup,
    context_settings=CONTEXT,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Answer with a GGUF model faster without changing what it says: a small model drafts, the target verifies.",
    epilog="Every option also reads SPECLLAMA_<NAME>, such as SPECLLAMA_CTX_SIZE. SPECLLAMA_DEBUG=1 shows tracebacks.",
)


def _show_version(wanted: bool) -> None:
    """Print the versions that decide what an answer is, and leave."""
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version  # a tenth of the time of --help

    parts = []
    for package in ("specllama", "llama-cpp-python"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} (not installed)")
    print(", ".join(parts))
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


# --------------------------------------------------------------------------------------------- errors and exit codes

# Typer's own usage error: the parent of the one kind of it that typer exports.
_TyperUsageError: Any = typer.BadParameter.__bases__[0]

# The first row that fits decides; the message is the error's own, see `say_error`.
EXIT_CODES = ((UsageError, USAGE), (SpecllamaError, FAILED))

ALIKE = 0.7  # names that share no more may mean anything; 1 = the same
_PROMPT_FLAGS = ("-p", "--prompt")  # llama.cpp's, which here is the argument itself


def _pair_of(words: Sequence[str]) -> str:
    """What stands behind --pair."""
    for i, word in enumerate(words):
        if word == "--pair":
            return words[i + 1] if i + 1 < len(words) else "PAIR"
        if word.startswith("--pair="):
            return word.removeprefix("--pair=")
    return "PAIR"


def _command_of(words: Sequence[str]) -> str:
    """The command that these words call, as it is typed: typer's parser does not say it with every error."""
    command: Any = get_command(app)
    named = ["specllama"]
    for word in words:
        command = command.get_command(None, word) if hasattr(command, "get_command") else None
        if command is None:
            break
        named.append(word)
    return " ".join(named)


def _resembles(typed: str, name: str) -> bool:
    """May `name` have been meant? Its dashes, which every name has, do not count."""
    typed, name = typed.strip("-"), name.strip("-")
    return name.startswith(typed) or SequenceMatcher(None, typed, name).ratio() >= ALIKE


def _in_our_words(error: Any, words: Sequence[str]) -> UsageError:
    """One of typer's usage errors as ours."""
    message = str(error.format_message()).partition(" (Possible options")[0].rstrip(".")
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path if context else _command_of(words)} --help`"
    option = getattr(error, "option_name", "")
    near = [name for name in sorted(getattr(error, "possibilities", None) or ()) if _resembles(option, name)]
    if option in _PROMPT_FLAGS:
        hint = 'the prompt is the argument itself: specllama run "..."'
    elif option == "--pair" and context:  # of the commands that have something to do without it, it is the argument
        hint = f"give the pair as an argument: {context.command_path} {shlex.quote(_pair_of(words))}"
    elif near:
        hint = f"did you mean {' or '.join(near)}?"
    elif message.startswith("Got unexpected extra argument") and context is not None and context.info_name == "run":
        hint = "put a prompt of several words in quotes"
    elif message.startswith("No such command"):
        word = message.partition("'")[2].partition("'")[0]
        close = get_close_matches(word, COMMANDS)
        hint = f"did you mean `specllama {close[0]}`?" if close else f'{hint}; a prompt goes to `specllama run "..."`'
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def told(error: Exception) -> SpecllamaError:
    """The error that any exception is told as: what the system refuses is no defect of this program, all else is."""
    from specllama.base.disk import NO_ROOM

    if isinstance(error, SpecllamaError):
        return error
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        known = SpecllamaError(f"no room left on a disk: {error.strerror}", hint="make room")
    elif isinstance(error, OSError) and error.filename and error.strerror:
        known = SpecllamaError(f"the system refuses {error.filename}: {error.strerror}")
    else:
        known = SpecllamaError(
            f"this should not have happened: {type(error).__name__}: {error}",
            hint="please report it, with what SPECLLAMA_DEBUG=1 shows",
        )
    known.__cause__ = error
    return known


def _report(error: SpecllamaError) -> int:
    """Say the error and return the exit code."""
    if os.environ.get("SPECLLAMA_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    say_error(error)
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def _unheard() -> int:
    """The reader of stdout has gone: no error, but not all was said. The interpreter is left nothing to complain of."""
    forget_stdout()
    return READER_GONE


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 ok, 1 failed, 2 wrong use, 130 interrupted, 141 unheard."""
    words = list(sys.argv[1:] if args is None else args) or ["--help"]
    try:
        prepare_streams()
        with ending_in_order():
            code = get_command(app).main(words, prog_name="specllama", standalone_mode=False)
            sys.stdout.flush()
        return code if isinstance(code, int) else OK
    except _TyperUsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the group's help is the whole message
            print(error.format_message(), file=sys.stderr)
            return USAGE
        return _report(_in_our_words(error, words))
    except typer.Abort as answer:  # a question was answered with no, or with Ctrl-C
        return INTERRUPTED if isinstance(answer.__context__, KeyboardInterrupt) else FAILED
    except SpecllamaError as error:
        return _report(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as leaving:  # shell completion, or what typer makes of a reader that has gone
        if isinstance(leaving.__context__, BrokenPipeError):
            return _unheard()
        return leaving.code if isinstance(leaving.code, int) else FAILED
    except BrokenPipeError:
        return _unheard()
    except Exception as error:
        return _report(told(error))


if __name__ == "__main__":
    sys.exit(main())
