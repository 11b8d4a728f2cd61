"""Conversations and streaming text with the vocabularies and chat templates of real model files."""

from __future__ import annotations

import functools

import pytest

from specllama import llama
from specllama.chat.conversation import Conversation, Message, raw_tokens
from specllama.chat.stream import StopWatch, TextStream
from tests.real.conftest import path_of

pytestmark = pytest.mark.model

QWEN = "qwen2.5-coder-1.5b-instruct-q4_k_m"
SMALL_QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m"
SMOL = "SmolLM2-135M-Instruct.Q4_1"
GEMMA = "gemma-3-270m-q4_k_m"
ALL = [QWEN, SMALL_QWEN, SMOL, GEMMA]

CHAT = [
    Message("system", "Be brief."),
    Message("user", "Say 日本語 😀 in:\n\n  x <b>1</b>\n"),
    Message("assistant", "ok\n\n"),
    Message("user", "  go on"),
]
# ChatML as the three files write it, white space of the messages and all.
CHAT_TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nSay 日本語 😀 in:\n\n  x <b>1</b>\n<|im_end|>\n"
    "<|im_start|>assistant\nok\n\n<|im_end|>\n"
    "<|im_start|>user\n  go on<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@functools.cache
def vocabulary(name: str) -> llama.Vocabulary:
    return llama.load_vocabulary(path_of(name))


@functools.cache
def conversation(name: str) -> Conversation:
    return Conversation(vocabulary(name), llama.read_header(path_of(name)).chat_template)


def special_in(vocab: llama.Vocabulary, tokens: list[int]) -> list[str]:
    return [vocab.text(token) for token in tokens if not vocab.piece(token)]


@pytest.mark.parametrize("name", [QWEN, SMALL_QWEN, SMOL])
def test_a_chat_is_what_llama_cpp_makes_of_it(name):
    """Tokenised in pieces, or with other white space than the model was trained on."""
    assert conversation(name).text(CHAT) == CHAT_TEXT
    assert conversation(name).tokens(CHAT) == vocabulary(name).tokenize(CHAT_TEXT, special=True)
    assert not conversation(name).system_merged


@pytest.mark.parametrize(
    ("name", "system"),
    [
        (QWEN, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        (SMALL_QWEN, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        (SMOL, "You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
    ],
)
def test_without_a_system_prompt_the_file_brings_its_own(name, system):
    """The probe for the system role left its own prompt behind, or an empty one was sent."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert conversation(name).tokens([Message("user", "hi")]) == vocabulary(name).tokenize(text, special=True)


@pytest.mark.parametrize("name", ALL)
def test_no_special_text_of_the_vocabulary_becomes_a_token_when_it_is_typed(name):
    """One of the special texts was not known to be one."""
    vocab, chat = vocabulary(name), conversation(name)
    own = special_in(vocab, chat.tokens([Message("user", "x")]))
    typed = list(vocab.special_texts())
    assert len(typed) > 5
    for at in range(0, len(typed), 500):
        content = " a\n".join(typed[at : at + 500])
        tokens = chat.tokens([Message("user", content)])
        assert special_in(vocab, tokens) == own
        assert content in b"".join(map(vocab.piece, tokens)).decode()


@pytest.mark.parametrize("name", ALL)
def test_special_texts_are_those_that_only_special_tokenising_reads(name):
    """A normal token among them would be split off for nothing; a missing one would let a typed marker through."""
    vocab = vocabulary(name)
    known = set(vocab.special_texts())
    for text in (
        "<|im_end|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<bos>",
        "</s>",
        "<tool_call>",
        "\n\n",
        "the",
        "<unk>",
    ):
        reads = vocab.tokenize(text, special=True) != vocab.tokenize(text, special=False)
        assert reads == (text in known), text


def test_a_base_model_with_a_begin_token_continues_the_prompt():
    """On a real file: Gemma wants exactly one begin token; its file has no chat template."""
    vocab, chat = vocabulary(GEMMA), conversation(GEMMA)
    assert "no chat template" in chat.notice
    plain = [vocab.bos, *vocab.tokenize("Once upon a time", special=True)]
    assert chat.tokens([Message("user", "Once upon a time")]) == plain
    assert raw_tokens(vocab, "Once upon a time") == raw_tokens(vocab, "<bos>Once upon a time") == plain
    assert chat.tokens([Message("user", "<bos>Once")])[:2] != [vocab.bos, vocab.bos]


@pytest.mark.parametrize("name", ALL)
def test_characters_of_several_tokens_come_out_whole(name):
    """Emoji and rare signs split over tokens were printed as U+FFFD."""
    text = "Grüße 東京です。 👩‍👩‍👧 🏴‍☠️ 𒀀 ꙮ ﷽ done"
    vocab = vocabulary(name)
    tokens = vocab.tokenize(text, special=False)
    whole = TextStream(vocab.piece, [])
    spans = [whole.push(token) for token in tokens]
    assert whole.finish() == []
    assert whole.text == text
    assert [] in spans  # some character did take several tokens
    stream = TextStream(vocab.piece, ["﷽ do"])
    watch = StopWatch(["﷽ do"], vocab.piece)
    stops = []
    for token in tokens:
        stream.push(token)
        stops.append(watch.push(token))
    assert stream.text == text[: text.index("﷽")]
    assert True in stops
    assert tokens[: len(stream.tokens)] == stream.tokens
