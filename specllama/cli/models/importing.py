"""`specllama models import`: models that other programs left on this disk, and the pairs that can be made of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specllama import llama
from specllama.base.disk import size_text
from specllama.base.errors import SpecllamaError
from specllama.base.text import counted
from specllama.cli.check.drafts import ranked
from specllama.cli.screen.output import Output
from specllama.cli.screen.tables import draw_table
from specllama.files import hub
from specllama.files.catalog import Catalog
from specllama.files.other_apps import FoundModel, folders
from specllama.llama import Header, LoadOptions
from specllama.llama.header import refuse_architecture
from specllama.pairs.ask import Hardware
from specllama.pairs.check import Candidate, this_machine
from specllama.pairs.find_drafts import FoundDraft, judge, look_at
from specllama.pairs.setup import usual_context

_PADDING = 1024  # most ids by which the vocabularies of two models of a family differ


@dataclass(frozen=True, slots=True)
class Readable:
    """A found model that can be used."""

    found: FoundModel
    header: Header


@dataclass(frozen=True, slots=True)
class PairOffer:
    """A pair that can be made, and the command that does it."""

    name: str
    target: FoundModel
    draft: FoundModel
    facts: FoundDraft

    @property
    def command(self) -> str:
        return shlex.join(
            ["specllama", "models", "add", self.name, "-m", str(self.target.path), "-md", str(self.draft.path)]
        )


def readable(found: Sequence[FoundModel], output: Output) -> list[Readable]:
    """The models that can be used; the reason for the others is a note."""
    usable = []
    for each in found:
        try:
            header = llama.read_header(each.path)
            refuse_architecture(header)
        except SpecllamaError as error:
            output.note(f"{each.name} ({each.program}) cannot be used: {error}")
            continue
        usable.append(Readable(each, header))
    return usable


def offers(models: Sequence[Readable], catalog: Catalog) -> Iterator[PairOffer]:
    """For each model the best draft among the others, if one fits and the two are no pair of the catalog."""
    names, machine = set(catalog.pairs), this_machine()
    known = {_files(hub.find(pair.target), hub.find(pair.draft)) for pair in catalog.pairs.values()}
    for one in models:
        others = {each.found.path: each for each in models if _is_near(one.header, each.header)}
        target = Candidate(one.header, LoadOptions(n_ctx=usual_context(one.header)))
        judged = [judge(target, str(path), partial(look_at, path), machine, Hardware()) for path in others]
        best = next((each for each in ranked(judged) if each.fits), None)
        if best is not None:
            draft = next(each for path, each in others.items() if str(path) == best.name)
            if _files(one.found.path, draft.found.path) in known:
                continue
            name = _free_name(one.found.name, names)
            names.add(name)
            yield PairOffer(name, one.found, draft.found, best)


def _files(target: Path | None, draft: Path | None) -> tuple[Path | None, Path | None]:
    """The files of a pair, without links."""
    return target and target.resolve(), draft and draft.resolve()


def _is_near(target: Header, draft: Header) -> bool:
    """True if it is worth comparing the vocabularies: one kind, about as many tokens, and a smaller model."""
    return (
        target.tokenizer == draft.tokenizer
        and abs(target.n_vocab - draft.n_vocab) <= _PADDING
        and draft.n_pass_bytes < target.n_pass_bytes
    )


def _free_name(name: str, taken: Collection[str]) -> str:
    """A name for models.toml like that of the model, which no other pair has."""
    base = name.rpartition("/")[2].removesuffix(".gguf").removesuffix(":latest")
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", base).strip("-._+").lower() or "pair"
    number = 2
    chosen = plain
    while chosen in taken:
        chosen, number = f"{plain}-{number}", number + 1
    return chosen


def report(output: Output, models: Sequence[Readable], pairs: Sequence[PairOffer]) -> None:
    """Print both lists."""
    if output.format == "json":
        output.data({"models": [_model_json(each) for each in models], "pairs": [_pair_json(each) for each in pairs]})
        return
    if not output.out.is_terminal:
        for each in models:
            found, size = each.found, size_text(each.header.n_file_bytes)
            output.row("model", found.name, found.program, size, str(found.path))
        for pair in pairs:
            output.row("pair", pair.name, pair.target.name, pair.draft.name, pair.command)
        return
    rows = [((each.found.name, "bold"), each.found.program, size_text(each.header.n_file_bytes)) for each in models]
    if rows:
        draw_table(output, ("model", "program", "size"), rows, figures=("size",))
    for pair in pairs:
        output.line()
        share = "" if pair.facts.ratio is None else f" ({pair.facts.ratio:.0%} of its size)"
        output.prose(f"{pair.target.name}, drafted by {pair.draft.name}{share}:")
        output.line(pair.command)  # whole, to be copied
    if pairs:
        output.note("Add a pair with its command, then: specllama chat --pair NAME")


def looked_in() -> str:
    """The sentence for a disk without models."""
    places = ", ".join(str(place) for group in folders().values() for place in group)
    return f"no models were found (looked in {places})"


def counts(models: Sequence[Readable], pairs: Sequence[PairOffer]) -> str:
    """The last line of the report."""
    return f"{counted(len(models), 'model')}, {counted(len(pairs), 'pair')}; nothing was copied or changed"


def _model_json(each: Readable) -> dict[str, object]:
    found, header = each.found, each.header
    return {
        "name": found.name,
        "program": found.program,
        "path": found.path,
        "size": header.n_file_bytes,
        "architecture": header.architecture,
        "parameters": header.n_params,
    }


def _pair_json(each: PairOffer) -> dict[str, object]:
    return {
        "name": each.name,
        "target": each.target.path,
        "draft": each.draft.path,
        "ratio": each.facts.ratio,
        "gain": each.facts.gain,
        "command": each.command,
    }
