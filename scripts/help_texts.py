"""Writes the help texts of `specllama` into README.md, between `<!-- help: COMMAND -->` and `<!-- /help -->`.

`python scripts/help_texts.py` rewrites them, `--check` only says whether they are as they should be (exit code 1 if
not). The text between the marks is generated: 100 columns, no colours. `<!-- help: -->` is the program's own text.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(?P<begin><!-- help:(?P<command>[\w -]*?) ?-->\n).*?(?P<end><!-- /help -->)", re.DOTALL)


def help_text(command: str) -> str:
    """What `specllama COMMAND --help` prints in a window of 100 columns."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SPECLLAMA_")}
    return subprocess.run(
        [sys.executable, "-m", "specllama", *command.split(), "--help"],
        env={**plain, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def filled(text: str) -> str:
    """`text` with every block as it should be."""

    def block(found: re.Match[str]) -> str:
        command = found["command"].strip()
        shown = f"$ specllama {command} --help".replace("  ", " ")
        return f"{found['begin']}```text\n{shown}\n{help_text(command).rstrip()}\n```\n{found['end']}"

    return BLOCK.sub(block, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the help texts into README.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if something would change")
    parser.add_argument("file", nargs="?", type=Path, default=README, help="the file to fill, README.md by default")
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
