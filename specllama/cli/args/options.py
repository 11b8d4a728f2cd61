"""The options that commands share, in groups; names follow llama.cpp, and other tools' names work silently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from specllama.base.ranges import MAX_CTX, MAX_DRAFT, MIN_CTX
from specllama.cli.args.grouping import option
from specllama.cli.args.values import (
    KV_TYPES,
    gpu_layers,
    logit_bias,
    longest_draft,
    real,
    stop_string,
    strategies,
    whole,
    word,
)
from specllama.cli.screen.output import ColorMode
from specllama.drafters import REGISTRY

_N_THREADS = whole(1, 1024)
Color = Annotated[
    ColorMode,
    option(
        "--color",
        "Colours: auto, always or never; NO_COLOR and TERM=dumb are respected.",
        metavar="WHEN",
        check=word("auto", "always", "never"),
    ),
]

if TYPE_CHECKING:
    from specllama.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What is asked."""

    title: ClassVar[str] = "Prompt"

    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="What stands on stdin or in --file comes before it; - is stdin."),
    ] = None
    file: Annotated[str | None, option("-f --file", "Read the prompt from a file; - is stdin.", metavar="FILE")] = None
    system_prompt: Annotated[
        str | None,
        option("-sys --system-prompt", "What the model is told before the prompt.", metavar="TEXT", also="--system"),
    ] = None
    raw: Annotated[bool, option("--raw", "No chat template: the model continues the prompt as it stands.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which models; nothing at all means the default pair."""

    title: ClassVar[str] = "Models"

    pair: Annotated[
        str | None, option("--pair", "A pair by name; `specllama models list` shows them.", metavar="NAME")
    ] = None
    model: Annotated[
        str | None, option("-m --model", "The target: a file, a model or pair, or user/repo[:quant].", metavar="MODEL")
    ] = None
    model_draft: Annotated[
        str | None,
        option(
            "-md --model-draft",
            "The draft: a file, a model or pair, a derived draft, or user/repo[:quant].",
            metavar="MODEL",
            also="--draft-model --spec-draft-model",
        ),
    ] = None
    hf_repo: Annotated[
        str | None,
        option("-hf --hf-repo", "The target from the Hugging Face Hub.", metavar="USER/REPO[:QUANT]", also="-hfr"),
    ] = None
    hf_repo_draft: Annotated[
        str | None,
        option(
            "-hfd --hf-repo-draft", "The draft from the Hub.", metavar="USER/REPO[:QUANT]", also="--spec-draft-hf -hfrd"
        ),
    ] = None
    offline: Annotated[bool, option("--offline", "Use only what is here already; never ask the network.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions(ModelOptions):
    """Which pair, by its name alone; nothing at all means the default pair."""

    title: ClassVar[str] = "Models"

    pair: Annotated[
        str | None, typer.Argument(metavar="PAIR", help="A pair by name; the default pair if nothing is given.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How tokens are drafted and accepted."""

    title: ClassVar[str] = "Drafting"

    spec_type: Annotated[
        str,
        option(
            "--spec-type",
            f"Strategies that may draft, separated by commas: auto, {', '.join(REGISTRY)} (plain decoding).",
            metavar="LIST",
            check=strategies,
        ),
    ] = "auto"
    spec_draft_n_max: Annotated[
        Any,  # int or "auto"
        option(
            "--spec-draft-n-max",
            f"Longest draft, 0 to {MAX_DRAFT} tokens; auto decides anew at every step from what `specllama tune` "
            "measured, and before that takes the pair's, or 4.",
            metavar="N",
            check=longest_draft,
            also="--draft-max --draft --draft-n --num-draft-tokens",
        ),
    ] = "auto"
    spec_draft_p_min: Annotated[
        float,
        option(
            "--spec-draft-p-min",
            "Stop drafting where the draft's likeliest token is less likely than this.",
            metavar="P",
            check=real(0, 1),
            also="--draft-p-min",
        ),
    ] = 0.0
    draft_temp: Annotated[
        float | None,
        option(
            "--draft-temp",
            "Temperature of the draft; any value keeps the target's law. [--temp]",
            metavar="T",
            check=real(0),
        ),
    ] = None
    verify_rule: Annotated[
        str,
        option(
            "--verify-rule",
            "How drafted tokens are accepted, token, block or match; each keeps the target's law.",
            metavar="RULE",
            check=word("token", "block", "match"),
        ),
    ] = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class LawOptions:
    """How the target's law is made from its logits."""

    title: ClassVar[str] = "Sampling"

    temp: Annotated[
        float, option("--temp", "Temperature; 0 is greedy.", metavar="T", check=real(0), also="--temperature")
    ] = 0.8
    top_k: Annotated[
        int, option("--top-k", "Keep the K likeliest tokens; 0 keeps all.", metavar="K", check=whole(0))
    ] = 40
    top_p: Annotated[
        float,
        option("--top-p", "Keep the likeliest tokens that add up to P; 1 keeps all.", metavar="P", check=real(0, 1)),
    ] = 0.95
    min_p: Annotated[
        float,
        option(
            "--min-p",
            "Drop tokens less likely than P times the likeliest; 0 drops none.",
            metavar="P",
            check=real(0, 1),
        ),
    ] = 0.05
    repeat_penalty: Annotated[
        float,
        option(
            "--repeat-penalty",
            "Weaken tokens seen lately by this factor; 1 is off.",
            metavar="X",
            check=real(0, open_low=True),
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        option("--presence-penalty", "Take this from the logits of tokens seen lately.", metavar="X", check=real()),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        option("--frequency-penalty", "The same, once for each time a token was seen.", metavar="X", check=real()),
    ] = 0.0
    repeat_last_n: Annotated[
        int,
        option(
            "--repeat-last-n", "How far back penalties look; -1 is everything, 0 is off.", metavar="N", check=whole(-1)
        ),
    ] = 64
    logit_bias: Annotated[
        list[str] | None,
        option(
            "--logit-bias",
            "Add V to the logit of token ID, -inf forbids it; repeatable.",
            metavar="ID=V",
            check=logit_bias,
        ),
    ] = None

    @property
    def biases(self) -> dict[int, float]:
        """`--logit-bias` as a mapping; the last value of a token counts."""
        pairs = (text.partition("=") for text in self.logit_bias or ())
        return {int(token): float(bias) for token, _, bias in pairs}

    @property
    def params(self) -> SamplingParams:
        """The target's sampler settings."""
        from specllama.core.sampling import SamplingParams  # numpy; the help texts do without

        return SamplingParams(
            temperature=self.temp,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repeat_last_n=self.repeat_last_n,
            logit_bias=self.biases,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(LawOptions):
    """How an answer is drawn, and where it ends."""

    seed: Annotated[
        int,
        option("-s --seed", "Seed of every random draw; -1 takes a new one.", metavar="N", check=whole(-1, 2**64 - 1)),
    ] = -1
    predict: Annotated[
        int,
        option(
            "-n --predict",
            "Most tokens to generate; -1 goes on to the end of the answer.",
            metavar="N",
            check=whole(1, special=-1),
            also="--max-tokens --n-predict",
        ),
    ] = -1
    stop: Annotated[
        list[str] | None,
        option(
            "--stop",
            r"End the answer before this text; \n, \t and the like are understood; repeatable.",
            metavar="TEXT",
            check=stop_string,
            also="-r --reverse-prompt",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOptions:
    """How models are loaded."""

    title: ClassVar[str] = "Context and hardware"

    ctx_size: Annotated[
        int | None,
        option(
            "-c --ctx-size",
            "Tokens of context; 0 takes what the model was trained for. [the pair's, or 4096]",
            metavar="N",
            check=whole(MIN_CTX, MAX_CTX, special=0),
        ),
    ] = None
    threads: Annotated[
        int | None, option("-t --threads", "Threads that generate. [physical cores]", metavar="N", check=_N_THREADS)
    ] = None
    threads_batch: Annotated[
        int | None, option("-tb --threads-batch", "Threads that read the prompt. [-t]", metavar="N", check=_N_THREADS)
    ] = None
    threads_draft: Annotated[
        int | None,
        option(
            "-td --threads-draft",
            "Threads of the draft. [-t]",
            metavar="N",
            check=_N_THREADS,
            also="--spec-draft-threads",
        ),
    ] = None
    threads_batch_draft: Annotated[
        int | None,
        option(
            "-tbd --threads-batch-draft",
            "Threads with which the draft reads the prompt. [-td, or -tb]",
            metavar="N",
            check=_N_THREADS,
            also="--spec-draft-threads-batch",
        ),
    ] = None
    gpu_layers: Annotated[
        str,
        option(
            "-ngl --gpu-layers",
            "Layers on the GPU: a number, all, or auto for what fits.",
            metavar="N",
            check=gpu_layers,
            also="--n-gpu-layers",
        ),
    ] = "auto"
    gpu_layers_draft: Annotated[
        str,
        option(
            "-ngld --gpu-layers-draft",
            "Layers of the draft on the GPU.",
            metavar="N",
            check=gpu_layers,
            also="--n-gpu-layers-draft --spec-draft-ngl",
        ),
    ] = "auto"
    cache_type_k: Annotated[
        str,
        option(
            "-ctk --cache-type-k",
            f"Type of keys in the KV cache: {', '.join(KV_TYPES)}.",
            metavar="TYPE",
            check=word(*KV_TYPES),
        ),
    ] = "f16"
    cache_type_v: Annotated[
        str,
        option(
            "-ctv --cache-type-v",
            "Type of values; a quantised one needs flash attention.",
            metavar="TYPE",
            check=word(*KV_TYPES),
        ),
    ] = "f16"
    cache_type_k_draft: Annotated[
        str,
        option(
            "-ctkd --cache-type-k-draft",
            "Type of the draft's keys; a quantised one can ruin the acceptance.",
            metavar="TYPE",
            check=word(*KV_TYPES),
            also="--spec-draft-type-k",
        ),
    ] = "f16"
    cache_type_v_draft: Annotated[
        str,
        option(
            "-ctvd --cache-type-v-draft",
            "Type of the draft's values.",
            metavar="TYPE",
            check=word(*KV_TYPES),
            also="--spec-draft-type-v",
        ),
    ] = "f16"
    flash_attn: Annotated[
        Literal["on", "off", "auto"],
        option(
            "-fa --flash-attn", "Flash attention: on, off or auto.", metavar="WHEN", check=word("on", "off", "auto")
        ),
    ] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is printed."""

    title: ClassVar[str] = "Output"

    json: Annotated[bool, option("--json", "One JSON object at the end instead of the answer.")] = False
    jsonl: Annotated[bool, option("--jsonl", "One JSON event a line, as it happens.")] = False
    quiet: Annotated[bool, option("-q --quiet", "The answer and errors, nothing else.")] = False
    color: Color = "auto"
    live: Annotated[
        bool | None, option("--live/--no-live", "Live figures below the answer. [on where both are on the terminal]")
    ] = None
    verbose: Annotated[
        bool, option("-v --verbose", "Say the seed and the models, and pass on llama.cpp's log; all on stderr.")
    ] = False

    @property
    def format(self) -> Literal["human", "json", "jsonl"]:
        """The form of stdout."""
        return "json" if self.json else "jsonl" if self.jsonl else "human"
