"""The program: its commands and `main`."""

from __future__ import annotations

import sys

try:
    from collections.abc import Sequence
    from dataclasses import dataclass
    from importlib import import_module
    from typing import Annotated, Any

    import typer
    from typer.main import get_command

    from specllama.cli.codes import FAILED, INTERRUPTED, OK, READER_GONE, USAGE
    from specllama.cli.command import CONTEXT, Group, adopt, write_commands
    from specllama.cli.errors import misused, report
    from specllama.cli.screen.ending import ending_in_order
    from specllama.cli.screen.output import forget_stdout, prepare_streams
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


# Typer's own usage error: the parent of the one kind of it that typer exports.
_TyperUsageError: Any = typer.BadParameter.__bases__[0]


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
        return report(misused(error, words, get_command(app)))
    except typer.Abort as answer:  # a question was answered with no, or with Ctrl-C
        return INTERRUPTED if isinstance(answer.__context__, KeyboardInterrupt) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as leaving:  # shell completion, or what typer makes of a reader that has gone
        if isinstance(leaving.__context__, BrokenPipeError):
            return _unheard()
        return leaving.code if isinstance(leaving.code, int) else FAILED
    except BrokenPipeError:
        return _unheard()
    except Exception as error:
        return report(error)


if __name__ == "__main__":
    sys.exit(main())
