"""Every option that commands share, each defined once, and the groups of them.

Names follow llama.cpp; other tools' names work and are not shown. Range and text of an option that is a setting of a
chat, too, are those of the setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import typer

from specllama.base.ranges import MAX_CTX, MAX_DRAFT, MIN_CTX, whole, word
from specllama.chat.settings import SETTINGS, stop_string
from specllama.cli.args.grouping import Option
from specllama.cli.args.values import KV_TYPES, gpu_layers, logit_bias, strategies
from specllama.cli.screen.output import ColorMode
from specllama.core.sampling import SamplingParams
from specllama.drafters import REGISTRY
from specllama.drafters.length import AUTO_LENGTH, DraftLength


def _setting(name: str, names: str, more: str = "", *, also: str = "") -> Option:
    """The option of a setting; `more` ends its help text."""
    setting = SETTINGS[name]
    return Option(names, setting.help[0].upper() + setting.help[1:] + (more or "."), setting.check, also)


# prompt
FILE = Option("-f --file FILE", "Read the prompt from a file; - is stdin.")
SYSTEM_PROMPT = Option("-sys --system-prompt TEXT", "What the model is told before the prompt.", also="--system")
RAW = Option("--raw", "No chat template: the model continues the prompt as it stands.")

# models
PAIR = Option("--pair NAME", "A pair by name; `specllama models list` shows them.")
MODEL = Option("-m --model MODEL", "The target: a file, a model or pair, or user/repo[:quant].")
MODEL_DRAFT = Option(
    "-md --model-draft MODEL",
    "The draft: a file, a model or pair, a derived draft, or user/repo[:quant].",
    also="--draft-model --spec-draft-model",
)
HF_REPO = Option("-hf --hf-repo USER/REPO[:QUANT]", "The target from the Hugging Face Hub.", also="-hfr")
HF_REPO_DRAFT = Option(
    "-hfd --hf-repo-draft USER/REPO[:QUANT]", "The draft from the Hub.", also="--spec-draft-hf -hfrd"
)
OFFLINE = Option("--offline", "Use only what is here already; never ask the network.")

# drafting
SPEC_TYPE = Option(
    "--spec-type LIST",
    f"Strategies that may draft, separated by commas: auto, {', '.join(REGISTRY)} (plain decoding).",
    strategies,
)
DRAFT_N_MAX = Option(
    "--spec-draft-n-max N",
    f"Longest draft, 0 to {MAX_DRAFT} tokens; auto decides anew at every step from what `specllama tune` measured, and "
    "before that takes the pair's, or 4.",
    SETTINGS["draft-n-max"].check,
    also="--draft-max --draft --draft-n --num-draft-tokens",
)
DRAFT_P_MIN = _setting("draft-p-min", "--spec-draft-p-min P", also="--draft-p-min")
DRAFT_TEMP = Option(
    "--draft-temp T",
    "Temperature of the draft; any value keeps the target's law. [--temp]",
    SETTINGS["draft-temp"].check,
)
VERIFY_RULE = _setting("rule", "--verify-rule RULE", ", token, block or match; each keeps the target's law.")

# sampling
TEMP = _setting("temp", "--temp T", also="--temperature")
TOP_K = _setting("top-k", "--top-k K")
TOP_P = _setting("top-p", "--top-p P")
MIN_P = _setting("min-p", "--min-p P")
REPEAT_PENALTY = _setting("repeat-penalty", "--repeat-penalty X")
PRESENCE_PENALTY = _setting("presence-penalty", "--presence-penalty X")
FREQUENCY_PENALTY = _setting("frequency-penalty", "--frequency-penalty X")
REPEAT_LAST_N = _setting("repeat-last-n", "--repeat-last-n N")
LOGIT_BIAS = Option("--logit-bias ID=V", f"A{SETTINGS['logit-bias'].help[1:]}; repeatable.", logit_bias)
SEED = _setting("seed", "-s --seed N")
PREDICT = _setting("predict", "-n --predict N", also="--max-tokens --n-predict")
STOP = Option("--stop TEXT", f"E{SETTINGS['stop'].help[1:]}; repeatable.", stop_string, also="-r --reverse-prompt")

# context and hardware
_N_THREADS = whole(1, 1024)
_KV_TYPE = word(*KV_TYPES)
CTX_SIZE = Option(
    "-c --ctx-size N",
    "Tokens of context; 0 takes what the model was trained for. [the pair's, or 4096]",
    whole(MIN_CTX, MAX_CTX, special=0),
)
THREADS = Option("-t --threads N", "Threads that generate. [physical cores]", _N_THREADS)
THREADS_BATCH = Option("-tb --threads-batch N", "Threads that read the prompt. [-t]", _N_THREADS)
THREADS_DRAFT = Option("-td --threads-draft N", "Threads of the draft. [-t]", _N_THREADS, also="--spec-draft-threads")
THREADS_BATCH_DRAFT = Option(
    "-tbd --threads-batch-draft N",
    "Threads with which the draft reads the prompt. [-td, or -tb]",
    _N_THREADS,
    also="--spec-draft-threads-batch",
)
GPU_LAYERS = Option(
    "-ngl --gpu-layers N", "Layers on the GPU: a number, all, or auto for what fits.", gpu_layers, also="--n-gpu-layers"
)
GPU_LAYERS_DRAFT = Option(
    "-ngld --gpu-layers-draft N",
    "Layers of the draft on the GPU.",
    gpu_layers,
    also="--n-gpu-layers-draft --spec-draft-ngl",
)
CACHE_TYPE_K = Option("-ctk --cache-type-k TYPE", f"Type of keys in the KV cache: {', '.join(KV_TYPES)}.", _KV_TYPE)
CACHE_TYPE_V = Option("-ctv --cache-type-v TYPE", "Type of values; a quantised one needs flash attention.", _KV_TYPE)
CACHE_TYPE_K_DRAFT = Option(
    "-ctkd --cache-type-k-draft TYPE",
    "Type of the draft's keys; a quantised one can ruin the acceptance.",
    _KV_TYPE,
    also="--spec-draft-type-k",
)
CACHE_TYPE_V_DRAFT = Option(
    "-ctvd --cache-type-v-draft TYPE", "Type of the draft's values.", _KV_TYPE, also="--spec-draft-type-v"
)
FLASH_ATTN = Option("-fa --flash-attn WHEN", "Flash attention: on, off or auto.", word("on", "off", "auto"))

# output
JSON = Option("--json", "One JSON object.")
QUIET = Option("-q --quiet", "Only the data and errors.")
VERBOSE = Option("-v --verbose", "Say the seed and the models, and pass on llama.cpp's log; all on stderr.")
COLOR = Option(
    "--color WHEN",
    "Colours: auto, always or never; NO_COLOR and TERM=dumb are respected.",
    word("auto", "always", "never"),
)

Offline = Annotated[bool, OFFLINE]
Json = Annotated[bool, JSON]
Quiet = Annotated[bool, QUIET]
Color = Annotated[ColorMode, COLOR]


# ------------------------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What is asked."""

    title: ClassVar[str] = "Prompt"

    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="What stands on stdin or in --file comes before it; - is stdin."),
    ] = None
    file: Annotated[str | None, FILE] = None
    system_prompt: Annotated[str | None, SYSTEM_PROMPT] = None
    raw: Annotated[bool, RAW] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which models; nothing at all means the default pair."""

    title: ClassVar[str] = "Models"

    pair: Annotated[str | None, PAIR] = None
    model: Annotated[str | None, MODEL] = None
    model_draft: Annotated[str | None, MODEL_DRAFT] = None
    hf_repo: Annotated[str | None, HF_REPO] = None
    hf_repo_draft: Annotated[str | None, HF_REPO_DRAFT] = None
    offline: Offline = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions(ModelOptions):
    """Which pair, by its name alone; nothing at all means the default pair."""

    pair: Annotated[
        str | None, typer.Argument(metavar="PAIR", help="A pair by name; the default pair if nothing is given.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How tokens are drafted and accepted."""

    title: ClassVar[str] = "Drafting"

    spec_type: Annotated[str, SPEC_TYPE] = "auto"
    spec_draft_n_max: Annotated[DraftLength, DRAFT_N_MAX] = AUTO_LENGTH
    spec_draft_p_min: Annotated[float, DRAFT_P_MIN] = 0.0
    draft_temp: Annotated[float | None, DRAFT_TEMP] = None
    verify_rule: Annotated[str, VERIFY_RULE] = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class LawOptions:
    """How the target's law is made from its logits."""

    title: ClassVar[str] = "Sampling"

    temp: Annotated[float, TEMP] = 0.8
    top_k: Annotated[int, TOP_K] = 40
    top_p: Annotated[float, TOP_P] = 0.95
    min_p: Annotated[float, MIN_P] = 0.05
    repeat_penalty: Annotated[float, REPEAT_PENALTY] = 1.0
    presence_penalty: Annotated[float, PRESENCE_PENALTY] = 0.0
    frequency_penalty: Annotated[float, FREQUENCY_PENALTY] = 0.0
    repeat_last_n: Annotated[int, REPEAT_LAST_N] = 64
    logit_bias: Annotated[list[str] | None, LOGIT_BIAS] = None

    @property
    def params(self) -> SamplingParams:
        """The target's sampler settings; the last bias of a token counts."""
        pairs = (text.partition("=") for text in self.logit_bias or ())
        return SamplingParams(
            temperature=self.temp,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repeat_last_n=self.repeat_last_n,
            logit_bias={int(token): float(bias) for token, _, bias in pairs},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(LawOptions):
    """How an answer is drawn, and where it ends."""

    seed: Annotated[int, SEED] = -1
    predict: Annotated[int, PREDICT] = -1
    stop: Annotated[list[str] | None, STOP] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOptions:
    """How models are loaded."""

    title: ClassVar[str] = "Context and hardware"

    ctx_size: Annotated[int | None, CTX_SIZE] = None
    threads: Annotated[int | None, THREADS] = None
    threads_batch: Annotated[int | None, THREADS_BATCH] = None
    threads_draft: Annotated[int | None, THREADS_DRAFT] = None
    threads_batch_draft: Annotated[int | None, THREADS_BATCH_DRAFT] = None
    gpu_layers: Annotated[str, GPU_LAYERS] = "auto"
    gpu_layers_draft: Annotated[str, GPU_LAYERS_DRAFT] = "auto"
    cache_type_k: Annotated[str, CACHE_TYPE_K] = "f16"
    cache_type_v: Annotated[str, CACHE_TYPE_V] = "f16"
    cache_type_k_draft: Annotated[str, CACHE_TYPE_K_DRAFT] = "f16"
    cache_type_v_draft: Annotated[str, CACHE_TYPE_V_DRAFT] = "f16"
    flash_attn: Annotated[Literal["on", "off", "auto"], FLASH_ATTN] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is printed."""

    title: ClassVar[str] = "Output"

    json: Annotated[bool, Option("--json", "One JSON object at the end instead of the answer.")] = False
    jsonl: Annotated[bool, Option("--jsonl", "One JSON event a line, as it happens.")] = False
    quiet: Annotated[bool, Option("-q --quiet", "The answer and errors, nothing else.")] = False
    color: Color = "auto"
    live: Annotated[
        bool | None, Option("--live/--no-live", "Live figures below the answer. [on where both are on the terminal]")
    ] = None
    verbose: Annotated[bool, VERBOSE] = False

    @property
    def format(self) -> Literal["human", "json", "jsonl"]:
        """The form of stdout."""
        return "json" if self.json else "jsonl" if self.jsonl else "human"
