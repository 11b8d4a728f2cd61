"""Answers in a format from real llama.cpp models: they parse whatever the model says, with every strategy."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path

import pytest

from specllama.chat.format import AnswerFormat, format_of
from specllama.chat.format_masks import constraint_of
from specllama.core.engine import Engine
from specllama.core.events import Finished, TokenEvent
from specllama.core.noise import SharedNoise
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Chooser, Rule
from specllama.drafters import REGISTRY, DraftSettings
from specllama.drafters.length import DraftLength
from specllama.llama import LlamaModel
from tests import tiny
from tests.chat.test_format import random_schema

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytestmark = pytest.mark.slow

STRATEGIES = [name for name in REGISTRY if name not in ("draft-tli", "none")]
WARM = SamplingParams(temperature=1.4, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = SamplingParams(temperature=0.0)


def said(
    models: tuple[LlamaModel, LlamaModel],
    strategy: str,
    form: AnswerFormat,
    params: SamplingParams,
    choose: Chooser,
    n: int,
) -> tuple[str, str, int]:
    """(text, reason, steps) of an answer."""
    target, draft = models
    settings = DraftSettings(length=DraftLength(5), vocab_size=target.vocab_size, n_leaves=4)
    engine = Engine(target, REGISTRY[strategy].make(draft, settings), rule=list(Rule)[n % 3])
    prompt = target.vocab.tokenize(f'{n} {{"name": "the", "name": "the"', special=False)
    tokens: list[int] = []
    for event in engine.generate(prompt, params, choose, max_tokens=200, constraint=constraint_of(form, target.vocab)):
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
        elif isinstance(event, Finished):
            return (
                b"".join(map(target.vocab.piece, tokens)).decode("utf-8", "surrogateescape"),
                event.reason,
                event.stats.n_steps,
            )
    raise AssertionError("no end")


@pytest.mark.parametrize("vocabulary", ["bytes", "spm"])
def test_two_hundred_answers_parse(tmp_path: Path, vocabulary: str) -> None:
    """Any wrong mask shows as text that is no JSON; greedy text and that of one seed are those of plain decoding."""
    kind = tiny.byte_level(words=["na", "me", "tr", "ue"]) if vocabulary == "bytes" else tiny.sentencepiece()
    target, draft = tiny.write_pair(tmp_path, vocabulary=kind)
    n_done = n_fast = 0
    with closing(tiny.load(target)) as one, closing(tiny.load(draft)) as other:
        for n in range(100):
            node = random_schema(random.Random(n))
            form, strategy = format_of("json-schema", json.dumps(node)), STRATEGIES[n % len(STRATEGIES)]
            params, choose = ((WARM, RandomChooser), (GREEDY, RandomChooser), (WARM, SharedNoise))[n % 3]
            text, reason, n_steps = said((one, other), strategy, form, params, choose(n), n)
            if n % 3:
                plain, _, n_plain = said((one, other), "none", form, params, choose(n), n)
                assert text == plain, (n, strategy)
                n_fast += n_steps < n_plain
            if reason == "stop":
                n_done += 1
                value = json.loads(text)
                assert "enum" not in node or value in node["enum"]
    assert n_done > 40
    assert n_fast > 10
