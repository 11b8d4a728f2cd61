"""`specllama chat` on a real model: what follows a stopped answer, and what a person sees."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specllama.chat.conversation import Conversation
from specllama.chat.session import ChatSession
from specllama.chat.settings import Settings
from specllama.core.engine import Engine
from specllama.core.events import Event, TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Cancel
from specllama.drafters import DraftSettings
from specllama.drafters.length import DraftLength
from specllama.llama import LlamaModel
from tests.cli.conftest import SPECLLAMA, Terminal
from tests.real.conftest import SMALL

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0)
# Without extra buffers a row's logits do not depend on how many others are computed with it, so that a KV filled token
# by token equals one that was filled at once.
OPTIONS = {"n_ctx": 2048, "use_extra_bufts": False}


def _said(events: Iterator[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent)]


def _fresh(target: LlamaModel, session: ChatSession, text: str, n: int) -> list[int]:
    """What the target answers to the session's history and `text`, from an empty KV, decoding plainly."""
    target.truncate(0)
    prompt = Conversation(target.vocab, target.chat_template).tokens(session._messages(session.turns, text))
    return _said(Engine(target).generate(prompt, GREEDY, RandomChooser(0), max_tokens=n))


@pytest.mark.parametrize("strategy", ["none", "lookup", "draft-simple"])
def test_after_ctrl_c_the_next_turn_is_that_of_a_fresh_run(
    open_model: Callable[..., LlamaModel], strategy: str
) -> None:
    """KV that is not that of the history after an answer was stopped, in either model."""
    target, draft = open_model(SMALL, **OPTIONS), open_model(SMALL, **OPTIONS, max_block=1)
    settings = Settings(params=GREEDY, strategy=strategy, drafting=DraftSettings(length=DraftLength(4)), n_predict=120)
    session, cancel = ChatSession(target, draft, settings), Cancel()
    for model in (target, draft):
        model.watch(cancel)
    for n_tokens, text in ((40, "Tell me a long story about a fox."), (15, "Go on, with a wolf.")):
        n_seen = 0
        for event in session.ask(text, cancel):
            n_seen += isinstance(event, TokenEvent)
            if n_seen >= n_tokens:
                cancel.set()
        cancel.clear()
        assert session.turns[-1].reason == "cancelled"
        assert session.turns[-1].answer
    session.settings = replace(settings, n_predict=30)
    kept = list(session.turns)
    answer = _said(session.ask("Who is in the story?", cancel))
    assert session.reuse is not None
    assert session.reuse.n_target > 60
    session.turns = kept
    assert answer == _fresh(target, session, "Who is in the story?", 30)
    assert len(answer) > 5


def test_a_person_talks_stops_and_goes_on(model_file: Callable[[str], Path], tmp_path: Path) -> None:
    """A chat that works with toys only: a slow stop, an answer that is not kept, a history that is read again."""
    file = str(model_file(SMALL))
    command = [*SPECLLAMA, "chat", "-m", file, "-md", file, "-c", "4096", "--temp", "0", "-n", "200"]
    shown = Terminal(command, 80, 30, {"XDG_STATE_HOME": str(tmp_path)})
    shown.display.write_process_input = lambda data: shown.child.send(data.encode())  # type: ignore[method-assign]
    shown.wait_for(lambda t: ">>>" in t.text, 120)
    shown.child.send("Tell me a story about a fox.\r")
    shown.wait_for(lambda t: "% accepted" in t.text and "cached 0" in t.text, 120)
    shown.read(1.0)
    shown.interrupt()
    pressed = time.monotonic()
    shown.wait_for(lambda t: "[ stopped | " in t.text)
    assert time.monotonic() - pressed < shown.at_once_s
    shown.wait_for(lambda t: t.text.endswith("\n>>>"))
    shown.child.send("/set predict 10\r")
    shown.wait_for(lambda t: "predict is 10" in t.text and t.text.endswith("\n>>>"))
    shown.child.send("And then?\r")
    shown.wait_for(lambda t: len(re.findall(r"cached \d+, read \d+", t.text)) == 2, 120)
    cached, read = map(int, re.findall(r"cached (\d+), read (\d+)", shown.text)[1])
    assert cached > 40
    assert read < 25
    assert "fox" in shown.text
    shown.wait_for(lambda t: t.text.endswith("\n>>>"))
    shown.child.sendeof()
    assert shown.finish() == 0
