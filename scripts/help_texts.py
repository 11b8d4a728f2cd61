"""Writes the help texts of `specllama` into docs/cli.md, between `<!-- help: COMMAND -->` and `<!-- /help -->`.

`python scripts/help_texts.py` rewrites them; `--check` changes nothing and exits with 1 where they are out of date.
The text is generated for 100 columns without colours. `<!-- help: -->` is the help of `specllama` itself.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import sys
from pathlib import Path
from unittest.mock import patch

from specllama.cli.app import main as specllama

MANUAL = Path(__file__).parent.parent / "docs" / "cli.md"
WINDOW = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
BLOCK = re.compile(r"(?P<begin><!-- help:(?P<command>[\w -]*?) ?-->\n).*?(?P<end><!-- /help -->)", re.DOTALL)


def help_text(command: str) -> str:
    """What `specllama COMMAND --help-all` prints in a window of 100 columns; in this process, a start costs 0.2 s."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SPECLLAMA_")}
    told = io.StringIO()
    with patch.dict(os.environ, {**plain, **WINDOW}, clear=True), contextlib.redirect_stdout(told):
        status = specllama([*command.split(), "--help-all"])
    assert status == 0, f"specllama {command} --help-all ends with {status}"
    return told.getvalue()


def filled(text: str) -> str:
    """`text` with every block filled in."""

    def block(found: re.Match[str]) -> str:
        command = found["command"].strip()
        shown = f"$ specllama {command} --help-all".replace("  ", " ")
        return f"{found['begin']}```text\n{shown}\n{help_text(command).rstrip()}\n```\n{found['end']}"

    return BLOCK.sub(block, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the help texts into docs/cli.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if something would change")
    parser.add_argument("file", nargs="?", type=Path, default=MANUAL, help="the file to fill, docs/cli.md by default")
    options = parser.parse_args(arguments)
    before = options.file.read_text(encoding="utf-8")
    after = filled(before)
    if before == after:
        return 0
    if not options.check:
        options.file.write_text(after, encoding="utf-8")
        return 0
    sys.stderr.writelines(
        difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(options.file), "generated")
    )
    print(f"{options.file.name}: the help texts are out of date; run: python scripts/help_texts.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
