"""Read and edit `models.toml`, and other TOML files of the user."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from specllama.base.disk import NO_ROOM, meant, read_bytes, write_text
from specllama.base.errors import ConfigError, DiskFull, ModelFileError, unreadable
from specllama.base.jsonable import shown
from specllama.base.ranges import MAX_CTX, MAX_DRAFT, MAX_MEMORY_GB, MIN_CTX
from specllama.base.text import counted, decoded
from specllama.files.model import (
    MAX_SIZE,
    CatalogPair,
    HubSource,
    Model,
    ModelFile,
    PairDefaults,
    PathSource,
    Source,
    WheelSource,
)
from specllama.files.repo_files import MOST_PARTS, split_names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

UNPINNED = "unpinned"

# These values go into paths, command lines and addresses, and a project's file may be untrusted: no `..`, no leading
# dash.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_REPO_FILE = re.compile(r"(?:[\w+][\w .+-]*/)*[\w+][\w .+-]*\.gguf", re.IGNORECASE)
_REVISION = re.compile(r"\w[\w./-]*")
_WHEEL = re.compile(r"[A-Za-z0-9][\w.{}-]*")
_VERSION = re.compile(r"[A-Za-z0-9][\w.+!-]*")
_PLACEHOLDER = re.compile(r"\{[ni](?::0\d)?\}")
_MOST_DOTS = 100  # the time to read a key grows with the square
_DEEP_KEY = re.compile(rf"""(?:\.[ \t]*[\w"'-]+[ \t]*){{{_MOST_DOTS + 1}}}""")
_SHA256 = re.compile(r"[0-9a-f]{64}|unpinned")

_KINDS: dict[type, str] = {str: "a text", int: "a whole number", list: "a list", dict: "a table"}


@dataclass(frozen=True, slots=True)
class PairEntry:
    """A pair in one file; its models may be in another."""

    where: str  # file and table, for error messages
    name: str
    target: str
    draft: str
    summary: str
    memory_gb: int | None
    defaults: PairDefaults


@dataclass(frozen=True, slots=True)
class Layer:
    """The contents of one `models.toml`."""

    path: Path
    models: tuple[Model, ...]
    pairs: tuple[PairEntry, ...]
    default: str | None


class _Table:
    """One table, read key by key. `done` raises for keys that were not read."""

    def __init__(self, data: object, where: str) -> None:
        self.where = where
        self.asked: list[str] = []
        if not isinstance(data, dict):
            raise ConfigError(f"{where} is {shown(data)}, expected a table")
        self.data: dict[str, Any] = data

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value of `key`, of type `kind`; None if it is missing."""
        self.asked.append(key)
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key} is {shown(value)}, expected {_KINDS[kind]}")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """The value of a required key."""
        value = self.get(key, kind)
        if value is None:
            raise ConfigError(f"{self.where}: the key {key!r} is missing")
        return value

    def text(self, key: str, pattern: re.Pattern[str]) -> str | None:
        """A text that matches `pattern`; None if it is missing."""
        value = self.get(key, str)
        if value is not None and not pattern.fullmatch(value):
            raise ConfigError(f"{self.where}: {key} = {shown(value)} is not a valid value")
        return value

    def need_text(self, key: str, pattern: re.Pattern[str]) -> str:
        self.need(key, str)
        return self.text(key, pattern) or ""

    def count(self, key: str, least: int = 1, most: int = MAX_SIZE) -> int | None:
        """A whole number in this range; None if it is missing."""
        value = self.get(key, int)
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{self.where}: {key} is {shown(value)}, expected a whole number from {least} to {most}")
        return value

    def done(self) -> None:
        """Raise for unknown keys."""
        known = dict.fromkeys(self.asked)
        unknown = [key for key in self.data if key not in known]
        if unknown:
            raise ConfigError(f"{self.where}: unknown key {unknown[0]!r}", hint=f"possible keys: {', '.join(known)}")


def _read_source(table: _Table, model_file: str) -> Source:
    """One entry of `sources`; the key hub, wheel or path gives its kind."""
    source: Source
    if "hub" in table.data:
        repo, file = table.need_text("hub", REPO), table.text("file", _REPO_FILE)
        source = HubSource(repo, file or model_file, table.text("revision", _REVISION))
    elif "wheel" in table.data:
        name, version = table.need_text("wheel", _WHEEL), table.need_text("version", _VERSION)
        source = WheelSource(name, version, table.count("parts", most=MOST_PARTS) or 1, table.need("member", str))
        _check_patterns(source, table.where)
    elif "path" in table.data:
        path = table.need("path", str)
        if "\0" in path:
            raise ConfigError(f"{table.where}: path has a null character, which no file name can have")
        source = PathSource(Path(path))
    else:
        raise ConfigError(f"{table.where} has none of the keys hub, wheel, path")
    table.done()
    return source


def _check_patterns(source: WheelSource, where: str) -> None:
    """Raise for placeholders other than {n} and {i}: `str.format` can read attributes of objects."""
    for pattern in (source.name_pattern, source.member_pattern):
        if re.search(r"[{}]", _PLACEHOLDER.sub("", pattern)):
            raise ConfigError(f"{where}: {shown(pattern)} has braces other than {{n}}, {{i}}, {{n:02}} and {{i:02}}")


def _read_sha256(table: _Table) -> str | None:
    value = table.text("sha256", _SHA256)
    return None if value == UNPINNED else value


def _read_parts(table: _Table, names: tuple[str, ...]) -> tuple[ModelFile, ...]:
    """Sizes and checksums of a split model's parts; empty if they are missing."""
    entries = table.get("parts", list)
    if entries is None:
        return ()
    if len(entries) != len(names):
        raise ConfigError(
            f"{table.where}: parts has {counted(len(entries), 'entry', 'entries')} "
            f"(expected {len(names)}, as in the name)"
        )
    parts = []
    for number, (name, entry) in enumerate(zip(names, entries, strict=True), start=1):
        part = _Table(entry, f"{table.where} part {number}")
        parts.append(ModelFile(name, part.count("size"), _read_sha256(part)))
        part.done()
    return tuple(parts)


def _total(parts: tuple[ModelFile, ...]) -> int | None:
    sizes = [part.size for part in parts if part.size is not None]
    return sum(sizes) if parts and len(sizes) == len(parts) else None


def _read_model(name: str, data: object, path: Path) -> Model:
    table = _Table(data, f'{path}: [models."{name}"]')
    _check_name(name, table.where)
    file = f"{name}.gguf"
    try:
        names = split_names(file)
    except ModelFileError as error:
        raise ConfigError(f"{table.where}: {error}", hint=error.hint) from error
    sources = tuple(
        _at_home(_read_source(_Table(entry, f"{table.where} source {number}"), file), path.parent)
        for number, entry in enumerate(table.need("sources", list), start=1)
    )
    if not sources:
        raise ConfigError(f"{table.where}: sources is empty")
    licence, original = table.get("licence", str) or "not stated", table.text("original", REPO)
    if len(names) == 1:
        model = Model(name, file, table.count("size"), _read_sha256(table), licence, sources, original=original)
    else:
        if any(isinstance(source, WheelSource) for source in sources):
            raise ConfigError(f"{table.where}: a split model cannot come from wheels")
        parts = _read_parts(table, names)
        model = Model(name, file, _total(parts), None, licence, sources, parts, original)
    table.done()
    return model


def _at_home(source: Source, folder: Path) -> Source:
    return PathSource(folder / meant(str(source.path))) if isinstance(source, PathSource) else source


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: invalid name (expected letters, digits, '.', '_', '+', '-', beginning with a letter or digit)"
        )


def _read_pair(name: str, data: object, path: Path) -> PairEntry:
    table = _Table(data, f'{path}: [pairs."{name}"]')
    _check_name(name, table.where)
    settings = _Table(table.get("defaults", dict) or {}, f"{table.where} defaults")
    defaults = PairDefaults(settings.count("n_max", most=MAX_DRAFT), settings.count("n_ctx", MIN_CTX, MAX_CTX))
    settings.done()
    entry = PairEntry(
        where=table.where,
        name=name,
        target=table.need("target", str).removesuffix(".gguf"),
        draft=table.need("draft", str).removesuffix(".gguf"),
        summary=table.get("summary", str) or "",
        memory_gb=table.count("memory_gb", most=MAX_MEMORY_GB),
        defaults=defaults,
    )
    table.done()
    return entry


def parse(text: str, path: Path) -> dict[str, Any]:
    """The raw tables of a TOML text. Raises ConfigError."""
    if _DEEP_KEY.search(text):
        raise ConfigError(f"{path} has a key with more than {_MOST_DOTS} dots (expected at most {_MOST_DOTS})")
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except ValueError as error:  # Python reads at most 4,300 digits
        raise ConfigError(f"{path} has a number with too many digits") from error
    except RecursionError:
        raise ConfigError(f"{path} nests brackets too deeply") from None
    return data


def text_of(path: Path) -> str:
    """The text of the file. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():  # a pipe may have no writer, a device no end
            raise ConfigError(f"{path} is not a regular file (expected a text file)", hint="check the path")
        return decoded(read_bytes(path), str(path), ConfigError).replace("\r\n", "\n")
    except OSError as error:
        raise unreadable(path, error, ConfigError) from error


def load(path: Path) -> dict[str, Any]:
    """The raw tables of the file. Raises ConfigError."""
    return parse(text_of(path), path)


def layer(data: dict[str, Any], path: Path) -> Layer:
    """The models and pairs of the file's tables. Raises ConfigError with file, table and key."""
    table = _Table(data, str(path))
    default = table.get("default", str)
    models, pairs = table.get("models", dict) or {}, table.get("pairs", dict) or {}
    table.done()
    return Layer(
        path=path,
        models=tuple(_read_model(name, entry, path) for name, entry in models.items()),
        pairs=tuple(_read_pair(name, entry, path) for name, entry in pairs.items()),
        default=default,
    )


def source_table(source: Source) -> dict[str, Any]:
    """A source as plain data; what is not known is None."""
    if isinstance(source, HubSource):
        return {"hub": source.repo, "file": source.file, "revision": source.revision}
    if isinstance(source, WheelSource):
        facts = (source.name_pattern, source.version, source.n_parts, source.member_pattern)
        return dict(zip(("wheel", "version", "parts", "member"), facts, strict=True))
    return {"path": str(source.path)}


def _model_table(model: Model) -> dict[str, Any]:
    sources = [without_none(source_table(source)) for source in model.sources]
    table: dict[str, Any] = {"licence": model.licence, "original": model.original, "sources": sources}
    if len(model.files) == 1:
        table = {"size": model.size, "sha256": model.sha256 or UNPINNED, **table}
    elif model.parts:
        parts = [without_none({"size": part.size, "sha256": part.sha256}) for part in model.parts]
        table = {"parts": parts, **table}
    return without_none(table)


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    """The table for TOML, which has no null."""
    return {key: value for key, value in table.items() if value is not None}


def _pair_table(pair: CatalogPair) -> dict[str, Any]:
    defaults = without_none(asdict(pair.defaults))
    return without_none(
        {
            "target": pair.target.name,
            "draft": pair.draft.name,
            "summary": pair.summary or None,
            "memory_gb": pair.memory_gb,
            "defaults": defaults or None,
        }
    )


def write(path: Path, text: str, *, like: Path | None = None) -> None:
    """Replace the file in one step. Raises ConfigError, DiskFull."""
    try:
        write_text(path, text, like=like)
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror or error}"
        if error.errno in NO_ROOM:
            raise DiskFull(reason, hint="free some space on that disk and try again") from error
        raise ConfigError(reason, hint="make the folder writable, or set XDG_CONFIG_HOME to one that is") from error
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{shown(error.object[error.start : error.end])} is not UTF-8 text and cannot be written to {path}",
            hint="give the summary and file names in UTF-8",
        ) from error


def edited(text: str, path: Path, changes: Mapping[tuple[str, ...], Any]) -> str:
    """The TOML `text` of `path` with the tables or values of `changes` set, or removed if None; other text stays.

    Raises ConfigError, also if tomlkit cannot make the change.
    """
    import tomlkit  # takes 45 ms
    from tomlkit.exceptions import TOMLKitError

    expected = parse(text, path)
    try:
        document = tomlkit.parse(text)
        for (*outer, name), table in changes.items():
            inner, plain = document, expected
            for each in outer:
                inner = inner[each] if each in inner else inner.setdefault(each, tomlkit.table(is_super_table=True))
                plain = plain.setdefault(each, {})
            if table is None:
                inner.remove(name)
                del plain[name]
                continue
            if isinstance(table, Mapping):
                _set_table(inner, name, table)
            else:
                inner[name] = table
            plain[name] = table
        result = tomlkit.dumps(document)
        is_right = _full(tomllib.loads(result)) == _full(expected)
    except (TOMLKitError, ValueError, RecursionError):
        is_right = False
    if not is_right:
        raise ConfigError(f"{path} cannot be edited", hint="give each table its own [header]")
    return result


def _full(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without empty ones: tomlkit drops a table without a header once its last one is removed."""
    inner = ((key, _full(value) if isinstance(value, Mapping) else value) for key, value in table.items())
    return {key: value for key, value in inner if value != {}}


def _set_table(outer: Any, name: str, values: Mapping[str, Any]) -> None:
    """Set the table `name` of `outer` to `values`; equal values are not touched."""
    import tomlkit

    if name not in outer:
        outer[name] = tomlkit.inline_table() if isinstance(outer, tomlkit.items.InlineTable) else tomlkit.table()
    table = outer[name]
    for key in [key for key in table if key not in values]:
        table.remove(key)
    for key, value in values.items():
        if key not in table:
            table[key] = _toml_value(value)
        elif isinstance(value, Mapping):
            _set_table(table, key, value)
        elif table[key] != value:
            if isinstance(table[key], tomlkit.items.AoT):  # [[headers]] must follow all plain keys
                table.remove(key)
            table[key] = _toml_value(value)


def _toml_value(value: object) -> Any:
    """Nested tables on one line each, as in the shipped models.toml."""
    import tomlkit

    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update({key: _toml_value(each) for key, each in value.items()})
        return table
    if isinstance(value, list):
        array = tomlkit.array()
        array.extend(map(_toml_value, value))
        return array.multiline(len(value) > 1)
    return value


def add_pair(path: Path, pair: CatalogPair, models: tuple[Model, ...]) -> Path | None:
    """Write `pair` and `models` into the file, replacing tables of the same names; all other text stays.

    Returns the backup of the file if a table was replaced. Raises ConfigError, DiskFull.
    """
    old_text = text_of(path) if path.exists() else ""
    tables: dict[tuple[str, ...], dict[str, Any]] = {("models", model.name): _model_table(model) for model in models}
    tables["pairs", pair.name] = _pair_table(pair)
    data = parse(old_text, path)
    layer(data, path)
    is_replaced = any(name in data.get(kind, {}) for kind, name in tables)
    text = edited(old_text, path, tables)
    layer(parse(text, path), path)  # raises if the new text cannot be read again
    backup = path.with_name(f"{path.name}.bak") if is_replaced else None
    if backup is not None:
        write(backup, old_text, like=path)
    write(path, text)
    return backup


def remove_pair(path: Path, pair: CatalogPair) -> None:
    """Remove `pair` from the file, with those of its models that no other pair of the file uses.

    Raises ConfigError if the pair is not in this file or is its default, and DiskFull.
    """
    text = text_of(path) if path.exists() else ""
    found = layer(parse(text, path), path)
    others = [entry for entry in found.pairs if entry.name != pair.name]
    if len(others) == len(found.pairs):
        raise ConfigError(f"the pair {pair.name} is not in {path}", hint="remove it from the file that has it")
    if found.default == pair.name:
        raise ConfigError(f"{pair.name} is the default in {path}", hint="name another default there first")
    used = {name for entry in others for name in (entry.target, entry.draft)}
    unused = {pair.target.name, pair.draft.name} & {model.name for model in found.models} - used
    write(path, edited(text, path, {("pairs", pair.name): None, **{("models", name): None for name in unused}}))
