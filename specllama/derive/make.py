"""Derive a draft from a model: fewer tokens, fewer layers, coarser weights."""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from specllama import llama
from specllama.base import child, disk
from specllama.base.child import Tell, TellShare
from specllama.base.errors import BackendError, DiskFull, UsageError
from specllama.base.text import counted
from specllama.derive.layers import check_dropped, without_layers
from specllama.derive.vocab import MULTIPLE, kept_tokens, with_vocabulary
from specllama.files import gguf_rewrite
from specllama.llama.header import Header, refuse_architecture
from specllama.llama.quantize import QUANTS, quant_of
from specllama.pairs.derived import Recipe, room_hint, written
from specllama.pairs.draft_in_target_ids import VOCAB_MAP
from specllama.pairs.tokenizer import read_tokenizer

_HEADER_ROOM = 32 << 20  # more than any header


def checked(parent: Header, recipe: Recipe) -> Recipe:
    """The recipe in normal form. Raises UsageError and UnsupportedModel if it does not suit the parent."""
    refuse_architecture(parent)
    if recipe == Recipe():
        raise UsageError("the recipe changes nothing", hint="add --quant, --vocab or --drop-layers")
    if VOCAB_MAP in parent.gguf.entries and recipe.n_vocab:
        raise UsageError(f"the vocabulary of {parent.path.name} was already cut", hint="derive from its parent")
    if recipe.n_vocab < 0:
        raise UsageError(f"the vocabulary is {counted(recipe.n_vocab, 'token')} (expected at least 1)")
    return Recipe(
        n_vocab=recipe.n_vocab + -recipe.n_vocab % MULTIPLE,
        dropped=check_dropped(parent, recipe.dropped) if recipe.dropped else (),
        quant=quant_of(recipe.quant) if recipe.quant else "",
    )


def make(parent: Header, recipe: Recipe, destination: Path, tell: Tell) -> None:
    """Write the derived model in a child process. `destination` never holds a part of it.

    Raises UsageError, UnsupportedModel, ModelFileError, DiskFull and BackendError.
    """
    recipe = checked(parent, recipe)
    with written(destination), disk.work_folder(destination.with_name(f".{destination.name}.making")) as folder:
        disk.check_room(destination.parent, room_for(parent, recipe), destination.name, room_hint(destination))
        whole = child.run(partial(build, parent.path, recipe, folder), tell)
        llama.read_header(whole)
        whole.replace(destination)


def room_for(parent: Header, recipe: Recipe) -> int:
    """Bytes for the file and the intermediate one."""
    n_bytes = parent.n_file_bytes if recipe.n_vocab or recipe.dropped else 0
    if recipe.quant:
        n_bytes += int(parent.n_params * QUANTS[recipe.quant].bits / 8) + _HEADER_ROOM
    return n_bytes


def build(parent: Path, recipe: Recipe, folder: Path, tell: Tell) -> Path:
    """Write the derived model into `folder`; returns its path. llama.cpp may end the process."""
    header, source = llama.read_header(parent), parent
    if recipe.n_vocab or recipe.dropped:
        source = folder / "cut.gguf"
        cut(header, recipe, source, lambda share: tell("cutting", share))
    if not recipe.quant:
        return source
    destination = folder / "quantized.gguf"

    def progress(share: float) -> bool:
        tell(f"storing as {recipe.quant}", share)
        return True

    try:
        llama.requantize(header if source == parent else source, destination, recipe.quant, progress=progress)
    except BackendError:  # llama.cpp does not say that the disk is full
        with suppress(OSError):
            free = shutil.disk_usage(folder).free
            if free < _HEADER_ROOM:
                left = f"the disk of {folder.parent} has {disk.size_text(free)} left"
                raise DiskFull(f"no space left while writing the draft: {left}", hint=room_hint(folder)) from None
        raise
    if source != parent:
        source.unlink()
    return destination


def cut(parent: Header, recipe: Recipe, destination: Path, tell: TellShare | None = None) -> None:
    """Write the parent with fewer tokens and layers. Raises UsageError, UnsupportedModel, and as `written`."""
    source = gguf_rewrite.read_source(parent.files)
    values: dict[str, bytes | None] = {}
    tensors = list(source.tensors)
    if recipe.n_vocab:
        kept = kept_tokens(source, read_tokenizer(parent), recipe.n_vocab)
        changed, tensors = with_vocabulary(source, parent, tensors, kept)
        values.update(changed)
    if recipe.dropped:
        changed, tensors = without_layers(source, parent, tensors, recipe.dropped)
        values.update(changed)
    with written(destination):
        gguf_rewrite.write(source, destination, values=values, tensors=tensors, tell=tell)
