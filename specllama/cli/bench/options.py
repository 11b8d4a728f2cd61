"""The options of `specllama bench`: those of the other commands, several values at once where they can be compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import typer

from specllama.base.errors import UsageError
from specllama.base.ranges import MAX_CTX, MAX_DRAFT, real, several, whole, word
from specllama.cli.args import options as shared
from specllama.cli.args.grouping import Option
from specllama.cli.args.options import Color, DraftOptions, HardwareOptions, PairOptions, SamplingOptions
from specllama.cli.args.values import KV_TYPES, duration, strategy_or_auto

FORMATS = ("md", "csv", "json", "jsonl")
LEAST_BUDGET_S = 90.0  # costs, warm-up and two prompts of a 1.5B model on two cores take about that


def _budget(name: str, text: object) -> float | None:
    """A `duration` that is enough for a benchmark."""
    seconds = duration(name, text)
    if seconds is not None and seconds < LEAST_BUDGET_S:
        raise UsageError(
            f"{name} is {text}, expected {LEAST_BUDGET_S:.0f}s or more",
            hint="for a quick look: --budget none --n-prompts 2 --spec-draft-n-max 4 --temp 0 -n 32",
        )
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModels(PairOptions):
    """Which pair; nothing at all means the default pair."""

    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="A.json B.json", help="After the word compare: two reports to set side by side."),
    ] = None
    model_draft: Annotated[
        list[str] | None,
        replace(shared.MODEL_DRAFT, help=shared.MODEL_DRAFT.help[:-1] + "; repeatable, to compare drafts."),
    ] = None  # type: ignore[assignment]  # several drafts instead of one


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDrafting(DraftOptions):
    """How tokens are drafted; values separated by commas are all compared."""

    title: ClassVar[str] = "Drafting (values separated by commas are all compared)"

    spec_draft_n_max: Annotated[
        Any,  # tuple of int and "auto"
        shared.DRAFT_N_MAX.many(
            f"Longest drafts, 0 to {MAX_DRAFT} tokens or auto; 0 is plain decoding, which always takes part; auto "
            "takes part where `specllama tune` left a profile. [0,2,4,8,auto; 0,4,auto where the budget is below 3m]"
        ),
    ] = None
    spec_type: Annotated[
        Any,
        replace(shared.SPEC_TYPE, names="--spec-type NAME").many(
            "Strategies that draft; auto is draft-simple, or lookup where there is no draft model.", strategy_or_auto
        ),
    ] = "auto"
    verify_rule: Annotated[
        Any, shared.VERIFY_RULE.many("Rules by which drafted tokens are accepted: token, block, match.")
    ] = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSampling(SamplingOptions):
    """How the target's law is made, and how long an answer is."""

    temp: Annotated[Any, shared.TEMP.many("Temperatures; 0 is greedy. [0,0.7; 0 where the budget is below 3m]")] = None
    seed: Annotated[
        int, replace(shared.SEED, help="Seed; every prompt and repetition gets its own from it.", check=whole(0))
    ] = 0
    predict: Annotated[
        Any,
        replace(shared.PREDICT, also=shared.PREDICT.also + " --n-gen").many(
            "Tokens of an answer; end tokens are forbidden, see --natural-stop. [128, 64 or 32, as the budget allows]",
            whole(8),
        ),
    ] = None
    stop: ClassVar[None] = None  # type: ignore[misc]  # its -r is the repetitions here


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchHardware(HardwareOptions):
    """How models are loaded; several values make several loads, each with a plain baseline of its own."""

    threads: Annotated[Any, shared.THREADS.many(shared.THREADS.help)] = None
    cache_type_k: Annotated[Any, shared.CACHE_TYPE_K.many(f"Types of keys in the KV cache: {', '.join(KV_TYPES)}.")] = (
        "f16"
    )
    cache_type_v: Annotated[
        Any, shared.CACHE_TYPE_V.many("Types of values; a quantised one needs flash attention.")
    ] = "f16"
    cache_type_k_draft: Annotated[
        Any, shared.CACHE_TYPE_K_DRAFT.many("Types of the draft's keys; a quantised one can ruin the acceptance.")
    ] = "f16"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRuns:
    """What is asked, and how often."""

    title: ClassVar[str] = "Runs"

    budget: Annotated[
        Any,
        Option(
            "--budget TIME",
            "Time to spend, 90s or more; it decides how many prompts and repetitions there are. none runs everything.",
            _budget,
        ),
    ] = "10m"
    repetitions: Annotated[
        int | None,
        Option("-r --repetitions N", "How often each run is repeated. [as the budget allows]", whole(1)),
    ] = None
    prompts: Annotated[
        str | None,
        Option(
            "--prompts FILE",
            "Prompts of your own: JSON lines with category and turns, or Spec-Bench's question.jsonl. Of several turns "
            "the first is asked.",
        ),
    ] = None
    category: Annotated[
        Any, Option("--category NAME,...", "Only these classes of prompts.", several(lambda _, text: text))
    ] = None
    n_prompts: Annotated[int | None, Option("--n-prompts N", "At most so many prompts.", whole(1))] = None
    prompt_length: Annotated[
        Any,
        Option(
            "-p --prompt-length N,...",
            "Lengthen prompts to so many tokens, with notes before the question; 0 leaves them as they are.",
            several(whole(0, MAX_CTX)),
            also="--n-prompt",
        ),
    ] = "0"
    depth: Annotated[
        Any,
        Option(
            "-d --depth N,...",
            "Tokens that both caches hold already when a prompt is read.",
            several(whole(0, MAX_CTX)),
            also="--n-depth",
        ),
    ] = "0"
    delay: Annotated[
        float, Option("--delay S", "Seconds to wait before every run: a fanless laptop cools down.", real(0, 3600))
    ] = 0.0
    natural_stop: Annotated[
        bool, Option("--natural-stop", "Let answers end where they end, after -n tokens at the latest.")
    ] = False
    synthetic: Annotated[
        float | None,
        Option(
            "--synthetic RATE",
            "Accept drafted tokens with this chance without judging them, to see what the loop itself costs; what is "
            "generated is no valid output.",
            real(0, 1),
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOutput:
    """What is printed, and where."""

    title: ClassVar[str] = "Output"

    format: Annotated[
        Literal["md", "csv", "json", "jsonl"],
        Option("--format NAME", "md, csv, json or jsonl (one event a line, as it happens).", word(*FORMATS)),
    ] = "md"
    output: Annotated[
        str | None,
        Option("-o --output FILE", "Also write the full report there; .md, .csv, .json and .jsonl say how."),
    ] = None
    plots: Annotated[
        str | None, Option("--plots DIR", "Draw plots into this folder, as PNG and SVG; needs matplotlib.")
    ] = None
    quiet: Annotated[bool, Option("-q --quiet", "The report and errors, nothing else.")] = False
    verbose: Annotated[
        bool,
        Option("-v --verbose", "All tables: classes, time, acceptance, costs, machine and build."),
    ] = False
    color: Color = "auto"
