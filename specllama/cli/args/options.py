"""The options that commands share, and their groups.

Names follow llama.cpp; names of other tools work but are not shown. An option that is also a chat setting has the
setting's range and text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import typer

from specllama.base.ranges import AUTO, MAX_CTX, MAX_DRAFT, MIN_CTX, ROLLBACKS, address, several, sound, whole, word
from specllama.chat.format import GRAMMAR, JSON_SCHEMA, REGEX, AnswerFormat, option_format
from specllama.chat.named_templates import NAMED
from specllama.chat.settings import SETTINGS, stop_string, strategies
from specllama.cli.args.grouping import Option
from specllama.cli.args.values import KV_TYPES, gpu_layers, logit_bias
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
SYSTEM_PROMPT = Option("-sys --system-prompt TEXT", "The system prompt.", sound, also="--system")
SYSTEM_PROMPT_FILE = Option("-sysf --system-prompt-file FILE", "Read the system prompt from a file.")
CHAT_TEMPLATE = Option(
    "--chat-template TEMPLATE",
    f"A chat template instead of the model's: a Jinja file, or {', '.join(NAMED)}.",
    also="--chat-template-file",
)
TEMPLATE = Option("--template NAME", "A prompt template: a name of `specllama templates`, or a file.")
PARAM = Option("--param KEY=VALUE", "A value for a variable of the template; repeatable.", sound)
RAW = Option("--raw", "Do not use the chat template: the model continues the prompt.")

# models
PAIR = Option("--pair NAME", "A pair by name, see `specllama models list`.")
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
OFFLINE = Option("--offline", "Use only local files; never use the network.")

# drafting
SPEC_TYPE = Option(
    "--spec-type LIST",
    f"Drafting strategies, separated by commas: auto, {', '.join(REGISTRY)} (plain decoding).",
    strategies,
)
DRAFT_N_MAX = Option(
    "--spec-draft-n-max N",
    f"Longest draft, 0 to {MAX_DRAFT} tokens. auto chooses at every step by the measured costs.",
    SETTINGS["spec-draft-n-max"].check,
    also="--draft-max --draft --draft-n --num-draft-tokens",
)
TREE = Option(
    "--tree NODES",
    "Draft trees of so many nodes, or auto: where they pay. Short for --spec-type tree with that length.",
    DRAFT_N_MAX.check,
)
DRAFT_P_MIN = _setting("spec-draft-p-min", "--spec-draft-p-min P", also="--draft-p-min")
DRAFT_TEMP = Option(
    "--draft-temp T",
    "Temperature of the draft; does not change the output distribution. [--temp]",
    SETTINGS["draft-temp"].check,
)
MEASURE = Option(
    "--measure WHEN",
    "auto: measure an untuned pair at its first use. never: draft with lookups only, until it is tuned.",
    word("auto", "never"),
)
VERIFY_RULE = _setting("verify-rule", "--verify-rule RULE", ": token, block or match. All are exact.")

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
SEED_MODE = _setting("seed-mode", "--seed-mode MODE", "; draws is faster, but other drafts draw another text.")
PREDICT = _setting("predict", "-n --predict N", also="--max-tokens --n-predict")
STOP = Option("--stop TEXT", f"E{SETTINGS['stop'].help[1:]}; repeatable.", stop_string, also="-r --reverse-prompt")

# format
SCHEMA = Option(
    "--json-schema SCHEMA",
    "Answer in JSON that fits a schema: a file, or the schema itself.",
    partial(option_format, JSON_SCHEMA),
)
GRAMMAR_FILE = Option(
    "--grammar FILE",
    "Answer in the language of a GBNF or Lark grammar.",
    partial(option_format, GRAMMAR),
)
EXPRESSION = Option(
    "--regex R",
    "Answer with a text that a regular expression matches as a whole.",
    partial(option_format, REGEX),
)

# context and hardware
_N_THREADS = whole(1, 1024)
_KV_TYPE = word(*KV_TYPES)
CTX_SIZE = Option(
    "-c --ctx-size N",
    "Context size in tokens; 0 is the training context. [the pair's, or up to 4096]",
    whole(MIN_CTX, MAX_CTX, special=0),
)
THREADS = Option("-t --threads N", "Threads for decoding. [physical cores]", _N_THREADS)
THREADS_BATCH = Option("-tb --threads-batch N", "Threads for prefill. [-t]", _N_THREADS)
THREADS_DRAFT = Option("-td --threads-draft N", "Threads of the draft. [-t]", _N_THREADS, also="--spec-draft-threads")
THREADS_BATCH_DRAFT = Option(
    "-tbd --threads-batch-draft N",
    "Threads for the draft's prefill. [-td, or -tb]",
    _N_THREADS,
    also="--spec-draft-threads-batch",
)
GPU_LAYERS = Option(
    "-ngl --gpu-layers N",
    "Layers on the GPU: a number, all, or auto for as many as fit.",
    gpu_layers,
    also="--n-gpu-layers",
)
GPU_LAYERS_DRAFT = Option(
    "-ngld --gpu-layers-draft N",
    "Layers of the draft on the GPU.",
    gpu_layers,
    also="--n-gpu-layers-draft --spec-draft-ngl",
)
CACHE_TYPE_K = Option("-ctk --cache-type-k TYPE", f"Type of keys in the KV cache: {', '.join(KV_TYPES)}.", _KV_TYPE)
CACHE_TYPE_V = Option("-ctv --cache-type-v TYPE", "Type of values; a quantized type needs flash attention.", _KV_TYPE)
CACHE_TYPE_K_DRAFT = Option(
    "-ctkd --cache-type-k-draft TYPE",
    "Type of the draft's keys; a quantized type can lower the acceptance rate.",
    _KV_TYPE,
    also="--spec-draft-type-k",
)
CACHE_TYPE_V_DRAFT = Option(
    "-ctvd --cache-type-v-draft TYPE", "Type of the draft's values.", _KV_TYPE, also="--spec-draft-type-v"
)
RPC = Option(
    "--rpc HOST:PORT,...",
    "Servers (ggml-rpc-server) that compute layers of the target. Only in networks that you trust.",
    several(address),
)
KERNELS = Option("--kernels WHEN", "specllama's own CPU kernels: on, off or auto.", word("on", "off", "auto"))
FLASH_ATTN = Option("-fa --flash-attn WHEN", "Flash attention: on, off or auto.", word("on", "off", "auto"))
ROLLBACK = Option(
    "--rollback WAY",
    f"How rejected tokens are removed: auto, {', '.join(ROLLBACKS)}, for models that have the way.",
    word(AUTO, *ROLLBACKS),
)

# output
JSON = Option("--json", "Print one JSON object.")
QUIET = Option("-q --quiet", "Print only data and errors.")
VERBOSE = Option("-v --verbose", "Print the seed, the models and llama.cpp's log to stderr.")
COLOR = Option(
    "--color WHEN",
    "Colours: auto, always or never. auto follows NO_COLOR and TERM=dumb.",
    word("auto", "always", "never"),
)

Offline = Annotated[bool, OFFLINE]
Json = Annotated[bool, JSON]
Quiet = Annotated[bool, QUIET]
Color = Annotated[ColorMode, COLOR]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The prompt and its form."""

    title: ClassVar[str] = "Prompt"

    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt. Appended to --file or stdin; - reads stdin.",
            parser=partial(sound, "the prompt"),
        ),
    ] = None
    file: Annotated[str | None, FILE] = None
    system_prompt: Annotated[str | None, SYSTEM_PROMPT] = None
    system_prompt_file: Annotated[str | None, SYSTEM_PROMPT_FILE] = None
    template: Annotated[str | None, TEMPLATE] = None
    param: Annotated[list[str] | None, PARAM] = None
    chat_template: Annotated[str | None, CHAT_TEMPLATE] = None
    raw: Annotated[bool, RAW] = False
    dry_run: Annotated[
        bool, Option("--dry-run", "Print the prompt as the model would read it, and load no weights.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The models; without any option, the default pair."""

    title: ClassVar[str] = "Models"

    pair: Annotated[str | None, PAIR] = None
    model: Annotated[str | None, MODEL] = None
    model_draft: Annotated[str | None, MODEL_DRAFT] = None
    hf_repo: Annotated[str | None, HF_REPO] = None
    hf_repo_draft: Annotated[str | None, HF_REPO_DRAFT] = None
    offline: Offline = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions(ModelOptions):
    """The models, with the pair as an argument."""

    pair: Annotated[str | None, typer.Argument(metavar="PAIR", help="A pair by name. [the default pair]")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How tokens are drafted and accepted."""

    title: ClassVar[str] = "Drafting"

    spec_type: Annotated[str, SPEC_TYPE] = "auto"
    spec_draft_n_max: Annotated[DraftLength, DRAFT_N_MAX] = AUTO_LENGTH
    tree: Annotated[DraftLength | None, TREE] = None
    spec_draft_p_min: Annotated[float, DRAFT_P_MIN] = 0.0
    draft_temp: Annotated[float | None, DRAFT_TEMP] = None
    verify_rule: Annotated[str, VERIFY_RULE] = "block"
    measure: Annotated[Literal["auto", "never"], MEASURE] = "auto"


_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class LawOptions:
    """How the target's distribution is made from its logits."""

    title: ClassVar[str] = "Sampling"

    temp: Annotated[float, TEMP] = _DEFAULTS.temperature
    top_k: Annotated[int, TOP_K] = _DEFAULTS.top_k
    top_p: Annotated[float, TOP_P] = _DEFAULTS.top_p
    min_p: Annotated[float, MIN_P] = _DEFAULTS.min_p
    repeat_penalty: Annotated[float, REPEAT_PENALTY] = _DEFAULTS.repeat_penalty
    presence_penalty: Annotated[float, PRESENCE_PENALTY] = _DEFAULTS.presence_penalty
    frequency_penalty: Annotated[float, FREQUENCY_PENALTY] = _DEFAULTS.frequency_penalty
    repeat_last_n: Annotated[int, REPEAT_LAST_N] = _DEFAULTS.repeat_last_n
    logit_bias: Annotated[list[str] | None, LOGIT_BIAS] = None

    @property
    def params(self) -> SamplingParams:
        """The sampler settings; a later bias of a token replaces an earlier one."""
        return SamplingParams(
            temperature=self.temp,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repeat_last_n=self.repeat_last_n,
            logit_bias=SETTINGS["logit-bias"].check("--logit-bias", " ".join(self.logit_bias or ()) or None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(LawOptions):
    """How an answer is sampled, and where it ends."""

    seed: Annotated[int, SEED] = -1
    seed_mode: Annotated[str, SEED_MODE] = "draws"
    predict: Annotated[int, PREDICT] = -1
    stop: Annotated[list[str] | None, STOP] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOptions:
    """What an answer must look like."""

    title: ClassVar[str] = "Format of the answer"

    json_schema: Annotated[Any, SCHEMA] = None
    grammar: Annotated[Any, GRAMMAR_FILE] = None
    regex: Annotated[Any, EXPRESSION] = None

    @property
    def format(self) -> AnswerFormat | None:
        """The only one that was given."""
        found: AnswerFormat | None = self.json_schema or self.grammar or self.regex
        return found


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
    kernels: Annotated[Literal["on", "off", "auto"], KERNELS] = "auto"
    rollback: Annotated[Any, ROLLBACK] = AUTO
    rpc: Annotated[Any, RPC] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is printed."""

    title: ClassVar[str] = "Output"

    json: Annotated[bool, Option("--json", "Print one JSON object instead of the answer.")] = False
    jsonl: Annotated[bool, Option("--jsonl", "Print one JSON event a line while the answer runs.")] = False
    quiet: Annotated[bool, Option("-q --quiet", "Print only the answer and errors.")] = False
    color: Color = "auto"
    live: Annotated[
        bool | None, Option("--live/--no-live", "Show live figures below the answer. [on in a terminal]")
    ] = None
    verbose: Annotated[bool, VERBOSE] = False

    @property
    def format(self) -> Literal["human", "json", "jsonl"]:
        return "json" if self.json else "jsonl" if self.jsonl else "human"
