"""Read the headers of model files, with an error that names the format of any other file.

For any other file llama.cpp only returns a null pointer.
"""

from __future__ import annotations

import struct
from pathlib import Path

from specllama.base import disk as storage
from specllama.base.errors import ModelFileError, unreadable
from specllama.base.text import counted
from specllama.files.gguf_header import GgufHeader, Unsound, long_texts, require_sound_values, walk_from
from specllama.files.repo_files import MOST_PARTS, SPLIT, split_name

GGUF_VERSIONS = (2, 3)  # what llama.cpp reads; version 1 files date from August 2023

_STEP_BYTES = 8 << 20  # headers are read in pieces of this size
_SOUND = "headers"  # the kind of record about a sound header: where its long arrays of texts end
_VERSION = 2  # of the checks; what older ones found sound is checked again
_LONG_HEADER = 1 << 20  # a shorter header is read as fast as its record
_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata keys
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length and one character of the name, type, one byte of value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # length and one character of the name, dimensions, one size, type, offset
_OLD_FORMATS = {b"lmgg", b"fmgg", b"tjgg", b"algg"}  # ggml, ggmf, ggjt, ggla, little-endian
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive (perhaps a PyTorch checkpoint)",
    b"\x80\x02": "a Python pickle (perhaps a PyTorch checkpoint)",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
    b"\x1f\x8b": "a gzip archive",
}

_N_NAMED = 5  # missing parts in a message
_DOWNLOAD = "download it again"


def read_parts(path: Path) -> tuple[GgufHeader, ...]:
    """The header of a model file, or of each part of a split model, given its first part. Raises ModelFileError."""
    first = read_file(path)
    n_parts = first.integer("split.count", high=MOST_PARTS)
    if n_parts < 2:
        return (first,)
    paths = part_paths(path, first.integer("split.no", high=MOST_PARTS), n_parts)
    return (first, *map(read_file, paths[1:]))


def read_file(path: Path) -> GgufHeader:
    """The checked header of one file. Raises ModelFileError.

    A long header takes 0.1 s the first time, and 10 ms until the file changes.
    """
    _check_beginning(path)
    record = storage.FileRecord(_SOUND, path, by=_VERSION)
    ends = record.value(tuple[tuple[int, int], ...])
    known = None if ends is None else {start: end for start, end in ends if start < end}
    with path.open("rb") as file:

        def read(start: int, stop: int) -> bytes:
            file.seek(start)
            return file.read(stop - start)

        try:
            header = walk_from(read, path.stat().st_size, path, first=_STEP_BYTES, step=_STEP_BYTES, text_ends=known)
            if known is None:
                require_sound_values(header)
        except Unsound as found:
            raise ModelFileError(f"{path} is damaged: {found}", hint=_DOWNLOAD) from None
    if known is None and header.end > _LONG_HEADER:
        record.keep(list(long_texts(header).items()))
    return header


def _check_beginning(path: Path) -> None:
    head, size = _first_bytes(path)
    if not head:
        raise ModelFileError(f"{path} is empty", hint="delete it and download it again")
    if head[:4] != b"GGUF":
        kind, hint = _guess(head)
        raise ModelFileError(f"{path} is not a GGUF model: it is {kind}", hint=hint)
    if len(head) < _HEADER.size:
        raise ModelFileError(f"{path} ends inside its header, after {counted(size, 'byte')}", hint=_DOWNLOAD)
    _, version, n_tensors, n_keys = _HEADER.unpack_from(head)
    if version & 0xFFFF == 0:
        raise ModelFileError(
            f"{path} is big-endian (expected little-endian byte order)", hint="get the little-endian file of this model"
        )
    if version not in GGUF_VERSIONS:
        hint = "get a current file of this model" if version < GGUF_VERSIONS[0] else "update llama-cpp-python"
        raise ModelFileError(f"{path} is GGUF version {version} (expected 2 or 3)", hint=hint)
    if n_tensors * _MIN_TENSOR_BYTES + n_keys * _MIN_KEY_BYTES > size:
        raise ModelFileError(
            f"{path} is damaged: it announces {counted(n_tensors, 'tensor')} and {counted(n_keys, 'key')}, "
            f"too many for {counted(size, 'byte')}",
            hint=_DOWNLOAD,
        )


def part_paths(path: Path, number: int, count: int) -> tuple[Path, ...]:
    """All parts of a split model in order; `path` is part `number` (from 0) of `count`.

    Raises ModelFileError if `path` is not the first part, if its name does not follow llama.cpp's pattern, and if a
    part is missing.
    """
    match = SPLIT.fullmatch(path.name)
    if match is None or int(match["count"]) != count or int(match["part"]) != number + 1:
        raise ModelFileError(
            f"{path} is part {number + 1} of {count} of a split model (expected a name that ends in "
            f"{split_name('', number + 1, count)})",
            hint=f"rename all parts by this pattern; this one is {split_name(path.stem, number + 1, count)}",
        )
    parts = tuple(path.with_name(split_name(match["stem"], index, count)) for index in range(1, count + 1))
    if number != 0:
        raise ModelFileError(
            f"{path} is part {number + 1} of {count} of a split model (expected part 1)",
            hint=f"give part 1: {parts[0]}",
        )
    missing = [part for part in parts if not part.is_file()]
    if missing:
        names = ", ".join(part.name for part in missing[:_N_NAMED])
        names += f" and {len(missing) - _N_NAMED} more" if len(missing) > _N_NAMED else ""
        raise ModelFileError(
            f"{path} is part 1 of {count} of a split model, and parts are missing: {names}",
            hint="download the missing parts into the same folder",
        )
    return parts


def _first_bytes(path: Path) -> tuple[bytes, int]:
    try:
        if path.is_dir():
            raise ModelFileError(f"{path} is a directory, not a model file", hint=_in_directory(path))
        if path.exists() and not path.is_file():  # reading a pipe would never end
            raise ModelFileError(f"{path} is not a regular file", hint="give the path of a .gguf file")
        with path.open("rb") as file:
            return file.read(64), path.stat().st_size
    except FileNotFoundError:
        raise ModelFileError(
            f"there is no file {path}", hint="check the path; `specllama models list` shows the downloaded models"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise unreadable(path, error, ModelFileError, "a GGUF file") from None


def _in_directory(path: Path) -> str:
    found = sorted(entry.name for entry in path.glob("*.gguf"))
    return f"give one of the files in it, such as {path / found[0]}" if found else "give the path of a .gguf file"


def _guess(head: bytes) -> tuple[str, str]:
    """The format of a file that is not GGUF, by its first bytes, and the hint."""
    if head[:4] in _OLD_FORMATS:
        return "a model in the old GGML format, dropped by llama.cpp in 2023", "get a current GGUF file of this model"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself", "run `git lfs pull`, or `specllama models pull`"
    kind = next((name for magic, name in _OTHER_FORMATS.items() if head.startswith(magic)), "")
    if not kind and len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        kind = "a safetensors file"
    if not kind and all(byte in b"\t\n\r\f\x1b" or byte >= 0x20 for byte in head):
        kind = "a text file"
    kind = kind or f"of an unknown format (it begins with {head[:4].hex(' ')})"
    return kind, "give a .gguf file; `specllama models list` shows models that can be downloaded"
