"""`specllama models`: list, show, pull, path, verify, remove, add, import."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from specllama import llama
from specllama.base.disk import meant, only_one, size_text
from specllama.base.errors import ConfigError, ModelFileError, UsageError
from specllama.base.ranges import MAX_CTX, MAX_DRAFT, MAX_MEMORY_GB, MIN_CTX, whole
from specllama.cli.args import options as shared
from specllama.cli.args.grouping import Option, with_options
from specllama.cli.args.options import Color, Json, Offline, Quiet
from specllama.cli.codes import FAILED
from specllama.cli.loading import Said
from specllama.cli.models import importing
from specllama.cli.models import view as models_view
from specllama.cli.screen.output import Output, open_output
from specllama.cli.screen.status import watching
from specllama.files import hub, models_toml
from specllama.files.catalog import Catalog, load_catalog, user_file
from specllama.files.model import CatalogPair, Model, PairDefaults, PathSource
from specllama.files.other_apps import found_models
from specllama.files.verify import Verified
from specllama.files.verify import verify as verified
from specllama.pairs.naming import Wanted
from specllama.pairs.setup import fetch, resolve

app = typer.Typer(help="List, fetch and describe models and pairs.", no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A pair, a model, or user/repo[:quant] on the Hub.")]


def _catalog(output: Output) -> Catalog:
    """Every pair and model; notes about models.toml go to stderr."""
    catalog = load_catalog()
    for note in catalog.notes:
        output.note(note)
    return catalog


def _models(catalog: Catalog, name: str, *, offline: bool) -> tuple[Model, ...]:
    """The models behind a name. Raises ConfigError, SourceUnavailable."""
    return (hub.repo_model(name, offline=offline),) if "/" in name else catalog.resolve(name)


@app.command("list")
@with_options
def list_all(json: Json = False, color: Color = "auto") -> None:
    """List all pairs and models, and which of them are on this machine."""
    output = open_output(color=color, format="json" if json else "human")
    catalog = _catalog(output)
    if json:
        pairs = [models_view.pair_json(pair) for pair in catalog.pairs.values()]
        models = [models_view.model_json(model) for model in catalog.models.values()]
        output.data({"default": catalog.default, "pairs": pairs, "models": models})
    else:
        models_view.show_list(output, catalog)


@app.command()
@with_options
def show(name: Name, json: Json = False, color: Color = "auto") -> None:
    """Show everything known about a pair or a model."""
    output = open_output(color=color, format="json" if json else "human")
    catalog = _catalog(output)
    pair = catalog.pairs.get(name)
    models = _models(catalog, name, offline=True)
    if json:
        described = [models_view.model_json(model) for model in models]
        output.data({**models_view.pair_json(pair), "models": described} if pair else described[0])
    elif pair:
        models_view.show_pair(output, pair)
    else:
        models_view.show_model(output, models[0])


@app.command()
@with_options
def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Pairs, models or user/repo[:quant]. [the default pair]"),
    ] = None,
    offline: Offline = False,
    update: Annotated[
        bool, Option("--update", "Fetch the newest revision of unpinned models, and keep to it from then on.")
    ] = False,
    quiet: Quiet = False,
    color: Color = "auto",
) -> None:
    """Fetch models and print their paths; for a pair the target, then the draft."""
    output = open_output(color=color, quiet=quiet)
    catalog = _catalog(output)
    listener, wanted = Said(output), list[Wanted]()
    for name in names or [catalog.default]:
        wanted += [name] if "/" in name else catalog.resolve(name)
    for model in resolve(wanted, listener, offline=offline, update=update):
        assert isinstance(model, Model), "a catalog and a repository hold no paths"
        output.path(fetch(model, listener, offline=offline, update=update).path)


@app.command()
@with_options
def path(name: Name) -> None:
    """Print the path of a model; for a pair the target, then the draft. Exit code 1 if it is not fetched."""
    output = open_output()
    for model in _models(_catalog(output), name, offline=True):
        found = hub.find(model)
        if found is None:
            raise ModelFileError(f"{model.name} is not on this machine", hint=models_view.how_to_get(model, name))
        output.path(found)


@app.command()
@with_options
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Pairs, models or user/repo[:quant]. [all on this machine]"),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    color: Color = "auto",
) -> None:
    """Read the files of models again and compare their SHA-256. Exit code 1 if a file is damaged."""
    output = open_output(color=color, format="json" if json else "human", quiet=quiet)
    catalog = _catalog(output)
    models = {model.name: model for name in names or () for model in _models(catalog, name, offline=True)}
    checked: list[tuple[Model, list[Verified]]] = []
    with watching(output) as watch:
        for model in models.values() if names else catalog.models.values():
            files = verified(model, watch)
            if names and not files:
                raise ModelFileError(
                    f"{model.name} is not on this machine", hint=models_view.how_to_get(model, model.name)
                )
            checked += [(model, files)] if files else []
    models_view.show_verified(output, checked)
    if any(file.state == "damaged" for _, files in checked for file in files):
        raise typer.Exit(FAILED)


@app.command()
@with_options
def remove(name: Name, yes: Annotated[bool, Option("-y --yes", "Do not ask.")] = False, quiet: Quiet = False) -> None:
    """Remove the files of a model from this machine; for a pair those that no other fetched pair uses.

    Your own files stay. A pair that has no others is removed from your models.toml.
    """
    output = open_output(quiet=quiet)
    catalog = _catalog(output)
    models = _models(catalog, name, offline=True)
    if all(model.only_here for model in models):
        _forget(catalog, name, output, yes=yes)
        return
    doomed: dict[Path, Model] = {}  # by file: the halves of a pair may be one
    for model in models:
        users = _other_users(catalog, name, model) if name in catalog.pairs else []
        if users:
            output.note(f"{model.name} is kept: {', '.join(users)} uses it")
        elif (found := hub.find(model)) is None:
            output.note(f"{model.name} is not on this machine")
        else:
            doomed[found.resolve()] = model
    if doomed and not yes:
        if not sys.stdin.isatty():
            raise UsageError("removing files needs --yes (stdin is not a terminal)")
        size = size_text(sum(path.stat().st_size for path in doomed))
        output.confirm(f"Remove {', '.join(model.name for model in doomed.values())} ({size})?")
    for path, model in doomed.items():
        removed = hub.remove(model)
        if not removed:
            output.note(f"{model.name} is kept because it is your own file: {path}")
        for place in removed:
            output.note(f"removed {place}")


def _forget(catalog: Catalog, name: str, output: Output, *, yes: bool) -> None:
    """Remove a pair of the user's own files from models.toml. Raises ConfigError for a model, and for another file."""
    if name not in catalog.pairs:
        path = catalog.model(name).sources[0]
        raise ConfigError(f"{name} is your own file, which is not removed ({path})", hint="delete it by hand")
    if not yes and not sys.stdin.isatty():
        raise UsageError("removing a pair needs --yes (stdin is not a terminal)")
    if not yes:
        output.confirm(f"Remove the pair {name} from {user_file()}? Its files stay.")
    with watching(output) as watch, only_one(user_file().name, watch):
        models_toml.remove_pair(user_file(), load_catalog().pairs[name])
    output.note(f"removed {name} from {user_file()}; its files stay")


def _other_users(catalog: Catalog, name: str, model: Model) -> list[str]:
    """The other pairs that use `model` and whose other model is on this machine."""
    users = []
    for pair in catalog.pairs.values():
        other = {pair.target.name: pair.draft, pair.draft.name: pair.target}.get(model.name)
        if pair.name != name and other is not None and hub.find(other):
            users.append(pair.name)
    return users


_WHAT = "A model's name, a GGUF file, or user/repo[:quant or file.gguf] on the Hub."


@app.command()
@with_options
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the new pair.")],
    target: Annotated[str, Option("-m --target WHAT", _WHAT)],
    draft: Annotated[str, Option("-md --draft WHAT", _WHAT)],
    summary: Annotated[str, Option("--summary TEXT", "The description in `models list`.")] = "",
    memory_gb: Annotated[
        int | None, Option("--memory-gb N", "Memory of a suitable machine.", whole(1, MAX_MEMORY_GB))
    ] = None,
    n_max: Annotated[
        int | None,
        replace(shared.DRAFT_N_MAX, help="Its longest draft.", check=whole(1, MAX_DRAFT), also="--draft-max"),
    ] = None,
    n_ctx: Annotated[int | None, replace(shared.CTX_SIZE, help="Its context.", check=whole(MIN_CTX, MAX_CTX))] = None,
    force: Annotated[bool, Option("--force", "Replace a pair or model with this name.")] = False,
    offline: Offline = False,
) -> None:
    """Add a named pair to your models.toml. Fetches nothing."""
    output = open_output()
    catalog = _catalog(output)
    _check_free(catalog, name, force=force)
    halves = [_described(catalog, what, offline=offline) for what in (target, draft)]
    pair = CatalogPair(name, halves[0], halves[1], summary, memory_gb, PairDefaults(n_max, n_ctx))
    with watching(output) as watch, only_one(user_file().name, watch):
        catalog = load_catalog()  # again: another `add` may have changed the file
        _check_free(catalog, name, force=force)
        backup = models_toml.add_pair(user_file(), pair, _new_models(catalog, halves, force=force))
    fetch = (
        ""
        if all(model.only_here or hub.find(model) for model in halves)
        else f"; fetch it: specllama models pull {name}"
    )
    output.note(f"added {name} to {user_file()}{fetch}")
    if backup is not None:
        output.note(f"the previous file is kept as {backup.name}")


@app.command("import")
@with_options
def import_models(json: Json = False, quiet: Quiet = False, color: Color = "auto") -> None:
    """Find models of ollama, LM Studio, llama.cpp and the Hub, and pairs of them.

    Shows the command that adds each pair. Copies and changes nothing.
    """
    output = open_output(color=color, format="json" if json else "human", quiet=quiet)
    models = importing.readable(list(found_models()), output)
    pairs = list(importing.offers(models, load_catalog()))
    importing.report(output, models, pairs)
    output.note(importing.counts(models, pairs) if models else importing.looked_in())


def _check_free(catalog: Catalog, name: str, *, force: bool) -> None:
    """Raise ConfigError if a pair has this name."""
    if name in catalog.pairs and not force:
        raise ConfigError(f"a pair named {name} exists", hint="use another name, or --force to replace it")


def _new_models(catalog: Catalog, halves: list[Model], *, force: bool) -> tuple[Model, ...]:
    """The models that have no table yet. Raises ConfigError if another model has the same name."""
    new = {model.name: model for model in halves if model != catalog.models.get(model.name)}
    for name in new:
        if name in catalog.models and not force:
            raise ConfigError(
                f"a model named {name} exists, from {catalog.models[name].sources[0]}",
                hint=f"to use it, give its name: {name}; to replace it, use --force",
            )
    return tuple(new.values())


def _described(catalog: Catalog, what: str, *, offline: bool) -> Model:
    """The model that `what` means. Raises ConfigError, UsageError, SourceUnavailable."""
    file = meant(what)
    if os.path.isfile(file):  # also False for a name that is too long
        if (same := hub.named_among(catalog.models.values(), file)) is not None:
            return same
        name = file.stem if file.suffix == ".gguf" else _name_inside(file)
        return Model(name, f"{name}.gguf", None, None, "not stated", (PathSource(file.resolve()),))
    if what.removesuffix(".gguf") in catalog.models or "/" not in what:
        return catalog.model(what)
    if what.endswith(".gguf") and ":" not in what:
        raise ModelFileError(f"{file} does not exist", hint="check the path")
    model = hub.repo_model(what, offline=offline)
    return hub.named_among(catalog.models.values(), model) or model


def _name_inside(file: Path) -> str:
    """A name for a file such as a blob of ollama, which has no readable one: by its header, and the end of its name."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", llama.read_header(file).name).strip("-._+")
    end = re.sub(r"[^A-Za-z0-9]+", "", file.name)[-8:]
    return "-".join(part for part in (name, end) if part)
