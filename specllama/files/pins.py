"""Commits and checksums of unpinned files: the first pull records them, later pulls expect them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from specllama.base.disk import FetchWatch, only_one, write_own
from specllama.base.errors import ConfigError, DownloadError, ReportError
from specllama.base.jsonable import from_plain
from specllama.files import models_toml
from specllama.files.model import MAX_SIZE


@dataclass(frozen=True, slots=True)
class Pin:
    """The record of the first pull of an unpinned file."""

    sha256: str
    size: int
    commit: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_SIZE:
            raise ValueError("size is not that of a file")


def pins_file() -> Path:
    """The file of the records. It is in the state folder because it must outlive the cache."""
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
        raise ConfigError(f"{path} is damaged", hint="delete it; the next pulls record the checksums again") from error


def set_pin(key: str, pin: Pin | None, watch: FetchWatch) -> None:
    """Record a pin, or delete it if None. A file that cannot be written is only noted: the model is usable anyway."""
    if pins().get(key) == pin:
        return
    try:
        with only_one("pins", watch):
            if pins().get(key) == pin:  # another process may have written since
                return
            path = pins_file()
            text = models_toml.text_of(path) if path.exists() else ""
            table = None if pin is None else models_toml.without_none(asdict(pin))
            write_own(path, models_toml.edited(text, path, {(key,): table}).encode("utf-8"))
    except (ConfigError, DownloadError, OSError) as error:
        watch.note(f"cannot record the checksum of {key}: {error}")


@contextmanager
def forgotten(keys: Sequence[str], watch: FetchWatch) -> Iterator[None]:
    """Delete these pins, and restore them if the body raises, also KeyboardInterrupt."""
    before = pins()
    try:
        for key in keys:
            set_pin(key, None, watch)
        yield
    except BaseException:
        for key in keys:
            set_pin(key, before.get(key), watch)
        raise
