"""What the enumerations run under."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specllama.core import sampling
from specllama.core.arrays import FloatArray, IntArray
from specllama.core.distribution import Distribution
from specllama.core.sampling import SamplingParams
from specllama.drafters import model


@pytest.fixture(autouse=True)
def each_law_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An enumeration asks for the same few laws thousands of times, a third of its time.

    Keyed by all that `law` looks at, so a wrong row, history or setting is still seen. `law` itself is tested alone.
    """
    law = sampling.law
    known: dict[object, tuple[SamplingParams, Distribution]] = {}

    def once(
        logits: FloatArray, history: Sequence[int], params: SamplingParams, ids: IntArray | None = None
    ) -> Distribution:
        key = (logits.tobytes(), tuple(params.window(history)), id(params), None if ids is None else ids.tobytes())
        if key not in known:
            known[key] = (params, law(logits, history, params, ids))  # `params` is kept, so its id is not used again
        return known[key][1]

    monkeypatch.setattr(sampling, "law", once)
    monkeypatch.setattr(model, "law", once)
