"""`specllama draft`: make, list, remove: cheaper drafts derived from a model that is here."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from specllama.base.disk import meant, only_one, size_text
from specllama.base.errors import ConfigError, UsageError
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import THREADS, Color, Json, Offline, Quiet
from specllama.cli.args.values import layers, n_tokens, quants
from specllama.cli.check.probe import warn_of_noise
from specllama.cli.draft import view as draft_view
from specllama.cli.loading import Said
from specllama.cli.screen.fetching import watching
from specllama.cli.screen.output import Output, open_output
from specllama.cli.screen.status import StatusLine
from specllama.derive import make as derive
from specllama.derive import search as derive_search
from specllama.derive.layers import check_dropped, refuse_undroppable
from specllama.derive.search import SearchOutcome, Space
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
from specllama.tuning.child import Way

app = typer.Typer(
    help="Make cheaper drafts out of models that are here, and keep account of them.",
    no_args_is_help=True,
    add_completion=False,
)

_N_CTX = 1024  # of the models while they are measured
_LOCK = "drafts"  # one at a time makes them


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentOptions:
    """What the draft is made of, and for which target."""

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
            "-m --model TARGET",
            "The target that the draft is for: a file, a model, a pair, user/repo[:quant]. [the pair's]",
        ),
    ] = None
    offline: Offline = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions:
    """What is done to it. Without any of these, what is fastest here is searched for."""

    title: ClassVar[str] = "Recipe"

    quant: Annotated[
        Any,
        Option(
            "--quant LIST",
            f"Store the weights as one of {', '.join(QUANTS)}; of several, the best is searched for.",
            quants,
        ),
    ] = None
    vocab: Annotated[
        Any,
        Option("--vocab N", "Keep the N most frequent tokens, such as 32k; no other is drafted.", n_tokens),
    ] = None
    drop_layers: Annotated[
        Any,
        Option("--drop-layers LIST", "Leave out layers, such as 4,7-9; auto finds out which.", layers),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeOptions:
    """How, and where to."""

    title: ClassVar[str] = "Making"

    output: Annotated[
        str | None, Option("-o --output FILE", "Where to write it. [the cache, where -md finds it by name]")
    ] = None
    measure: Annotated[bool, Option("--measure", "Measure one recipe, too; a search always measures.")] = False
    quick: Annotated[bool, Option("--quick", "Measure for seconds instead of minutes.")] = False
    force: Annotated[bool, Option("--force", "Make it again although it is there, or replace FILE.")] = False
    threads: Annotated[int | None, replace(THREADS, help="Threads to measure with. [physical cores]")] = None
    json: Annotated[bool, Option("--json", "One JSON object: what was made and what was measured.")] = False
    quiet: Annotated[bool, Option("-q --quiet", "Only the path and errors.")] = False
    color: Color = "auto"


@app.command()
@with_options
def make(models: ParentOptions, recipe: RecipeOptions, options: MakeOptions) -> None:
    """Derive a draft that costs less a token: coarser weights, fewer tokens, fewer layers.

    Without a recipe, or with a choice in it, candidates are made and measured with the target one after the other, and
    the one that promises most speed on this machine is kept, if any is faster than the model as it is. The answer's
    text never depends on the draft. The last line on stdout is the new file's path.
    """
    output = open_output(color=options.color, format="json" if options.json else "human", quiet=options.quiet)
    space = _space(recipe)
    parent_wanted, target_wanted = _meant(models)
    destination = None if options.output is None else _destination(options.output, force=options.force)
    searches = space.recipe is None or options.measure
    if searches and target_wanted is None:
        raise UsageError(
            "measuring a draft needs its target",
            hint="add -m TARGET; a draft of a model for itself: -m and the model again",
        )
    parent = pair_setup.bring(parent_wanted, Said(output), offline=models.offline).header
    if destination is not None and destination.resolve() in {part.resolve() for part in parent.parts}:
        raise UsageError("-o is the model's own file", hint="give another name")
    if searches and target_wanted is not None:
        _search(parent, target_wanted, space, destination, models, options, output)
        return
    assert space.recipe is not None
    derived, is_new = _made(parent, space.recipe, destination, force=options.force, output=output)
    _tell_made(derived, is_new, output)


def _space(options: RecipeOptions) -> Space:
    """What may be tried."""
    finds = options.drop_layers == "auto"
    dropped = () if finds or options.drop_layers is None else options.drop_layers
    return Space(options.quant or (), options.vocab or 0, dropped, finds)


def _meant(models: ParentOptions) -> tuple[Wanted, Wanted | None]:
    """(what to derive from, for which target; None where nobody said and nothing follows). Raises ConfigError."""
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
    """Where to write. Raises UsageError where that cannot be meant."""
    path = meant(text)
    if path.suffix != ".gguf" or path.is_dir():
        raise UsageError(f"-o {text} is no name for a model", hint="it ends in .gguf; its provenance goes beside it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}")
    if path.exists() and not force:
        raise UsageError(f"{path} is there already", hint="take another name, or --force to replace it")
    return path


def _made(
    parent: Header, recipe: Recipe, destination: Path | None, *, force: bool, output: Output
) -> tuple[Derived, bool]:
    """The draft of one recipe, and whether it was made now."""
    recipe = derive.checked(parent, recipe)
    path = destination or drafts.place(parent.path, recipe)
    with watching(output) as watch, only_one(_LOCK, watch):
        drafts.sweep()
        if destination is None and not force and (known := derive_search.ready(parent, recipe)) is not None:
            return known, False
        with StatusLine(output) as status:
            derive.make(parent, recipe, path, status.show)
            status.show("checksums", 1.0)
            return drafts.record(path, recipe, parent.path), True


def _tell_made(derived: Derived, is_new: bool, output: Output) -> None:
    if output.format == "json":
        output.data({"made": is_new, "draft": draft_view.draft_json(derived)})
        return
    share = derived.n_bytes / max(derived.parent.path.stat().st_size, 1)
    did = "made" if is_new else "there already:"
    size = f"{size_text(derived.n_bytes)}, {100 * share:.0f} % of its parent"
    output.note(f"{did} {derived.name}: {derived.recipe.summary}; {size}")
    output.note(draft_view.use_of(derived))
    output.line(str(derived.path))


def _search(
    parent: Header,
    target: Wanted,
    space: Space,
    destination: Path | None,
    models: ParentOptions,
    options: MakeOptions,
    output: Output,
) -> None:
    """Search, tell what was found, keep the best."""
    only = space.recipe
    if only is not None:
        only = derive.checked(parent, only)
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
    with watching(output) as watch, only_one(_LOCK, watch), StatusLine(output) as status:
        drafts.sweep()
        found = derive_search.search(
            parent,
            setup.subject,
            derive_search.everything(parent) if space == Space() else space,
            status.show,
            way=Way(path, path),
            effort=derive_search.QUICK if options.quick else derive_search.SEARCH,
            only=only,
        )
    kept = _kept(found, destination)
    for failure in found.failures:
        output.warn(f"not tried: {failure}")
    warn_of_noise(output, found.noise)
    draft_view.show_search(output, found, kept)


def _kept(found: SearchOutcome, destination: Path | None) -> Derived | None:
    """The draft that stays, where it was wanted."""
    kept = found.kept
    if kept is None or destination is None:
        return kept
    return drafts.moved(kept, destination)


@app.command("list")
@with_options
def list_all(json: Json = False, color: Color = "auto") -> None:
    """The derived drafts in the cache: what they were made of, and what they were worth when measured."""
    output = open_output(color=color, format="json" if json else "human")
    found, damaged = [], []
    for path in drafts.paths():
        try:
            derived = drafts.read(path)
            if derived is None:
                raise ConfigError(f"{path.name} has no record of what it was made of")
            found.append(derived)
        except ConfigError as error:
            damaged.append(f"{error}")
    if json:
        output.data({"folder": drafts.folder(), "drafts": [draft_view.draft_json(each) for each in found]})
    elif found:
        draft_view.show_list(output, found)
    else:
        output.line("No derived drafts yet. `specllama draft make` looks for one that pays.")
    for text in damaged:
        output.warn(text, "specllama draft remove NAME")


@app.command()
@with_options
def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Derived drafts, as `draft list` names them.")],
    yes: Annotated[bool, Option("-y --yes", "Do not ask.")] = False,
    quiet: Quiet = False,
) -> None:
    """Remove derived drafts from the cache."""
    output = open_output(quiet=quiet)
    paths = [_named(name) for name in dict.fromkeys(names)]
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("removing files needs --yes where nobody can be asked")
        size = size_text(sum(path.stat().st_size for path in paths))
        typer.confirm(f"Remove {', '.join(path.stem for path in paths)} ({size})?", abort=True, err=True)
    for path in paths:
        output.note(f"removed {path.stem} ({size_text(drafts.remove(path))})")


def _named(name: str) -> Path:
    """Raises ConfigError where there is no such draft."""
    path = drafts.named(name)
    if path is None:
        known = ", ".join(each.stem for each in drafts.paths())
        raise ConfigError(f"there is no derived draft named {name!r}", hint=f"there are: {known}" if known else "")
    return path
