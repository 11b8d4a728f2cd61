"""The options of `specllama batch`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import typer

from specllama.base.ranges import AUTO, either, sound, whole, word
from specllama.batch.requests import INPUT_FORMATS, RowTemplate
from specllama.cli.args import options as shared
from specllama.cli.args.grouping import Option
from specllama.cli.args.options import Color, HardwareOptions, SamplingOptions

MOST_PARALLEL = 64
# A bound is needed: the context of every request holds the longest prompt and an answer of this length. 512 tokens are
# a page of text; labels, translations and summaries are shorter.
N_PREDICT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The requests and their form."""

    title: ClassVar[str] = "Requests"

    prompts: Annotated[
        str,
        typer.Argument(
            metavar="PROMPTS",
            help="The requests: *.jsonl, *.txt or *.csv; - is stdin.",
            parser=partial(sound, "PROMPTS"),
        ),
    ]
    input_format: Annotated[
        str | None,
        Option("--input-format NAME", f"{', '.join(INPUT_FORMATS)}. [by the file's ending]", word(*INPUT_FORMATS)),
    ] = None
    row_template: Annotated[
        Any,
        Option(
            "--template TEXT",
            'Make prompts of rows or lines: "Translate: {text}" takes their text.',
            RowTemplate.check,
        ),
    ] = None
    system_prompt: Annotated[str | None, shared.SYSTEM_PROMPT] = None
    system_prompt_file: Annotated[str | None, shared.SYSTEM_PROMPT_FILE] = None
    chat_template: Annotated[str | None, shared.CHAT_TEMPLATE] = None
    raw: Annotated[bool, shared.RAW] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Where the answers go."""

    title: ClassVar[str] = "Answers"

    output: Annotated[
        str | None, Option("-o --output FILE", "A new file for the answers, a JSON object a line. [stdout]")
    ] = None
    resume: Annotated[bool, Option("--resume", "Answer only the requests that FILE does not hold.")] = False
    in_order: Annotated[
        bool, Option("--in-order", "Write the answers in the order of the requests, not as they finish.")
    ] = False
    json: Annotated[bool, Option("--json", "Print the statistics as one JSON object; needs -o.")] = False
    quiet: Annotated[bool, shared.QUIET] = False
    verbose: Annotated[bool, shared.VERBOSE] = False
    color: Color = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSampling(SamplingOptions):
    """How answers are sampled, and where they end."""

    seed: Annotated[int, replace(shared.SEED, help=f"{shared.SEED.help[:-1]}; line n has N + n - 1.")] = -1
    predict: Annotated[int, replace(shared.PREDICT, help="Most tokens of an answer; -1 is no limit but -c.")] = (
        N_PREDICT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHardware(HardwareOptions):
    """How models are loaded, and how many requests share them."""

    parallel: Annotated[
        Any,
        Option(
            "-np --parallel N",
            "Requests at once; auto: by costs and memory.",
            either(AUTO, AUTO, whole(1, MOST_PARALLEL)),
        ),
    ] = AUTO
    ctx_size: Annotated[
        int | None,
        replace(
            shared.CTX_SIZE,
            help="Context of each request in tokens; 0 is the training context. [the longest prompt and -n; "
            "for stdin the pair's, or up to 4096]",
        ),
    ] = None
