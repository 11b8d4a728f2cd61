"""Pairs with different tokenizers on the command line: refused by default, accepted with `--spec-type draft-tli`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specllama.pairs.draft_in_target_ids import VOCAB_MAP
from tests import tiny
from tests.cli.conftest import Pair, Run, Terminal, forbidden, record_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_home")]

ASK = ["--raw", "the heat of the heather ", "-n", "40", "-s", "3", "--draft-max", "3", "--json"]


def test_a_pair_of_two_tokenizers_is_refused_with_a_hint(specllama: Run, strangers: Pair) -> None:
    """Prevents: 'does not fit' without naming the strategy that works; a translation without a request."""
    options = strangers.options[:4]
    refused, served = specllama("check", *options, "--json"), specllama("check", *options, "--spec-type", "draft-tli")
    assert (refused.code, served.code) == (1, 0)
    rows = {row["test"]: row for row in json.loads(refused.out)["rows"]}
    assert rows["tokenizer"]["mark"] == rows["token texts"]["mark"] == "FAIL"
    assert "draft-tli" in rows["tokenizer"]["remedy"]
    assert "% of a sample of" in rows["overlap"]["reason"]
    assert "FAIL" not in served.out
    run = specllama("run", *strangers.options, *ASK)
    assert (run.code, run.out) == (1, "")
    assert "the target's tokenizer is bpe, the draft's is spm" in run.err
    assert "hint: draft-tli" in run.err


@pytest.mark.parametrize("spec_type", ["draft-tli", "lookup,draft-tli", "draft-simple,draft-tli"])
@pytest.mark.parametrize("rule", ["block", "token"])
def test_it_says_what_plain_decoding_says(specllama: Run, strangers: Pair, spec_type: str, rule: str) -> None:
    """Prevents: the draft's tokens in the output; a named strategy that does not draft."""
    args = ["run", *strangers.options, *ASK, "--temp", "0", "--verify-rule", rule]
    record = record_of(specllama(*args, "--spec-type", spec_type))
    assert record["acceptance"]["drafted"] > 0
    assert record["text"] == record_of(specllama(*args, "--spec-type", "none"))["text"]
    assert record["settings"]["spec_type"] == ("chain" if "lookup" in spec_type else spec_type.split(",")[0])


def test_a_chat_can_translate(specllama: Run, strangers: Pair) -> None:
    """Prevents: translation in `run` only."""
    args = ["chat", *strangers.options, "-n", "8", "--temp", "0", "--spec-type", "draft-tli", "--jsonl"]
    result = specllama(*args, stdin=b'{"message": "hello"}\n{"message": "and again"}\n')
    assert result.code == 0, result.err
    assert '"drafter": "draft-tli"' in result.out
    assert specllama(*args[:-3], stdin=b"hello\n").code == 1


def test_a_draft_with_too_few_shared_tokens_is_refused(specllama: Run, strangers: Pair, tmp_path: Path) -> None:
    """Prevents: a draft that knows one token in four."""
    letters = tiny.write_model(tmp_path / "letters.gguf", n_vocab=12)
    for extra in ([], ["--spec-type", "draft-tli"]):
        result = specllama("check", "-m", str(strangers.target), "-md", str(letters), "--json", *extra)
        assert result.code == 1
        assert "draft-tli" not in "".join(row["remedy"] for row in json.loads(result.out)["rows"])
    run = specllama("run", "-m", str(strangers.target), "-md", str(letters), *ASK, "--spec-type", "draft-tli")
    assert (run.code, run.out) == (1, "")
    assert "upper limit of the acceptance rate" in run.err


def test_a_trimmed_draft_is_used_through_its_map(specllama: Run, tmp_path: Path) -> None:
    """Prevents: ids of a trimmed vocabulary taken for the target's."""
    whole, kept = tiny.letters(20), [*range(12), 17, 18, 19]
    tokens, types = (tuple(values[token] for token in kept) for values in (whole.tokens, whole.types))
    trimmed = replace(whole, tokens=tokens, types=types, bos=12, eot=13, eos=14)
    target = tiny.write_model(tmp_path / "t.gguf", vocabulary=whole)
    draft = tiny.write_model(tmp_path / "d.gguf", vocabulary=trimmed, seed=3, extra={VOCAB_MAP: kept})
    pair = Pair(target, draft)
    checked = specllama("check", *pair.options[:4], "--json")
    assert checked.code == 0, checked.out
    args = ["run", *pair.options, "--raw", "abcmnopabc", "-n", "40", "--temp", "0", "--draft-max", "3", "--json"]
    args += forbidden(17, 18, 19)
    record = record_of(specllama(*args))
    assert record["acceptance"]["drafted"] > 0
    assert record["text"] == record_of(specllama(*args, "--spec-type", "none"))["text"]
    wrong = tiny.write_model(tmp_path / "w.gguf", vocabulary=trimmed, extra={VOCAB_MAP: [*kept[1:], 0]})
    refused = specllama("run", "-m", str(target), "-md", str(wrong), "--raw", "abc")
    assert (refused.code, refused.out) == (1, "")
    assert "token ids differ" in refused.err


def test_a_mismatch_is_one_screen(terminal: Callable[..., Terminal], strangers: Pair) -> None:
    """Prevents: a reason that scrolled away in a terminal of 24 rows."""
    shown = terminal("check", *strangers.options[:4], columns=80, rows=24)
    assert shown.finish() == 1
    lines = shown.display.text_lines
    assert len(lines) <= 23, "the shell's prompt needs a line"
    assert lines[-1].startswith("It does not fit: tokenizer, token texts")
    assert sum(line.startswith("hint: ") for line in lines) == 1, "one hint, shown once"
    assert "draft-tli" in shown.text
