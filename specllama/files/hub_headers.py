"""Read the header of a model on the Hub without downloading the weights.

The header goes into a sparse file of the model's size, so the same code reads it as a downloaded file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from specllama.base import disk as storage
from specllama.base.disk import FetchWatch, Silent, work
from specllama.base.errors import DownloadError, ModelFileError, SourceUnavailable
from specllama.files import hub, hub_cache
from specllama.files.gguf_header import Read, Unsound, walk_from
from specllama.files.inventory import WantedFile, wanted_files
from specllama.files.model import HubSource, Model

# The first piece covers the header of a later part of a split model; other headers need two or three steps more.
FIRST_BYTES, STEP_BYTES = 1 << 20, 3 << 20


@contextmanager
def header_only(model: Model, *, offline: bool = False, watch: FetchWatch | None = None) -> Iterator[Path]:
    """A temporary file with the header of `model` and no weights.

    Raises SourceUnavailable, GatedRepository, DownloadError, and ModelFileError for a damaged header.
    """
    sources = [source for source in model.sources if isinstance(source, HubSource)]
    offline = offline or hub_cache.is_offline()
    if offline or not sources:
        why = "specllama is offline" if offline else "it comes in packages, which cannot be read in part"
        raise SourceUnavailable(
            f"{model.name} is not downloaded, and {why}", hint=f"specllama models pull {model.name}"
        )
    prefix = f"{sources[0].repo.replace('/', '--')}-"  # error messages show the folder
    with TemporaryDirectory(prefix=prefix) as folder:
        yield _from_first(model, sources, Path(folder), watch or Silent())


def _from_first(model: Model, sources: list[HubSource], folder: Path, watch: FetchWatch) -> Path:
    """The headers of all parts, from the first source that answers; else the error of the last source."""
    for source in sources[:-1]:
        try:
            return _from(source, model, folder, watch)
        except DownloadError as error:
            watch.note(f"{error}; trying the next source")
    return _from(sources[-1], model, folder, watch)


def _from(source: HubSource, model: Model, folder: Path, watch: FetchWatch) -> Path:
    paths = [_copy_header(source, wanted, folder, watch) for wanted in wanted_files(model, source)]
    return paths[0]


def _copy_header(source: HubSource, wanted: WantedFile, folder: Path, watch: FetchWatch) -> Path:
    """One file's header in a sparse file of the whole file's size."""
    path = folder / wanted.file.name
    with work(watch, f"reading the header of {path.name}", None), hub.open_remote(source, wanted, watch) as remote:
        n_bytes, read = remote
        data = _header(read, n_bytes, f"{wanted.place} of {source.repo}", watch)
    with storage.named_disk_full(path.name, "set TMPDIR to a folder on another disk"), path.open("wb") as file:
        file.write(data)
        file.truncate(n_bytes)
    return path


def _header(read: Read, n_bytes: int, what: str, watch: FetchWatch) -> bytes:
    """The bytes of a header. For any other file its first piece, by which `gguf_check` names the format."""

    def watched(start: int, stop: int) -> bytes:
        data = read(start, stop)
        watch.advance(len(data))
        return data

    first = watched(0, min(FIRST_BYTES, n_bytes)) if n_bytes else b""
    if first[:4] != b"GGUF":
        return first
    try:
        header = walk_from(
            lambda start, stop: first[start:stop] if start == 0 else watched(start, stop),
            n_bytes,
            first=FIRST_BYTES,
            step=STEP_BYTES,
        )
    except Unsound as found:
        raise ModelFileError(f"{what} is damaged: {found}", hint="choose another file of this model") from None
    return header.data
