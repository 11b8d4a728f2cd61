"""`/set` in a chat: settings by name, how answers look, the system prompt, the history."""

from __future__ import annotations

from specllama.base.errors import UsageError
from specllama.chat.settings import SETTINGS, find, on_off, value_text
from specllama.cli.chat.answering import Chat
from specllama.cli.chat.input import Editor, bare
from specllama.cli.tuned import length_text

LOOKS = {"colors": "show who wrote each token", "fold": "hide what the model thinks"}
LENGTH = "draft-n-max"


def _value(chat: Chat, name: str) -> str:
    """A setting's value, and what an automatic one comes to."""
    settings = chat.session.settings
    is_auto = name == LENGTH and settings.drafting.length.is_auto
    return length_text(chat.opened.setup) if is_auto else value_text(settings, name)


def parameters(chat: Chat) -> str:
    """All settings and their values, one a line."""
    rows = {name: _value(chat, name) for name in SETTINGS}
    if not chat.session.can_think:
        del rows["think"]
    rows.update({name: "on" if getattr(chat.look, name) else "off" for name in LOOKS})
    return "\n".join(f"{name:<18} {value}" for name, value in rows.items())


def _remember(chat: Chat, wanted: bool) -> None:
    if isinstance(chat.source, Editor):
        chat.source.remember(wanted=wanted)
    chat.note(f"messages are {'' if wanted else 'not '}written to the history from now on")


def _set_parameter(chat: Chat, name: str, value: str) -> None:
    name = find(name)
    if not value:
        chat.say(f"{name} is {_value(chat, name)}: {SETTINGS[name].help}")
        return
    if name == "think" and not chat.session.can_think:
        raise UsageError("this model's template has no switch for thinking", hint="/show template shows it")
    was_auto = chat.session.settings.drafting.length.is_auto
    chat.change_setting(name, bare(value))
    chat.note(f"{name} is {_value(chat, name)}")
    if was_auto and name != LENGTH and not chat.session.settings.drafting.length.is_auto:
        chat.note(f"{LENGTH} is {_value(chat, LENGTH)}")


def set_setting(chat: Chat, rest: str) -> None:
    """`/set NAME VALUE`. Raises UsageError for what is no setting or out of range."""
    name, _, value = rest.strip().partition(" ")
    if name in ("parameter", "param"):
        name, _, value = value.strip().partition(" ")
    value = value.strip()
    if not name:
        chat.say(parameters(chat))
    elif name == "system":
        chat.session.system = bare(value)
        chat.note("the system prompt is set" if chat.session.system else "there is no system prompt now")
    elif name in LOOKS:
        setattr(chat.look, name, on_off(name, value))
        chat.note(f"{name} is {value}")
    elif name in ("history", "nohistory"):
        _remember(chat, name == "history")
    else:
        _set_parameter(chat, name, value)
