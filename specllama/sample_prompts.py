"""Prompts to measure with, by class: our own, so that they may go anywhere this program goes."""

from __future__ import annotations

from collections.abc import Mapping

# The classes differ in how predictable their answers are, and so in how much of a draft is accepted.
PROMPTS: Mapping[str, str] = {
    "code": "Write a Python function that merges two sorted lists into one sorted list. Answer with code only.",
    "summary": (
        "Summarise in two sentences: The mill by the river ground flour for three villages until the railway came. "
        "Then the wheat went to the city, the wheel stood still, and the miller's grandson turned the building into a "
        "small museum, where visitors may now watch the old stones turn once a week."
    ),
    "story": "Tell the beginning of a story about a lighthouse keeper who finds a letter in a bottle.",
    "question": "Why is the sky blue in the daytime and red in the evening? Explain it in a few sentences.",
}
