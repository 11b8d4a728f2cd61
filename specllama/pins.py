"""Commits and sums of unpinned files: recorded by the first pull, expected by every later one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from platformdirs import user_state_path

from specllama import models_toml
from specllama.errors import ConfigError
from specllama.storage import FetchWatch, only_one, write_text


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
        return {key: Pin(**table) for key, table in tables.items()}
    except TypeError as error:
        raise ConfigError(f"{path} is damaged", hint="delete it: the next pulls record sums anew") from error


def set_pin(key: str, pin: Pin | None, watch: FetchWatch) -> None:
    """Record a pin, or forget it."""
    with only_one("pins", watch):
        known = pins()
        if known.pop(key, None) == pin:
            return
        if pin is not None:
            known[key] = pin
        tables = {name: _table(known[name]) for name in sorted(known)}
        write_text(pins_file(), tomli_w.dumps(tables))


def _table(pin: Pin) -> dict[str, Any]:
    """TOML has no word for nothing."""
    return {key: value for key, value in asdict(pin).items() if value is not None}
