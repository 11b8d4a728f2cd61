"""Counts in sentences, and bytes that should be text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from specllama.base.errors import PromptError
from specllama.base.text import counted, decoded, figure
from tests.test_layers import FILES, PACKAGE, tree_of

# What is counted elsewhere: "cut after {n} tokens" is wrong for one. Totals are never one: "the context of {n} tokens".
_PLURAL = re.compile(
    r" (?:\w+ )?(tokens|ids|answers|runs|prompts|turns|words|entries|reports|plots|tensors|keys|cores|bytes|drafts"
    r"|texts|near-ties|contexts|repetitions)\b"
)
_TOTAL = re.compile(r"(?:^|\W)(of|to|than|least|most|exactly) $")


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens"), (4096, "4096 tokens"), (81000, "81,000 tokens")]
)
def test_one_is_counted_in_the_singular(n: int, text: str) -> None:
    """Prevents: "the answer was cut after 1 tokens"."""
    assert counted(n, "token") == text
    assert counted(n, "entry", "entries") == text.replace("tokens", "entries").replace("token", "entry")


def test_every_number_has_the_same_format() -> None:
    """Prevents: "8123 bytes (expected 8,200)"."""
    assert [figure(n) for n in (0, 8123, 9999, 10_000, -81_000)] == ["0", "8123", "9999", "10,000", "-81,000"]
    assert [path.name for path in FILES if ":,}" in path.read_text(encoding="utf-8")] == []


def _hand_made_plurals(tree: ast.AST) -> Iterator[int]:
    """Lines of f-strings with a number and a noun in the plural; errors of programmers are left out."""
    programmers = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ValueError":
            programmers.update(ast.walk(node))
        if not isinstance(node, ast.JoinedStr) or node in programmers:
            continue
        for before, value, after in zip(["", *node.values], node.values, node.values[1:], strict=False):
            if not (isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant)):
                continue
            is_whole = value.conversion == -1 and (
                value.format_spec is None or ast.unparse(value.format_spec) == "f','"
            )
            is_total = isinstance(before, ast.Constant) and _TOTAL.search(str(before.value))
            if is_whole and not is_total and not ast.unparse(value.value).isupper() and _PLURAL.match(str(after.value)):
                yield value.lineno


@pytest.mark.slow
def test_no_sentence_makes_its_own_plural() -> None:
    """Prevents: a new sentence that says "1 tokens"."""
    found = [f"{path.relative_to(PACKAGE)}:{line}" for path in FILES for line in _hand_made_plurals(tree_of(path))]
    assert not found


@pytest.mark.parametrize(
    ("data", "encoding"),
    [("é".encode("latin-1"), "LATIN1"), ("hé".encode("utf-16"), "UTF-16"), (b"\xfe\xff\x00h", "UTF-16")],
)
def test_the_hint_names_the_encoding(data: bytes, encoding: str) -> None:
    """Prevents: advice for Latin-1 to someone whose shell writes UTF-16, which turns the text into rubbish."""
    with pytest.raises(PromptError) as caught:
        decoded(data, "x.txt", PromptError)
    assert encoding in caught.value.hint.split()
    assert decoded("\ufeffé".encode(), "x.txt", PromptError) == "é"
