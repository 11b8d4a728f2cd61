"""Chat templates: what Hugging Face's templates may use, and that none can harm or hang the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import psutil
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
        "{{ range(10 ** 9) | list }}",
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
LONG = "{% set x = 'a' * 1000000 %}"
NESTED = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
MACRO = "{% macro twice(t) %}{{ t }}{{ t }}{% endmacro %}"

ATTACKS = {
    "nested loops": NESTED,
    "doubling calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "a long search at every item": "{% set r = range(9999) %}{{ r | select('in', r | list) | list | length }}",
    "wrapped words": "{{ ('a' * 10 ** 7) | wordwrap(2) | length }}",
    "rounding far before the point": "{{ 5 | round(-10 ** 9) }}",
    "big power": "{{ 9 ** (9 ** 9) }}",
    "namespaces that print each other": GROW.replace("BODY", "namespace(a=ns.x, b=ns.x)"),
    "lists that compare slowly": GROW.replace("BODY", "[ns.x] * 2 %}{% set ns.y = [ns.y] * 2") + "{{ ns.x == ns.y }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "translated": LONG + "{{ x.translate({97: x}) }}",
    "replaced": LONG + "{{ x | replace('a', x) }}",
    "joined": LONG + "{{ x.join(x) }}",
    "padded": "{{ '%9999999999d' | format(1) }}{{ 'a'.ljust(10 ** 10) }}",
    "indented JSON": "{{ {'a': 1} | tojson(indent=10 ** 10) }}",
    "doubled text": GROW.replace("BODY", "ns.x ~ ns.x"),
    "400 variables": "".join(f"{{% set v{i} = 'a' * 10000000 + '{i}' %}}" for i in range(400)),
    "400 blocks": LONG + "".join(f"{{% set v{i} %}}{'{{ x }}' * 10}{{% endset %}}" for i in range(400)),
    "macros in macros": MACRO + "{{ " + "twice(" * 40 + "'ab'" + ")" * 40 + " }}",
    "long answer": LONG + "{% for i in range(30) %}{{ x }}{% endfor %}",
    "long source": "x" * 30_000_000,
}  # fmt: skip


@pytest.fixture
def renderer(monkeypatch):
    """A child process of its own with less memory, and with time for a busy machine."""
    monkeypatch.setattr(room, "_MAX_SECONDS", 60.0)
    monkeypatch.setattr(room, "_MAX_MEMORY", 200_000_000)
    own = room._Renderer()
    monkeypatch.setattr(room, "_renderer", own)
    yield own
    own.stop()


def overrun(template, monkeypatch, *contents):
    """The error of a rendering that has little time."""
    with monkeypatch.context() as short:
        short.setattr(room, "_MAX_SECONDS", 0.4)
        with pytest.raises(TemplateError) as caught:
            rendered(template, *contents)
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_that_takes_all_time_or_memory_is_an_error_and_the_next_one_works(attack, renderer, monkeypatch):
    """Ten lines in a model file hung the program or took all the memory there is."""
    start = time.monotonic()
    assert "--raw" in overrun(ATTACKS[attack], monkeypatch, "hi").hint
    assert time.monotonic() - start < 20  # most end in 0.5 s; the machine may be busy
    assert rendered("{{ messages[0].content }}", "hi") == "hi"


@pytest.mark.slow
def test_a_chat_goes_on_after_the_message_that_a_template_hangs_on(renderer, monkeypatch):
    """Jinja2 computed constants while it compiled, so that no message could be rendered."""
    template = "{% if messages[0].content == 'x' %}{{ 5 | round(-10 ** 9) }}{% endif %}ok"
    assert rendered(template, "hi") == "ok"
    assert isinstance(overrun(template, monkeypatch, "x"), TemplateOverrun)
    assert rendered(template, "so") == "ok"


@pytest.mark.slow
def test_time_is_up_by_the_clock(renderer, monkeypatch):
    """The limit counted steps, and slow steps took minutes."""
    start = time.monotonic()
    assert "takes more than 0.4 seconds" in str(overrun(NESTED, monkeypatch, "hi"))
    assert time.monotonic() - start >= 0.4


@pytest.mark.parametrize(
    "keeper",
    [
        pytest.param("kernel", marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces it")),
        "parent",
    ],
)
def test_the_kernel_and_the_parent_each_hold_the_limit_of_memory(keeper, renderer, monkeypatch):
    """Prevents: no limit where the system enforces none."""
    if keeper == "kernel":
        monkeypatch.setattr(room, "_memory_of", lambda pid: 0)
    else:
        command = room._command()
        command[command.index(str(room._MAX_MEMORY))] = str(1 << 60)
        monkeypatch.setattr(room, "_command", lambda: command)
    with pytest.raises(TemplateOverrun, match="of memory"):
        rendered("{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + ['a' * 10 ** 6 ~ i] %}"
                 "{% endfor %}", "hi")  # fmt: skip


def test_ctrl_c_in_a_template_leaves_no_reply_for_the_next_one(renderer):
    """The next conversation got the text of the one that was interrupted."""
    rendered("warm")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            rendered(NESTED, "hi")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rendered("{{ messages[0].content }}", "next") == "next"


def test_a_child_that_was_killed_is_started_again(renderer):
    """After the system killed the child, each conversation failed."""
    assert rendered("a") == "a"
    renderer._process.kill()
    renderer._process.wait()
    assert rendered("b") == "b"


def test_threads_get_each_their_own_text():
    """Two threads of a program that uses the API got each other's conversation."""
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"

    def work(number):
        return [rendered(source, f"{number}/{i}") for i in range(20)] == [f"{number}/{i}" for i in range(20)]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


def python(code, **options):
    """A Python program that has this file's names; `room` is the module under test."""
    prelude = "import os, sys\nfrom tests.chat.test_template import NESTED, rendered, room\n"
    return subprocess.Popen([sys.executable, "-c", prelude + code], stdout=subprocess.PIPE, text=True, **options)


def runs(pid):
    """True until the process has ended; in a container its zombie may stay."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("work", ["print(room._renderer._process.pid, flush=True); input()",
                                  "print(room._renderer._process.pid, flush=True); rendered(NESTED, 'hi')"],
                         ids=["idle", "busy"])  # fmt: skip
def test_the_child_ends_with_a_parent_that_was_killed(work):
    """After `kill -9` an endless template went on, on one core."""
    code = f"room._MAX_SECONDS = 1.0\nroom.warm_up()\nroom._MAX_SECONDS = 60.0\nassert rendered('a') == 'a'\n{work}"
    with python(code, stdin=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        assert runs(child)
        parent.kill()
    end = time.monotonic() + 20
    while runs(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not runs(child)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_has_a_child_of_its_own():
    """Parent and fork read each other's replies from one pipe."""
    code = (
        "assert rendered('a') == 'a'\n"
        "first = room._renderer._process.pid\n"
        "fork = os.fork()\n"
        "same = all(rendered(str(i)) == str(i) for i in range(50))\n"
        "other = room._renderer._process.pid != first\n"
        "if not fork: os._exit(0 if same and other else 1)\n"
        "assert same and not other and os.waitpid(fork, 0)[1] == 0\n"
        "print('jinja2' in sys.modules)\n"
    )
    with python(code) as program:
        assert program.communicate()[0] == "False\n"
    assert program.returncode == 0


def test_a_child_that_cannot_start_is_one_sentence(renderer, monkeypatch):
    """A damaged installation of jinja2 ended in a traceback."""
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    with pytest.raises(TemplateError, match="does not start"):
        rendered("a")


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
