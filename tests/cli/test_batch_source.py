"""The prompts of a batch before they reach a pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from specllama.base.errors import PromptError
from specllama.batch.requests import Asked
from specllama.chat.conversation import Conversation, Message
from specllama.chat.settings import Settings
from specllama.cli.batch.source import LONG, Survey, prompts
from specllama.llama import Vocabulary, load_vocabulary
from tests import tiny


@pytest.mark.parametrize("raw", [False, True])
def test_a_prompt_that_cannot_fit_is_refused_without_tokenizing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bool
) -> None:
    """Prevents: twice the seconds of tokenizing megabytes to say that they do not fit."""
    vocab = load_vocabulary(tiny.write_model(tmp_path / "m.gguf", vocabulary=tiny.byte_level()))
    conversation, lengths, tokenize = Conversation(vocab, None), list[int](), Vocabulary.tokenize

    def spy(self: Vocabulary, text: str, *, special: bool, bos: bool = False) -> list[int]:
        lengths.append(len(text))
        return tokenize(self, text, special=special, bos=bos)

    monkeypatch.setattr(Vocabulary, "tokenize", spy)
    texts = ["a" * (LONG + 1), "b"]
    asked = [Asked(n, n, (Message("user", text),), raw, Settings(n_predict=1), "") for n, text in enumerate(texts, 1)]
    survey = Survey.of(asked, vocab, conversation, 512, 2048)
    (_, error), (_, tokens) = prompts(asked, vocab, conversation, survey.n_ctx)
    assert (survey.n_requests, survey.n_line) == (2, 2)
    assert isinstance(error, PromptError)
    assert isinstance(tokens, list)
    assert max(lengths) < LONG
