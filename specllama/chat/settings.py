"""The settings of a chat: one table with the range, the help text and the field of each."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from operator import attrgetter
from typing import Any

from specllama.base.errors import UsageError
from specllama.base.ranges import AUTO, Check, either, real, sound, whole, word
from specllama.chat.format import KINDS, AnswerFormat, check_format
from specllama.core.noise import SeedMode
from specllama.core.sampling import RANGES, SamplingParams
from specllama.core.types import Rule
from specllama.drafters import ALIASES, REGISTRY, DraftSettings
from specllama.drafters.length import DraftLength

MAX_SEED = 2**64 - 1
_ON_OFF = {"on": True, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that determines an answer besides the models and the conversation."""

    params: SamplingParams = field(default_factory=SamplingParams)
    strategy: str = "none"  # a key of the registry
    spec: bool = True  # False = plain decoding with any strategy
    drafting: DraftSettings = field(default_factory=DraftSettings)
    rule: Rule = Rule.TOKEN
    seed: int = -1  # of the next answer, one more for each later one; -1 = a random one for each
    seed_mode: SeedMode = SeedMode.DRAWS
    n_predict: int = -1  # most tokens of an answer; -1 = no limit
    stops: tuple[str, ...] = ()
    format: AnswerFormat | None = None  # what an answer must look like; None = free text
    think: bool | None = None  # the template's switch; None = its default

    @property
    def seeded(self) -> bool:
        """The seed is fixed, and the text depends on the drafts as well."""
        return self.seed >= 0 and self.seed_mode is SeedMode.DRAWS

    @property
    def drafter(self) -> str:
        """The strategy of the next answer."""
        return self.strategy if self.spec and self.drafting.length.longest else "none"


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of SETTINGS."""

    help: str
    check: Check
    get: Callable[[Settings], Any]
    put: Callable[[Settings, Any], Settings]
    words: tuple[str, ...] = ()  # for completion


def _field(place: str, help: str, check: Check, words: tuple[str, ...] = ()) -> Setting:
    """The setting of a field of Settings, such as `seed`, or of one of its parts, such as `params.top_k`."""
    part, _, name = place.rpartition(".")

    def put(settings: Settings, value: Any) -> Settings:
        new = replace(getattr(settings, part), **{name: value}) if part else value
        return replace(settings, **{part or name: new})

    return Setting(help, check, attrgetter(place), put, words)


def _sampling(name: str, help: str) -> Setting:
    """The setting of a number of the sampler."""
    return _field(f"params.{name}", help, RANGES[name])


def _with_length(settings: Settings, value: DraftLength) -> Settings:
    """Another draft length. For `auto`, the chat sets the longest draft and the policy of the loaded models."""
    policy = settings.drafting.policy if value.is_auto else None
    return replace(settings, drafting=replace(settings.drafting, length=value, policy=policy))


def _with_confidence(settings: Settings, value: float) -> Settings:
    """Another p-min; an explicit one switches auto off."""
    settings = replace(settings, drafting=replace(settings.drafting, p_min=value))
    return _with_length(settings, DraftLength(settings.drafting.length.longest)) if value else settings


def on_off(name: str, text: object) -> bool:
    """`on` or `off` as a bool."""
    return text if isinstance(text, bool) else _ON_OFF[word(*_ON_OFF)(name, text)]


def strategy(name: str, text: object) -> str:
    """A strategy of the registry, by its name or an alias of another tool."""
    known = ALIASES.get(str(text).strip(), str(text).strip())
    if known not in REGISTRY:
        there = "; ".join(f"{key} ({each.summary})" for key, each in REGISTRY.items())
        raise UsageError(f"{name} is {known}, which is not a strategy", hint=f"there are: {there}")
    return known


def strategy_or_auto(name: str, text: object) -> str:
    """A strategy, or `auto` for all of them."""
    try:
        return AUTO if text == AUTO else strategy(name, text)
    except UsageError as error:
        raise UsageError(str(error), hint=error.hint.replace("there are: ", f"there are: {AUTO}; ")) from None


def strategies(name: str, text: object) -> str:
    """A comma list of strategies, or `auto`."""
    names = [strategy_or_auto(name, part.strip()) for part in str(text).split(",")]
    if AUTO in names and len(names) > 1:
        raise UsageError(f"{name} is {text}, expected auto alone (it is every strategy) or a list without it")
    return ",".join(dict.fromkeys(names))


def _stop(name: str, stop: object) -> str:
    """A stop string."""
    if not isinstance(stop, str):
        raise UsageError(f"{name} is {stop!r}, expected text")
    if not stop:
        raise UsageError(f"{name} is empty, expected at least one character")
    return sound(name, stop)


def stop_string(name: str, text: object) -> str:
    r"""A stop string, with the escape sequences \n, \t, \r, \\, \xNN and \uNNNN decoded."""
    try:
        # Characters beyond latin-1 become escape sequences first, because the decoder reads its input as latin-1.
        stop = codecs.decode(str(text).encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError:
        raise UsageError(f"{name} {text} holds an invalid escape sequence", hint=r"write \\ for a backslash") from None
    return _stop(name, stop)


def _stops(name: str, value: object) -> tuple[str, ...]:
    """`none`, one typed stop string, or a list of them from a file or a program."""
    if value in (None, "none"):
        return ()
    if isinstance(value, str):
        return (stop_string(name, value),)
    if not isinstance(value, Sequence):
        raise UsageError(f"{name} is {value!r}, expected text")
    return tuple(_stop(name, stop) for stop in value)


def logit_bias(name: str, text: object) -> tuple[int, float]:
    """(token, bias) of ID=V, or of llama.cpp's ID+V and ID-V."""
    match = re.fullmatch(r"(\d+)(?:=|(?=[+-]))(.+)", str(text))
    try:
        bias = float(match[2]) if match else math.nan
    except ValueError:
        bias = math.nan
    if match is None or math.isnan(bias) or bias == math.inf:
        raise UsageError(
            f"{name} is {text}, expected ID=V with a token id and a number",
            hint="for example 15043=-5, or 15043=-inf to forbid the token",
        )
    return int(match[1]), bias


def _biases(name: str, value: object) -> dict[int, float]:
    """`none`, typed items separated by spaces, or a mapping from a file."""
    if value in (None, "none"):
        return {}
    items = [f"{token}={bias}" for token, bias in value.items()] if isinstance(value, Mapping) else str(value).split()
    return dict(logit_bias(name, item) for item in items)


def require_known(biases: Iterable[int], n_vocab: int) -> None:
    """Raise UsageError for a token that is not in the vocabulary."""
    for token in biases:
        if token >= n_vocab:
            raise UsageError(
                f"logit-bias has token {token}, expected 0 to {n_vocab - 1}",
                hint="`specllama run --jsonl` shows token ids",
            )


RULES = tuple(rule.value for rule in Rule)
SEED_MODES = tuple(mode.value for mode in SeedMode)

# Options have the same names, ranges and texts, see `cli.args.options`.
SETTINGS: dict[str, Setting] = {
    "temp": _sampling("temperature", "temperature; 0 is greedy"),
    "top-k": _sampling("top_k", "keep the K most likely tokens; 0 keeps all"),
    "top-p": _sampling("top_p", "keep the most likely tokens that add up to P; 1 keeps all"),
    "min-p": _sampling("min_p", "drop tokens less likely than P times the most likely one; 0 drops none"),
    "repeat-penalty": _sampling("repeat_penalty", "reduce the logits of recent tokens by this factor; 1 is off"),
    "presence-penalty": _sampling("presence_penalty", "subtract this from the logits of recent tokens"),
    "frequency-penalty": _sampling("frequency_penalty", "the same, for each time a token occurred"),
    "repeat-last-n": _sampling("repeat_last_n", "how many tokens back penalties look; -1 is all, 0 is off"),
    "logit-bias": _field("params.logit_bias", "add V to the logit of token ID; -inf forbids it", _biases),
    "seed": _field("seed", "seed of the random numbers; -1 takes a random one", whole(-1, MAX_SEED)),
    "seed-mode": Setting(
        "what a seed fixes: same gives one text with any drafts or none",
        word(*SEED_MODES),
        lambda settings: settings.seed_mode.value,
        lambda settings, value: replace(settings, seed_mode=SeedMode(value)),
        SEED_MODES,
    ),
    "predict": _field("n_predict", "most tokens to generate; -1 is no limit", whole(1, special=-1)),
    "stop": _field("stops", r"end the answer before this text; may have escapes such as \n", _stops),
    "format": _field(
        "format",
        "what answers must look like: json-schema FILE, grammar FILE, regex R, or none",
        check_format,
        (*KINDS, "none"),
    ),
    "spec-type": _field("strategy", "the drafting strategy", strategy, tuple(REGISTRY)),
    "spec-draft-n-max": Setting(
        "longest draft; 0 is plain decoding, auto decides by the measured costs",
        DraftLength.check,
        lambda settings: settings.drafting.length.to_json(),
        _with_length,
        (AUTO,),
    ),
    "spec-draft-p-min": Setting(
        "stop drafting at a token with a lower draft probability than this",
        real(0, 1),
        lambda settings: settings.drafting.p_min,
        _with_confidence,
    ),
    "draft-temp": _field(
        "drafting.temperature", "temperature of the draft; none is the target's", either("none", None, real(0))
    ),
    "verify-rule": Setting(
        "how drafted tokens are accepted",
        word(*RULES),
        lambda settings: settings.rule.value,
        lambda settings, value: replace(settings, rule=Rule(value)),
        RULES,
    ),
    "spec": _field("spec", "on drafts, off is plain decoding", on_off, tuple(_ON_OFF)),
    "think": _field("think", "let the model think first, if its template has the switch", on_off, tuple(_ON_OFF)),
}

# Names in other tools and in older saved chats.
OTHER_NAMES = {
    "temperature": "temp",
    "num-predict": "predict",
    "n-predict": "predict",
    "max-tokens": "predict",
    "draft-max": "spec-draft-n-max",
    "draft-n-max": "spec-draft-n-max",
    "draft-p-min": "spec-draft-p-min",
    "drafter": "spec-type",
    "strategy": "spec-type",
    "rule": "verify-rule",
}


def find(name: str, others: Iterable[str] = ()) -> str:
    """The name in SETTINGS for `name`. Raises UsageError with a similar name, also one of `others`."""
    plain = name.lower().lstrip("-").replace("_", "-")
    known = OTHER_NAMES.get(plain, plain)
    if known not in SETTINGS:
        near = get_close_matches(plain, [*SETTINGS, *OTHER_NAMES, *others], 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join([*SETTINGS, *others])}"
        raise UsageError(f"unknown setting {name}", hint=hint)
    return known


def changed(settings: Settings, name: str, value: object) -> Settings:
    """`settings` with one of them changed. Raises UsageError with the range."""
    known = find(name)
    setting = SETTINGS[known]
    return setting.put(settings, setting.check(known, value))


def value_text(settings: Settings, name: str) -> str:
    """A setting's value as it is typed."""
    value = SETTINGS[name].get(settings)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{token}={bias:g}" for token, bias in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def to_json(settings: Settings) -> dict[str, object]:
    """The settings as plain data; an infinite bias is text, because JSON has no infinity."""
    data: dict[str, object] = {}
    for name, setting in SETTINGS.items():
        value = setting.get(settings)
        if isinstance(value, Mapping):
            value = {str(token): bias if math.isfinite(bias) else "-inf" for token, bias in value.items()}
        elif isinstance(value, AnswerFormat):
            value = value.to_json()
        data[name.replace("-", "_")] = value
    return data


def from_json(data: Mapping[str, object], start: Settings) -> Settings:
    """`start` changed by `data`. Raises UsageError for an unknown setting or a value out of range."""
    for name, value in data.items():
        if not (find(name) == "think" and value is None):
            start = changed(start, name, value)
    return start
