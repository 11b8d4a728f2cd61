"""Is this a model file? The cheap checks, in plain Python, before llama.cpp is asked to read it.

llama.cpp's own answer to a file that is none of its own is one line of log and a null pointer; and its reader trusts
the header more than a damaged file deserves (see `gguf_walk`).
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from specllama.base import disk as storage
from specllama.base.errors import ModelFileError
from specllama.files import gguf_header as gguf_walk
from specllama.files.gguf_header import Walked

GGUF_VERSIONS = (2, 3)  # what llama.cpp reads; version 1 files date from August 2023

_STEP_BYTES = 8 << 20  # headers are read in pieces of this size
_SOUND = "sound headers"
_LONG_HEADER = 1 << 20  # walking a shorter one takes no longer than remembering it
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


def check_file(path: Path) -> None:
    """Raise ModelFileError unless `path` begins with a sound GGUF header of a version that llama.cpp reads.

    The whole header is walked once, which takes a fifth of a second, and again when the file has changed.
    """
    _check_beginning(path)
    if storage.recall(_SOUND, path) is None and walk_file(path).end > _LONG_HEADER:
        storage.remember(_SOUND, True, path)


def walk_file(path: Path) -> Walked:
    """The header of a file that begins like a GGUF model, walked to its end. Raises ModelFileError."""
    with path.open("rb") as file:

        def read(start: int, stop: int) -> bytes:
            file.seek(start)
            return file.read(stop - start)

        try:
            walked = gguf_walk.walk_from(read, path.stat().st_size, first=_STEP_BYTES, step=_STEP_BYTES)
            gguf_walk.require_sound_values(walked)
        except gguf_walk.Unsound as found:
            raise ModelFileError(f"{path} is damaged: {found}", hint="download it again") from None
    return walked


def _check_beginning(path: Path) -> None:
    """The first bytes: is it GGUF at all, and of which version?"""
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
