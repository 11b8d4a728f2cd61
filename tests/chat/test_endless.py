"""Parts of schemas and grammars that no text can end are found wherever an answer may come to them."""

from __future__ import annotations

import json

import pytest

from specllama.base.errors import UsageError
from specllama.chat.endless import Lark, endless_schema
from specllama.chat.format import format_of

A = {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}}

WITH_END = {
    "schema": 'start: TEXT | call\nTEXT: /[^{](.|\\n)*/\ncall: %json {\n  "properties": {"a:b": {"const": "w"}}\n}\n',
    "lines": (
        '%llguidance {}\nstart: a // first\n   | b # second\n\n   | (c | "d")~2..3\n// more\na: "(" start ")" | "x"\n'
        'b: "y" start?\nc: "z"{0,3} start{0,1} | [start] "q" start*\n%ignore / +/\n'
    ),
    "not": "start: LINES\nLINES: /[a-z \\n]*/ & ~/(?s:.*)\\n\\n(?s:.*)/\n",
    "parameters": (
        'start: p::0x0\np::_: "" %if eq(_, 7)\n | "a" p::set_bit(0) %if bit_clear(0)\n'
        ' | "b" p::set_bit(1) %if and(bit_clear(1), bit_clear(0))\n | "c" p::set_bit(2) %if bit_clear(2)\n'
    ),
    "grammar within": 'start: "a" %lark {\n start: "b" start | "c"\n} "d"\n',
    "signs": 'start: "//" | "#x" | /\\/[^\\/]+\\// | "a|b)]}" "->" x -> name\nx: "%json" | "::" "i"i "a".."z"\n',
    "values": 'start: %regex {"substring_words": "a b c"} x\nx: "1" | x "," "1"\n',
    "windows": 'start: a\r\n  | "b" start\r\na: "c"\r\n',
    "attributes": 'start: x y z\nx[capture="a:b", suffix="q"]: /[a-z]*/\ny[lazy]: /.*;/\n?z: "u" | z "v"\n!k: "u"\n',
    "never used": 'start: "a"\nb: b "x"\n',
    "import": '%import common.INT\nstart: INT ("," INT)*\n',
    "json of llama.cpp": r"""root ::= object
value ::= object | array | string | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
ws ::= | " " | "\n" [ \t]{0,20}
""",
}


@pytest.mark.parametrize("case", WITH_END)
def test_grammars_with_an_end_are_taken(case: str) -> None:
    """Prevents: a lexeme that our reader takes for another one than llguidance does."""
    assert format_of("grammar", WITH_END[case]).text == WITH_END[case]


@pytest.mark.parametrize(
    ("part", "lark"),
    [
        ("b", 'start: "a" | b\nb: [a] b\na: "c"'),
        ("b", 'start: "a" | b\nb: b "x"'),
        ("x", 'start: "a" | x\nx: "b" y\ny: "c" x | "d" y'),
        ("x", 'start: ("a" | ("b" x)+)\nx: "b" x'),
        ("x", 'start: "a" [x]\nx: "b" x'),
        ("x", 'start: "a" x*\nx: "b" x{2}'),
        ("x", 'start: "a" x~0..2\nx: "b"~0 x~1..2'),
        ("x", 'start: "a" x{,2}\nx: "b" x'),
        ("start", 'start: "a" | %lark {\n start: "b" | c\n c: "d" c\n} "d"'),
        ("a", 'start: "q" | a::0\na::_: "x" a::incr(_)'),
        ("j", 'start: "a" | "b" j\nj: %json {"type": "array", "items": {"$ref": "#"}, "minItems": 1} | "c"'),
    ],
)  # fmt: skip
def test_a_rule_without_an_end_is_found_behind_any_operator(part: str, lark: str) -> None:
    """Prevents: an answer that goes on for ever because the model chose the other alternative."""
    assert Lark(lark).endless == part
    with pytest.raises(UsageError) as caught:
        format_of("grammar", lark)
    assert part in str(caught.value)


def test_rules_of_gbnf_are_read_as_llguidance_reads_them() -> None:
    """Prevents: a check of Lark grammars only."""
    with pytest.raises(UsageError) as caught:
        format_of("grammar", 'root ::= "a" | foo-Bar\nfoo-Bar ::= [a-z] foo-Bar')
    assert "foo_bar" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        format_of("grammar", 'root ::= "a" root')
    assert str(caught.value).endswith(" root")


@pytest.mark.parametrize(
    "node",
    [
        {"properties": {"v": {"type": "null"}, "x": {"$ref": "#/$defs/a"}}},
        {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]},
        {"type": ["array", "null"], "items": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/a"}},
        {"type": "object", "patternProperties": {"^k": {"$ref": "#/$defs/a"}}},
        {"type": "array", "prefixItems": [True, {"$ref": "#/$defs/a"}]},
    ],
)
def test_an_optional_part_without_an_end_is_found(node: dict[str, object]) -> None:
    """Prevents: a schema that is taken because some text fits, though an answer may come to the endless part."""
    assert endless_schema({**node, "$defs": A}) == "#/$defs/a"
    with pytest.raises(UsageError):
        format_of("json-schema", json.dumps({**node, "$defs": A}))


def test_parts_that_no_answer_has_do_not_count() -> None:
    """Prevents: a schema refused because of a definition that it does not use."""
    for node in ({"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 0}, {"const": A}):
        assert endless_schema({**node, "$defs": A}) == ""


KEYWORDS = (
    "$ref", "anyOf", "oneOf", "allOf", "prefixItems", "properties", "patternProperties", "additionalProperties",
    "items", "minItems", "maxItems", "required", "minProperties", "type",
)  # fmt: skip


OF_ANY_TYPE = (None, True, 7, -1, 0.5, "a", [], [None], [[]], [{}], {}, {"a": None})


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_with_a_value_of_another_type_is_no_internal_error(keyword: str) -> None:
    """Prevents: a traceback for a schema that llguidance takes, because the keyword is not of the schema's type."""
    kinds = ({}, *({"type": kind} for kind in ("string", "array", "object", ["string", "null"])))
    for node in ({**kind, keyword: value} for kind in kinds for value in OF_ANY_TYPE):
        for schema in (node, {"properties": {"x": node}}, {"$ref": "#/$defs/a", "$defs": {"a": node}}):
            assert isinstance(endless_schema(schema), str)
            assert isinstance(Lark(f"start: j\nj: %json {json.dumps(schema)}").endless, str)


@pytest.mark.parametrize("keyword", ["maxItems", "patternProperties"])
def test_a_keyword_that_the_type_does_not_have_is_ignored(keyword: str) -> None:
    """Prevents: an internal error for a schema that llguidance takes."""
    node = {"type": "string", keyword: None}
    for text in (json.dumps(node), json.dumps({"type": "object", "properties": {"x": node}})):
        assert format_of("json-schema", text).text == text
        assert format_of("grammar", f"start: %json {text}").kind == "grammar"


@pytest.mark.parametrize(
    ("part", "lark"),
    [
        ("D", 'start: "a" D | "b"\nD: /a/ & /b/'),
        ("/[^\\s\\S]x/", 'start: "a" x?\nx: A /[^\\s\\S]x/\nA: "q"\n  | /a|[^\\s\\S]/'),
        ("B", 'start: A B?\nA: %regex {"substring_words": "a b"}\nB: /[a-z]*/ & ~/(?s:.*)/ // none\n'),
    ],
)
def test_a_terminal_that_no_text_fits_is_found_before_an_answer_comes_to_it(part: str, lark: str) -> None:
    """Prevents: an error in the middle of an answer."""
    with pytest.raises(UsageError) as caught:
        format_of("grammar", lark)
    assert str(caught.value).endswith(part)


@pytest.mark.parametrize("attribute", ['stop="q"', "max_tokens=3", "temperature=0.5"])
def test_attributes_that_masks_cannot_keep_are_refused(attribute: str) -> None:
    """Prevents: an error in the middle of an answer at the first rejected draft, or a setting without effect."""
    with pytest.raises(UsageError):
        format_of("grammar", f'start: x "!"\nx[{attribute}]: /[a-z]*/')
