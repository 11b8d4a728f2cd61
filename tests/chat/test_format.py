"""Formats of answers: what is refused before a model is loaded, and masks that follow the text."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from specllama.base.errors import UsageError
from specllama.chat import format as room
from specllama.chat.format import MAX_BYTES, AnswerFormat, check_format, format_of, read_format
from specllama.chat.format_masks import FormatConstraint
from specllama.core.constraint import Allowed

N_MOST = 280  # tokens of the vocabularies here
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
RECURSIVE = {
    "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}},
    "$ref": "#/$defs/a",
}


class Bytes:
    """A vocabulary of bytes, some pairs of them, a control token and two end tokens; splits text greedily."""

    def __init__(self, *pairs: str, space: bool = False) -> None:
        self._pieces = [*(bytes((byte,)) for byte in range(256)), *(pair.encode() for pair in pairs)]
        self._pieces += [b""] * (N_MOST - len(self._pieces))
        self.size = len(self._pieces)
        self.end_tokens = frozenset({self.size - 2, self.size - 1})
        self._unknown = b""  # bytes that no token has
        self._space = space  # put one before every text

    def lose(self, values: Iterable[int]) -> None:
        self._unknown = bytes(values)
        for byte in self._unknown:
            self._pieces[byte] = b""

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def pieces(self) -> list[bytes]:
        return self._pieces

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        data, tokens = (" " * self._space + text).encode(), list[int]()
        while data := data.lstrip(self._unknown):
            token = max(
                (i for i, piece in enumerate(self._pieces) if piece and data.startswith(piece)),
                key=lambda i: len(self._pieces[i]),
            )
            tokens.append(token)
            data = data[len(self._pieces[token]) :]
        return tokens

    def text(self, tokens: list[int]) -> bytes:
        return b"".join(self._pieces[token] for token in tokens)


def ids(allowed: Allowed) -> list[int]:
    return [token for token in range(N_MOST) if token in allowed]


def fits(constraint: FormatConstraint, path: list[int]) -> bool:
    return all(token in ids(constraint.allowed(path[:i])) for i, token in enumerate(path))


def schema(node: object) -> AnswerFormat:
    return format_of("json-schema", json.dumps(node))


OPTIONAL = {f"k{i}": {"type": "null"} for i in range(1000)}
CHAIN = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(4000)} | {"4000": {"type": "null"}}


def unchecked(node: object) -> AnswerFormat:
    """A schema as llguidance takes it, without our check."""
    return AnswerFormat("json-schema", "", room._json_rules(json.dumps(node)))


IMPOSSIBLE: dict[str, tuple[str, str]] = {
    "no JSON": ("json-schema", "{"),
    "a list": ("json-schema", "[]"),
    "a number": ("json-schema", "3"),
    "no type": ("json-schema", '{"type": "text"}'),
    "false": ("json-schema", "false"),
    "contradiction": ("json-schema", '{"type": "integer", "minimum": 3, "maximum": 1}'),
    "forbidden part": ("json-schema", '{"type": "object", "properties": {"a": false}, "required": ["a"]}'),
    "keyword": ("json-schema", '{"type": "array", "uniqueItems": true}'),
    "not": ("json-schema", '{"not": {"type": "string"}}'),
    "string format": ("json-schema", '{"type": "string", "format": "poem"}'),
    "look-ahead": ("json-schema", '{"type": "string", "pattern": "(?=a)b"}'),
    "other file": ("json-schema", '{"$ref": "other.json#/a"}'),
    "itself": ("json-schema", '{"$ref": "#"}'),
    "endless": ("json-schema", json.dumps(RECURSIVE)),
    "endless array": ("json-schema", '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'),
    "endless choice": ("json-schema", '{"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}'),
    "deep": ("json-schema", '{"type":"array","items":' * 3000 + "true" + "}" * 3000),
    "large": ("json-schema", json.dumps({"enum": ["x" * 100] * 11_000})),
    "endless by an escaped name": (
        "json-schema",
        json.dumps(RECURSIVE).replace("#/$defs", "#/%24defs"),
    ),
    "endless count": ("json-schema", '{"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}}'),
    "endless rule": ("grammar", 'root ::= "a" root'),
    "optional parts": ("json-schema", json.dumps({"type": "object", "properties": OPTIONAL})),
    "long chain": ("json-schema", json.dumps({"$ref": "#/$defs/0", "$defs": CHAIN})),
    "long chain of rules": (
        "grammar",
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(10_000)) + 'r10000: "a"',
    ),
    "unknown rule": ("grammar", "start: foo"),
    "no rules": ("grammar", ""),
    "left alone": ("grammar", 'start: start "x"'),
    "nested": ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "bad GBNF": ("grammar", 'root ::= "a'),
    "open group": ("regex", "(a"),
    "look-behind": ("regex", "(?<=a)b"),
    "nothing": ("regex", r"[^\s\S]"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_an_unusable_format_is_refused_at_once(case: str) -> None:
    """A format that fits nothing, is read in part, or never ends must not reach a model."""
    kind, text = IMPOSSIBLE[case]
    with pytest.raises(UsageError) as caught:
        format_of(kind, text, "--format")
    assert "--format" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "node",
    [
        NAME,
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": ["array", "null"], "items": {"$ref": "#/$defs/t"}}}},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {
            "type": "object",
            "patternProperties": {"^a": {"type": "null"}},
            "required": ["ab"],
            "additionalProperties": False,
        },
        {"type": "object", "minProperties": 1, "additionalProperties": {"type": ["object", "null"]}},
        {"type": "string", "format": "date", "title": "a", "default": "b", "unknown": 1},
    ],
)  # fmt: skip
def test_schemas_with_an_end_are_taken(node: object) -> None:
    """A recursion that can stop, annotations and keywords of other tools are no faults."""
    assert schema(node).kind == "json-schema"


def test_files_and_text_give_the_same_format(tmp_path: Path) -> None:
    """`--json-schema` takes both; a file that is missing, binary or too large is an error."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps(NAME), encoding="utf-8-sig")
    assert read_format("json-schema", str(path)) == read_format("json-schema", json.dumps(NAME)) == schema(NAME)
    assert check_format("format", f"json-schema {path}") == schema(NAME)
    assert check_format("format", schema(NAME).to_json()) == schema(NAME)
    assert check_format("format", "none") is check_format("format", None) is None
    path.write_bytes(b"\xff\xfe{}")
    (tmp_path / "large").write_bytes(b" " * (MAX_BYTES + 1))
    for source in (path, tmp_path / "missing", tmp_path, tmp_path / "large"):
        with pytest.raises(UsageError) as refused:
            read_format("json-schema", str(source))
        assert refused.value.hint
    for typed in ("json", "regex", {"regex": 3}, {"regex": "a", "grammar": "b"}, {}, 7):
        with pytest.raises(UsageError):
            check_format("format", typed)


def test_gbnf_and_lark_are_told_apart_by_content() -> None:
    """Files of llama.cpp work as they are."""
    for text in ('root ::= "yes" | "no"', 'start: "yes" | "no"'):
        constraint = FormatConstraint(format_of("grammar", text), Bytes())
        assert bytes(ids(constraint.allowed(()))) == b"ny"


def test_forced_text_has_only_its_own_tokens() -> None:
    """Other splits of the forced text would make its tokens uncertain."""
    vocab = Bytes('{"', '": ', '"}', "na", "me")
    constraint = FormatConstraint(schema(NAME), vocab)
    forced = list(constraint.forced())
    assert vocab.text(forced).startswith(b'{"name": ')
    assert forced == vocab.tokenize('{"name": "', special=False)[: len(forced)]
    for i, token in enumerate(forced):
        assert ids(constraint.allowed(forced[:i])) == [token]


def test_end_tokens_are_allowed_exactly_where_the_text_may_end() -> None:
    """An end too early leaves text that does not fit; control tokens never fit."""
    vocab = Bytes()
    ends = sorted(vocab.end_tokens)
    constraint = FormatConstraint(format_of("regex", "ab{1,2}"), vocab)
    said: list[int] = []
    seen = []
    for token in b"abb":
        seen.append(ids(constraint.allowed(())))
        constraint.advance([token])
        said.append(token)
    seen.append(ids(constraint.allowed(())))
    assert seen == [[97], [98], [98, *ends], ends]
    assert ids(constraint.allowed(ends[:1])) == []


def test_a_dead_end_of_one_path_leaves_the_others() -> None:
    """llguidance's matcher stays in its error when no token goes on, also after a rollback."""
    vocab = Bytes("ab")
    vocab.lose(range(128, 256))
    constraint = FormatConstraint(format_of("regex", "x(abc|cé|d)y"), vocab)
    constraint.advance(list(b"x"))
    assert bytes(ids(constraint.allowed(()))[:3]) == b"acd"
    assert ids(constraint.allowed(list(b"c"))) == []
    assert bytes(ids(constraint.allowed(list(b"d")))) == b"y"
    constraint.advance(list(b"d"))
    assert bytes(ids(constraint.allowed(()))) == b"y"


def test_a_space_that_the_tokenizer_adds_is_not_forced() -> None:
    """SentencePiece puts a space before every text, but not in the middle of an answer."""
    constraint = FormatConstraint(schema(NAME), vocab := Bytes("name", space=True))
    assert vocab.text(list(constraint.forced())).startswith(b'{"name":')


@pytest.mark.parametrize("n_call", [2, 3])  # of a new TokenizerWrapper, and of a matcher
def test_a_signal_in_the_tokenizer_reaches_its_handler(n_call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a Ctrl-C that llguidance takes for a tokenizer of another kind, or for a bad format."""
    form, vocab, n_calls = schema(NAME), Bytes("name"), 0

    def tokenize(self: Bytes, text: str, *, special: bool) -> list[int]:
        nonlocal n_calls
        n_calls += 1
        if n_calls == n_call:
            signal.raise_signal(signal.SIGINT)
        return plain(self, text, special=special)

    plain = Bytes.tokenize
    monkeypatch.setattr(Bytes, "tokenize", tokenize)
    with pytest.raises(KeyboardInterrupt):
        FormatConstraint(form, vocab).forced()
    assert vocab.text(list(FormatConstraint(form, vocab).forced())) == b'{"name": "'


@pytest.mark.parametrize(
    "form",
    [
        schema(NAME),
        schema({"enum": ["alpha", "alphabet", "beta"]}),
        schema({"type": "array", "items": {"type": "integer"}}),
        format_of("regex", "(abc|abd)+x{3}é?"),
        format_of("grammar", 'root ::= "hello" [a-z]+ "bye" | "help"'),
    ],
)
@pytest.mark.parametrize("space", [False, True])
def test_a_mask_calls_the_tokenizer_only_while_signals_are_held(
    monkeypatch: pytest.MonkeyPatch, form: AnswerFormat, space: bool
) -> None:
    """Prevents: another call of llguidance that hides a Ctrl-C. To hold signals for every mask takes a fifth of it."""
    vocab, rng, own = Bytes("he", "ab", space=space), random.Random(0), signal.getsignal(signal.SIGINT)
    constraint, held, tokenize = FormatConstraint(form, vocab), list[bool](), Bytes.tokenize

    def spy(self: Bytes, text: str, *, special: bool) -> list[int]:
        held.append(signal.getsignal(signal.SIGINT) is not own)
        return tokenize(self, text, special=special)

    monkeypatch.setattr(Bytes, "tokenize", spy)
    for _ in range(30):
        fitting = ids(constraint.allowed([]))
        token = rng.choice(fitting)
        constraint.forced()
        for other in (fitting[0], fitting[-1], rng.randrange(256)):
            constraint.allowed([other])
            constraint.allowed([token, other])
        if token in vocab.end_tokens:
            break
        constraint.advance([token])
    assert held
    assert all(held)


def test_what_fits_is_a_whole_answer() -> None:
    """Prevents: half an answer that is taken for the whole one, as after a stop text."""
    for form, texts in (
        (format_of("regex", "a{2,3}é?"), {"aa": True, "aaé": True, "a": False, "aab": False, "": False}),
        (schema(NAME), {'{"name": "\\n"}': True, '{"name": "x"': False, '{"name": "x"} ': False}),
    ):
        assert {text: form.fits(text) for text in texts} == texts


@pytest.mark.slow
def test_states_do_not_depend_on_the_way_to_them() -> None:
    """Rollback: after any walk over drafted paths, committed or not, masks equal those of a fresh matcher."""
    vocab = Bytes('{"', '": ', '"}', "na", "me", "the", ", ")
    form = schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "kind": {"enum": ["the", "them", "then"]},
                "n": {"type": "integer"},
            },
            "required": ["name", "kind", "n"],
        }
    )
    for seed in range(3):
        rng = random.Random(seed)
        walked, said = FormatConstraint(form, vocab), list[int]()
        for _ in range(12):
            paths = [[]]
            for _ in range(rng.randrange(6)):
                path = list(rng.choice(paths))
                inner = [token for token in ids(walked.allowed(path)) if token not in vocab.end_tokens]
                if not inner:
                    continue
                path.append(rng.choice(inner) if rng.random() < 0.9 else rng.randrange(vocab.size))
                paths.append(path)
            for path in paths:  # of one step: laws of rows, in any order
                ids(walked.allowed(rng.choice(paths)))
                direct = FormatConstraint(form, vocab)
                for token in (*said, *path):
                    if token not in ids(direct.allowed(())):
                        direct = None
                        break
                    direct.advance([token])
                assert ids(walked.allowed(path)) == ([] if direct is None else ids(direct.allowed(()))), (said, path)
            forced = list(walked.forced())
            good = [path for path in [*paths, forced] if fits(walked, path)]
            path = [token for token in rng.choice(good) if token not in vocab.end_tokens]
            walked.advance(path)
            said += path


def texts_of(node: Mapping[str, object], seed: int, vocab: Bytes) -> bytes | None:
    """A random text that the masks of a schema allow; None if it grows long."""
    rng, constraint, said = random.Random(seed), FormatConstraint(schema(node), vocab), list[int]()
    while len(said) < 600:
        allowed = ids(constraint.allowed(()))
        ends = [token for token in allowed if token in vocab.end_tokens]
        if ends and (len(ends) == len(allowed) or rng.random() < 0.5):
            return vocab.text(said)
        # Mostly what closes strings and numbers: random bytes would go on for long.
        closing = [token for token in allowed if vocab.text([token]) in (b'"', b",", b"]", b"}", b", ", b'"}')]
        inner = [token for token in allowed if token not in ends]
        said.append(rng.choice(closing if closing and rng.random() < 0.3 else inner))
        constraint.advance(said[-1:])
    return None


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, object]:
    kinds = ["string", "integer", "enum", "boolean", "number", "object", "array", "anyOf"]
    kind = rng.choice(kinds[: 8 if depth < 2 else 5])
    if kind == "object":
        names = rng.sample(["name", "id", "the list", "é", "x"], rng.randrange(1, 4))
        parts = {name: random_schema(rng, depth + 1) for name in names}
        return {
            "type": "object",
            "properties": parts,
            "required": names[: rng.randrange(len(names) + 1)],
            "additionalProperties": False,
        }
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 3}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}]}
    if kind == "enum":
        return {"enum": ["red", "green", 7, None, 'a "b"'][: rng.randrange(1, 6)]}
    return {"type": "string", "maxLength": 12} if kind == "string" else {"type": kind}


def test_whatever_is_allowed_parses() -> None:
    """A wrong mask, a wrong forced token or an end too early gives text that is no JSON."""
    vocab, n_done = Bytes('{"', '": ', '"}', "na", "me", ", ", "tr", "ue", "é"), 0
    for seed in range(60):
        node = random_schema(random.Random(seed))
        text = texts_of(node, seed, vocab)
        if text is not None:
            value = json.loads(text)
            n_done += 1
            if "enum" in node:
                assert value in node["enum"]
            if node.get("type") == "object":
                assert set(node["required"]) <= set(value) <= set(node["properties"])
    assert n_done > 30


def test_a_format_over_the_limits_is_an_error_where_they_are_reached() -> None:
    """Prevents: a matcher in an error that reads as text that does not fit."""
    constraint = FormatConstraint(unchecked({"type": "object", "properties": OPTIONAL}), Bytes())
    with pytest.raises(UsageError, match="too much work"):
        constraint.allowed(constraint.forced())


@pytest.mark.slow
def test_a_check_without_an_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents: a format that blocks the program for a minute, deaf to signals."""
    monkeypatch.setattr(room, "_MAX_SECONDS", 0.5)
    with pytest.raises(UsageError) as caught:
        schema({"type": "object", "properties": {f"k{i}": {"type": "null"} for i in range(5000)}})
    assert "0.5 seconds" in str(caught.value)
