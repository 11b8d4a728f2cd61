"""What may change between two answers of a chat: one table of settings, each with its range, its text and its place."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from specllama.base.errors import UsageError
from specllama.base.ranges import AUTO, Check, either, real, whole, word
from specllama.core.sampling import SamplingParams
from specllama.core.types import Rule
from specllama.drafters import ALIASES, REGISTRY, DraftSettings
from specllama.drafters.length import DraftLength

MAX_SEED = 2**64 - 1
_ON_OFF = {"on": True, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that decides an answer besides the models and the conversation."""

    params: SamplingParams = field(default_factory=SamplingParams)
    strategy: str = "none"  # a key of the registry
    spec: bool = True  # False = plain decoding for now, whatever the strategy
    drafting: DraftSettings = field(default_factory=DraftSettings)
    rule: Rule = Rule.TOKEN
    seed: int = -1  # of the next answer, counting up from there; -1 = a new one for each
    n_predict: int = -1  # most tokens of an answer; -1 = until it ends
    stops: tuple[str, ...] = ()
    think: bool | None = None  # the template's own switch; None = as the template has it

    @property
    def drafter(self) -> str:
        """The strategy that drafts the next answer."""
        return self.strategy if self.spec and self.drafting.length.longest else "none"


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of the table."""

    help: str
    check: Check
    get: Callable[[Settings], Any]
    put: Callable[[Settings, Any], Settings]
    words: tuple[str, ...] = ()  # what to offer where not any number goes


def _of_params(name: str, help: str, check: Check) -> Setting:
    """A field of SamplingParams."""
    return Setting(
        help,
        check,
        lambda settings: getattr(settings.params, name),
        lambda settings, value: replace(settings, params=replace(settings.params, **{name: value})),
    )


def _of_drafting(name: str, help: str, check: Check) -> Setting:
    """A field of DraftSettings."""
    return Setting(
        help,
        check,
        lambda settings: getattr(settings.drafting, name),
        lambda settings, value: replace(settings, drafting=replace(settings.drafting, **{name: value})),
    )


def _with_length(settings: Settings, value: DraftLength) -> Settings:
    """Another draft length; for `auto`, the chat finds the longest draft and the policy of the loaded models."""
    policy = settings.drafting.policy if value.is_auto else None
    return replace(settings, drafting=replace(settings.drafting, length=value, policy=policy))


def _with_confidence(settings: Settings, value: float) -> Settings:
    """Another p-min; an explicit one switches auto off."""
    settings = replace(settings, drafting=replace(settings.drafting, p_min=value))
    return _with_length(settings, DraftLength(settings.drafting.length.longest)) if value else settings


def _own(name: str, help: str, check: Check, words: tuple[str, ...] = ()) -> Setting:
    """A field of Settings itself."""
    return Setting(
        help,
        check,
        lambda settings: getattr(settings, name),
        lambda settings, value: replace(settings, **{name: value}),
        words,
    )


def on_off(name: str, text: object) -> bool:
    """`on` or `off`, as truth."""
    return text if isinstance(text, bool) else _ON_OFF[word(*_ON_OFF)(name, text)]


def strategy(name: str, text: object) -> str:
    """A strategy of the registry, by its name or by another tool's."""
    known = ALIASES.get(str(text).strip(), str(text).strip())
    if known not in REGISTRY:
        there = "; ".join(f"{key} ({each.summary})" for key, each in REGISTRY.items())
        raise UsageError(f"{name} {known} is no strategy of this version", hint=f"there are: {there}")
    return known


def stop_string(name: str, text: object) -> str:
    r"""A stop string; the escape sequences \n, \t, \r, \\, \xNN and \uNNNN are understood."""
    try:
        # What latin-1 cannot hold becomes an escape sequence first, so that only escape sequences are decoded.
        stop = codecs.decode(str(text).encode("latin-1", "backslashreplace"), "unicode_escape")
    except UnicodeDecodeError:
        raise UsageError(
            f"{name} {text} holds an escape sequence that cannot be read", hint=r"write \\ for a backslash"
        ) from None
    if not stop:
        raise UsageError(f"{name} is empty, expected at least one character")
    return stop


def _stops(name: str, value: object) -> tuple[str, ...]:
    """`none`, one stop string as it is typed, or a list of them as files hold it."""
    if value in (None, "none"):
        return ()
    if isinstance(value, str):
        return (stop_string(name, value),)
    if not isinstance(value, (list, tuple)) or not all(isinstance(stop, str) and stop for stop in value):
        raise UsageError(f"{name} is {value!r}, expected text")
    return tuple(value)


def logit_bias(name: str, text: object) -> tuple[int, float]:
    """(token, bias) of ID=V; llama.cpp's ID+V and ID-V are understood, too."""
    match = re.fullmatch(r"(\d+)=?(.+)", str(text))
    try:
        bias = float(match[2]) if match else math.nan
    except ValueError:
        bias = math.nan
    if match is None or math.isnan(bias) or bias == math.inf:
        raise UsageError(
            f"{name} is {text}, expected ID=V with a token's id and a number",
            hint="for example 15043=-5, or 15043=-inf to forbid the token",
        )
    return int(match[1]), bias


def _biases(name: str, value: object) -> dict[int, float]:
    """`none`, items separated by spaces as they are typed, or a mapping as files hold it."""
    if value in (None, "none"):
        return {}
    items = [f"{token}={bias}" for token, bias in value.items()] if isinstance(value, Mapping) else str(value).split()
    return dict(logit_bias(name, item) for item in items)


def require_known(biases: Iterable[int], n_vocab: int) -> None:
    """Raise UsageError for a bias of a token that the vocabulary does not hold."""
    for token in biases:
        if token >= n_vocab:
            raise UsageError(
                f"logit-bias names token {token}, the model's tokens are 0 to {n_vocab - 1}",
                hint="`run --jsonl` shows the ids of what was said",
            )


RULES = tuple(rule.value for rule in Rule)

# The range and the text of each are also those of the option, see `cli.args.options`.
SETTINGS: dict[str, Setting] = {
    "temp": _of_params("temperature", "temperature; 0 is greedy", real(0)),
    "top-k": _of_params("top_k", "keep the K likeliest tokens; 0 keeps all", whole(0)),
    "top-p": _of_params("top_p", "keep the likeliest tokens that add up to P; 1 keeps all", real(0, 1)),
    "min-p": _of_params("min_p", "drop tokens less likely than P times the likeliest; 0 drops none", real(0, 1)),
    "repeat-penalty": _of_params(
        "repeat_penalty", "weaken tokens seen lately by this factor; 1 is off", real(0, open_low=True)
    ),
    "presence-penalty": _of_params("presence_penalty", "take this from the logits of tokens seen lately", real()),
    "frequency-penalty": _of_params("frequency_penalty", "the same, once for each time a token was seen", real()),
    "repeat-last-n": _of_params("repeat_last_n", "how far back penalties look; -1 is everything, 0 is off", whole(-1)),
    "logit-bias": _of_params("logit_bias", "add V to the logit of token ID, -inf forbids it", _biases),
    "seed": _own("seed", "seed of every random draw; -1 takes a new one", whole(-1, MAX_SEED)),
    "predict": _own("n_predict", "most tokens to generate; -1 goes on to the end of the answer", whole(1, special=-1)),
    "stop": _own("stops", r"end the answer before this text; \n, \t and the like are understood", _stops),
    "drafter": _own("strategy", "what drafts", strategy, tuple(REGISTRY)),
    "draft-n-max": Setting(
        "longest draft; 0 drafts nothing, auto goes by what `specllama tune` measured",
        DraftLength.check,
        lambda settings: settings.drafting.length.to_json(),
        _with_length,
        (AUTO,),
    ),
    "draft-p-min": Setting(
        "stop drafting where the draft's likeliest token is less likely than this",
        real(0, 1),
        lambda settings: settings.drafting.p_min,
        _with_confidence,
    ),
    "draft-temp": _of_drafting(
        "temperature", "temperature of the draft; none is the target's", either("none", None, real(0))
    ),
    "rule": Setting(
        "how drafted tokens are accepted",
        word(*RULES),
        lambda settings: settings.rule.value,
        lambda settings, value: replace(settings, rule=Rule(value)),
        RULES,
    ),
    "spec": _own("spec", "draft at all", on_off, tuple(_ON_OFF)),
    "think": _own("think", "let the model think first, where its template has the switch", on_off, tuple(_ON_OFF)),
}

# Names by which other tools know them.
OTHER_NAMES = {
    "temperature": "temp",
    "num-predict": "predict",
    "n-predict": "predict",
    "max-tokens": "predict",
    "draft-max": "draft-n-max",
    "spec-draft-n-max": "draft-n-max",
    "spec-draft-p-min": "draft-p-min",
    "spec-type": "drafter",
    "verify-rule": "rule",
}


def find(name: str) -> str:
    """The table's own name for `name`. Raises UsageError with what comes near."""
    plain = name.lower().lstrip("-").replace("_", "-")
    known = OTHER_NAMES.get(plain, plain)
    if known not in SETTINGS:
        near = get_close_matches(plain, [*SETTINGS, *OTHER_NAMES], 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(SETTINGS)}"
        raise UsageError(f"there is no setting {name}", hint=hint)
    return known


def changed(settings: Settings, name: str, value: object) -> Settings:
    """`settings` with one of them changed. Raises UsageError that names the range."""
    known = find(name)
    setting = SETTINGS[known]
    # A number may come as JSON; int(3.7) would be 3, int("3.7") is an error.
    plain = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    return setting.put(settings, setting.check(known, plain))


def value_text(settings: Settings, name: str) -> str:
    """A setting's value as it would be typed."""
    value = SETTINGS[name].get(settings)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{token}={bias:g}" for token, bias in value.items()) or "none"
    if isinstance(value, tuple):
        return ", ".join(map(repr, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def to_json(settings: Settings) -> dict[str, object]:
    """The settings as plain data; JSON has no infinity, so a forbidden token's bias is text."""
    data: dict[str, object] = {}
    for name, setting in SETTINGS.items():
        value = setting.get(settings)
        if isinstance(value, Mapping):
            value = {str(token): bias if math.isfinite(bias) else "-inf" for token, bias in value.items()}
        data[name.replace("-", "_")] = value
    return data


def from_json(data: Mapping[str, object], start: Settings) -> Settings:
    """`start` with what `data` says. Raises UsageError for what is no setting or out of range."""
    for name, value in data.items():
        if not (find(name) == "think" and value is None):
            start = changed(start, name, value)
    return start
