"""`specllama draft make`, `list` and `remove`: faster drafts derived from a local model."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from specllama.base.disk import only_one, size_text
from specllama.base.errors import ConfigError, SpecllamaError, UsageError
from specllama.cli.args.completing import completer
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import THREADS, Color, Json, Offline, Quiet
from specllama.cli.args.values import layers, n_tokens, quants
from specllama.cli.check.probe import warn_of_noise
from specllama.cli.draft import view as draft_view
from specllama.cli.loading import Said
from specllama.cli.reports import not_lost, writable
from specllama.cli.screen.output import Output, open_output, to_json
from specllama.cli.screen.status import StatusLine, watching
from specllama.derive import make as derive
from specllama.derive import search as derive_search
from specllama.derive.candidates import ready
from specllama.derive.layers import check_dropped, refuse_undroppable
from specllama.derive.search import Space
from specllama.drafters import SIMPLE
from specllama.drafters.length import TUNED, DraftLength
from specllama.files.catalog import load_catalog
from specllama.files.model import Model
from specllama.llama import Header
from specllama.llama.kernel_path import KernelPath
from specllama.llama.quantize import QUANTS
from specllama.pairs import derived as drafts
from specllama.pairs import setup as pair_setup
from specllama.pairs.ask import Hardware
from specllama.pairs.derived import Derived, Recipe
from specllama.pairs.naming import Wanted, named
from specllama.pairs.setup import Choice

app = typer.Typer(
    help="Make faster drafts from local models; list and remove them.", no_args_is_help=True, add_completion=False
)

_N_CTX = 1024  # of the models while they are measured


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentOptions:
    """The model to derive from, and the target."""

    title: ClassVar[str] = "Models"

    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WHAT",
            help="What to derive from: a pair (its draft), a model, a GGUF file, or user/repo[:quant]; the default "
            "pair if nothing is given.",
        ),
    ] = None
    target: Annotated[
        str | None,
        Option(
            "-m --model TARGET", "The target of the draft: a file, a model, a pair, or user/repo[:quant]. [the pair's]"
        ),
    ] = None
    offline: Offline = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """How the draft differs from its parent. Without options, the fastest recipe is searched for."""

    title: ClassVar[str] = "Recipe"

    quant: Annotated[
        Any,
        Option(
            "--quant LIST",
            f"Quantization of the weights: {', '.join(QUANTS)}. Of several, the fastest is kept.",
            quants,
        ),
    ] = None
    vocab: Annotated[Any, Option("--vocab N", "Keep only the N most frequent tokens, for example 32k.", n_tokens)] = (
        None
    )
    drop_layers: Annotated[
        Any, Option("--drop-layers LIST", "Remove these layers, for example 4,7-9; auto searches for them.", layers)
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeOptions:
    """Where to write the draft, and how to measure it."""

    title: ClassVar[str] = "Making"

    output: Annotated[
        str | None, Option("-o --output FILE", "The file to write. [the cache, where -md finds it by name]")
    ] = None
    measure: Annotated[bool, Option("--measure", "Measure a single recipe; a search always measures.")] = False
    quick: Annotated[bool, Option("--quick", "Measure for seconds instead of minutes.")] = False
    force: Annotated[bool, Option("--force", "Make an existing draft again, or replace FILE.")] = False
    threads: Annotated[int | None, replace(THREADS, help="Threads to measure with. [physical cores]")] = None
    json: Annotated[bool, Option("--json", "One JSON object: the draft and the figures.")] = False
    quiet: Annotated[bool, Option("-q --quiet", "Only the path and errors.")] = False
    color: Color = "auto"


@app.command()
@with_options
def make(models: ParentOptions, recipe: RecipeOptions, options: MakeOptions) -> None:
    """Derive a faster draft: smaller weights, fewer tokens, fewer layers.

    Without a recipe, or with several values in it, the candidates are made and measured with the target one by one.
    The fastest is kept if it is faster than the unchanged model. The output of the target never depends on the draft.
    The last line on stdout is the path of the new file.
    """
    output = open_output(color=options.color, format="json" if options.json else "human", quiet=options.quiet)
    finds = recipe.drop_layers == "auto"
    dropped = () if finds or recipe.drop_layers is None else recipe.drop_layers
    space = Space(recipe.quant or (), recipe.vocab or 0, dropped, finds)
    parent_wanted, target_wanted = _meant(models)
    destination = None if options.output is None else _destination(options.output, force=options.force)
    searches = space.recipe is None or options.measure
    if searches and target_wanted is None:
        raise UsageError(
            "measuring a draft needs its target", hint="add -m TARGET (the same model if it drafts for itself)"
        )
    wanted = [parent_wanted] if target_wanted is None or not searches else [parent_wanted, target_wanted]
    found, *targets = pair_setup.resolve(wanted, Said(output), offline=models.offline)
    parent = pair_setup.bring(found, Said(output), offline=models.offline).header
    if destination is not None and destination.resolve() in {part.resolve() for part in parent.parts}:
        raise UsageError("-o is the parent's own file (expected another name)")
    if targets:
        _search(parent, targets[0], space, destination, models, options, output)
        return
    assert space.recipe is not None
    derived, is_new = _made(parent, space.recipe, destination, force=options.force, output=output)
    if output.format == "json":
        output.data({"made": is_new, "draft": draft_view.draft_json(derived)})
        return
    share = derived.n_bytes / max(derived.parent.path.stat().st_size, 1)
    size = f"{size_text(derived.n_bytes)}, {100 * share:.0f} % of its parent"
    output.note(f"{'made' if is_new else 'already made:'} {derived.name}: {derived.recipe.summary}; {size}")
    output.note(draft_view.use_of(derived))
    output.path(derived.path)


def _meant(models: ParentOptions) -> tuple[Wanted, Wanted | None]:
    """(the parent, the target; None if it is not given and no pair names it). Raises ConfigError."""
    catalog, what = load_catalog(), models.what
    target = None if models.target is None else named(models.target)
    if what is None or what in catalog.pairs:
        pair = catalog.pair(what)
        return pair.draft, target or pair.target
    model = named(what, draft=True)
    if not isinstance(model, Model):
        return model, target
    targets = [pair.target for pair in catalog.pairs.values() if pair.draft == model]
    own = [model for pair in catalog.pairs.values() if pair.target == model]
    return model, target or next(iter([*targets, *own]), None)


def _destination(text: str, *, force: bool) -> Path:
    """The file to write. Raises UsageError."""
    path = writable("-o", text)
    if path.suffix != ".gguf":
        raise UsageError(f"-o {text} is not a model file (expected a name that ends in .gguf)")
    if os.path.exists(path) and not force:
        raise UsageError(f"{path} exists", hint="use another name, or --force to replace it")
    return path


def _made(
    parent: Header, recipe: Recipe, destination: Path | None, *, force: bool, output: Output
) -> tuple[Derived, bool]:
    """The draft of one recipe, and whether it is new."""
    recipe = derive.checked(parent, recipe)
    path = destination or drafts.place(parent.path, recipe)
    with watching(output) as watch, only_one(drafts.LOCK, watch):
        drafts.sweep()
        if destination is None and not force and (known := ready(parent, recipe)) is not None:
            return known, False
        with StatusLine(output, logs=True) as status:
            derive.make(parent, recipe, path, status.show)
            status.show("checksums", 1.0)
            return drafts.record(path, recipe, parent.path), True


def _search(
    parent: Header,
    target: Wanted,
    space: Space,
    destination: Path | None,
    models: ParentOptions,
    options: MakeOptions,
    output: Output,
) -> None:
    """Search, report, keep the fastest."""
    only = None if space.recipe is None else derive.checked(parent, space.recipe)
    if space.finds_layers:
        refuse_undroppable(parent)
    if space.dropped:
        check_dropped(parent, space.dropped)
    hardware = Hardware(n_threads=options.threads)
    choice = Choice(target, parent.path, SIMPLE, _N_CTX, DraftLength(TUNED), hardware=hardware, offline=models.offline)
    listener = Said(output)
    setup = pair_setup.prepare(choice, listener)
    pair_setup.require_fit(setup, listener)
    path = KernelPath.of(setup.target_options)
    with watching(output) as watch, only_one(drafts.LOCK, watch), StatusLine(output, logs=True) as status:
        found = derive_search.search(
            parent,
            setup.subject,
            derive_search.everything(parent) if space == Space() else space,
            status.show,
            path=path,
            effort=derive_search.QUICK if options.quick else derive_search.SEARCH,
            only=only,
        )
    kept = found.kept
    problem: SpecllamaError | None = None
    if kept is not None and destination is not None:
        try:
            kept = drafts.moved(kept, destination)
        except SpecllamaError as error:  # after the report of these minutes
            error.hint += f"; the draft is in the cache: -md {kept.spoken}"
            problem = error
    for failure in found.failures:
        output.warn(f"not tried: {failure}")
    warn_of_noise(output, found.noise)
    place = None if kept is None else kept.path
    with not_lost(output, ".json", lambda: to_json(draft_view.search_json(found, kept)), place):
        draft_view.show_search(output, found, kept)
    if problem is not None:
        raise problem


@app.command("list")
@with_options
def list_all(json: Json = False, color: Color = "auto") -> None:
    """List the derived drafts in the cache, how they were made, and their measured speed."""
    output = open_output(color=color, format="json" if json else "human")
    found, damaged = [], []
    for path in drafts.paths():
        try:
            derived = drafts.read(path)
            if derived is None:
                raise ConfigError(f"{path.name} has no record of its parent")
            found.append(derived)
        except ConfigError as error:
            damaged.append(f"{error}")
    if json:
        output.data({"folder": drafts.folder(), "drafts": [draft_view.draft_json(each) for each in found]})
    elif found:
        draft_view.show_list(output, found)
    else:
        output.prose("No derived drafts yet. `specllama draft make` searches for a faster one.")
    for text in damaged:
        output.warn(text, "specllama draft remove NAME")


@app.command()
@with_options
def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Derived drafts, as `draft list` names them.", autocompletion=completer("DERIVED")
        ),
    ],
    yes: Annotated[bool, Option("-y --yes", "Do not ask.")] = False,
    quiet: Quiet = False,
) -> None:
    """Remove derived drafts from the cache."""
    output = open_output(quiet=quiet)
    paths = []
    for name in dict.fromkeys(names):
        path = drafts.named(name)
        if path is None:
            known = ", ".join(each.stem for each in drafts.paths())
            raise ConfigError(f"there is no derived draft named {name!r}", hint=f"there are: {known}" if known else "")
        paths.append(path)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("removing files needs --yes (stdin is not a terminal)")
        size = size_text(sum(path.stat().st_size for path in paths))
        output.confirm(f"Remove {', '.join(path.stem for path in paths)} ({size})?")
    for path in paths:
        output.note(f"removed {path.stem} ({size_text(drafts.remove(path))})")
