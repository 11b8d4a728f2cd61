"""Look at a model on the Hub without downloading it: its header is fetched, its weights are a hole in a sparse file.

A file of the right size with the right beginning is all that llama.cpp's reader needs, so a model that is still on the
Hub is looked at by the same code as one on this disk.
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

# Enough for the header of a later part of a split model; most others need two or three steps more.
FIRST_BYTES, STEP_BYTES = 1 << 20, 3 << 20


@contextmanager
def header_only(model: Model, *, offline: bool = False, watch: FetchWatch | None = None) -> Iterator[Path]:
    """A file that begins like `model` and has no weights; gone when the block ends.

    Raises SourceUnavailable, GatedRepository, DownloadError, and ModelFileError where the header cannot be right.
    """
    sources = [source for source in model.sources if isinstance(source, HubSource)]
    offline = offline or hub_cache.is_offline()
    if offline or not sources:
        why = "the network may not be asked" if offline else "none of its sources can be read in part"
        raise SourceUnavailable(f"{model.name} is not here, and {why}", hint=f"specllama models pull {model.name}")
    prefix = f"{sources[0].repo.replace('/', '--')}-"  # error messages name the place
    with TemporaryDirectory(prefix=prefix) as folder:
        yield _from_first(model, sources, Path(folder), watch or Silent())


def _from_first(model: Model, sources: list[HubSource], folder: Path, watch: FetchWatch) -> Path:
    """The headers of all parts, from the first source that answers; where none does, the last one's error."""
    for source in sources[:-1]:
        try:
            return _from(source, model, folder, watch)
        except DownloadError as error:
            watch.note(f"{error}; asking the next source")
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
    with storage.named_disk_full(path.name), path.open("wb") as file:
        file.write(data)
        file.truncate(n_bytes)
    return path


def _header(read: Read, n_bytes: int, what: str, watch: FetchWatch) -> bytes:
    """The bytes of a header; of another kind of file its first piece, from which `gguf_check` says what it is."""

    def told(start: int, stop: int) -> bytes:
        data = read(start, stop)
        watch.advance(len(data))
        return data

    first = told(0, min(FIRST_BYTES, n_bytes)) if n_bytes else b""
    if first[:4] != b"GGUF":
        return first
    try:
        header = walk_from(
            lambda start, stop: first[start:stop] if start == 0 else told(start, stop),
            n_bytes,
            first=FIRST_BYTES,
            step=STEP_BYTES,
        )
    except Unsound as found:
        raise ModelFileError(f"{what} is damaged: {found}", hint="take another file of this model") from None
    return header.data
