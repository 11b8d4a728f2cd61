"""The chat without a terminal: what is kept, what is read again, what goes when the context is full, and files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from specllama.base.errors import ConversationError, PromptError, UsageError
from specllama.chat import saved as chat_file
from specllama.chat.conversation import Conversation
from specllama.chat.saved import Saved
from specllama.chat.session import ChatSession, Turn
from specllama.chat.settings import Settings, changed
from specllama.core.engine import Engine
from specllama.core.events import Event, Finished, Notice, PromptProgress, TokenEvent
from specllama.core.sampling import RandomChooser, SamplingParams
from specllama.core.types import Cancel
from specllama.drafters import DraftSettings
from specllama.drafters.length import DraftLength
from specllama.drafters.model import ModelDrafter
from specllama.llama import LlamaModel
from tests import tiny

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

# Tokens of the template show nothing, so they would be lost in the text of an answer.
SILENT = {tiny.token_id(tiny.ascii_level(), text): float("-inf") for text in ("<|bos|>", "<|im_start|>")}
GREEDY = SamplingParams(temperature=0.0, logit_bias=SILENT)
# How Qwen3's own template goes about thinking: the thoughts of turns before the last question are left out, those in
# an answer to it are kept, and an empty passage tells the model not to think.
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == "user" %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
# Its successor that always thinks, and so writes the first mark itself.
ALWAYS_THINKING = THINKING.replace("{%- if enable_thinking", "{{- '<think>\n' }}{%- if false and enable_thinking")
# Roles must alternate, and a system prompt is an error.
STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlamaModel, LlamaModel]]:
    """A target and its draft that read and write ASCII; a context of 512 tokens."""
    folder = tmp_path_factory.mktemp("session")
    paths = tiny.write_pair(folder, vocabulary=tiny.ascii_level(), chat_template=tiny.CHATML, n_ctx=512, noise=0.02)
    with tiny.load(paths[0], n_ctx=512) as target, tiny.load(paths[1], n_ctx=512) as draft:
        yield target, draft


@pytest.fixture
def chat(pair: tuple[LlamaModel, LlamaModel]) -> Callable[..., ChatSession]:
    """A new session on emptied models; greedy answers of at most ten tokens unless told otherwise."""

    def start(*, system: str = "", **settings: object) -> ChatSession:
        for model in pair:
            model.truncate(0)
        wanted = {
            "params": GREEDY,
            "n_predict": 10,
            "strategy": "draft-simple",
            "drafting": DraftSettings(length=DraftLength(3)),
        }
        return ChatSession(*pair, Settings(**{**wanted, **settings}), system)  # type: ignore[arg-type]

    return start


def said(events: Iterator[Event]) -> list[int]:
    """The tokens of an answer."""
    return [event.token for event in events if isinstance(event, TokenEvent)]


def notices(events: Iterator[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice)]


def fresh(session: ChatSession, pair: tuple[LlamaModel, LlamaModel], text: str, n: int = 10) -> list[int]:
    """What a target with an empty KV answers to the session's history and `text`, decoding plainly."""
    target = pair[0]
    conversation = Conversation(target.vocab, target.chat_template)
    target.truncate(0)
    prompt = conversation.tokens(session._messages(session.turns, text))
    return said(Engine(target).generate(prompt, GREEDY, RandomChooser(0), max_tokens=n))


def test_the_next_turn_reads_only_what_is_new(chat, pair) -> None:
    """A chat that reads its whole history again each turn, in either model, or that only says it does not."""
    session = chat(drafting=DraftSettings(length=DraftLength(3)))
    said(session.ask("hello there"))
    assert (session.reuse.n_target, session.reuse.n_draft) == (0, 0)
    held = pair[0].length, pair[1].length
    events = session.ask("and then?")
    first = next(event for event in events if isinstance(event, PromptProgress))
    finished = list(events)[-1]
    assert first == PromptProgress(session.reuse.n_target, session.reuse.n_prompt)
    assert finished.stats.n_cached == session.reuse.n_target
    # One token a character: the text of the answer is tokenised as it was generated.
    assert (session.reuse.n_target, session.reuse.n_draft) == held
    assert session.reuse.n_read < session.reuse.n_prompt / 2


def test_the_draft_really_keeps_what_it_is_said_to_hold(chat, pair, monkeypatch) -> None:
    """A `cached N` that is not what the KV cache holds."""
    session = chat()
    said(session.ask("hello there"))
    seen = []
    begin = ModelDrafter.begin
    monkeypatch.setattr(ModelDrafter, "begin", lambda self, *a: (begin(self, *a), seen.append(self.model.length)))
    said(session.ask("and then?"))
    assert seen == [session.reuse.n_draft]
    assert seen[0] > 0


@pytest.mark.parametrize("n_seen", [0, 1, 4])
def test_after_a_stop_the_next_turn_is_that_of_a_fresh_run(chat, pair, n_seen: int) -> None:
    """A partial answer that is not in the history, or a KV cache that differs from the history."""
    session, cancel = chat(n_predict=40), Cancel()
    for event in session.ask("tell me a long story", cancel):
        if n_seen == 0 or (isinstance(event, TokenEvent) and event.step >= n_seen):
            cancel.set()
    assert [turn.reason for turn in session.turns] == (["cancelled"] if n_seen else [])
    cancel.clear()
    session.settings = replace(session.settings, n_predict=10)
    kept = list(session.turns)
    answer = said(session.ask("go on", cancel))
    session.turns = kept
    assert answer == fresh(session, pair, "go on")


def test_an_abandoned_answer_counts_as_far_as_it_was_read(chat) -> None:
    """A session that forgets half an answer because its reader went away."""
    session = chat(n_predict=40)
    events = session.ask("hello")
    tokens = [event.token for event in islice(events, 9) if isinstance(event, TokenEvent)]
    events.close()
    piece = session._target.vocab.piece
    text = b"".join(piece(token) for token in tokens).decode("utf-8", "replace")
    assert session.turns[0].answer == text != ""


def test_a_draft_that_leaves_takes_nothing_of_the_conversation_along(chat, pair) -> None:
    """Prevents: turns that were dropped and return; a KV cache that is read again; drafts of a freed model."""
    session = chat()
    for text in ("one", "two", "three"):
        said(session.ask(text))
    session.n_dropped, reuse = 1, session.reuse
    settings = replace(session.settings, strategy="lookup")
    session.use(None, settings)
    assert (session.n_dropped, session.reuse, session.settings, session.draft_kv) == (1, reuse, settings, None)
    with pytest.raises(UsageError):
        session.settings = replace(settings, strategy="draft-simple")
    said(session.ask("four"))
    assert session.n_dropped == 1


def test_regen_takes_another_seed_and_replaces_the_turn(chat) -> None:
    """An answer that is repeated word by word, or that is added to the one it should replace."""
    session = chat(params=SamplingParams(temperature=1.0), seed=7)
    said(session.ask("hello"))
    first = session.turns[0]
    said(session.regen())
    assert [turn.user for turn in session.turns] == ["hello"]
    assert (first.seed, session.turns[0].seed) == (7, 8)
    assert session.turns[0].answer != first.answer


def test_a_regen_that_is_stopped_at_once_leaves_the_old_answer(chat) -> None:
    """Ctrl-C on /regen that loses the answer one had."""
    session, cancel = chat(), Cancel()
    said(session.ask("hello"))
    before = list(session.turns)
    cancel.set()
    said(session.regen(cancel))
    assert session.turns == before


def test_the_same_seed_gives_the_same_conversation(chat) -> None:
    """A chat with --seed that cannot be repeated."""

    def talk() -> list[object]:
        session = chat(params=SamplingParams(temperature=1.0), seed=3)
        for text in ("hello", "why", "so"):
            said(session.ask(text))
        return session.turns

    first = talk()
    assert first == talk()
    assert [turn.seed for turn in first] == [3, 4, 5]


def test_undo_and_edit_and_clear(chat) -> None:
    """Commands that take back too much, or the wrong end."""
    session = chat(system="be brief")
    for text in ("one", "two"):
        said(session.ask(text))
    assert session.undo().user == "two"
    said(session.edit("three"))
    assert [turn.user for turn in session.turns] == ["three"]
    session.clear()
    assert [message.role for message in session.messages] == ["system"]
    for act in (session.undo, session.regen):
        with pytest.raises(UsageError, match="is empty"):
            act()


def test_a_full_context_drops_whole_turns_from_the_oldest_on_and_says_so(chat) -> None:
    """A chat that dies when its context is full, forgets the newest words, or forgets in silence."""
    session = chat(system="be brief")
    told: list[str] = []
    for i in range(12):
        told += notices(session.ask(f"question {i} " + "x" * 30))
        shown = session._messages(session.turns[session.n_dropped :])
        assert shown[0].role == "system"
        assert session.target_kv.n_used <= session.target_kv.n_ctx
    assert len(session.turns) == 12
    assert session.n_dropped > 0
    assert len(told) < 4
    assert told[0].startswith("the context of 512 tokens is full: the oldest ")
    assert '(from "question 0 xxxx' in told[0]


def test_a_message_longer_than_the_context_is_refused_and_not_kept(chat) -> None:
    """A history that is emptied for a message that cannot fit, or that holds one which was never read."""
    session = chat()
    said(session.ask("hello"))
    with pytest.raises(PromptError, match=r"has \d+ tokens, the context holds 512") as caught:
        said(session.ask("x" * 600))
    assert "shorten it" in caught.value.hint
    assert [turn.user for turn in session.turns] == ["hello"]
    assert session.n_dropped == 0
    assert said(session.ask("again"))


def test_a_template_without_a_system_role_is_served(chat, tmp_path: Path) -> None:
    """A strict template that is crashed into on the first or the second turn."""
    path = tiny.write_model(tmp_path / "strict.gguf", vocabulary=tiny.ascii_level(), chat_template=STRICT)
    with tiny.load(path, n_ctx=512) as target:
        session = ChatSession(target, settings=Settings(params=GREEDY, n_predict=5), system="be brief")
        for text in ("one", "two", "three"):
            assert isinstance(list(session.ask(text))[-1], Finished)
        assert session.template_notes == ["the template has no system prompt: it is merged into the first message"]


def test_thinking_is_switched_where_the_template_has_it(chat, tmp_path: Path) -> None:
    """`/set think off` that the template never hears of; thoughts that are read again and again in every turn."""
    assert not chat().can_think
    path = tiny.write_model(tmp_path / "thinks.gguf", vocabulary=tiny.ascii_level(), chat_template=THINKING)
    with tiny.load(path, n_ctx=512) as target:
        session = ChatSession(target, settings=Settings(params=GREEDY, n_predict=2))
        assert session.can_think
        said(session.ask("hello"))
        n_before = session.reuse.n_prompt
        for think, more in ((True, ""), (False, "<think>\n\n</think>\n\n"), (None, "")):
            session.undo()
            session.settings = replace(session.settings, think=think)
            said(session.ask("hello"))
            assert session.reuse.n_prompt == n_before + len(more)
            assert not session.starts_thinking
        session.turns = [Turn("hello", "<think>\nlong thoughts\n</think>\n\nyes", 0, "stop")]
        said(session.ask("so"))
        messages = session._conversation.text(session.messages)
        assert "assistant\nyes<|im_end|>" in messages
        assert "thoughts" not in messages
        assert session.reuse.n_target == n_before


def test_a_template_that_opens_the_thinking_itself_is_seen(tmp_path: Path) -> None:
    """Thoughts that are shown as the answer because their first mark stands in the prompt."""
    path = tiny.write_model(tmp_path / "thinks.gguf", vocabulary=tiny.ascii_level(), chat_template=ALWAYS_THINKING)
    with tiny.load(path, n_ctx=512) as target:
        session = ChatSession(target, settings=Settings(params=GREEDY, n_predict=2))
        assert session.starts_thinking


def test_settings_that_the_models_cannot_serve_are_refused(chat, pair) -> None:
    """A longer draft than the models were loaded for, cut in silence; a drafter without its model."""
    session = chat()
    before = session.settings
    with pytest.raises(UsageError, match="spec-draft-n-max is 64, expected a whole number from 0 to 32"):
        session.settings = changed(before, "spec-draft-n-max", "64")
    assert session.settings == before
    with pytest.raises(UsageError, match="the strategy chain needs a draft model"):
        ChatSession(pair[0], None, replace(before, strategy="chain"))


def test_drafting_can_be_switched_off_and_on_without_reading_again(chat, pair) -> None:
    """A draft model whose KV is lost, or believed to hold what it does not."""
    session = chat()
    for spec in (True, False, True):
        session.settings = replace(session.settings, spec=spec)
        said(session.ask("hello there, how is it going"))
    assert session.reuse.n_draft > 20
    assert session.answers[1].n_drafted == 0 < session.answers[2].n_drafted
    kept = session.turns[:-1]
    session.turns = kept
    answer = said(session.ask("hello there, how is it going"))
    session.turns = kept
    assert answer == fresh(session, pair, "hello there, how is it going")


def test_counters_of_a_session_are_those_of_its_answers(chat) -> None:
    """Figures of one answer shown as those of the session."""
    session = chat()
    for text in ("one", "two"):
        said(session.ask(text))
    assert session.stats.n_emitted == sum(answer.n_emitted for answer in session.answers)
    assert session.stats.n_drafted == sum(answer.n_drafted for answer in session.answers) > 0


def test_the_gain_is_that_of_the_profile_of_each_answer(chat) -> None:
    """A gain without a source; one that outlives the profile it came from."""
    session = chat()
    said(session.ask("hello"))
    assert all(each.cost is None for each in session.stats.passes)
    session.cost = lambda n_rows, n_context: n_rows + n_context / 1024
    said(session.ask("and"))
    passes = session.answers[1].passes
    contexts = [(each.cost - each.n_rows) * 1024 for each in passes if each.cost is not None]
    assert contexts == [contexts[0] + sum(each.n_tokens for each in passes[:i]) for i in range(len(passes))]
    assert contexts[0] > 0
    assert session.stats.passes == [*session.answers[0].passes, *session.answers[1].passes]


def test_a_saved_conversation_comes_back_whole(chat, tmp_path: Path) -> None:
    """A turn, a seed or a setting lost on the way to the disk and back."""
    settings = {"stops": ("\n\n", "END"), "rule": changed(Settings(), "rule", "block").rule, "seed": 5, "think": False}
    session = chat(
        system="be brief ✓", params=SamplingParams(temperature=0.3, logit_bias={3: -float("inf")}), **settings
    )
    for text in ("one", "two"):
        said(session.ask(text))
    chat_file.save(tmp_path / "talk.json", session, {"target": "a", "draft": "b"})
    saved = chat_file.load(tmp_path / "talk.json")
    assert saved == Saved("be brief ✓", tuple(session.turns), session.settings, {"target": "a", "draft": "b"})
    assert session.settings.seed == 7
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


def test_a_chat_with_a_model_file_of_any_name_is_saved(chat, tmp_path: Path) -> None:
    """A name that is not UTF-8 made a conversation that could never be saved."""
    chat_file.save(tmp_path / "talk.json", chat(), {"target": "caf\udce9.gguf"})
    assert chat_file.load(tmp_path / "talk.json").models == {"target": "caf?.gguf"}


def _damage(path: Path, change: Callable[[dict], None]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda d: d["messages"].pop(), "messages[0] has no answer after it"),
        (lambda d: d["messages"][0].update(role="assistant"), "messages[0].role is 'assistant', expected 'user'"),
        (lambda d: d["messages"][1].update(content=5), "messages[1].content is int, expected str"),
        (lambda d: d["messages"].__setitem__(0, "hi"), "messages[0] is str, expected an object"),
        (lambda d: d["messages"][1].update(seed=-1), "messages[1]: seed is -1, expected a whole number from 0 to"),
        (lambda d: d["messages"][1].update(finish_reason="why"), "messages[1].finish_reason is 'why', expected one of"),
        (lambda d: d["settings"].update(temp=None), "settings.temp: temp is None, expected a number"),
        (lambda d: d["settings"].update(top_k=10**400), "expected a whole number of at least 0"),
        (lambda d: d["settings"].update(wings=2), "settings.wings: unknown setting wings"),
        (lambda d: d["settings"].update(stop=[1]), "settings.stop: stop is 1, expected text"),
        (lambda d: d["messages"][0].update(content="\udcff"), "messages[0]: content is not UTF-8 text"),
        (lambda d: d.pop("settings"), "the file has no 'settings'"),
        (lambda d: d["schema"].update(version=9), "schema.version is 9"),
        (lambda d: d["schema"].update(name="x"), "schema.name is 'x'"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(chat, tmp_path: Path, change, place: str) -> None:
    """A traceback, or half a conversation taken for a whole one."""
    session, path = chat(), tmp_path / "talk.json"
    said(session.ask("one"))
    chat_file.save(path, session, {})
    _damage(path, change)
    with pytest.raises(ConversationError) as caught:
        chat_file.load(path)
    assert str(caught.value).startswith(f"{path} is damaged or not a saved chat: ")
    assert place in str(caught.value)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b'{"schema": {\n  "name": }', "line 2, column 11"),
        (b"", "line 1, column 1"),
        (b"[]", "the file is list, expected an object"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 10_000, "limit"),
    ],
)
def test_a_file_that_is_no_json_is_refused_with_the_place(tmp_path: Path, data: bytes, place: str) -> None:
    """A message without the place of the error."""
    path = tmp_path / "talk.json"
    path.write_bytes(data)
    with pytest.raises(ConversationError, match="is damaged or not a saved chat") as caught:
        chat_file.load(path)
    assert place in str(caught.value)
    assert "/save" in caught.value.hint


def test_a_failed_save_leaves_the_old_file(chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk that costs the conversation of yesterday."""
    path = tmp_path / "talk.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConversationError, match="cannot be written: No space left"):
        chat_file.save(path, chat(), {})
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["talk.json"]
    with pytest.raises(ConversationError, match="does not exist"):
        chat_file.save(tmp_path / "nowhere" / "talk.json", chat(), {})
