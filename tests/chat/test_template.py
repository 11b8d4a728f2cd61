"""Chat templates: what Hugging Face's templates may use, and that none can harm or hang the program."""

from __future__ import annotations

import itertools
import signal
import time
import tracemalloc
from datetime import datetime
from types import SimpleNamespace

import pytest

from specllama.base.errors import TemplateError
from specllama.chat import template as room
from specllama.chat.template import ChatTemplate, TemplateOverrun

NOW = datetime(2025, 3, 9, 12, 30)


def rendered(source: str, *contents: str, add_generation_prompt: bool = False, **tokens: str) -> str:
    messages = [{"role": "user", "content": content} for content in contents]
    return ChatTemplate(source, **tokens).render(messages, add_generation_prompt=add_generation_prompt, now=NOW)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{% if add_generation_prompt %}yes{% else %}no{% endif %}", "no"),
        ("{{ tools is none }} {{ documents is none }} {{ functions is defined }}", "True True False"),
        ("{{ strftime_now('%d %b %Y') }}", "09 Mar 2025"),
        ("{{ messages[0]['content'] }} {{ messages[0].content }} {{ messages[0].get('name', '-') }}", "a b a b -"),
        ("{{ messages | length }}{{ messages[0].tool_calls is defined }}", "1False"),
        ("{{ {'k': '<ä>\"'} | tojson }}", '{"k": "<ä>\\""}'),
        ("{{ {'k': [1]} | tojson(indent=2) }}", '{\n  "k": [\n    1\n  ]\n}'),
        ("{% for i in range(4) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "023"),
        ("{% for i in range(4) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for m in messages %}{{ loop.first }} {{ loop.last }} {{ loop.length }}{% endfor %}", "True True 1"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro shout(text) %}{{ text | upper }}!{% endmacro %}{{ shout(messages[0].content) ~ 1 }}", "A B!1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "a b"),
        ("  {% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ 'a' in messages[0].content and messages[0].content in ['x', 'a b'] }}", "True"),
        ("{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ m.content }}{% endfor %}", "a b"),
        ("{{ messages[0].content.split(' ')[-1] ~ messages[0].content[:1] ~ messages[::-1][0].role }}", "bauser"),
        ("{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "x1"),
    ],
)  # fmt: skip
def test_a_template_may_use_what_hugging_face_gives_it(source, text):
    """A template of a well-known model failed on a name, tag or filter that Hugging Face's renderer knows."""
    assert rendered(source, "a b", bos="<s>", eos="</s>") == text


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ 'x' }", "{% for m in messages %}", "{{ x | nofilter }}", "{% frobnicate %}", "{{ " + "(" * 9000],
)
def test_a_template_that_does_not_compile_is_one_sentence_with_a_way_out(source):
    """A broken template in a model file ended in jinja2's traceback."""
    with pytest.raises(TemplateError, match="does not compile") as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value)
    assert "--raw" in caught.value.hint


def test_an_endless_template_source_is_refused_before_it_is_parsed():
    """A metadata field of 100 MB took minutes to compile."""
    with pytest.raises(TemplateError, match="characters"):
        ChatTemplate("x" * 1_000_000)


def test_a_refusal_shows_the_templates_own_words_in_one_printable_line():
    """The template's message went to the terminal with its line breaks and escape sequences."""
    with pytest.raises(TemplateError) as caught:
        rendered("{{ raise_exception('roles must\n\x1b[31m  alternate' ~ '!' * 500) }}", "hi")
    assert str(caught.value).startswith("the chat template refuses this conversation: roles must [31m alternate!!!")
    assert len(str(caught.value)) < 300
    assert "--raw" in caught.value.hint


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing() }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% for m in none %}{% endfor %}",
        "{% include 'other' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_template_error(source):
    """A TypeError or RecursionError inside a template crashed the program."""
    with pytest.raises(TemplateError, match="fails on this conversation"):
        rendered(source, "hi")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('{0.__class__.__mro__}' | format)('') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ strftime_now.__self__ }}",
        "{{ messages | map(attribute='__class__') | first }}",
    ],
)
def test_a_template_cannot_reach_python(source):
    """A model file is not trusted: its template could have read files or run commands."""
    try:
        text = rendered(source, "hi")
    except TemplateError:
        return
    assert "class" not in text
    assert "0x" not in text


GROW = "{% set ns = namespace(x='ab', y='ab') %}{% for i in range(200) %}{% set ns.x = BODY %}{% endfor %}{{ ns.x }}"
LONG = "{% set x = 'a' * 100000 %}"
RANGE = "{% set r = range(9999) %}"

SLOW = {
    "loop in a loop": RANGE + "{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "loop with a condition": RANGE + "{% for a in r if r | list | sum == 1 %}{% endfor %}",
    "doubling calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "doubling recursion": "{% for x in [90] recursive %}{% if x %}{{ loop([x - 1, x - 1]) }}{% endif %}{% endfor %}",
    "sorting over and over": RANGE + "{% for i in r %}{% set x = r | list | sort %}{% endfor %}",
    "a long search at every item": RANGE + "{{ r | select('in', r | list) | list | length }}",
}

LARGE = {
    "repeated text": "{{ 'a' * 10 ** 10 }}",
    "repeated list": "{{ [1] * 10 ** 9 }}",
    "huge power": "{{ (10 ** 10000) ** 1000000 }}",
    "squared numbers": GROW.replace("BODY", "(ns.x if ns.x is number else 7) * (ns.x if ns.x is number else 7)"),
    "doubled text with ~": GROW.replace("BODY", "ns.x ~ ns.x"),
    "doubled text with +": GROW.replace("BODY", "ns.x + ns.x"),
    "doubled lists": GROW.replace("BODY", "[ns.x, ns.x]"),
    "doubled tuples": GROW.replace("BODY", "(ns.x, ns.x)"),
    "doubled dicts": GROW.replace("BODY", "{'a': ns.x, 'b': ns.x}"),
    "doubled dict calls": GROW.replace("BODY", "dict(a=ns.x, b=ns.x)"),
    "lists that compare slowly": GROW.replace("BODY", "[ns.x] * 2 %}{% set ns.y = [ns.y] * 2") + "{{ ns.x == ns.y }}",
    "centred": "{{ 'a' | center(10 ** 10) }}",
    "centred by keyword": "{{ 'a' | center(width=10 ** 10) }}",
    "centred by method": "{{ 'a'.center(10 ** 10) }}",
    "filled": "{{ 'a'.ljust(10 ** 10) }}{{ 'a'.zfill(10 ** 10) }}",
    "indented": "{{ 'a\n' | indent(10 ** 10) }}",
    "indented JSON": "{{ {'a': 1} | tojson(indent=10 ** 10) }}",
    "format width": "{{ '%9999999999d' % 1 }}",
    "format width as argument": "{{ '%*d' % (10 ** 10, 1) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "format method": "{{ '{:>9999999999}'.format(1) }}",
    "format method with argument": "{{ '{:{w}}'.format(1, w=10 ** 10) }}",
    "replaced": LONG + "{{ x.replace('a', x) }}",
    "replaced by filter": LONG + "{{ x | replace('a', x) }}",
    "joined": LONG + "{{ range(999) | map('string') | join(x) }}",
    "joined by method": LONG + "{{ x.join(range(999) | map('string')) }}",
    "padded batches": "{{ [1] | batch(10 ** 10, 0) | list }}",
    "many slices": "{{ [1] | slice(10 ** 10) | list }}",
    "long output": LONG + "{% for i in range(300) %}{{ x }}{% endfor %}",
    "long block": LONG + "{% set y %}{% for i in range(300) %}{{ x }}{% endfor %}{% endset %}",
}  # fmt: skip


class Hung(BaseException):
    """Real time ran out in the middle of a template."""


@pytest.fixture
def alarm():
    """Ends a test that hangs: without limits the templates run for years."""

    def ring(*_):
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("bomb", SLOW)
def test_a_template_that_would_run_for_years_is_stopped(bomb, monkeypatch):
    """Ten lines in a model file hung the program."""
    # This clock moves with every look: a template is stopped because it is metered, not because the machine is slow.
    clock = itertools.count(0, room._MAX_SECONDS / 20)
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(TemplateOverrun, match="takes more than"):
        rendered(SLOW[bomb], "hi")


@pytest.mark.usefixtures("alarm")
def test_time_is_up_by_the_clock(monkeypatch):
    """The limit counted steps, and slow steps took minutes."""
    monkeypatch.setattr(room, "_MAX_SECONDS", 0.05)
    start = time.monotonic()
    with pytest.raises(TemplateOverrun, match=r"takes more than 0\.05 seconds"):
        rendered(SLOW["loop in a loop"], "hi")
    assert time.monotonic() - start >= 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("bomb", LARGE)
def test_a_template_that_would_fill_the_memory_is_stopped_before_it_does(bomb, monkeypatch):
    """Ten lines in a model file took all the memory there is."""
    monkeypatch.setattr(room, "_MAX_SIZE", 1_000_000)
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: 0.0))
    tracemalloc.start()
    try:
        with pytest.raises(TemplateOverrun, match="too large"):
            rendered(LARGE[bomb], "hi")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000


def test_a_range_is_bounded_by_the_sandbox_itself():
    """`range(10 ** 9)` made a list of that length."""
    with pytest.raises(TemplateError, match="Range too big"):
        rendered("{{ range(10 ** 9) | list }}", "hi")


def test_a_namespace_that_holds_itself_many_times_prints_in_no_time():
    """Jinja2 prints what a namespace holds; nested namespaces print exponentially much."""
    assert rendered(GROW.replace("BODY", "namespace(a=ns.x, b=ns.x)"), "hi") == "<namespace>"


def test_long_messages_are_no_bomb():
    """The limits against hostile templates refused a long document."""
    document = "line <b>of</b> 100% text 0123456789\n" * 30_000  # a million characters: far more than any context holds
    source = (
        "{% for m in messages %}{% if m.content is string and '</think>' in m.content %}x{% endif %}"
        "{{ '<|' + m.role ~ '|>' + m.content.replace('<b>', '**').split('</think>')[-1] | trim + '\n' }}"
        "{{ ['a', m.content] | join(', ') }}{{ m | tojson }}{% endfor %}"
    )
    text = rendered(source, document, "and?")
    assert text.startswith("<|user|>line **of</b> 100%")
    assert text.count("0123456789") == 3 * 30_000


def test_the_literals_of_a_template_are_the_strings_it_may_search_for():
    """A string used in a condition was not known, and a message that holds it was laid out wrongly."""
    source = "text {% if '</think>' in m.content and m.content.startswith('/no') %}{{ 'out' }}{% endif %}{{ '' }}"
    assert ChatTemplate(source).literals >= {"</think>", "/no"}
    assert "" not in ChatTemplate(source).literals
