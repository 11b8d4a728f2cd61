"""A text of many kinds, written for this program, for comparing tokenizers."""

from __future__ import annotations

# Code, prose, a chat, figures, lists, and languages other than English.
SAMPLE = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists into one."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]

The keeper had not expected a letter. It lay in a green bottle between two stones, dry and folded twice, and the hand
that had written it was his own. "You will read this in the autumn," it began, "when the lamp has failed for the third
time." He turned it over, looked at the sea, which was quiet, and put the kettle on.

User: Why is the sky blue, and why is it red in the evening?
Assistant: Sunlight is scattered by the molecules of the air. Short wavelengths are scattered far more strongly (the
strength grows with 1/λ⁴), so blue light reaches us from everywhere. In the evening the path is about 40 times longer:
- most of the blue is gone before it arrives;
- what is left is orange and red.

| year | visitors | share |
|------|---------:|------:|
| 2023 | 14,207   | 38.5% |
| 2024 | 15,981   | 41.2% |

In 2024 the museum had 15981 - 14207 = 1774 more visitors than in 2023, that is an increase of about 12.5 percent.

{"name": "mill", "open": true, "hours": [9, 17], "stones": null}

Die Mühle am Fluss mahlte Mehl für drei Dörfer, bis die Eisenbahn kam. Le moulin s'est arrêté, et le petit-fils du
meunier en a fait un petit musée. El río sigue pasando por delante de la puerta. 磨坊现在是一个小博物馆。
'''
