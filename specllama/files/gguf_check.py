"""Open model files: their headers, or an error that says what the file is instead.

llama.cpp answers another kind of file with one line of log and a null pointer.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from specllama.base import disk as storage
from specllama.base.errors import ModelFileError
from specllama.files.gguf_header import GgufHeader, Unsound, long_texts, require_sound_values, walk_from

GGUF_VERSIONS = (2, 3)  # what llama.cpp reads; version 1 files date from August 2023

_STEP_BYTES = 8 << 20  # headers are read in pieces of this size
_SOUND = "headers"  # what is remembered of a sound one: where its long arrays of texts end
_LONG_HEADER = 1 << 20  # reading a shorter one takes no longer than remembering it
_MAX_PARTS = 99_999  # as many as a name can count
_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata keys
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length and one character of the name, type, one byte of value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length and one character of the name, dimensions, one size, type, offset
_PART_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_OLD_FORMATS = {b"lmgg", b"fmgg", b"tjgg", b"algg"}  # ggml, ggmf, ggjt, ggla as they stand in the file
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive (perhaps a PyTorch checkpoint)",
    b"\x80\x02": "a Python pickle (perhaps a PyTorch checkpoint)",
    b"version https://git-lfs": "a Git LFS pointer: the file itself was not downloaded",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
    b"\x1f\x8b": "a gzip archive",
}
_GET_GGUF = "give a .gguf file; `specllama models list` shows models that can be fetched"


def read_parts(path: Path) -> tuple[GgufHeader, ...]:
    """The headers of a model file, or of all parts of a split model whose first part it is. Raises ModelFileError."""
    first = read_file(path)
    n_parts = first.integer("split.count", high=_MAX_PARTS)
    if n_parts < 2:
        return (first,)
    paths = part_paths(path, first.integer("split.no", high=_MAX_PARTS), n_parts)
    return (first, *map(read_file, paths[1:]))


def read_file(path: Path) -> GgufHeader:
    """The header of one file. Raises ModelFileError unless it is a sound one of a version that llama.cpp reads.

    A long header takes a tenth of a second the first time, and 10 ms until the file changes.
    """
    _check_beginning(path)
    known = _text_ends(storage.recall(_SOUND, path))
    with path.open("rb") as file:

        def read(start: int, stop: int) -> bytes:
            file.seek(start)
            return file.read(stop - start)

        try:
            header = walk_from(read, path.stat().st_size, path, first=_STEP_BYTES, step=_STEP_BYTES, text_ends=known)
            if known is None:
                require_sound_values(header)
        except Unsound as found:
            raise ModelFileError(f"{path} is damaged: {found}", hint="download it again") from None
    if known is None and header.end > _LONG_HEADER:
        storage.remember(_SOUND, list(long_texts(header).items()), path)
    return header


def _text_ends(known: object) -> dict[int, int] | None:
    """What was remembered of a header; None where nothing was, or nothing of use."""
    try:
        return {int(start): int(end) for start, end in known if start < end}  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return None


def _check_beginning(path: Path) -> None:
    """The first bytes: is it GGUF, and which version?"""
    head, size = _first_bytes(path)
    if not head:
        raise ModelFileError(f"{path} is empty", hint="delete it and download it again")
    if head[:4] != b"GGUF":
        raise ModelFileError(f"{path} is not a GGUF model: it is {_guess(head)}", hint=_hint_for(head))
    if len(head) < _HEADER.size:
        raise ModelFileError(f"{path} ends inside its header, after {size} bytes", hint="download it again")
    _, version, n_tensors, n_keys = _HEADER.unpack_from(head)
    if version & 0xFFFF == 0:
        raise ModelFileError(
            f"{path} was written for machines of the other byte order", hint="get the little-endian file of this model"
        )
    if version not in GGUF_VERSIONS:
        hint = "get a current file of this model" if version < GGUF_VERSIONS[0] else "update llama-cpp-python"
        raise ModelFileError(f"{path} is GGUF version {version}; versions 2 and 3 can be read", hint=hint)
    if n_tensors * _MIN_TENSOR_BYTES + n_keys * _MIN_KEY_BYTES > size:
        raise ModelFileError(
            f"{path} is damaged: it announces {n_tensors} tensors and {n_keys} keys, more than {size} bytes hold",
            hint="download it again",
        )


def part_paths(path: Path, number: int, count: int) -> tuple[Path, ...]:
    """All parts of the split model of which `path` is part `number` (from 0) of `count`, in order.

    Raises ModelFileError where `path` is not the first part, where its name does not follow the pattern by which
    llama.cpp finds the others, and where a part is missing.
    """
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or int(match["number"]) != number + 1:
        name = f"{path.stem}-{number + 1:05d}-of-{count:05d}.gguf"
        raise ModelFileError(
            f"{path} is part {number + 1} of {count} of a split model, but its name does not say so, "
            "so the other parts cannot be found",
            hint=f"give all parts their original names again; this one could be {name}",
        )
    parts = tuple(path.with_name(f"{match['prefix']}-{index + 1:05d}-of-{count:05d}.gguf") for index in range(count))
    if number != 0:
        raise ModelFileError(
            f"{path} is part {number + 1} of {count} of a split model", hint=f"give part 1: {parts[0]}"
        )
    missing = [part for part in parts if not part.is_file()]
    if missing:
        names = ", ".join(part.name for part in missing)
        raise ModelFileError(
            f"{path} is part 1 of {count} of a split model, and not all parts are beside it; missing: {names}",
            hint="download the missing parts into the same folder",
        )
    return parts


def _first_bytes(path: Path) -> tuple[bytes, int]:
    """The beginning of the file and its size."""
    try:
        if path.is_dir():
            raise ModelFileError(f"{path} is a directory, not a model file", hint=_in_directory(path))
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise ModelFileError(f"{path} is no regular file", hint="give the path of a .gguf file")
        with path.open("rb") as file:
            return file.read(64), path.stat().st_size
    except FileNotFoundError:
        raise ModelFileError(
            f"there is no file {path}", hint="check the path; `specllama models list` shows the models that are here"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ModelFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", hint="") from None


def _in_directory(path: Path) -> str:
    found = sorted(entry.name for entry in path.glob("*.gguf"))
    return f"give one of the files in it, such as {path / found[0]}" if found else "give the path of a .gguf file"


def _guess(head: bytes) -> str:
    """What a file that is not GGUF seems to be."""
    if head[:4] in _OLD_FORMATS:
        return "a model in the old GGML format, which llama.cpp dropped in 2023"
    for magic, name in _OTHER_FORMATS.items():
        if head.startswith(magic):
            return name
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file"
    if all(byte in b"\t\n\r\f\x1b" or byte >= 0x20 for byte in head):
        return "a text file"
    return f"something else (it begins with {head[:4].hex(' ')})"


def _hint_for(head: bytes) -> str:
    if head[:4] in _OLD_FORMATS:
        return "get a current GGUF file of this model"
    if head.startswith(b"version https://git-lfs"):
        return "fetch the file with `git lfs pull`, or with `specllama models pull`"
    return _GET_GGUF
