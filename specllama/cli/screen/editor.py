"""The user's own editor, from $VISUAL or $EDITOR."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specllama.base.errors import SpecllamaError, unreadable
from specllama.base.text import decoded


def editor() -> list[str]:
    """The words that start it; none without both variables. Raises SpecllamaError."""
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise SpecllamaError(
            f"the editor {command} is no command: {error}", hint="set VISUAL or EDITOR, for example to nano"
        ) from None


@contextmanager
def edited(text: str, name: str) -> Iterator[str]:
    """`text` after the user has edited it as a file called `name`. Raises SpecllamaError.

    If the new text is not UTF-8, or the block cannot use it, the file is kept and the error names it.
    """
    folder = Path(tempfile.mkdtemp(prefix="specllama-"))
    path, keep = folder / name, False
    try:
        path.write_text(text, encoding="utf-8")
        command = editor()
        try:
            code = subprocess.run([*command, str(path)], check=False).returncode
        except OSError as error:
            raise SpecllamaError(f"the editor {command[0]} does not start: {error.strerror}") from None
        if code:
            raise SpecllamaError(f"the editor ended with exit code {code}; nothing was changed")
        try:
            data = path.read_bytes()
            keep = True
            yield decoded(data, "the edited text", SpecllamaError).replace("\r\n", "\n")
            keep = False
        except SpecllamaError as error:
            error.hint = "; ".join(filter(None, (error.hint, f"your text is kept in {path}")))
            raise
        except OSError as error:
            if not keep:
                raise unreadable("the edited file", error, SpecllamaError) from None
            raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
