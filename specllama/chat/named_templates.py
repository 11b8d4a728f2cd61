"""Chat templates by llama.cpp's names, for model files without a template or with a wrong one.

A test compares each with llama.cpp's own. `Conversation` adds the begin token, and merges a system prompt that a
template leaves out into the next message.
"""

from __future__ import annotations

from collections.abc import Mapping


def _frames(before: str, after: str) -> str:
    """The same frame around every message; {} stands for the role. `before` with `assistant` begins an answer."""
    return (
        f"{{% for message in messages %}}{{{{ '{before}'.format(message.role) + message.content + '{after}' }}}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{before}'.format('assistant') }}}}{{% endif %}}"
    )


def _by_role(frames: Mapping[str, str], end: str = "") -> str:
    """A frame for each role, {} stands for the message; roles without one are left out. `end` begins an answer."""
    cases = "".join(
        f"{{% if message.role == '{role}' %}}{{{{ '{frame}'.replace('{{}}', message.content) }}}}{{% endif %}}"
        for role, frame in frames.items()
    )
    return (
        f"{{% for message in messages %}}{cases}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{end}' }}}}{{% endif %}}"
    )


CHATML = _frames(r"<|im_start|>{}\n", r"<|im_end|>\n")
NAMED = {
    "chatml": CHATML,
    "gemma": _by_role(
        {
            "user": r"<start_of_turn>user\n{}<end_of_turn>\n",
            "assistant": r"<start_of_turn>model\n{}<end_of_turn>\n",
        },
        r"<start_of_turn>model\n",
    ),
    "llama2-sys": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content + '</s>' }}"
        "{% elif message.role == 'system' %}{{ '[INST] <<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' }}"
        "{% else %}{{ ('' if loop.previtem is defined and loop.previtem.role == 'system' else '[INST] ')"
        " + message.content + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "llama3": _frames(r"<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    "mistral-v3": _by_role({"user": "[INST] {}[/INST]", "assistant": " {}</s>"}),
    "mistral-v7": _by_role(
        {"system": "[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]", "user": "[INST] {}[/INST]", "assistant": " {}</s>"}
    ),
    "phi3": _frames(r"<|{}|>\n", r"<|end|>\n"),
    "phi4": _frames("<|im_start|>{}<|im_sep|>", "<|im_end|>"),
    "vicuna": _by_role({"system": r"{}\n\n", "user": r"USER: {}\n", "assistant": r"ASSISTANT: {}</s>\n"}, "ASSISTANT:"),
}
