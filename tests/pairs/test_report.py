"""The compatibility report: the rows about two tokenizers and two models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specllama.base.errors import PairError
from specllama.llama.header import Header
from specllama.llama.memory import MemoryNeed
from specllama.pairs.model_rows import MachineMemory, Side, family, is_tuned, model_rows, refusal_row
from specllama.pairs.report import CheckRow, CompatReport, RowMark
from specllama.pairs.token_rows import llama_cpp_refusal, token_rows
from specllama.pairs.tokenizer import CONTROL, NORMAL, Tokenizer
from tests.headers import QWEN

TEXTS = [f"t{i}" for i in range(300)]
BASE = Tokenizer(
    kind="bpe",
    pre="qwen2",
    entries=TEXTS,
    types=[NORMAL] * 298 + [CONTROL] * 2,
    n_merges=290,
    merges_sum="abc",
    bos=1,
    eos=2,
    eot=3,
    add_bos=False,
    add_eos=False,
    end_tokens=frozenset([2, 3]),
    spellings=[text.encode() for text in TEXTS],
)
GB = 10**9
HEADER = replace(
    QWEN,
    path=Path("big-7b-instruct.gguf"),
    name="Big 7B Instruct",
    weight_bytes={"q4_K": 4 * GB},
    basename="Big",
    finetune="Instruct",
    chat_template="{{ x }}" * 50,
)
SMALL = replace(HEADER, path=Path("big-0.5b-instruct.gguf"), name="Big 0.5B Instruct", weight_bytes={"q4_0": GB // 2})
MACHINE = MachineMemory(memory_free=16 * GB, gpu_free=0, bindings="0.3.36", llama_cpp="b1234")


def texts(entries: list[str]) -> dict[str, list[Any]]:
    return {"entries": entries, "spellings": [text.encode() for text in entries]}


def token_row(test: str, **changes: object) -> CheckRow:
    return row_of(token_rows(BASE, replace(BASE, **changes)), test)  # type: ignore[arg-type]


def row_of(rows: tuple[CheckRow, ...], test: str) -> CheckRow:
    found = [row for row in rows if row.test == test]
    assert len(found) == 1, f"{test} in {[row.test for row in rows]}"
    return found[0]


def side(header: Header, n_ctx: int = 4096) -> Side:
    need = MemoryNeed(header.n_weight_bytes, GB // 10, GB // 10) if header.n_weight_bytes else None
    return Side(header, 2 * header.n_weight_bytes, need, n_ctx)


def model_row(
    test: str, target: Header = HEADER, draft: Header = SMALL, n_ctx: int = 4096, machine: MachineMemory = MACHINE
) -> CheckRow:
    return row_of(model_rows(side(target, n_ctx), side(draft, n_ctx), machine), test)


def test_equal_tokenizers_pass_every_test_without_a_reason() -> None:
    """Prevents: warnings without a cause."""
    rows = token_rows(BASE, BASE)
    assert {row.mark for row in rows} == {RowMark.PASS}
    assert not [row for row in rows if row.reason or row.remedy]


@pytest.mark.parametrize(
    ("entries", "n_differing", "first", "missing"),
    [
        ([*TEXTS[:299], "other"], 1, "299: 't299' | 'other'", "; 1 text of the draft"),
        ([f"x{i}" for i in range(300)], 300, "0: 't0' | 'x0'", "; 297 texts of the draft"),
        (TEXTS[::-1], 300, "0: 't0' | 't299'", "every text of the draft"),
        ([*TEXTS[:10], "new", *TEXTS[10:]], 290, "10: 't10' | 'new'", "; 1 text of the draft"),
    ],
)
def test_differing_ids_are_counted_and_the_first_ten_shown(
    entries: list[str], n_differing: int, first: str, missing: str
) -> None:
    """Prevents: 'does not match' for one id of 256,000 without its number (case 17); an insertion taken for padding."""
    row = token_row("token texts", **texts(entries))
    assert row.mark is RowMark.FAIL
    assert row.reason.startswith(f"{n_differing} of 300 token ids differ")
    assert (row.details[0], len(row.details)) == (first, min(n_differing, 10))
    assert missing in row.reason


@pytest.mark.parametrize(("n_more", "whose"), [(128, "draft"), (-128, "target")])
def test_padding_at_the_end_passes_and_is_explained(n_more: int, whose: str) -> None:
    """Prevents: refusing models of one family for the padding of their matrices (case 16)."""
    sizes = (151_936 // 8, 151_936 // 8 + n_more)
    target, draft = (replace(BASE, entries=[f"t{i}" for i in range(size)], types=()) for size in sizes)
    rows = token_rows(target, draft)
    assert not [row for row in rows if row.mark is RowMark.FAIL]
    assert f"the {whose} has 128 more token ids" in row_of(rows, "vocabulary").reason
    assert row_of(rows, "llama.cpp rule").mark is RowMark.PASS


def test_other_special_tokens_are_allowed_with_a_note() -> None:
    """Prevents: refusing a pair for harmless metadata, or hiding it (case 18)."""
    rows = token_rows(BASE, replace(BASE, eos=7, eot=8, end_tokens=frozenset([7, 8])))
    assert not [row for row in rows if row.mark is RowMark.FAIL]
    assert "EOS is 2 for the target, 7 for the draft" in row_of(rows, "begin and end").reason
    assert "EOT is 3 for the target, 8 for the draft" in row_of(rows, "begin and end").reason
    assert (row_of(rows, "begin and end").target, row_of(rows, "begin and end").draft) == ("1/2/3 +none", "1/7/8 +none")
    assert token_row("begin and end", add_bos=True, add_eos=True, eot=None).draft == "1/2/- +BOS+EOS"
    assert row_of(rows, "end tokens").mark is RowMark.WARN
    assert row_of(rows, "llama.cpp rule").mark is RowMark.PASS, "it looks at EOS only where one is added"


@pytest.mark.parametrize(
    ("test", "changes", "mark"),
    [
        ("tokenizer", {"kind": "spm"}, RowMark.FAIL),
        ("pre-tokenizer", {"pre": "llama-bpe"}, RowMark.WARN),
        ("merges", {"merges_sum": "xyz"}, RowMark.WARN),
        ("token types", {"types": [NORMAL] * 300}, RowMark.WARN),
        ("begin and end", {"add_bos": True}, RowMark.WARN),
        ("begin and end", {"add_eos": True}, RowMark.WARN),
        ("end tokens", {"end_tokens": frozenset([2])}, RowMark.WARN),
    ],
)
def test_each_difference_shows_in_its_own_row(test: str, changes: dict[str, object], mark: RowMark) -> None:
    """Prevents: a row that always passes."""
    row = token_row(test, **changes)
    assert row.mark is mark
    assert row.reason
    assert row.remedy


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"kind": "spm"}, "kinds"),
        ({"add_bos": True}, "BOS"),
        ({"add_eos": True}, "EOS"),
        ({"entries": [*TEXTS, *(f"p{i}" for i in range(128))]}, ""),
        ({"entries": [*TEXTS, *(f"p{i}" for i in range(129))]}, "more than 128"),
        ({"entries": ["a", "b", "c", "d", "e", *TEXTS[5:]]}, ""),
        ({"entries": ["a", "b", "c", "d", "e", "f", *TEXTS[6:]]}, "from id 5"),
        ({"bos": 9, "eos": 9}, ""),
    ],
)
def test_llama_cpps_rule_is_as_in_llama_cpp(changes: dict[str, object], word: str) -> None:
    """Prevents: a wrong copy of the rule."""
    refusal = llama_cpp_refusal(BASE, replace(BASE, **changes))  # type: ignore[arg-type]
    assert bool(refusal) == bool(word)
    assert word in refusal


WORDS = [b" the", b"\xe9", b"a", b""]  # the last one is a control token
OTHER = replace(BASE, kind="spm", entries=["\u2581the", "<0xE9>", "b", "</s>"], spellings=[b" the", b"\xe9", b"b", b""])
OURS = replace(
    BASE, entries=["\u0120the", "\u00e9", "a", "<|end|>"], spellings=WORDS, types=[], bos=None, eos=3, eot=None
)
THEIRS = replace(OTHER, types=[], bos=None, eos=3, eot=None)


def with_sample(*sample: int) -> Tokenizer:
    return replace(OURS, sample=sample)


@pytest.mark.parametrize(("sample", "used", "serves"), [((0, 0, 1, 2), 75, True), ((2, 2, 2, 0), 25, False)])
def test_another_tokenizer_is_refused_with_what_could_be_accepted(
    sample: tuple[int, ...], used: int, serves: bool
) -> None:
    """Prevents: a useless remedy, or none where one helps; a share of the vocabulary instead of a share of a text."""
    rows = token_rows(with_sample(*sample), THEIRS)
    row = row_of(rows, "overlap")
    assert (row.target, row.draft) == ("75 % shared", f"{used} % by use")
    assert f"{used} % of a sample of 4 tokens" in row.reason
    assert row_of(rows, "tokenizer").mark is row_of(rows, "token texts").mark is RowMark.FAIL
    for test in ("tokenizer", "token texts", "overlap"):
        assert ("draft-tli" in row_of(rows, test).remedy) is serves
        assert "own family" in row_of(rows, test).remedy


def test_drafting_over_what_both_have_fits_where_that_is_enough() -> None:
    """Prevents: `draft-tli` refused for a pair with two tokenizers, or accepted where it cannot pay."""
    for sample, mark in (((0, 1), RowMark.WARN), ((0, 2), RowMark.WARN), ((0, 2, 2), RowMark.FAIL)):
        rows = token_rows(with_sample(*sample), THEIRS, strategy="draft-tli")
        assert row_of(rows, "overlap").mark is mark
        assert {row.mark for row in rows if row.test not in ("overlap", "llama.cpp rule")} == {RowMark.PASS}
        assert ("own family" in row_of(rows, "overlap").remedy) == (mark is RowMark.FAIL)
    assert "3 tokens with the same text" in row_of(rows, "vocabulary").reason


def test_a_draft_that_cannot_propose_an_end_token_gets_a_warning() -> None:
    """Prevents: the last token of each answer rejected for no visible reason."""
    nameless = replace(THEIRS, eos=None)
    assert row_of(token_rows(OURS, nameless, strategy="draft-tli"), "end tokens").mark is RowMark.WARN
    assert row_of(token_rows(OURS, THEIRS, strategy="draft-tli"), "end tokens").mark is RowMark.PASS


def test_a_trimmed_draft_is_compared_through_its_map() -> None:
    """Prevents: a trimmed draft refused for its ids, or one of another parent accepted."""
    target = replace(BASE, sample=range(100))
    kept = [*range(95), 297, 298, 299]
    trimmed = replace(BASE, entries=[TEXTS[token] for token in kept], vocab_map=tuple(kept), end_tokens=frozenset())
    rows = token_rows(target, trimmed)
    assert not [row for row in rows if row.mark is RowMark.FAIL]
    assert (row_of(rows, "overlap").mark, row_of(rows, "overlap").draft) == (RowMark.PASS, "95 % by use")
    assert row_of(token_rows(replace(target, sample=range(120)), trimmed), "overlap").mark is RowMark.WARN
    other = replace(trimmed, vocab_map=(*(token + 1 for token in kept[:-1]), 0))
    row = row_of(token_rows(target, other), "token texts")
    assert row.mark is RowMark.FAIL
    assert row.reason.startswith("98 of 98 token ids differ")
    outside = replace(trimmed, entries=TEXTS[:3], vocab_map=(300, 301, 302))
    row = row_of(token_rows(target, outside), "vocabulary")
    assert (row.mark, row.draft) == (RowMark.FAIL, "none of them"), "it has nothing to propose"
    padded = replace(trimmed, entries=[*trimmed.entries, "pad"], vocab_map=(*kept, 300))
    assert row_of(token_rows(target, padded), "token texts").mark is RowMark.PASS


def test_a_pair_of_one_family_passes_every_test() -> None:
    """Prevents: warnings without a cause."""
    assert {row.mark for row in model_rows(side(HEADER), side(SMALL), MACHINE)} == {RowMark.PASS}


@pytest.mark.parametrize(
    ("test", "changes", "word"),
    [
        ("size", {"draft": {"weight_bytes": {"q4_0": int(1.01 * GB)}}}, "above a quarter"),
        ("size", {"draft": {"weight_bytes": {"q4_0": int(0.039 * GB)}}}, "below a hundredth"),
        ("quantization", {"draft": {"weight_bytes": {"f16": GB // 2}}}, "not quantized"),
        ("family", {"draft": {"basename": "Other"}}, "families"),
        ("family", {"draft": {"architecture": "llama"}}, "families"),
        (
            "fine-tuning",
            {"draft": {"name": "Big 0.5B", "path": Path("big-0.5b.gguf"), "finetune": ""}},
            "only the target",
        ),
        ("chat template", {"draft": {"chat_template": "z"}}, "another"),
        ("chat template", {"target": {"chat_template": None}}, "no chat template"),
        ("context", {"draft": {"n_ctx_train": 2048}}, "beyond 2048 nothing is drafted"),
        ("context", {"n_ctx": 100_000}, "longer than the target was trained for"),
        ("experts", {"target": {"n_expert": 64}}, "mixture of experts"),
    ],
)
def test_what_may_not_pay_is_a_warning_with_a_remedy(test: str, changes: dict[str, Any], word: str) -> None:
    """Prevents: a slow pair reported as a good one (case 19)."""
    target, draft = replace(HEADER, **changes.get("target", {})), replace(SMALL, **changes.get("draft", {}))
    row = model_row(test, target, draft, changes.get("n_ctx", 4096))
    assert row.mark is RowMark.WARN
    assert word in row.reason
    assert row.remedy


def test_files_without_weights_are_compared_but_are_no_pair() -> None:
    """Prevents: a vocabulary-only file that passes as a draft and fails when it is loaded."""
    bare_target, bare_draft = (replace(header, weight_bytes={}) for header in (HEADER, SMALL))
    for target, draft, mark in (
        (HEADER, bare_draft, RowMark.FAIL),
        (bare_target, SMALL, RowMark.FAIL),
        (bare_target, bare_draft, RowMark.WARN),
    ):
        row = model_row("weights", target, draft)
        assert row.mark is mark
        assert "weights" in row.reason
        assert row.remedy


def test_free_memory_names_the_gpus_share() -> None:
    """Prevents: one figure for two kinds of memory."""
    assert model_row("memory", machine=replace(MACHINE, gpu_free=8 * GB)).draft == "24 GB free, 8 GB on GPUs"
    assert model_row("memory").draft == "16 GB free"


def test_models_that_are_too_large_for_the_memory_do_not_fit() -> None:
    """Prevents: a system that swaps (case 27)."""
    row = model_row("memory", machine=replace(MACHINE, memory_free=4 * GB))
    assert row.mark is RowMark.FAIL
    assert "need 4.9 GB" in row.reason
    assert "only 4 GB are free" in row.reason
    assert "shorter context" in row.remedy
    assert model_row("memory", machine=replace(MACHINE, memory_free=4 * GB, gpu_free=GB)).mark is RowMark.PASS


@pytest.mark.parametrize(("architecture", "word"), [("llada", "diffusion"), ("t5", "encoder"), ("bert", "encoder")])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_that_cannot_generate_text_fails_with_the_reason(architecture: str, word: str, role: str) -> None:
    """Prevents: a model that is refused only after its weights were loaded (case 20)."""
    row = refusal_row(replace(HEADER, architecture=architecture), role)
    assert row is not None
    assert row.mark is RowMark.FAIL
    assert word in row.reason
    assert (row.target if role == "target" else row.draft).startswith(architecture)
    assert refusal_row(HEADER, role) is None


@pytest.mark.parametrize(
    ("name", "basename", "stem", "expected", "tuned"),
    [
        ("Qwen2.5 Coder 1.5B Instruct GGUF", "Qwen2.5-Coder", "qwen2.5-coder", "qwen2.5 coder", True),
        ("Gemma 3 270m", "gemma-3", "gemma-3-270m-it-Q8_0", "gemma 3", True),
        ("Gemma 3 270m", "gemma-3", "gemma-3-270m-q4_k_m", "gemma 3", False),
        ("Smollm2 135M 8k", "smollm2", "SmolLM2-135M-Instruct.Q4_1", "smollm2", True),
        ("Qwen3 30B A3B", "", "x", "qwen3", False),
        ("", "", "model", "qwen2", False),
    ],
)
def test_family_and_tuning_are_read_from_what_files_say(
    name: str, basename: str, stem: str, expected: str, tuned: bool
) -> None:
    """Prevents: two sizes of one model taken for two families, or a base model for a tuned one."""
    header = replace(HEADER, name=name, path=Path(f"{stem}.gguf"), basename=basename, finetune="")
    assert family(header) == expected
    assert is_tuned(header) is tuned


def test_a_report_fits_unless_a_row_failed() -> None:
    """Prevents: a warning that refuses a pair, or a failure that does not."""
    rows = [CheckRow("a", RowMark.PASS, "", ""), CheckRow("b", RowMark.WARN, "", "", "slow", "wait")]
    report = CompatReport("t", "d", tuple(rows))
    assert report.fits
    report.require()
    failing = CompatReport("t", "d", (*rows, CheckRow("c", RowMark.FAIL, "", "", "other words", "take another")))
    assert not failing.fits
    with pytest.raises(PairError, match="the draft does not fit the target: other words") as caught:
        failing.require()
    assert caught.value.hint == "take another"


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"),
    [
        (("\xe6\xbc\xa2", "漢".encode()), ("\xe5\u0143\u0139", "字".encode()), "3: '漢' | '字'"),
        (("\xc3", b"\xc3"), ("\u0120b", b" b"), "3: b'\\xc3' | ' b'"),
        (("<|end|>", b""), ("\x1b", b"\x1b"), "3: '<|end|>' | '\\x1b'"),
        (("\u0120the", b" the"), ("\u2581the", b" the"), "3: '\u0120the' | '\u2581the'"),  # equal texts
    ],
)
@pytest.mark.parametrize("trimmed", [False, True])
def test_texts_that_differ_are_shown_as_people_read_them(
    ours: tuple[str, bytes], theirs: tuple[str, bytes], shown: str, trimmed: bool
) -> None:
    """Prevents: the byte alphabet of GPT-2 in a report, where '漢' is three other letters."""

    def with_token(entry: str, spelled: bytes, **changes: Any) -> Tokenizer:
        entries, spellings = [*TEXTS], list(BASE.spellings)
        entries[3], spellings[3] = entry, spelled
        return replace(BASE, entries=entries, spellings=spellings, **changes)

    draft = with_token(*theirs, vocab_map=tuple(range(len(TEXTS)))) if trimmed else with_token(*theirs)
    row = row_of(token_rows(with_token(*ours), draft), "token texts")
    assert row.details == (shown,)
    assert shown.partition(" | ")[2] in row.reason
