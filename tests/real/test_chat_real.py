"""`specllama chat` on a real model: what follows a stopped answer, and what a person sees."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import SPECLLAMA, Terminal
from tests.real.conftest import SMALL

pytestmark = pytest.mark.model


def test_a_person_talks_stops_and_goes_on(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    """A chat that works with toys only: a slow stop, an answer that is not kept, a history that is read again."""
    file = str(model_file(SMALL))
    command = [*SPECLLAMA, "chat", "-m", file, "-md", file, "-c", "4096", "--temp", "0", "-n", "200",
               "--spec-draft-n-max", "4"]  # fmt: skip
    shown = Terminal(command, 120, 30, {"XDG_STATE_HOME": str(tmp_path)})
    shown.display.write_process_input = lambda data: shown.child.send(data.encode())  # type: ignore[method-assign]
    shown.wait_for(lambda t: ">>>" in t.text, 120)
    shown.child.send("Tell me a story about a fox.\r")
    shown.wait_for(lambda t: "% accepted" in t.text, 120)
    shown.read(1.0)
    shown.interrupt()
    pressed = time.monotonic()
    shown.wait_for(lambda t: "[ stopped | " in t.text)
    assert time.monotonic() - pressed < shown.at_once_s
    shown.wait_for(lambda t: t.text.endswith("\n>>>"))
    shown.child.send("/set predict 10\r")
    shown.wait_for(lambda t: "predict is 10" in t.text and t.text.endswith("\n>>>"))
    shown.child.send("And then?\r")
    shown.wait_for(lambda t: bool(re.search(r"tokens,\s+\d+\s+cached\)", t.text)), 120)
    [(read, cached)] = [map(int, pair) for pair in re.findall(r"\((\d+)\s+tokens,\s+(\d+)\s+cached\)", shown.text)]
    assert cached > 40
    assert read < 25
    assert "fox" in shown.text
    shown.wait_for(lambda t: t.text.endswith("\n>>>"))
    shown.child.sendeof()
    assert shown.finish() == 0
