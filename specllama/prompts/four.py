"""The few prompts that `tune` and `check --probe` measure with: one of four classes of the benchmark's."""

from __future__ import annotations

from collections.abc import Mapping

from specllama.prompts.load import built_in

# Short ones, for they are read again and again; what the profiles call the class -> the prompt's id. The classes differ
# in how predictable their answers are, and so in how much of a draft is accepted.
IDS: Mapping[str, str] = {
    "code": "coding-en-1",
    "summary": "summarization-en-1",
    "story": "writing-en-1",
    "question": "qa-en-1",
}


def sample_prompts() -> Mapping[str, str]:
    """Class -> prompt."""
    first_turn = {prompt.id: prompt.turns[0] for prompt in built_in()}
    return {name: first_turn[id] for name, id in IDS.items()}
