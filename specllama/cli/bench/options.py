"""The options of `specllama bench`: those of the other commands, several with lists of values to compare."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import typer

from specllama.base.errors import UsageError
from specllama.base.ranges import MAX_CTX, MAX_DRAFT, real, several, whole, word
from specllama.chat.settings import strategy_or_auto
from specllama.cli.args import options as shared
from specllama.cli.args.grouping import Option
from specllama.cli.args.options import Color, DraftOptions, HardwareOptions, PairOptions, SamplingOptions
from specllama.cli.args.values import KV_TYPES, duration

FORMATS = ("md", "csv", "json", "jsonl")
LEAST_BUDGET_S = 90.0  # about the time of costs, warm-up and two prompts of a 1.5B model on two cores


def _budget(name: str, text: object) -> float | None:
    """A `duration` long enough for a benchmark."""
    seconds = duration(name, text)
    if seconds is not None and seconds < LEAST_BUDGET_S:
        raise UsageError(
            f"{name} is {text}, expected {LEAST_BUDGET_S:.0f}s or more",
            hint="for a quick look: --budget none --n-prompts 2 --spec-draft-n-max 4 --temp 0 -n 32",
        )
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModels(PairOptions):
    """The pair or models, and the reports to compare."""

    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="A.json B.json", help="After the word compare: two reports to compare."),
    ] = None
    model_draft: Annotated[
        list[str] | None,
        replace(shared.MODEL_DRAFT, help=shared.MODEL_DRAFT.help[:-1] + "; repeatable, to compare drafts."),
    ] = None  # type: ignore[assignment]  # several drafts instead of one


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDrafting(DraftOptions):
    """How tokens are drafted, in lists."""

    title: ClassVar[str] = "Drafting (values separated by commas are all compared)"

    spec_draft_n_max: Annotated[
        Any,  # tuple of int and "auto"
        shared.DRAFT_N_MAX.many(
            f"Longest drafts, 0 to {MAX_DRAFT} tokens or auto. 0 is plain decoding, which is always measured; auto "
            "needs a profile of `specllama tune`. [0,2,4,8,auto; 0,4,auto for a budget below 3m; auto for --parallel]"
        ),
    ] = None
    spec_type: Annotated[
        Any,
        replace(shared.SPEC_TYPE, names="--spec-type NAME").many(
            "Strategies; auto is draft-simple, or lookup without a draft model.", strategy_or_auto
        ),
    ] = "auto"
    tree: Annotated[
        Any,
        shared.TREE.many(
            "Compare trees of so many nodes with chains of that length: short for --spec-type auto,tree with these "
            "lengths. With --parallel: one tree, without chains."
        ),
    ] = None
    verify_rule: Annotated[Any, shared.VERIFY_RULE.many("Rules to accept drafted tokens: token, block, match.")] = (
        "block"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSampling(SamplingOptions):
    """How the target samples, and how long an answer is."""

    temp: Annotated[
        Any, shared.TEMP.many("Temperatures; 0 is greedy. [0,0.7; 0 for a budget below 3m or --parallel]")
    ] = None
    seed: Annotated[
        int, replace(shared.SEED, help="Seed; every prompt and repetition derives its own.", check=whole(0))
    ] = 0
    seed_mode: Annotated[Any, shared.SEED_MODE.many("What a seed fixes: draws, or one text (same).")] = "draws"
    predict: Annotated[
        Any,
        replace(shared.PREDICT, also=shared.PREDICT.also + " --n-gen").many(
            "Tokens of an answer; end tokens are forbidden, see --natural-stop. [128, 64 or 32, by budget; 64 for "
            "--parallel]",
            whole(8),
        ),
    ] = None
    stop: ClassVar[None] = None  # type: ignore[misc]  # -r means --repetitions here


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchHardware(HardwareOptions):
    """How models are loaded. Every combination of values is a load with its own plain baseline."""

    ctx_size: Annotated[
        int | None,
        replace(shared.CTX_SIZE, help=f"{shared.CTX_SIZE.help[:-1]}; more for long runs, up to the training context]"),
    ] = None
    threads: Annotated[Any, shared.THREADS.many(shared.THREADS.help)] = None
    cache_type_k: Annotated[Any, shared.CACHE_TYPE_K.many(f"Types of keys in the KV cache: {', '.join(KV_TYPES)}.")] = (
        "f16"
    )
    cache_type_v: Annotated[
        Any, shared.CACHE_TYPE_V.many("Types of values; a quantized type needs flash attention.")
    ] = "f16"
    cache_type_k_draft: Annotated[
        Any, shared.CACHE_TYPE_K_DRAFT.many("Types of the draft's keys; quantization can lower the acceptance rate.")
    ] = "f16"
    rollback: Annotated[Any, shared.ROLLBACK.many(shared.ROLLBACK.help)] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRuns:
    """The prompts and the number of runs."""

    title: ClassVar[str] = "Runs"

    budget: Annotated[
        Any,
        Option(
            "--budget TIME",
            "Time to spend, 90s or more; limits the prompts and repetitions. none: run everything.",
            _budget,
        ),
    ] = "10m"
    parallel: Annotated[
        Any,
        Option(
            "-np --parallel N,...",
            "Measure many requests at once instead, these numbers of them, with and without drafts.",
            several(whole(1, 64)),
        ),
    ] = None
    repetitions: Annotated[
        int | None, Option("-r --repetitions N", "Repetitions of each run. [by budget]", whole(1))
    ] = None
    prompts: Annotated[
        str | None,
        Option(
            "--prompts FILE",
            "Your own prompts: JSON lines with category and turns, or Spec-Bench's question.jsonl. Only the first turn "
            "is used.",
        ),
    ] = None
    category: Annotated[
        Any, Option("--category NAME,...", "Only these classes of prompts.", several(lambda _, text: text))
    ] = None
    n_prompts: Annotated[int | None, Option("--n-prompts N", "Use at most N prompts.", whole(1))] = None
    prompt_length: Annotated[
        Any,
        Option(
            "-p --prompt-length N,...",
            "Lengthen prompts to N tokens, with notes before the question; 0 does not change them.",
            several(whole(0, MAX_CTX)),
            also="--n-prompt",
        ),
    ] = "0"
    depth: Annotated[
        Any,
        Option(
            "-d --depth N,...",
            "Tokens in both KV caches before the prompt.",
            several(whole(0, MAX_CTX)),
            also="--n-depth",
        ),
    ] = "0"
    delay: Annotated[
        float,
        Option("--delay S", "Seconds to wait before every run, to let a fanless laptop cool down.", real(0, 3600)),
    ] = 0.0
    natural_stop: Annotated[bool, Option("--natural-stop", "Allow end tokens; answers have at most -n tokens.")] = False
    synthetic: Annotated[
        float | None,
        Option(
            "--synthetic RATE",
            "Accept drafted tokens with this probability without verifying them, to measure the cost of the loop. The "
            "output is not valid.",
            real(0, 1),
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOutput:
    """The form and place of the report."""

    title: ClassVar[str] = "Output"

    format: Annotated[
        Literal["md", "csv", "json", "jsonl"],
        Option("--format NAME", "md, csv, json or jsonl (one line for each event).", word(*FORMATS)),
    ] = "md"
    output: Annotated[
        str | None,
        Option("-o --output FILE", "Also write the full report to FILE, named *.md, *.csv, *.json or *.jsonl."),
    ] = None
    plots: Annotated[
        str | None, Option("--plots DIR", "Write plots to this folder, as PNG and SVG; needs matplotlib.")
    ] = None
    quiet: Annotated[bool, Option("-q --quiet", "Only the report and errors.")] = False
    verbose: Annotated[
        bool, Option("-v --verbose", "All tables: classes, time, acceptance, costs, machine and build.")
    ] = False
    color: Color = "auto"
