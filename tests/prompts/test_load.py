"""The built-in prompts, and files of prompts."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest

from specllama.base.errors import PromptError, UsageError
from specllama.prompts.load import CATEGORIES, SAMPLES, BenchPrompt, built_in, read, sample_prompts

KANA, HAN = re.compile("[\u3041-\u30ff]"), re.compile("[\u4e00-\u9fff]")
# Classes of prompts with a long text, and its least length: in words, or in characters without spaces.
WITH_TEXT = ("summarization", "rag", "translation", "extraction")
LEAST_WORDS, LEAST_CHARS = 150, 350


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def written(file: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_class_has_eight_prompts_and_three_languages(category: str) -> None:
    """Prevents: a class too small for a bootstrap; a language in only some classes."""
    prompts = built_in([category])
    assert {prompt.category for prompt in prompts} == {category}
    assert len(prompts) >= 8
    assert {prompt.language for prompt in prompts} == {"en", "ja", "zh"}
    assert {prompt.language for prompt in prompts[:3]} == {"en", "ja", "zh"}, "a small budget needs all languages"
    assert len({turn for prompt in prompts for turn in prompt.turns}) == sum(len(prompt.turns) for prompt in prompts)


def test_the_prompts_are_in_the_language_they_claim() -> None:
    """Prevents: figures of one language under the name of another."""
    for prompt in built_in():
        for turn in prompt.turns:
            scripts = (bool(KANA.search(turn)), bool(HAN.search(turn)))
            assert scripts == {"en": (False, False), "ja": (True, True), "zh": (False, True)}[prompt.language], (
                prompt.id
            )


@pytest.mark.parametrize("category", WITH_TEXT)
def test_prompts_about_a_text_have_one_of_real_length(category: str) -> None:
    """Prevents: figures about summaries from texts of two sentences."""
    for prompt in built_in([category]):
        text = prompt.turns[0]
        if prompt.language == "en":
            assert LEAST_WORDS <= len(text.split()) <= 450, prompt.id
        else:
            assert LEAST_CHARS <= len(re.sub(r"\s", "", text)) <= 800, prompt.id


def test_some_prompts_have_several_turns_and_ids_name_one_prompt_each() -> None:
    """Prevents: report rows with equal names; conversations that are never measured."""
    prompts = built_in()
    assert not [id for id, n in Counter(prompt.id for prompt in prompts).items() if n > 1]
    assert {prompt.category for prompt in prompts if len(prompt.turns) > 1} >= {"coding", "roleplay", "dialogue"}


def test_the_order_is_always_that_of_the_classes() -> None:
    """Prevents: equal settings that measure other prompts."""
    assert built_in(["poem", "coding"]) == built_in(["coding", "poem"])
    assert [name for name, _ in Counter(prompt.category for prompt in built_in()).items()] == list(CATEGORIES)


def test_an_unknown_class_is_refused_with_the_known_ones() -> None:
    """Prevents: a typing error that measures nothing."""
    with pytest.raises(UsageError, match=r"'codding', expected one of coding"):
        built_in(["codding"])


def test_the_built_in_files_are_read_like_the_users(tmp_path: Path) -> None:
    """Prevents: built-in prompts in a format that users cannot write."""
    shipped = (resources.files("specllama") / "prompts" / "math.jsonl").read_text(encoding="utf-8")
    copy = tmp_path / "copy.jsonl"
    copy.write_text("\ufeff" + shipped.replace("\n", "\r\n\r\n"), encoding="utf-8")
    assert read(copy) == built_in(["math"])


def test_a_prompt_alone_is_enough(file: Path) -> None:
    """Prevents: required fields that users do not need."""
    written(file, "", {"prompt": "Say hello.", "source": "mine"}, {"prompt": "Say goodbye.", "category": "manners"})
    assert read(file) == (
        BenchPrompt("line-2", "other", "und", ("Say hello.",)),
        BenchPrompt("line-3", "manners", "und", ("Say goodbye.",)),
    )


def test_question_files_of_spec_bench_are_read(file: Path) -> None:
    """Prevents: a conversion of the usual files by the user."""
    written(
        file,
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
        {"question_id": 82, "category": "rag", "turns": ["What is it?"], "reference": ["It."]},
    )
    assert read(file) == (
        BenchPrompt("81", "writing", "und", ("Compose a post.", "Rewrite it.")),
        BenchPrompt("82", "rag", "und", ("What is it?",)),
    )


GOOD = {"id": "a", "category": "qa", "language": "en", "turns": ["Why?"]}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "cut off', "not JSON"),
        ("[" * 100_000, "not JSON that can be read"),
        ('["Why?"]', r"found \[.*, expected an object"),
        ({"category": "qa"}, "turns is None, expected a list"),
        ({**GOOD, "turns": []}, r"turns is \[\], expected a list"),
        ({**GOOD, "turns": "Why"}, "turns is 'Why', expected a list"),
        ({**GOOD, "turns": ["Why?", " \n"]}, r"turns\[1\] is"),
        ({**GOOD, "turns": [{"role": "user"}]}, r"turns\[0\] is \{"),
        ({**GOOD, "prompt": "Why?"}, "both prompt and turns"),
        ({"prompt": 7}, "prompt is 7, expected text"),
        ('{"prompt": "half \\ud800"}', "prompt is not UTF-8 text"),
        ({**GOOD, "id": "a\x1b[31m"}, "id is .*expected one short line"),
        ({**GOOD, "id": 7}, "id is 7"),
        ({**GOOD, "category": "all"}, "category is 'all'"),
        ({**GOOD, "category": "q" * 81}, "category is"),
        ({**GOOD, "language": None}, "language is None"),
        ({"question_id": True, "turns": ["Why?"]}, "id is True"),
        ({"question_id": "q\n1", "turns": ["Why?"]}, "id is"),
        ({**GOOD, "id": "first"}, "the id 'first' is already in line 1"),
    ],
)
def test_a_damaged_line_is_refused_with_its_place(file: Path, line: object, said: str) -> None:
    """Prevents: a traceback; prompts that are silently left out."""
    written(file, {**GOOD, "id": "first"}, "", line)
    with pytest.raises(PromptError, match=f"line 3: .*{said}") as caught:
        read(file)
    assert "\x1b" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_refused_with_their_place(file: Path) -> None:
    """Prevents: a traceback for a compressed or Latin-1 file."""
    file.write_bytes(b'{"prompt": "good"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(PromptError, match="is not UTF-8 text: byte 34 is 0xe9"):
        read(file)


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path, file: Path) -> None:
    """Prevents: a benchmark without prompts that reports success."""
    with pytest.raises(PromptError, match="cannot be read: No such file"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(PromptError, match="cannot be read: Is a directory"):
        read(tmp_path)
    with pytest.raises(PromptError, match="no prompts"):
        read(written(file, "", " "))


def test_tune_measures_with_prompts_of_four_different_classes() -> None:
    """Prevents: an id that does not exist; profiles with one kind of text only."""
    prompts = sample_prompts()
    assert set(prompts) == {"code", "summary", "story", "question"}
    assert len({id.split("-")[0] for id in SAMPLES.values()}) == len(prompts)
    assert all(len(text.split()) <= 200 for text in prompts.values()), "they are prefilled many times"
