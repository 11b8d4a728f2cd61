"""The first fenced code block of an answer, found while it streams."""

from __future__ import annotations

from specllama.cli.screen.code_block import BlockWatch, CodeBlock
from specllama.cli.screen.markdown import AnswerText
from tests.marks import looped

ANSWERS = [
    ("Here:\n```python\na = 1\n\nb = 2\n```\nDone.\n", "a = 1\n\nb = 2\n"),
    ("```\na\n```\n```\nb\n```\n", "a\n"),
    ("~~~~\n```\n~~~\n~~~~\n", "```\n~~~\n"),
    ("1. x\n   ```sh\n   ls\n     -l\n   ```\n", "ls\n  -l\n"),
    ("```\nno end", "no end"),
    ("```\nend without newline\n```", "end without newline\n"),
    ("```\r\na\r\n```\r\n", "a\r\n"),
    ("`x` and ```inline``` text\n", None),
    ("```a`b\nno\n", None),
    ("<think>\n```\nnot this\n```\n</think>\n```\nthis\n```\n", "this\n"),
    ("```\n\u2028 `` ` \n `\n```\n", "\u2028 `` ` \n `\n"),
    ("```\na\n``` \nb\n```\n", "a\n"),
    ("```\na\n    ```\n```\n", "a\n    ```\n"),
    ("a\n    ```\n    b\n", None),
    ("", None),
]


@looped(case=ANSWERS, size=(1, 2, 3, 1000))
def test_the_code_does_not_depend_on_how_the_text_arrives(case: tuple[str, str | None], size: int) -> None:
    """Prevents: fences in the code, a block of the thinking, or text that is lost between two tokens."""
    (answer, code), block = case, CodeBlock()
    parts = [block.feed(answer[i : i + size]) for i in range(0, len(answer), size)]
    assert "".join([*parts, block.finish()]) == (code or "")
    assert block.found is (code is not None)
    assert "".join(AnswerText.of(answer).blocks[:1]) == (code or "")


def test_thinking_that_the_template_began_does_not_count() -> None:
    """Prevents: a sketch of the model's thinking printed as the answer's code."""
    block = CodeBlock(starts_thinking=True)
    assert block.feed("```\nsketch\n```\n</think>\n```\nresult\n```\n") == "result\n"


def test_the_answer_ends_with_the_line_of_the_closing_fence() -> None:
    """Prevents: minutes of explanations behind the code, which are not printed; an end inside the block."""
    pieces = [b"```", b"py\n", b"``", b"x\n", b"``", b"`", b"\n", b"More."]
    watch = BlockWatch([], pieces.__getitem__, starts_thinking=False)
    assert [watch.push(token) for token in range(7)] == [False] * 6 + [True]
    stops = BlockWatch(["x"], pieces.__getitem__, starts_thinking=False)
    assert [stops.push(token) for token in range(4)] == [False] * 3 + [True]
