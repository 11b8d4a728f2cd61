"""Prompts of the comparisons: four kinds, our own, fixed before the first measurement."""

from __future__ import annotations

PROMPTS: dict[str, str] = {
    "code": (
        "Write a Python class LRUCache with get and put in O(1), using a doubly linked list and a dict. Add "
        "type hints and docstrings, then a unittest.TestCase that covers eviction, update and a capacity of "
        "one."
    ),
    "summary": (
        "Summarise the following text in five bullet points, keeping its wording where you can.\n\n"
        "The harbour of Lindhavn was built in 1874 for the herring fleet. Two stone piers, 310 and 260 metres "
        "long, shelter a basin of four hectares. Until 1921 every boat was sail-driven, and the harbour "
        "office kept a book of winds in which the master wrote the direction and force of the wind every six "
        "hours. The book survived; it is the longest unbroken record of wind on that coast. In 1958 the fleet "
        "moved to deeper water at Storvik, and the basin began to silt up. The town bought the piers for one "
        "crown in 1979. Since 1994 the basin has been dredged every third winter, and it now serves forty "
        "sailing boats, a school of boat building and a museum that shows the book of winds. Last year the "
        "museum let a group of physicists scan all 41,000 pages. They found that the strong westerly winds of "
        "autumn now come eleven days later than they did in the first thirty years."
    ),
    "question": (
        "Why does the moon always show the same face to the earth? Explain it to a curious adult, with the "
        "physics but without formulas, and say which other moons behave alike."
    ),
    "story": (
        "Tell a short story about a lighthouse keeper who finds a letter in a bottle, and the letter is "
        "addressed to her."
    ),
}
