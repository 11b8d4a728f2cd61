"""The prompts of `tune` and `check --probe`: one from each of four classes of the benchmark."""

from __future__ import annotations

from collections.abc import Mapping

from specllama.prompts.load import built_in

# The class in profiles -> the prompt's id. The prompts are short because they are prefilled many times. The classes
# differ in how predictable their answers are, and so in their acceptance rate.
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
