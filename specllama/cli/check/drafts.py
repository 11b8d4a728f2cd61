"""`specllama check --draft-for`: possible drafts for a target, best first."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import fmean

from specllama import llama
from specllama.base.disk import FetchWatch, meant, size_text
from specllama.base.errors import SourceUnavailable, UsageError
from specllama.cli.args.options import ModelOptions
from specllama.cli.screen.output import Output
from specllama.cli.screen.status import watching
from specllama.cli.screen.tables import Cell, draw_table
from specllama.cli.screen.visible import in_one_line
from specllama.drafters.calibration import Prior
from specllama.drafters.controller import CostProfile, Points
from specllama.files.hub_cache import is_offline
from specllama.llama import Header, LoadOptions
from specllama.llama.header import refuse_architecture
from specllama.pairs.ask import Hardware
from specllama.pairs.check import Candidate, this_machine
from specllama.pairs.find_drafts import FoundDraft, OpenHeader, files_in, folders_here, judge, look_at, repos_for
from specllama.pairs.naming import named
from specllama.pairs.setup import usual_context
from specllama.tuning.forecast import FLAT, speedup

ONE_ROW: Points = ((1, 1.0),)


def find_drafts(
    text: str,
    models: ModelOptions,
    scan: str | None,
    wish: LoadOptions,
    hardware: Hardware,
    output: Output,
    *,
    hub: bool,
) -> bool:
    """List drafts for the target that `text` names; True if one fits.

    `wish`: how `hardware` loads the target, without its context. Raises UsageError, ConfigError,
    DownloadError, ModelFileError, and UnsupportedModel for a target without rollback.
    """
    if models.pair or models.model or models.model_draft or models.hf_repo or models.hf_repo_draft:
        raise UsageError("--draft-for names the target (expected no other model)", hint="omit PAIR, -m, -md, -hf, -hfd")
    with watching(output) as watch, look_at(named(text), offline=models.offline, watch=watch) as path:
        header = llama.read_header(path)
        refuse_architecture(header)
        places = _on_hub(header, models.offline, watch) if hub else _on_disk(header, scan)
        n_ctx = usual_context(header) if hardware.n_ctx is None else hardware.n_ctx
        target, machine = Candidate(header, replace(wish, n_ctx=n_ctx)), this_machine()
        found = ranked(
            [replace(judge(target, name, look, machine, hardware), place=place) for name, place, look in places]
        )
    if output.format == "json":
        output.data({"target": header.path.name, "candidates": list(map(_facts, found))})
    else:
        _show(output, header, found)
        best = next((each for each in found if each.fits), None)
        if best is not None and best.gain is not None and best.gain > 1.0:
            output.note(f"to use the best: specllama run {shlex.join(['-m', text, '-md', best.place])}")
    return any(each.fits for each in found)


def ranked(found: Sequence[FoundDraft]) -> list[FoundDraft]:
    """The candidates with their predicted gains, best first.

    Costs come from the profile of the pair, as far as they were measured. Without one, c is the share of the target's
    bytes, because both models are limited by the memory, and T(n) that of another pair with this target; if that was
    not measured, T(n) = T(1), the best case.
    """
    verify = _measured(found) or FLAT

    def gain(each: FoundDraft) -> float | None:
        if not each.fits or each.ratio is None:
            return None
        costs, alpha = CostProfile(verify=verify, draft=((1, each.ratio), (2, each.ratio))), Prior().typical
        if each.profile is not None:
            habits = [habit.acceptance for greedy in (True, False) if (habit := each.profile.habit(greedy=greedy))]
            costs = replace(each.profile.costs, verify=_measured([each]) or ONE_ROW, assumed=())
            alpha = fmean(habits) if habits else alpha
        return max(speedup(costs, alpha, k) for k in range(costs.verify[-1][0]))

    return sorted((replace(each, gain=gain(each)) for each in found), key=lambda each: each.order)


def _measured(found: Sequence[FoundDraft]) -> Points:
    """T(n) of the first profile that has it, without what is assumed; empty if T(1) alone was measured."""
    several = (each.profile.costs for each in found if each.profile is not None)
    curves = (tuple(point for point in costs.verify if point[0] not in costs.assumed) for costs in several)
    return next((curve for curve in curves if curve != ONE_ROW), ())


def _facts(each: FoundDraft) -> dict[str, object]:
    """For JSON; `measured`: the costs are those of the pair's profile."""
    facts = asdict(replace(each, profile=None))
    return {**facts, "profile": None if each.profile is None else each.profile.made}


def _on_disk(target: Header, scan: str | None) -> Iterator[tuple[str, str, OpenHeader]]:
    """Name, value of -md, and header of the models in the folder `scan`, else in the model folders of this machine."""
    folder = meant(scan) if scan is not None else None
    if folder is not None and not os.path.isdir(folder):
        raise UsageError(f"--scan {folder} is not a folder")
    for place in folders_here() if folder is None else [folder]:
        for path in files_in(place, target):
            name = path.name if folder is None else str(path.relative_to(place))
            yield name, str(path), partial(look_at, path)


def _on_hub(target: Header, offline: bool, watch: FetchWatch) -> Iterator[tuple[str, str, OpenHeader]]:
    if offline or is_offline():
        raise SourceUnavailable("--hub needs the network (offline mode is on)", hint="omit --offline once")
    for repo in repos_for(target, target.n_params, watch):
        yield repo, repo, partial(look_at, repo, watch=watch)


def _show(output: Output, target: Header, found: list[FoundDraft]) -> None:
    """A row for each candidate."""
    rows = [("in" if each.fits else "out", *_columns(each)) for each in found]
    if output.out.steerable:
        cells: list[tuple[Cell, ...]] = [
            ((name, "green" if mark == "in" else "red"), mark, *words) for mark, name, *words in rows
        ]
        heads = ("draft", "", "size", "", "gain", "reason")
        draw_table(output, heads, cells, figures=["size"], prose="reason")
    else:
        for row in rows:
            output.row(*row)
    n_in = sum(each.fits for each in found)
    output.note(f"{n_in} of {len(found)} fit {in_one_line(target.path.name)}" if found else "no models found")
    if any(each.fits and each.profile is None for each in found):
        bound = "" if _measured(found) else ", with free verification: upper bounds"
        output.note(f"gains with `about` are from sizes, at an acceptance of {Prior().typical:.0%}{bound}")


def _columns(each: FoundDraft) -> tuple[str, str, str, str, str]:
    """Name, size, share of the target's size, predicted gain, and reason."""
    size = "" if each.n_bytes is None else size_text(each.n_bytes)
    ratio = "" if each.ratio is None else f"{each.ratio:.2g} of it"
    about = "" if each.profile is not None else "about "
    gain = "" if each.gain is None else f"{about}{each.gain:.1f}x plain"
    return each.name, size, ratio, gain, each.reason
