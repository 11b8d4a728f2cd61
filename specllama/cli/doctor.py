"""`specllama doctor`: whether the installed llama.cpp works and is fast on this machine, and its surroundings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import typer

from specllama.base.errors import ConfigError
from specllama.base.text import counted
from specllama.cli import config, templates
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import Color
from specllama.cli.screen.output import Output, open_output
from specllama.cli.screen.terminal import size_of
from specllama.cli.screen.visible import Raw, wrapped
from specllama.llama import tested_kernels
from specllama.pairs.checkup import Checkup, Finding, Level, look

# Sign, word and colour each show the level alone.
_SIGNS = {Level.OK: ("✓", "+"), Level.NOTE: ("·", "-"), Level.ATTENTION: ("!", "!")}
_COLOURS = {Level.OK: "green", Level.NOTE: None, Level.ATTENTION: "red"}

_GAP = "  "
_HINT = "hint:"
_LEAST_WIDTH = 20  # of the last column, in narrow windows


@with_options
def doctor(
    json: Annotated[bool, Option("--json", "One JSON object: the findings and the facts behind them.")] = False,
    fix: Annotated[bool, Option("--fix", "Compile specllama's kernels, and test them again.")] = False,
    color: Color = "auto",
) -> None:
    """Check the installed llama.cpp build and this machine; exit code 1 if anything needs attention."""
    output = open_output(color=color, format="json" if json else "human")
    if fix:
        output.note("compiling and testing specllama's kernels; this takes about a minute")
        tested_kernels.renew()
    checkup = look()
    checkup = replace(checkup, findings=(*checkup.findings, *_of_settings()))
    if json:
        output.data(checkup.to_json())
    elif output.out.steerable:
        _draw(output, checkup)
    else:
        _write(output, checkup)
    if checkup.needs_attention:
        raise typer.Exit(1)


def _of_settings() -> Iterator[Finding]:
    """The user's files of `config` and `templates`."""
    try:
        if values := config.load():
            yield Finding("settings", Level.OK, f"{counted(len(values), 'default')} in {config.config_path()}")
    except ConfigError as error:
        yield Finding("settings", Level.ATTENTION, str(error), error.hint)
    for name in templates.template_names():
        try:
            templates.find(name)
        except ConfigError as error:
            yield Finding("template", Level.ATTENTION, str(error), error.hint)


def _draw(output: Output, checkup: Checkup) -> None:
    """A table with each hint below its finding."""
    stream = output.out
    signs = 0 if stream.encodes("✓·") else 1
    n_level = max(len(f"{_SIGNS[level][signs]} {level.value}") for level in {each.level for each in checkup.findings})
    n_name = max(len(finding.name) for finding in checkup.findings)
    indent = n_level + n_name + 2 * len(_GAP)
    width = max((size_of(stream)[0]) - indent, _LEAST_WIDTH)
    for finding in checkup.findings:
        sign = f"{_SIGNS[finding.level][signs]} {finding.level.value}".ljust(n_level)
        begin = (stream.paint(sign, fg=_COLOURS[finding.level]), stream.paint(finding.name.ljust(n_name), bold=True))
        first, *rest = wrapped(finding.found, width).split("\n")
        stream.line(Raw(_GAP).join([*begin, first]))
        hint = wrapped(f"{_HINT} {finding.hint}", width).split("\n") if finding.hint else []
        for n, line in enumerate([*rest, *hint]):
            # A line too long for its column starts further left if that keeps it whole.
            margin = " " * max(indent - max(len(line) - width, 0), 0)
            if n == len(rest):
                line = stream.paint(_HINT, bold=True) + line.removeprefix(_HINT)
            stream.line(margin + line)
    output.line()
    output.line(_conclusion(checkup))


def _write(output: Output, checkup: Checkup) -> None:
    """For pipes: one line for each finding and each hint."""
    for finding in checkup.findings:
        output.line(f"{finding.level.value:<9} {finding.name}: {finding.found}")
        if finding.hint:
            output.line(f"{'hint':<9} {finding.name}: {finding.hint}")
    output.line(_conclusion(checkup))


def _conclusion(checkup: Checkup) -> str:
    names = [finding.name for finding in checkup.findings if finding.level is Level.ATTENTION]
    return f"Needs attention: {', '.join(names)}." if names else "All is well."
