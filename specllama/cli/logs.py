"""The log of answers, which `run --log` keeps, and `specllama logs`, which shows it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from platformdirs import user_state_path

from specllama.base.disk import open_own
from specllama.base.jsonable import parsed
from specllama.base.ranges import whole
from specllama.base.text import counted
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import Color
from specllama.cli.screen.output import Output, open_output, to_json
from specllama.cli.screen.visible import in_one_line

SHOWN = 3  # answers, by default


def log_file() -> Path:
    """The file, one JSON object a line, readable only by its owner. It need not exist."""
    return user_state_path("specllama") / "answers.jsonl"


def keep(entry: Mapping[str, object], output: Output) -> None:
    """Append an answer. A log that cannot be written is a warning: the answer was given."""
    line = to_json({"at": datetime.now(timezone.utc).isoformat(timespec="seconds"), **entry}) + "\n"
    try:
        log_file().parent.mkdir(parents=True, exist_ok=True)
        with open_own(log_file(), 0o600) as file:
            file.write(line.encode("utf-8", "replace"))  # in one write: two programs may log at once
    except OSError as error:
        output.warn(f"the answer was not logged: {error.strerror}", f"look at {log_file()}")


@with_options
def logs(
    n_last: Annotated[int, Option("-n --last N", "How many answers to show, the last ones.", whole(1))] = SHOWN,
    json: Annotated[bool, Option("--json", "Print the entries as JSON, one a line.")] = False,
    path: Annotated[bool, Option("--path", "Print only the path of the log.")] = False,
    color: Color = "auto",
) -> None:
    """Show the answers that `run --log` kept, the last one at the end."""
    output = open_output(color=color, format="json" if json else "human")
    if path:
        output.path(log_file())
        return
    entries, n_damaged = _last(n_last)
    for entry in entries:
        output.data(entry) if json else _show(output, entry)
    if n_damaged:
        output.warn(f"{counted(n_damaged, 'line')} of the log cannot be read", f"look at {log_file()}")
    if not entries:
        output.note("no answer was logged; to log one: specllama run --log, or SPECLLAMA_LOG=1")


def _last(n_last: int) -> tuple[list[dict[str, Any]], int]:
    """The last entries, and the number of lines that are none."""
    entries: deque[dict[str, Any]] = deque(maxlen=n_last)
    n_damaged = 0
    if log_file().exists():
        with log_file().open("rb") as file:
            for line in file:
                try:
                    entry = parsed(line.decode())
                    entries.append({**entry, "prompt": str(entry["prompt"]), "text": str(entry["text"])})
                except (ValueError, LookupError, TypeError):
                    n_damaged += 1
    return list(entries), n_damaged


def _show(output: Output, entry: Mapping[str, Any]) -> None:
    models = entry.get("models")
    target = models.get("target") if isinstance(models, dict) else None
    file = target.get("file", "") if isinstance(target, dict) else ""
    title = f"{entry.get('at', '')}  {os.path.basename(str(file))}"
    output.out.line(output.out.paint(in_one_line(title), bold=True))
    output.text(f"> {entry['prompt'].rstrip()}")
    output.text(entry["text"].rstrip())
    output.line()
