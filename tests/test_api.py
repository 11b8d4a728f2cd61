"""The library: `load`, answers, chats, and answers that are abandoned or interrupted."""

from __future__ import annotations

import gc
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import specllama
from specllama import (
    Finished,
    ModelBusy,
    Pair,
    PairError,
    PromptError,
    SamplingParams,
    StepEvent,
    TokenEvent,
    UsageError,
    api,
    llama,
)
from specllama.api import SamplingKeywords
from specllama.cli.args.options import DraftOptions, HardwareOptions, ModelOptions, SamplingOptions
from specllama.cli.loading import ask_of
from specllama.files.catalog import user_file
from specllama.llama import LlamaModel, load_plan
from specllama.pairs.ask import Ask
from specllama.pairs.learning import Lesson
from tests import tiny
from tests.hubserver import HubServer

pytestmark = pytest.mark.usefixtures("sound_build", "children")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
ENDLESS = {98: float("-inf"), 99: float("-inf")}  # no end tokens
N_CTX = 1024
NAME = "qwen2.5-coder-1.5b"  # the pair in docs/api.md


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft with an ASCII vocabulary and a chat template."""
    folder = tmp_path_factory.mktemp("api")
    options: dict[str, Any] = {"vocabulary": tiny.ascii_level(), "chat_template": tiny.CHATML, "n_ctx": 8192}
    return tiny.write_pair(folder, noise=0.03, **options)


@pytest.fixture
def pair(files: tuple[Path, Path]) -> Iterator[Pair]:
    with opened(files) as loaded:
        yield loaded


def opened(files: tuple[Path, Path], **options: Any) -> Pair:
    return specllama.load(target=files[0], draft=files[1], **{"n_ctx": N_CTX, "n_threads": 1, "n_max": 4, **options})


def ask(pair: Pair, text: str = "hello", **options: Any) -> specllama.Answer:
    return pair.answer(text, **{"temperature": 0, "max_tokens": 40, "logit_bias": ENDLESS, **options})


def test_text_tokens_and_figures_agree_and_drafts_change_nothing(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    """Prevents: text lost between the three ways to read an answer; a draft that changes the text."""
    answer, plain = ask(pair), ask(pair, drafts=False)
    assert "".join(pair.stream("hello", temperature=0, max_tokens=40, logit_bias=ENDLESS)) == answer.text == str(answer)
    assert pair.stats.n_emitted == len(answer.tokens) == 40
    assert (answer.tokens, answer.text, answer.reason) == (plain.tokens, plain.text, "length")
    assert (answer.stats.n_from_draft > 0, plain.stats.n_drafted) == (True, 0)
    events = list(pair.events("hello", temperature=0, max_tokens=40, logit_bias=ENDLESS))
    assert tuple(event.token for event in events if isinstance(event, TokenEvent)) == answer.tokens
    assert any(isinstance(event, StepEvent) and event.accepted for event in events)
    assert isinstance(events[-1], Finished)
    assert capfd.readouterr() == ("", "")


def test_a_common_beginning_is_read_only_once(pair: Pair) -> None:
    """Prevents: answers that read a long prompt again because the record of the KV cache ended with the last answer."""
    first = ask(pair)
    gc.collect()
    again = ask(pair)
    assert (first.stats.n_cached, again.stats.n_cached) == (0, first.stats.n_prompt - 1)
    assert first.tokens == again.tokens


def test_a_seed_a_stop_text_and_a_limit_are_kept(files: tuple[Path, Path]) -> None:
    """Prevents: keywords that are ignored."""
    with opened(files, n_max=3) as pair:
        first, again, other = (ask(pair, temperature=1, seed=seed) for seed in (7, 7, 8))
        assert first.tokens == again.tokens != other.tokens
        assert (first.seed, other.seed) == (7, 8)
        whole = ask(pair).text
        cut = ask(pair, stop=[whole[10:13]])
        assert (cut.text, cut.reason) == (whole[: whole.index(whole[10:13])], "stop")
        assert "".join(pair.stream("hello", temperature=0, stop=whole[10:13])) == cut.text


def test_an_answer_in_a_format_says_whether_it_is_whole(pair: Pair) -> None:
    """Prevents: half an object that parses as nothing, with no word about it; masks that stay after the answer."""
    for options, fits in (({}, True), ({"stop": "b a"}, False), ({"max_tokens": 3}, False), ({"drafts": False}, True)):
        answer = pair.answer("hello", regex="(ab ){4}", **{"temperature": 0, "max_tokens": 40, **options})
        assert ((answer.text == "ab " * 4), answer.fits_format) == (fits, fits)
    assert pair.chat(regex="a{3}", max_tokens=9).send("hello").fits_format
    assert ask(pair).fits_format is None


def test_prompts_are_texts_messages_or_raw(pair: Pair) -> None:
    """Prevents: a template around a raw prompt, or none around a question."""
    text = ask(pair, "b", system="a")
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert pair.answer(messages, temperature=0, max_tokens=40, logit_bias=ENDLESS).tokens == text.tokens
    assert text.stats.n_prompt > ask(pair, "b").stats.n_prompt > ask(pair, "b", raw=True).stats.n_prompt == 1
    for wrong in ({"raw": True, "system": "a"}, {"logit_bias": {100: 1.0}}, {"temperature": -1}):
        with pytest.raises(UsageError):
            ask(pair, "b", **wrong)


def test_an_answer_that_was_left_changes_no_later_one(files: tuple[Path, Path], pair: Pair) -> None:
    """Prevents: an answer that continues the wrong prompt because an abandoned one was closed late."""
    expected = [ask(pair, text).tokens for text in ("one", "two", "three")]
    with opened(files) as fresh:
        left = fresh.stream("one", temperature=0, logit_bias=ENDLESS)
        next(left)
        other = fresh.stream("two", temperature=0)
        with pytest.raises(ModelBusy):
            next(other)
        next(left)
        left.close()
        assert ask(fresh, "two").tokens == expected[1]
        for text in fresh.stream("one", temperature=0, logit_bias=ENDLESS):
            assert text
            break
        gc.collect()
        assert ask(fresh, "three").tokens == expected[2]
        other.close()
        assert ask(fresh, "one").tokens == expected[0]


def test_a_refused_answer_changes_nothing_of_the_running_one(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a second answer that undoes the first one's `cancel`, or counts in what the first one teaches."""
    lessons = list[object]()

    def begun(*args: Any, **options: Any) -> Lesson:
        lessons.append(args)
        return Lesson(*args, **options)

    monkeypatch.setattr(api, "Lesson", begun)
    with opened(files) as fresh:
        running = fresh.events("one", temperature=0, logit_bias=ENDLESS)
        next(running)
        fresh.cancel()
        for refused in (fresh.events("two"), fresh.chat().events("two")):
            with pytest.raises(ModelBusy):
                next(refused)
        assert len(lessons) == 1
        assert list(running)[-1].reason == "cancelled"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_ctrl_c_within_an_answer_leaves_the_pair_usable(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, when: str, role: str
) -> None:
    """Prevents: unknown tokens in the KV cache after an interrupt in the middle of a pass."""
    expected, path = ask(pair).tokens, getattr(pair, role)
    original, n_left = LlamaModel.eval, 5

    def interrupted(self: LlamaModel, *args: Any) -> Any:
        nonlocal n_left
        n_left -= self.path == path
        now = n_left == 0 and self.path == path
        if now and when == "before":
            signal.raise_signal(signal.SIGINT)
        rows = original(self, *args)
        if now:
            signal.raise_signal(signal.SIGINT)
        return rows

    monkeypatch.setattr(LlamaModel, "eval", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(pair)
    assert ask(pair).tokens == expected
    assert ask(pair, "something else").tokens == ask(pair, "something else", drafts=False).tokens


def test_one_file_as_target_and_draft_is_loaded_twice(files: tuple[Path, Path]) -> None:
    """Prevents: target and draft with one KV cache, which gives wrong text."""
    with opened((files[0], files[0])) as pair:
        answer = ask(pair)
        assert answer.tokens == ask(pair, drafts=False).tokens
        assert answer.stats.acceptance_rate == 1.0


def test_cancel_ends_an_answer_and_not_the_next(pair: Pair) -> None:
    """Prevents: a cancel without effect, or one that ends later answers."""
    reading = pair.events("hello", temperature=0, logit_bias=ENDLESS)
    for event in reading:
        if isinstance(event, StepEvent):
            pair.cancel()
    assert isinstance(event, Finished)
    assert event.reason == "cancelled"
    threading.Thread(target=pair.cancel).start()
    assert ask(pair, max_tokens=5).reason == "length"


def test_a_closed_pair_says_so_and_ends_what_was_being_read(
    files: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Prevents: a crash in freed memory, or a message on stderr when an iterator is collected late."""
    pair = opened(files)
    chat, left = pair.chat(), pair.stream("hello", logit_bias=ENDLESS)
    next(left)
    pair.close()
    pair.close()
    assert list(left) == []
    del left
    gc.collect()
    for use in (lambda: ask(pair), lambda: pair.stream("a"), pair.chat, lambda: chat.send("a")):
        with pytest.raises(UsageError, match="closed"):
            use()
    assert capfd.readouterr() == ("", "")


def test_a_chat_goes_on_from_what_was_said(pair: Pair) -> None:
    """Prevents: turns that the model does not read, or that it reads again."""
    chat = pair.chat("brief", temperature=0, max_tokens=20, logit_bias=ENDLESS)
    first = chat.send("hello")
    assert [message.role for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.messages[2].content == first.text
    second = "".join(chat.stream("and then?"))
    assert second == chat.messages[-1].content
    assert pair.stats.n_cached > first.stats.n_prompt
    messages = [{"role": message.role, "content": message.content} for message in chat.messages[:-1]]
    assert pair.answer(messages, temperature=0, max_tokens=20, logit_bias=ENDLESS).text == second
    chat.undo()
    assert [message.role for message in chat.messages] == ["system", "user", "assistant"]
    assert chat.send("and then?").text == second
    chat.clear()
    assert [message.role for message in chat.messages] == ["system"]
    assert chat.send("hello").tokens == first.tokens


def test_two_chats_share_the_models_but_not_the_words(pair: Pair) -> None:
    """Prevents: tokens of one conversation in the other."""
    one, other = (pair.chat(temperature=0, max_tokens=10, logit_bias=ENDLESS) for _ in range(2))
    expected = one.send("hello").text
    other.send("another thing")
    assert other.send("hello").text != expected
    assert one.send("hello").text != expected
    one.clear()
    assert one.send("hello").text == expected


def test_a_full_context_is_noted_without_commands_of_the_chat(files: tuple[Path, Path]) -> None:
    """Prevents: turns dropped silently, or a note about a command that a library does not have."""
    notes: list[str] = []
    with opened(files, on_note=notes.append) as pair:
        chat = pair.chat(temperature=0, max_tokens=10, logit_bias=ENDLESS)
        while not notes:
            chat.send("x" * 200)
    assert "is full" in notes[0]
    assert "/" not in notes[0]
    assert "--" not in notes[0]


def test_progress_and_notes_reach_the_caller(tmp_path: Path) -> None:
    """Prevents: a minute of loading without progress; a missing template without a note."""
    heard: list[tuple[str, float]] = []
    notes: list[str] = []
    options: dict[str, Any] = {"on_note": notes.append, "on_progress": lambda *each: heard.append(each)}
    with specllama.load(target=tiny.write_model(tmp_path / "plain.gguf"), n_threads=1, **options) as pair:
        assert (pair.draft, pair.spec_type) == (None, "lookup")
        pair.answer("abc", max_tokens=2)
        pair.answer("abc", max_tokens=2)
    shares = [share for what, share in heard if what == "loading"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert sum("chat template" in note for note in notes) == 1


def test_repositories_of_the_hub_are_fetched_with_progress(files: tuple[Path, Path], hub_server: HubServer) -> None:
    """Prevents: a download without progress, or a repository taken for a file."""
    names = "maker/tiny-GGUF:Q4_K_M", "maker/tinier-GGUF:Q4_0"
    for name, path in zip(names, files, strict=True):
        repo, _, quant = name.partition(":")
        hub_server.repo(repo).files[f"model-{quant}.gguf"] = path.read_bytes()
    heard: list[tuple[str, float]] = []
    notes: list[str] = []
    options: dict[str, Any] = {"target": names[0], "draft": names[1], "n_ctx": N_CTX, "n_threads": 1, "n_max": 4}
    with specllama.load(**options, on_note=notes.append, on_progress=lambda *each: heard.append(each)) as pair:
        assert pair.draft is not None
        assert (pair.target.name, pair.draft.name) == ("model-Q4_K_M.gguf", "model-Q4_0.gguf")
        assert ask(pair, max_tokens=5).reason == "length"
    for name in ("model-Q4_K_M.gguf", "model-Q4_0.gguf"):
        assert max(share for what, share in heard if what == f"fetching {name}") == 1.0
        assert any(note.startswith(f"fetched {name} from Hub maker/") for note in notes)
    specllama.load(**options, offline=True).close()


def test_what_does_not_fit_or_go_together_is_refused_before_anything_is_loaded(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a draft that is silently left out, or a minute of loading before the refusal."""
    monkeypatch.setattr(llama, "load_together", None)
    foreign = tiny.write_model(tmp_path / "foreign.gguf", n_vocab=14)
    with pytest.raises(PairError):
        opened((files[0], foreign))
    target, draft = files
    wrong: list[dict[str, Any]] = [
        {"draft": draft},
        {"pair": "a", "target": target},
        {"target": target, "spec_type": "draft-simple"},
        {"target": target, "draft": draft, "spec_type": "none-such"},
        {"target": target, "draft": draft, "n_max": -1},
        {"target": target, "draft": draft, "rule": "none-such"},
        {"target": target, "draft": draft, "draft_temperature": -1},
    ]
    for options in wrong:
        with pytest.raises(UsageError):
            specllama.load(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"target": ""},
        {"target": None, "draft": None, "pair": ""},
        {"target": 1},
        {"draft": 3},
        {"draft": ""},
        {"n_ctx": "x"},
        {"n_ctx": 300.5},
        {"n_threads": "a"},
        {"n_gpu_layers": -3},
        {"spec_type": ["lookup"]},
        {"spec_type": "auto,lookup"},
        {"n_max": 1.5},
        {"hardware": {}},
        {"on_note": 3},
        {"on_progress": 3},
    ],
    ids=str,
)
def test_values_of_another_type_are_refused(files: tuple[Path, Path], options: dict[str, Any]) -> None:
    """Prevents: the default pair for an empty name, a number that is cut off, TypeError from deep inside."""
    with pytest.raises(UsageError):
        specllama.load(**{"target": files[0], "n_threads": 1, **options}).close()


def test_an_answer_refuses_what_the_command_line_refuses(pair: Pair) -> None:
    """Prevents: an option of another type or out of range that is ignored, cut off, or raises TypeError."""
    wrong: list[dict[str, Any]] = [
        {"temperature": "0.5"},
        {"top_k": 1.5},
        {"repeat_last_n": 2.5},
        {"logit_bias": [1]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1: "x"}},
        {"seed": -5},
        {"seed": 1.5},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": None},
        {"stop": 1},
        {"stop": ["a", 1]},
        {"stop": ""},
        {"stop": "\udcff"},
        {"system": "\ud800"},
    ]
    for options in wrong:
        with pytest.raises(UsageError):
            ask(pair, **options)
    prompts: list[Any] = [3, None, b"x", ["x"], {"role": "user"}, [{}], [{"role": "user", "content": 3}], "\ud800"]
    for prompt in prompts:
        with pytest.raises((UsageError, PromptError)):
            ask(pair, prompt)
    with pytest.raises(UsageError):
        pair.chat(3)  # type: ignore[arg-type]
    chat = pair.chat(temperature=0, max_tokens=5)
    for text in (None, 3):
        with pytest.raises(UsageError):
            chat.send(text)  # type: ignore[arg-type]
    assert chat.messages == []
    assert chat.send("hello").text == ask(pair, max_tokens=5, logit_bias={}).text


def test_a_chat_keeps_its_turns_while_an_answer_is_read(pair: Pair) -> None:
    """Prevents: an undo in the middle of an answer that removes the turn before it."""
    chat = pair.chat(temperature=0, max_tokens=5, logit_bias=ENDLESS)
    chat.send("first")
    answer = chat.stream("second")
    next(answer)
    for change in (chat.undo, chat.clear):
        with pytest.raises(ModelBusy):
            change()
    answer.close()
    assert [message.content for message in chat.messages if message.role == "user"] == ["first", "second"]
    chat.undo()
    assert [message.content for message in chat.messages if message.role == "user"] == ["first"]


def test_defaults_are_those_of_the_command_line() -> None:
    """Prevents: an answer that differs from that of `specllama run`."""
    assert ask_of(ModelOptions(), DraftOptions(), HardwareOptions()) == Ask()
    assert SamplingOptions().params == SamplingParams()
    assert set(SamplingKeywords.__annotations__) == {field.name for field in fields(SamplingParams)}


BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def named_pair(files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny pair with the name in docs/api.md."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(load_plan, "physical_cores", lambda: 1)  # threads that wait for one another under load
    monkeypatch.chdir(tmp_path)
    target, draft = (shutil.copy(path, tmp_path) for path in files)
    user_file().parent.mkdir(parents=True)
    user_file().write_text(
        f'[models.big]\nsources = [{{ path = "{target}" }}]\n[models.little]\nsources = [{{ path = "{draft}" }}]\n'
        f'[pairs."{NAME}"]\ntarget = "big"\ndraft = "little"\n'
        "defaults = { n_ctx = 512 }\n"  # an answer without a limit ends there
    )


@pytest.mark.usefixtures("named_pair")
def test_the_examples_of_the_page_run_and_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Prevents: examples that were never run."""
    names: dict[str, Any] = {}
    printed: list[str] = []
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
        printed.append(capsys.readouterr().out)
    five, loaded, answered, prompts, inside, chat, many, left, busy, exact = printed
    assert re.match(r"\d+ tokens, [\d.]+ tokens/s", five.splitlines()[-1])  # more if the draft pays
    assert "loading 100%" in loaded
    assert re.match(r"target.gguf (chain|lookup) 2048$", loaded.splitlines()[-1])  # whether the draft pays was measured
    assert re.match(r"(stop|length) \d+ (0\.\d+|1\.0|None)$", answered.splitlines()[-1])
    assert len(prompts.splitlines()) >= 2
    assert re.search(r"^step 0: \d+ of \d+ accepted in", inside, re.MULTILINE)
    assert re.search(r"^\d+ (draft|correction|bonus|target)$", inside, re.MULTILINE)
    assert chat.splitlines()[-1].endswith("['system', 'user', 'assistant']")
    assert sorted(line.split()[0] for line in many.splitlines()[:-1] if line[:1].isdigit()) == ["0", "1", "2", "3"]
    assert many.splitlines()[-1].startswith("4 ")
    assert len(left.splitlines()) == 2
    assert busy.splitlines() == ["ModelBusy", busy.splitlines()[1]]
    assert exact.startswith("True ")
