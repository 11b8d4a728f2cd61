"""The user's own editor, from $VISUAL or $EDITOR."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from specllama.base.errors import UsageError
from specllama.base.text import decoded


def editor() -> list[str]:
    """The words that start it; none without both variables."""
    return shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")


def edited(text: str, name: str) -> str:
    """`text` after the user has edited it as a file called `name`. Raises UsageError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        try:
            code = subprocess.run([*editor(), str(path)], check=False).returncode
        except OSError as error:
            raise UsageError(f"the editor {editor()[0]} does not start: {error.strerror}") from None
        if code:
            raise UsageError(f"the editor ended with exit code {code}; nothing was changed")
        return decoded(path.read_bytes(), "the edited text", UsageError).replace("\r\n", "\n")
