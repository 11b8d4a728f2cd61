"""Dataclasses to JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest

from specllama.base.errors import ReportError
from specllama.base.jsonable import from_plain, parsed, to_plain


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    place: Path
    colour: Colour
    n: int = 0

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("n is negative")


@dataclass(frozen=True)
class Outer:
    name: str
    share: float
    inner: Inner | None
    many: tuple[Inner, ...]
    pairs: tuple[tuple[int, float], ...]
    table: Mapping[str, int]
    kind: Literal["a", "b"] = "a"


WHOLE = Outer("x", 0.5, Inner(Path("/m"), Colour.BLUE), (Inner(Path("n"), Colour.RED, 2),), ((1, 0.5),), {"k": 3}, "b")


def test_what_is_written_is_read_again() -> None:
    """Prevents: a field that is lost or changes its type in a file."""
    plain = json.loads(json.dumps(to_plain(WHOLE)))
    assert from_plain(Outer, plain) == WHOLE
    assert from_plain(Outer, {**plain, "newer": 1}) == WHOLE
    del plain["kind"]
    assert from_plain(Outer, plain).kind == "a"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"name": 3}, "it.name"),
        ({"share": "much"}, "it.share"),
        ({"share": math.nan}, "it.share"),
        ({"share": 10**400}, "it.share"),
        ({"share": True}, "it.share"),
        ({"inner": []}, "it.inner"),
        ({"inner": {"place": "x", "colour": "green"}}, "it.inner.colour"),
        ({"inner": {"place": 1, "colour": "red"}}, "it.inner.place"),
        ({"inner": {"place": "x"}}, "'colour'"),
        ({"many": [{"place": "x", "colour": "red", "n": -1}]}, "it.many[0]"),
        ({"many": 3}, "it.many"),
        ({"pairs": [[1, 2.0], [1]]}, "it.pairs[1]"),
        ({"table": {"k": "x"}}, "it.table.k"),
        ({"kind": "c"}, "it.kind"),
    ],
)
def test_an_invalid_value_is_named_with_its_place(change: dict[str, object], where: str) -> None:
    """Prevents: a traceback, or wrong results from an edited file."""
    with pytest.raises(ReportError) as caught:
        from_plain(Outer, {**to_plain(WHOLE), **change}, "it")
    assert where in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 50_000, '{"a":' * 50_000, "9" * 100_000, "", "{", "nope"])
def test_text_that_cannot_be_read_is_a_value_error(text: str) -> None:
    """Prevents: a RecursionError in a command."""
    with pytest.raises(ValueError):
        parsed(text)
