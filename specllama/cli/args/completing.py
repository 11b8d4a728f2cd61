"""What the shell offers for the value of an option or argument: names, words, and files by type.

Without an offer the shell completes file names by itself, with its own rules for folders and quotes. So nothing is
offered for a file of any type, in a path that may lead into a folder, and for names that need quotes.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from specllama.base.errors import SpecllamaError
from specllama.base.ranges import Check, Several, Word
from specllama.cli.screen.output import stream_of

Offer: TypeAlias = tuple[str, str]  # a value and what it is
Completer: TypeAlias = Callable[[str], list[Offer]]

_PLAIN = re.compile(r"[\w./~+@%,:-]+")  # needs no quotes
_BREAKS = re.compile(r"[=:]+")  # of words, in bash


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
    from specllama.files.hub_cache import cached_repos, files_of
    from specllama.files.repo_files import model_files, quant_of

    for repo in cached_repos():
        yield repo, "in the cache of the Hub"
        for quant in filter(None, map(quant_of, model_files(files_of(repo)))):
            yield f"{repo}:{quant}", "in the cache of the Hub"


def _chat_templates() -> Iterator[Offer]:
    from specllama.chat.named_templates import NAMED

    for name in NAMED:
        yield name, "chat template"


def _templates() -> Iterator[Offer]:
    from specllama.cli import templates

    for name in templates.template_names():
        yield name, "prompt template"


def _settings() -> Iterator[Offer]:
    from specllama.cli.config import KEYS

    for name, key in KEYS.items():
        yield name, key.help


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
    "SETTING": (_settings, ""),
    "--model": (_models, ".gguf"),
    "--draft-for": (_models, ".gguf"),
    "--target": (_models, ".gguf"),
    "--draft": (_models, ".gguf"),
    "--model-draft": (_drafts, ".gguf"),
    "--hf-repo": (_repositories, ""),
    "--hf-repo-draft": (_repositories, ""),
    "--chat-template": (_chat_templates, ".jinja"),
    "--template": (_templates, ".toml"),
    "TEMPLATE": (_templates, ""),
    "--spec-type": (_strategies, ""),
    "--load": (list, ".json"),
}
_LISTS = ("--spec-type",)


def completer(name: str | None, check: Check | None = None) -> Completer | None:
    """What is offered for the option or argument of this name; None leaves it to the shell."""
    names, ending = _NAMES.get(name or "", (None, ""))
    each = check.each if isinstance(check, Several) else check
    if isinstance(each, Word):
        offers = [(word, "") for word in each.words]
    elif names is None:
        return None

    def complete(incomplete: str) -> list[Offer]:
        is_list = name in _LISTS or isinstance(check, Several)
        return _offers(names or (lambda: offers), ending, is_list, incomplete)

    return complete


def _offers(names: Callable[[], Iterable[Offer]], ending: str, is_list: bool, incomplete: str) -> list[Offer]:
    """The values that begin with `incomplete`; of a list, its last part."""
    whole = _held + incomplete
    done, comma, last = whole.rpartition(",") if is_list else ("", "", whole)
    found: list[Offer] = []
    with suppress(SpecllamaError, OSError):  # such as a mistake in models.toml: the command itself says it
        found += [(done + comma + name, about) for name, about in names() if name.startswith(last)]
        found += [(path, "") for path in _files(whole, ending)] if ending else []
    if not all(_PLAIN.fullmatch(name) for name, _ in found):
        return []
    return [(name.removeprefix(_held), about) for name, about in found]


_held = ""  # the beginning of the current value, which bash has split off and does not replace


def rejoin(env: MutableMapping[str, str]) -> None:
    """Undo the splitting of bash, to which `--pair=qw` and `user/repo:Q4` are three words each."""
    global _held
    words, current = env.get("COMP_WORDS", "").split("\n"), int(env.get("COMP_CWORD", "0"))
    joined, _held = words[:1], ""
    for before, word in pairwise(words[: current + 1]):
        is_break = bool(_BREAKS.fullmatch(word))
        if is_break or (word and _BREAKS.fullmatch(before)):
            _held = joined[-1] + word * is_break
            joined[-1] += word
        else:
            _held = ""
            joined.append(word)
    if _held:
        name, equals, value = _held.partition("=")
        is_option = bool(equals) and name.startswith("-")
        joined[-1:] = [*[name] * is_option, joined[-1][len(_held) :]]
        _held = value if is_option else _held
    env["COMP_WORDS"], env["COMP_CWORD"] = "\n".join(joined), str(len(joined) - 1)


@contextmanager
def whole_words(env: Mapping[str, str]) -> Iterator[None]:
    """What is printed for zsh and fish behind `--name=`, with that name: they replace the whole word."""
    word = env.get("_TYPER_COMPLETE_ARGS", "").rpartition(" ")[2]
    name, equals, _ = word.partition("=")
    begins = {"complete_zsh": r"""^(_arguments '\*: :\(\()?["]""", "complete_fish": "^(?=.)"}
    begin = begins.get(env.get("_SPECLLAMA_COMPLETE", ""))
    if begin is None or not equals or not name.startswith("-"):
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:  # completion ends with SystemExit
        text = re.sub(begin, lambda found: found[0] + name + equals, printed.getvalue(), flags=re.MULTILINE)
        stream_of(sys.stdout).write(text)


def _files(incomplete: str, ending: str) -> list[str]:
    """The files with this ending; none if the path may go on into a folder."""
    folder, slash, start = incomplete.rpartition("/")
    place = Path(os.path.expanduser(folder + slash) or ".")
    entries = [entry for entry in place.iterdir() if entry.name.startswith(start) and (start or entry.name[0] != ".")]
    if slash and any(entry.is_dir() for entry in entries):
        return []
    return sorted(folder + slash + entry.name for entry in entries if entry.name.endswith(ending))
