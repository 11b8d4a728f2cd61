"""What the shell offers for the value of an option or argument: names, words, and files by type.

Without an offer the shell completes file names by itself, with its own rules for folders and quotes. So nothing is
offered for a file of any type, in a path that may lead into a folder, and for names that need quotes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from specllama.base.errors import SpecllamaError
from specllama.base.ranges import Check, Word

Offer: TypeAlias = tuple[str, str]  # a value and what it is
Completer: TypeAlias = Callable[[str], list[Offer]]

_PLAIN = re.compile(r"[\w./~+@%,-]+")  # needs no quotes


def _pairs() -> Iterator[Offer]:
    from specllama.files.catalog import load_catalog

    for pair in load_catalog().pairs.values():
        yield pair.name, pair.summary


def _models() -> Iterator[Offer]:
    from specllama.files.catalog import load_catalog

    yield from _pairs()
    for name in load_catalog().models:
        yield name, "model"


def _derived() -> Iterator[Offer]:
    from specllama.pairs import derived

    for path in derived.paths():
        yield path.stem, "derived draft"


def _drafts() -> Iterator[Offer]:
    yield from _derived()
    yield from _models()


def _repositories() -> Iterator[Offer]:
    from specllama.files.hub_cache import cached_repos

    for repo in cached_repos():
        yield repo, "in the cache of the Hub"


def _templates() -> Iterator[Offer]:
    from specllama.chat.named_templates import NAMED

    for name in NAMED:
        yield name, "chat template"


def _strategies() -> Iterator[Offer]:
    from specllama.drafters import REGISTRY

    for name in ("auto", *REGISTRY):
        yield name, ""


# Names by the long option, or by the metavar of an argument; and the ending of the files that do as well.
_NAMES: dict[str, tuple[Callable[[], Iterable[Offer]], str]] = {
    "--pair": (_pairs, ""),
    "PAIR": (_pairs, ""),
    "NAME": (_models, ""),
    "NAME...": (_models, ""),
    "WHAT": (_models, ".gguf"),
    "DERIVED": (_derived, ""),
    "--model": (_models, ".gguf"),
    "--draft-for": (_models, ".gguf"),
    "--target": (_models, ".gguf"),
    "--draft": (_models, ".gguf"),
    "--model-draft": (_drafts, ".gguf"),
    "--hf-repo": (_repositories, ""),
    "--hf-repo-draft": (_repositories, ""),
    "--chat-template": (_templates, ".jinja"),
    "--spec-type": (_strategies, ""),
    "--load": (list, ".json"),
}
_LISTS = ("--spec-type",)


def completer(name: str | None, check: Check | None = None) -> Completer | None:
    """What is offered for the option or argument of this name; None leaves it to the shell."""
    names, ending = _NAMES.get(name or "", (None, ""))
    if isinstance(check, Word):
        offers = [(word, "") for word in check.words]
    elif names is None:
        return None

    def complete(incomplete: str) -> list[Offer]:
        return _offers(names or (lambda: offers), ending, name in _LISTS, incomplete)

    return complete


def _offers(names: Callable[[], Iterable[Offer]], ending: str, is_list: bool, incomplete: str) -> list[Offer]:
    """The values that begin with `incomplete`; of a list, its last part."""
    done, comma, last = incomplete.rpartition(",") if is_list else ("", "", incomplete)
    found: list[Offer] = []
    with suppress(SpecllamaError, OSError):  # such as a mistake in models.toml: the command itself says it
        found += [(done + comma + name, about) for name, about in names() if name.startswith(last)]
        found += [(path, "") for path in _files(incomplete, ending)] if ending else []
    return found if all(_PLAIN.fullmatch(name) for name, _ in found) else []


def _files(incomplete: str, ending: str) -> list[str]:
    """The files with this ending; none if the path may go on into a folder."""
    folder, slash, start = incomplete.rpartition("/")
    place = Path(os.path.expanduser(folder + slash) or ".")
    entries = [entry for entry in place.iterdir() if entry.name.startswith(start) and (start or entry.name[0] != ".")]
    if slash and any(entry.is_dir() for entry in entries):
        return []
    return sorted(folder + slash + entry.name for entry in entries if entry.name.endswith(ending))
