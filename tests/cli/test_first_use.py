"""The first use of a pair: measured once, said once, kept, and used by the next answer."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

import specllama as specllama_module
from specllama.base.errors import Interrupted
from specllama.cli.chat import command
from specllama.cli.chat.answering import ChatState
from specllama.core.types import Cancel
from specllama.files.catalog import user_file
from specllama.llama import LoadOptions
from specllama.pairs import learning
from specllama.pairs import profile as profile_module
from specllama.pairs.profile import Profile
from specllama.tuning import first_use
from specllama.tuning.first_use import FirstCosts
from tests.cli.conftest import ENDLESS, Pair, Run, Terminal, events_of, record_of
from tests.cli.test_tune import DEAR, PROFILE

ASK = ["--raw", "abcabcabc", "-n", "40", "-s", "3", *ENDLESS]


@pytest.fixture(autouse=True)
def measures(auto: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a newcomer has it; but what the clock says is made up, so that drafts pay."""
    monkeypatch.delenv("SPECLLAMA_MEASURE")
    real = first_use.measuring

    def measuring(*args: object, **options: object):  # type: ignore[no-untyped-def]
        found = yield from real(*args, **options)  # type: ignore[arg-type]
        return FirstCosts(PROFILE.costs, found.step_s, 0.0)

    monkeypatch.setattr(first_use, "measuring", measuring)
    monkeypatch.setattr(learning, "learned", lambda profile, *_args, **_options: profile)


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "state").rglob("*.use.json"))


def test_the_first_answer_measures_and_the_second_does_not(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: half the speed for a newcomer; a measurement at every start; a draft that the first answer lacks."""
    args = ["run", *pair.options, *ASK, "--temp", "0"]
    first = specllama(*args, "-q")
    assert (first.code, first.err) == (0, "")
    assert len(kept(tmp_path)) == 1
    kept(tmp_path)[0].unlink()
    told = specllama(*args)
    lines = told.err.splitlines()
    assert lines[0].startswith("measured 20")
    assert lines[-1].startswith("hint: `specllama tune ")
    again = specllama(*args)
    assert "measured" not in again.err
    assert "hint" not in again.err
    record = record_of(specllama(*args, "--json"))
    assert (record["profile"]["source"], record["settings"]["spec_type"]) == ("use", "chain")
    assert record["acceptance"]["drafted"] > 0
    assert first.out == told.out == again.out == specllama(*args, "--spec-type", "none").out


def test_the_record_of_the_first_answer_names_the_profile_it_measured(specllama: Run, pair: Pair) -> None:
    """Prevents: an answer that cannot be repeated, because its record says that nothing decided."""
    start = events_of(specllama("run", *pair.options, *ASK, "--temp", "1", "--jsonl"))[0]
    again = events_of(specllama("run", *pair.options, *ASK, "--temp", "1", "--jsonl"))[0]
    assert start["profile"] == again["profile"]
    assert start["profile"]["source"] == "use"


def test_what_the_first_answer_assumed_is_measured_after_it(
    specllama: Run, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: costs that were only assumed and hold for good; a measurement after every answer."""
    hurries = list[bool]()

    def measuring(*_args: object, hurried: bool, **_options: object) -> Iterator[None]:
        hurries.append(hurried)
        yield
        return FirstCosts(replace(PROFILE.costs, assumed=(2,) if hurried else ()), 0.1, 0.0)  # type: ignore[return-value]

    monkeypatch.setattr(first_use, "measuring", measuring)
    record = record_of(specllama("run", *pair.options, *ASK, "--json"))
    assert (record["profile"]["costs"]["assumed"], hurries) == ([2], [True, False])
    record = record_of(specllama("run", *pair.options, *ASK, "--json"))
    assert (record["profile"]["costs"]["assumed"], hurries) == ([], [True, False])


def test_never_measures_nothing_and_loads_no_draft(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: drafts of a length that was not measured; an unused draft in memory."""
    record = record_of(specllama("run", *pair.options, *ASK, "--measure", "never", "--json"))
    assert (record["profile"], record["models"]["draft"], record["settings"]["spec_type"]) == (None, None, "lookup")
    assert kept(tmp_path) == []
    assert specllama("run", *pair.options, *ASK, "--measure", "soon").code == 2


def test_a_number_needs_no_measurement(specllama: Run, pair: Pair, tmp_path: Path) -> None:
    """Prevents: a second of waiting, or another length, for a number that was asked for."""
    record = record_of(specllama("run", *pair.options, *ASK, "--draft", "3", "--json"))
    assert (record["settings"]["spec_draft_n_max"], record["settings"]["spec_type"]) == (3, "draft-simple")
    assert record["profile"] is None
    assert kept(tmp_path) == []


def test_a_draft_that_cannot_pay_is_freed_and_next_time_not_loaded(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: half a gigabyte for a draft that never drafts; a record of a model that is gone."""
    monkeypatch.setattr(PROFILE.costs.__class__, "draft_cost", lambda _self, n=1: 9.0 * n)
    for _ in range(2):
        record = record_of(specllama("run", *pair.options, *ASK, "-s", "-1", "--json"))
        assert record["profile"]["loads"]["target"] == 0.0 < record["profile"]["loads"]["both"]
        assert (record["models"]["draft"], record["settings"]["spec_type"]) == (None, "lookup")


@pytest.mark.parametrize("command", ["run", "run --jsonl", "chat", "chat --jsonl"])
def test_a_named_draft_that_is_not_loaded_is_told_every_time(
    specllama: Run, talker: Pair, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Prevents: answers without the draft that was named, and no word about it after the first time."""
    monkeypatch.setattr(PROFILE.costs.__class__, "draft_cost", lambda _self, n=1: 9.0 * n)
    words, is_chat = command.split(), command.startswith("chat")
    args = [words[0], *talker.options, "-n", "2", *words[1:], *([] if is_chat else ["hello"])]
    line = (json.dumps({"message": "hello"}) if "--jsonl" in words else "hello").encode() + b"\n"
    for _ in range(2):
        result = specllama(*args, stdin=line if is_chat else b"")
        told = [each for each in result.err.splitlines() if each.startswith("measured 20")]
        assert len(told) == 1
        if "--jsonl" in words:
            assert [event["notices"] for event in events_of(result) if "notices" in event] == [told]
    assert specllama(*args, "-q", stdin=line if is_chat else b"").err == ""
    if command == "run":
        silent = specllama(*args, "--json")
        assert (silent.err, record_of(silent)["notices"]) == ("", told)


def dearer(profile: Profile, *_args: object, **_options: object) -> Profile:
    """As if the answer had shown a dearer draft."""
    return replace(
        profile,
        costs=replace(profile.costs, draft=((1, profile.costs.draft_cost() + 0.01),)),
        evidence=replace(profile.evidence, verify=(learning.RowCost(2, 1.0, 1.0),)),
    )


def test_an_answer_teaches_the_next_unless_its_seed_was_fixed(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a profile that never learns; a seed that says something else the second time."""
    monkeypatch.setattr(learning, "learned", dearer)

    def cost(*args: str) -> float:
        """The draft's cost by which this answer decides."""
        record = record_of(specllama("run", *pair.options, "--raw", "abcabcabc", "-n", "20", *ENDLESS, *args, "--json"))
        found: float = record["profile"]["costs"]["draft"][0][1]
        return found

    first = cost("--temp", "1", "-s", "3")
    assert cost("--temp", "1", "-s", "3") == cost("--temp", "1") == first
    assert cost("--temp", "0", "-s", "3") == pytest.approx(first + 0.01)
    assert cost("--temp", "0", "-s", "3") == pytest.approx(first + 0.01)
    with specllama_module.load(target=pair.target, draft=pair.draft, n_threads=1) as loaded:
        for options in ({"seed": 1}, {}, {"temperature": 0.0, "seed": 1}):
            loaded.answer("abc", raw=True, max_tokens=5, **options)
    assert cost("--temp", "1", "-s", "3") == pytest.approx(first + 0.02)


def test_a_short_answer_loads_no_draft_unless_it_is_named(specllama: Run, pair: Pair, own_home: Path) -> None:
    """Prevents: seconds of loading for a draft that saves less in so few tokens, or no word about it."""
    user_file().parent.mkdir(parents=True)
    user_file().write_text(
        f'[models.big]\nsources = [{{ path = "{pair.target}" }}]\n'
        f'[models.little]\nsources = [{{ path = "{pair.draft}" }}]\n'
        '[pairs.toy]\ntarget = "big"\ndraft = "little"\n'
    )

    def answered(*args: str, n_predict: int = 1) -> dict[str, Any]:
        words = ("--raw", "abcabcabc", "-n", str(n_predict), "-c", "256", "-t", "1", "--json", *ENDLESS, *args)
        return record_of(specllama("run", *words))

    first = answered("--pair", "toy")
    assert first["models"]["draft"] is not None
    second = answered("--pair", "toy")
    assert second["profile"]["loads"]["both"] > 0.0
    assert (second["models"]["draft"], second["settings"]["spec_type"]) == (None, "lookup")
    assert [("loading it takes" in each) for each in second["notices"]] == [True]
    third = answered("--pair", "toy")
    assert third["profile"]["loads"]["target"] > 0.0
    assert answered("-m", "big", "-md", "little")["models"]["draft"] is not None
    words = ["run", "--pair", "toy", "--raw", "abc", "-n", "1", "-c", "256", "-t", "1"]
    assert "loading it takes" in specllama(*words, "-v").err
    assert "loading it takes" not in specllama(*words).err


def test_costs_are_looked_at_again_unless_the_seed_was_fixed(
    specllama: Run, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: an answer that cannot be repeated, because costs were measured behind it."""
    args = ["run", *pair.options, *ASK, "--temp", "1"]
    assert specllama(*args).code == 0
    assert specllama(*args).code == 0  # completes the profile of the first answer, if that did not
    real, looks = first_use.looked, []
    monkeypatch.setattr(profile_module, "LOOK_AFTER", 0)
    monkeypatch.setattr(first_use, "looked", lambda *args: looks.append(args) or real(*args))
    assert (specllama(*args, "-s", "3").code, len(looks)) == (0, 0)
    assert (specllama(*args, "-s", "-1").code, len(looks)) == (0, 1)


@pytest.mark.parametrize(
    ("draft", "args", "n_told"), [(True, (), 2), (True, ("-s", "3"), 0), (False, (), 2)], ids=["pair", "seed", "target"]
)
def test_a_profile_that_learned_within_a_chat_is_told(
    specllama: Run,
    talker: Pair,
    monkeypatch: pytest.MonkeyPatch,
    draft: bool,
    args: tuple[str, ...],
    n_told: int,
) -> None:
    """Prevents: answers by a profile that no record names, its first one included; a seed that teaches."""
    monkeypatch.setattr(learning, "learned", dearer)
    models = talker.options if draft else ["-m", str(talker.target), "-t", "1"]
    lines = "".join(json.dumps({"message": text}) + "\n" for text in ("hello", "and then", "and then"))
    result = specllama("chat", *models, "-n", "12", "--temp", "1", *args, "--jsonl", stdin=lines.encode())
    costs = [event["costs"]["draft"][0][1] for event in events_of(result) if event["event"] == "profile"]
    assert len(costs) == n_told
    assert costs == sorted(set(costs))


def test_ctrl_c_ends_the_measurement_of_a_benchmark_within_a_pass(
    specllama: Run, talker: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a benchmark that computes on after Ctrl-C, until llama.cpp returns."""
    measuring, n_heard = first_use.measuring, 0

    def interrupted(*args: object, **options: object):  # type: ignore[no-untyped-def]
        nonlocal n_heard
        signal.raise_signal(signal.SIGINT)
        n_heard += 1
        found = yield from measuring(*args, **options)  # type: ignore[arg-type]
        n_heard += 1
        return found

    monkeypatch.setattr(first_use, "measuring", interrupted)
    assert specllama("bench", *talker.options, "-n", "8", "--spec-draft-n-max", "0,auto").code == 130
    assert (n_heard, kept(tmp_path)) == (1, [])


@pytest.mark.slow
def test_a_chat_measures_while_its_user_types(terminal: Callable[..., Terminal], talker: Pair, tmp_path: Path) -> None:
    """Prevents: a prompt that waits for a measurement; one that is lost when the line is entered."""
    chat = terminal("chat", *talker.options, "-n", "8", "--temp", "0", columns=100)
    chat.wait_for(lambda t: ">>>" in t.text and bool(kept(tmp_path)))
    assert "measured while you type" in chat.text
    chat.child.send("hello\r")
    chat.wait_for(lambda t: "measured 20" in t.text and t.text.count(">>>") == 2)
    chat.child.send("/exit\r")
    assert chat.finish() == 0
    assert json.loads(kept(tmp_path)[0].read_text())["profile"]["source"] == "use"


class Slow:
    """A measurement of three passes; each waits to be let go."""

    def __init__(self) -> None:
        self.done, self.n_begun, self.go = False, 0, threading.Semaphore(0)
        self._steps = self._passes()

    def __iter__(self) -> Iterator[float]:
        return self._steps

    def _passes(self) -> Iterator[float]:
        for _ in range(3):
            self.n_begun += 1
            self.go.acquire()
            yield 0.5
        self.done = True


def test_a_wait_that_ends_stops_the_measurement_after_one_pass_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents: two threads in one KV cache; a measurement that Ctrl-C or a quick line loses or starts anew."""
    adopted = list[int]()
    monkeypatch.setattr(ChatState, "use_measured", lambda self: adopted.append(self.first_use.n_begun))
    talk, work = object.__new__(ChatState), Slow()
    talk.__dict__ |= {"first_use": work, "cancel": Cancel(), "_measuring": None, "_ended": threading.Event()}
    talk.cancel.set()
    with pytest.raises(KeyboardInterrupt), talk.meanwhile():
        assert not talk.cancel.is_set()
        work.go.release()
        raise KeyboardInterrupt
    assert (talk._measuring, work.done, adopted) == (None, False, [])
    work.go.release(3)
    while not work.done:
        with talk.meanwhile():
            pass
    assert work.n_begun == 3
    assert adopted[-1] == 3


def test_closing_a_chat_ends_a_pass_that_two_ctrl_c_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: models freed under a running pass; a traceback of the measuring thread at SIGTERM."""
    tracebacks, freed, presses, join = list[object](), list[bool](), [KeyboardInterrupt], threading.Thread.join
    monkeypatch.setattr(threading, "excepthook", tracebacks.append)

    class Endless(Slow):
        def _passes(self) -> Iterator[float]:
            while not talk.cancel.is_set():
                sleep(0.01)
            raise Interrupted("stopped on request")
            yield

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if presses:
            raise presses.pop()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    talk = object.__new__(ChatState)
    talk.__dict__ |= {"first_use": Endless(), "cancel": Cancel(), "_measuring": None, "_ended": threading.Event()}
    talk._stack = ExitStack()
    talk._stack.callback(lambda: freed.append(thread.is_alive()))
    with pytest.raises(KeyboardInterrupt), talk.meanwhile():
        pass
    thread = talk._measuring
    assert thread is not None
    assert thread.is_alive()
    talk.close()
    assert (freed, tracebacks) == ([False], [])


class Typed:
    """Lines of a person; None = the measurement ends before the next line."""

    edits = True

    def __init__(self, lines: list[str | None], ended: Callable[[], object]) -> None:
        self._lines, self._ended = lines, ended

    def read(self, _start: str = "") -> str:
        if not self._lines:
            raise EOFError
        if (line := self._lines.pop(0)) is None:
            end = monotonic() + 60.0
            while not self._ended():
                assert monotonic() < end
                sleep(0.01)
            line = self._lines.pop(0)
        assert line is not None
        return json.dumps({"command" if line[0] == "/" else "message": line})


@pytest.mark.parametrize(("dear", "strategy"), [(False, "chain"), (True, "lookup")])
def test_a_number_set_while_a_chat_measures_gives_way_to_the_measured_setup(
    specllama: Run,
    talker: Pair,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loaded: list[LoadOptions],
    dear: bool,
    strategy: str,
) -> None:
    """Prevents: `auto` after a number that is not what it was; a conversation that is read again, or models loaded."""
    if dear:
        monkeypatch.setattr("tests.cli.test_first_use.PROFILE", replace(PROFILE, costs=DEAR))
    lines = ["/set spec-draft-n-max 4", None, "hello", "/set spec-draft-n-max auto", "and then", "/set drafter"]
    monkeypatch.setattr(command, "_source", lambda *_args: Typed(lines, lambda: kept(tmp_path)))
    events = events_of(specllama("chat", *talker.options, "-n", "12", "--temp", "0", "--jsonl"))
    assert len(loaded) == 2
    first, second = (event for event in events if event["event"] == "turn")
    assert second["reuse"]["n_target"] > first["reuse"]["n_prompt"]
    assert [event["source"] for event in events if event["event"] == "profile"] == ["use"]
    assert events[-1]["text"].startswith(f"spec-type is {strategy}:")


def test_a_chat_decides_by_the_profile_that_it_completed(
    specllama: Run, talker: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents: a chat that measures what was assumed, and goes on with what was assumed."""

    def assumed() -> object:
        return json.loads(kept(tmp_path)[0].read_text())["profile"]["costs"]["assumed"]

    args = ["chat", *talker.options, "-n", "12", "--temp", "0", "--jsonl"]
    whole, rows = PROFILE, (PROFILE.costs.verify[1][0],)
    partial = replace(PROFILE, costs=replace(PROFILE.costs, assumed=rows))
    monkeypatch.setattr("tests.cli.test_first_use.PROFILE", partial)
    specllama(*args, stdin=b'"hello"\n')
    assert assumed() == [*rows]
    monkeypatch.setattr("tests.cli.test_first_use.PROFILE", whole)
    lines = ["hello", None, "and then", "and then"]
    monkeypatch.setattr(command, "_source", lambda *_args: Typed(lines, lambda: not assumed()))
    events = events_of(specllama(*args))
    assert [event["costs"]["assumed"] for event in events if event["event"] == "profile"] == [[]]
    assert sum(event["event"] == "turn" for event in events) == 3
