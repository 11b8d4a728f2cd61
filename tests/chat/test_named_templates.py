"""Our chat templates by name against llama.cpp's own."""

from __future__ import annotations

import ctypes

import pytest

from specllama.chat.conversation import Conversation, Message
from specllama.chat.named_templates import NAMED
from specllama.llama import load_vocabulary
from tests import tiny

CHATS = [
    [("user", "U1")],
    [("system", "S {} it's"), ("user", "U1"), ("assistant", "A1"), ("user", "U2")],
    [("user", "U1"), ("assistant", "A1"), ("user", "U2"), ("assistant", "A2"), ("user", "U3")],
]


def of_llama_cpp(name: str, chat: list[tuple[str, str]]) -> str:
    """The conversation by llama.cpp's template of this name."""
    import llama_cpp

    messages = (llama_cpp.llama_chat_message * len(chat))(
        *(llama_cpp.llama_chat_message(role=role.encode(), content=content.encode()) for role, content in chat)
    )
    buffer = ctypes.create_string_buffer(4096)
    n_bytes = llama_cpp.llama_chat_apply_template(name.encode(), messages, len(chat), True, buffer, 4096)
    assert 0 < n_bytes < 4096
    return buffer.raw[:n_bytes].decode()


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", NAMED)
def test_a_named_template_is_llama_cpps(
    name: str, chat: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Prevents: a name that stands for another format than in llama.cpp."""
    path = tmp_path_factory.getbasetemp() / "named-templates.gguf"
    if not path.exists():
        tiny.write_model(path, vocabulary=tiny.byte_level())
    vocab = load_vocabulary(path)
    text = Conversation(vocab, NAMED[name]).text([Message(*each) for each in chat])
    assert text == of_llama_cpp(name, chat)
    vocab.close()
