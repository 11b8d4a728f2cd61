"""Commits and sums of unpinned files: recorded by the first pull, expected by every later one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from specllama.base.disk import FetchWatch, only_one, write_text
from specllama.base.errors import ConfigError, DownloadError, ReportError
from specllama.base.jsonable import from_plain
from specllama.files import models_toml


@dataclass(frozen=True, slots=True)
class Pin:
    """What the first pull of an unpinned file found."""

    sha256: str
    size: int
    commit: str | None = None


def pins_file() -> Path:
    """Where they are kept: it is not configuration, and it outlives the cache."""
    return user_state_path("specllama") / "pins.toml"


def pins() -> dict[str, Pin]:
    """All recorded pins by their key: `user/repo/path` of a Hub file, the name of any other."""
    path = pins_file()
    if not path.exists():
        return {}
    tables: dict[str, Any] = models_toml.load(path)
    try:
        return {key: from_plain(Pin, table) for key, table in tables.items()}
    except ReportError as error:
        raise ConfigError(f"{path} is damaged", hint="delete it: the next pulls record sums anew") from error


def set_pin(key: str, pin: Pin | None, watch: FetchWatch) -> None:
    """Record a pin, or forget it. Where nothing can be written that is said, and no reason to go without the model."""
    if pins().get(key) == pin:
        return
    try:
        with only_one("pins", watch):
            if pins().get(key) == pin:  # another process may have written since
                return
            path = pins_file()
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            table = None if pin is None else models_toml.without_none(asdict(pin))
            write_text(path, models_toml.edited(text, path, {(key,): table}))
    except (ConfigError, DownloadError, OSError) as error:
        watch.note(f"the checksum of {key} cannot be recorded: {error}")


@contextmanager
def forgotten(keys: Sequence[str], watch: FetchWatch) -> Iterator[None]:
    """Without these pins; they come back if the body fails, Ctrl-C included: nothing new was found to trust."""
    before = pins()
    try:
        for key in keys:
            set_pin(key, None, watch)
        yield
    except BaseException:
        for key in keys:
            set_pin(key, before.get(key), watch)
        raise
