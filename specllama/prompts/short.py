"""The prompts of the audit: short ones, because each part of the audit begins with a prefill."""

from __future__ import annotations

from collections.abc import Mapping

from specllama.prompts.load import built_in

# Open questions first: more rejected tokens test more.
WANTED = (
    ("writing", "en"),
    ("qa", "ja"),
    ("coding", "en"),
    ("dialogue", "zh"),
    ("math", "en"),
    ("poem", "en"),
    ("reasoning", "zh"),
    ("qa", "en"),
    ("coding", "zh"),
)


def short_prompts(n_most: int) -> Mapping[str, str]:
    """Id -> prompt of at most `n_most` prompts: the shortest of each class and language."""
    prompts = built_in()
    found = {}
    for category, language in WANTED[:n_most]:
        fit = [each for each in prompts if (each.category, each.language) == (category, language)]
        shortest = min(fit, key=lambda each: len(each.turns[0]))
        found[shortest.id] = shortest.turns[0]
    return found
