"""The options of `specllama bench`: those of the other commands, several values at once where they can be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import typer

from specllama.base.errors import UsageError
from specllama.base.ranges import MAX_CTX, MAX_DRAFT
from specllama.cli.args.grouping import option
from specllama.cli.args.options import Color, DraftOptions, HardwareOptions, PairOptions, SamplingOptions
from specllama.cli.args.values import KV_TYPES, duration, longest_draft, real, several, strategies, whole, word

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
        option(
            "-md --model-draft",
            "The draft: a file, a model or pair, a derived draft, or user/repo[:quant]; repeatable, to compare drafts.",
            metavar="MODEL",
            also="--draft-model --spec-draft-model",
        ),
    ] = None  # type: ignore[assignment]  # several drafts instead of one


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDrafting(DraftOptions):
    """How tokens are drafted; values separated by commas are all compared."""

    title: ClassVar[str] = "Drafting (values separated by commas are all compared)"

    spec_draft_n_max: Annotated[
        Any,  # tuple of int and "auto"
        option(
            "--spec-draft-n-max",
            f"Longest drafts, 0 to {MAX_DRAFT} tokens or auto; 0 is plain decoding, which always takes part; auto "
            "takes part where `specllama tune` left a profile. [0,2,4,8,auto; 0,4,auto where the budget is below 3m]",
            metavar="N,...",
            check=several(longest_draft),
            also="--draft-max --draft --draft-n --num-draft-tokens",
        ),
    ] = None
    spec_type: Annotated[
        Any,
        option(
            "--spec-type",
            "Strategies that draft; auto is draft-simple, or lookup where there is no draft model.",
            metavar="NAME,...",
            check=several(strategies),
        ),
    ] = "auto"
    verify_rule: Annotated[
        Any,
        option(
            "--verify-rule",
            "Rules by which drafted tokens are accepted: token, block, match.",
            metavar="RULE,...",
            check=several(word("token", "block", "match")),
        ),
    ] = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSampling(SamplingOptions):
    """How the target's law is made, and how long an answer is."""

    title: ClassVar[str] = "Sampling"

    temp: Annotated[
        Any,
        option(
            "--temp",
            "Temperatures; 0 is greedy. [0,0.7; 0 where the budget is below 3m]",
            metavar="T,...",
            check=several(real(0)),
            also="--temperature",
        ),
    ] = None
    seed: Annotated[
        int, option("-s --seed", "Seed; every prompt and repetition gets its own from it.", metavar="N", check=whole(0))
    ] = 0
    predict: Annotated[
        Any,
        option(
            "-n --predict",
            "Tokens of an answer; end tokens are forbidden, see --natural-stop. [128, 64 or 32, as the budget allows]",
            metavar="N,...",
            check=several(whole(8)),
            also="--max-tokens --n-predict --n-gen",
        ),
    ] = None
    stop: ClassVar[None] = None  # type: ignore[misc]  # its -r is the repetitions here


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchHardware(HardwareOptions):
    """How models are loaded; several values make several loads, each with a plain baseline of its own."""

    title: ClassVar[str] = "Context and hardware"

    threads: Annotated[
        Any,
        option(
            "-t --threads", "Threads that generate. [physical cores]", metavar="N,...", check=several(whole(1, 1024))
        ),
    ] = None
    cache_type_k: Annotated[
        Any,
        option(
            "-ctk --cache-type-k",
            f"Types of keys in the KV cache: {', '.join(KV_TYPES)}.",
            metavar="TYPE,...",
            check=several(word(*KV_TYPES)),
        ),
    ] = "f16"
    cache_type_v: Annotated[
        Any,
        option(
            "-ctv --cache-type-v",
            "Types of values; a quantised one needs flash attention.",
            metavar="TYPE,...",
            check=several(word(*KV_TYPES)),
        ),
    ] = "f16"
    cache_type_k_draft: Annotated[
        Any,
        option(
            "-ctkd --cache-type-k-draft",
            "Types of the draft's keys; a quantised one can ruin the acceptance.",
            metavar="TYPE,...",
            check=several(word(*KV_TYPES)),
            also="--spec-draft-type-k",
        ),
    ] = "f16"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRuns:
    """What is asked, and how often."""

    title: ClassVar[str] = "Runs"

    budget: Annotated[
        Any,
        option(
            "--budget",
            "Time to spend, 90s or more; it decides how many prompts and repetitions there are. none runs everything.",
            metavar="TIME",
            check=_budget,
        ),
    ] = "10m"
    repetitions: Annotated[
        int | None,
        option(
            "-r --repetitions", "How often each run is repeated. [as the budget allows]", metavar="N", check=whole(1)
        ),
    ] = None
    prompts: Annotated[
        str | None,
        option(
            "--prompts",
            "Prompts of your own: JSON lines with category and turns, or Spec-Bench's question.jsonl. Of several turns "
            "the first is asked.",
            metavar="FILE",
        ),
    ] = None
    category: Annotated[
        Any,
        option("--category", "Only these classes of prompts.", metavar="NAME,...", check=several(lambda _, text: text)),
    ] = None
    n_prompts: Annotated[int | None, option("--n-prompts", "At most so many prompts.", metavar="N", check=whole(1))] = (
        None
    )
    prompt_length: Annotated[
        Any,
        option(
            "-p --prompt-length",
            "Lengthen prompts to so many tokens, with notes before the question; 0 leaves them as they are.",
            metavar="N,...",
            check=several(whole(0, MAX_CTX)),
            also="--n-prompt",
        ),
    ] = "0"
    depth: Annotated[
        Any,
        option(
            "-d --depth",
            "Tokens that both caches hold already when a prompt is read.",
            metavar="N,...",
            check=several(whole(0, MAX_CTX)),
            also="--n-depth",
        ),
    ] = "0"
    delay: Annotated[
        float, option("--delay", "Seconds to wait before every run: a fanless laptop cools down.", metavar="S",
                      check=real(0, 3600))
    ] = 0.0  # fmt: skip
    natural_stop: Annotated[
        bool, option("--natural-stop", "Let answers end where they end, after -n tokens at the latest.")
    ] = False
    synthetic: Annotated[
        float | None,
        option(
            "--synthetic",
            "Accept drafted tokens with this chance without judging them, to see what the loop itself costs; what is "
            "generated is no valid output.",
            metavar="RATE",
            check=real(0, 1),
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOutput:
    """What is printed, and where."""

    title: ClassVar[str] = "Output"

    format: Annotated[
        Literal["md", "csv", "json", "jsonl"],
        option("--format", "md, csv, json or jsonl (one event a line, as it happens).", metavar="NAME",
               check=word(*FORMATS)),
    ] = "md"  # fmt: skip
    output: Annotated[
        str | None,
        option("-o --output", "Also write the full report there; .md, .csv, .json and .jsonl say how.", metavar="FILE"),
    ] = None
    plots: Annotated[
        str | None, option("--plots", "Draw plots into this folder, as PNG and SVG; needs matplotlib.", metavar="DIR")
    ] = None
    quiet: Annotated[bool, option("-q --quiet", "The report and errors, nothing else.")] = False
    verbose: Annotated[
        bool,
        option("-v --verbose", "All tables: classes, time, acceptance, costs, machine and build."),
    ] = False
    color: Color = "auto"
