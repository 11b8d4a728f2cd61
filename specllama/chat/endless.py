"""Parts of a schema or a grammar that no text can end: a model that says the beginning of one never stops.

llguidance takes such parts, because it looks at the next token only. What can end is found step by step, from the
parts that refer to nothing on. Every part that an answer may come to must have an end, also where others do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

# A name, all of a tuple, any one of a list; `()` is the empty text, None never ends.
Node: TypeAlias = "str | tuple[Node, ...] | list[Node] | None"


T = TypeVar("T")


def _finite(parts: dict[str, Any], ends: Callable[[Any, set[str]], bool]) -> set[str]:
    """The names of the parts that can end; `ends` is given those that are known to."""
    found, n_before = set[str](), -1
    while len(found) > n_before:
        n_before = len(found)
        for name in reversed(parts):  # what is referred to mostly comes later
            if name not in found and ends(parts[name], found):
                found.add(name)
    return found


def _read(node: Mapping[str, Any], key: str, default: T) -> T:
    """The value of a keyword; `default` for one of another type: llguidance takes that where the keyword has no use."""
    value = node.get(key, default)
    return value if isinstance(value, type(default)) else default


def _ref(node: object) -> str:
    return _read(node, "$ref", "") if isinstance(node, dict) else ""


def _prefix(node: Mapping[str, Any]) -> list[object]:
    """The schemas of the first items of an array."""
    return _read(node, "prefixItems", [])


def endless_schema(schema: object) -> str:
    """The name of a part of a JSON schema that cannot end, such as `#/$defs/a`; an empty text if all can."""
    targets = {ref: _target(schema, ref) for ref in _references(schema)}
    finite, entered = _finite(targets, _schema_ends), set[str]()
    waiting: list[tuple[str, object]] = [("the schema", schema)]
    while waiting:
        name, node = waiting.pop()
        ref = _ref(node)
        if ref and ref not in finite:
            return ref
        if not _schema_ends(node, finite):
            return name
        waiting += [(name, part) for part in _parts(node)]
        if ref and ref not in entered:
            entered.add(ref)
            waiting.append((ref, targets[ref]))
    return ""


def _parts(node: object) -> Iterator[object]:
    """The schemas of parts that a text may have. Not `false`: llguidance leaves such a part out."""
    if not isinstance(node, dict) or "const" in node or "enum" in node:
        return
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        yield from _read(node, key, [])
    for key in ("properties", "patternProperties"):
        yield from _read(node, key, {}).values()
    yield node.get("additionalProperties")
    if _read(node, "maxItems", 1) > len(_prefix(node)):
        yield node.get("items")


def _schema_ends(node: object, finite: set[str]) -> bool:
    """Does a text of this schema end? Also true of `false`, which has no texts at all."""
    if not isinstance(node, dict) or "const" in node or "enum" in node:
        return True
    if _ref(node) not in {"", *finite}:
        return False

    def ends(part: object) -> bool:
        return _schema_ends(part, finite)

    if not all(map(ends, _read(node, "allOf", []))):
        return False
    if not all(any(map(ends, _read(node, key, [True]))) for key in ("anyOf", "oneOf")):
        return False
    return any(_has_end(node, kind, ends) for kind in _read(node, "type", [_read(node, "type", "any")]))


def _has_end(node: Mapping[str, Any], kind: str, ends: Callable[[object], bool]) -> bool:
    """Can a value of this type end? An object needs its required parts, an array the least number of its items."""
    if kind == "object":
        known, more = _read(node, "properties", dict[str, object]()), node.get("additionalProperties", True)
        others = [*_read(node, "patternProperties", {}).values(), more]
        required = {name for name in _read(node, "required", list[object]()) if isinstance(name, str)}
        if not all(ends(known[name]) if name in known else any(map(ends, others)) for name in required):
            return False
        # llguidance takes minProperties only if all known names are required.
        return _read(node, "minProperties", 0) <= len(required) or any(map(ends, others))
    if kind == "array":
        first, n_least = _prefix(node), _read(node, "minItems", 0)
        return all(map(ends, first[:n_least])) and (n_least <= len(first) or ends(node.get("items", True)))
    return True


def _references(node: object) -> set[str]:
    """Every `$ref` in a schema."""
    if isinstance(node, list):
        return set().union(*map(_references, node))
    if not isinstance(node, dict):
        return set()
    return ({_ref(node)} - {""}).union(*map(_references, node.values()))


def _target(schema: object, ref: str) -> object:
    """What a reference of the form `#/a/b` points to; True, which always ends, for all others."""
    if not ref.startswith("#"):
        return True
    node = schema
    for part in ref[1:].split("/")[1:]:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return True
    return node


# As in llguidance: parser/src/lark/lexer.rs.
_LEXEME = re.compile(
    r"""(?P<skip> (?:\#|//)[^\n]* | [ \t]+ )
      | (?P<line> \r?\n )
      | (?P<terminal> "(?:\\.|[^"\\])*"i? | /(?:\\.|[^/\\])+/[imslux]* | _?[A-Z][_A-Z0-9\-]* | <[^<>\s]+> | @[\w\-]+ )
      | (?P<rule> !?[_?]?[a-z][_a-z0-9\-]* )
      | (?P<sign> -> | :: | \.\. | %[a-z]+ | [+-]?\d\w*(?:\.\d\w*)? | \S )""",
    re.VERBOSE,
)
_SPACE = re.compile(r"\s*")
_AFTER_SEQUENCE = ("|", ")", "]", "}", "")


class Lark:
    """A Lark grammar that llguidance takes. Raises ValueError if it cannot be read, or sets what a mask cannot keep.

    `endless`: the name of a rule that cannot end, though `start` leads to it; an empty text if all can.
    `used`: the terminals in its rules, by name or as an expression; those of grammars within it are left out.
    """

    def __init__(self, text: str) -> None:
        self._lexemes: list[tuple[str, str]] = []  # (kind, text); the last one is empty
        self._at = 0
        self._definitions: list[str] = []  # of terminals
        self._used = dict[str, None]()
        at, decoder = 0, json.JSONDecoder()
        while at < len(text):
            if (found := _LEXEME.match(text, at)) is None:
                raise ValueError(f"cannot read {text[at : at + 20]!r}")
            kind, lexeme, begun, at = str(found.lastgroup), found[0], at, found.end()
            if lexeme in ("%json", "%regex", "%llguidance"):
                value, at = decoder.raw_decode(text, _SPACE.match(text, at).end())  # type: ignore[union-attr]
                kind = "endless" if lexeme == "%json" and endless_schema(value) else "terminal"
            if kind != "skip" and lexeme != "%llguidance":
                self._lexemes.append((kind, text[begun:at]))
        self._lexemes.append(("end", ""))
        self.endless = self._grammar()
        self.used = list(self._used)

    def chooser(self) -> str:
        """A grammar whose texts are the number of a terminal of `used`, in six digits, and a text of that terminal."""
        choices = (f'"{i:06}" {terminal}' for i, terminal in enumerate(self.used))
        return "\n".join([*self._definitions, "start: " + "\n  | ".join(choices)])

    def _grammar(self) -> str:
        """Reads the grammar that begins here; returns the name of an endless rule."""
        rules: dict[str, Node] = {}
        while self._next not in ("}", ""):
            kind, name = self._lexemes[self._at]
            begun = self._at
            if kind in ("rule", "terminal"):
                self._skip_to(":")
                if ("rule", "temperature") in self._lexemes[begun : self._at]:
                    raise ValueError(f"{name} sets a temperature, which only --temp does")
                self._at += 1
                known = dict(self._used)
                rules[name.lstrip("!?")] = self._alternatives()
                if kind == "terminal":
                    self._used = known
                    self._definitions.append(" ".join(lexeme for _, lexeme in self._lexemes[begun : self._at]))
            elif kind == "sign":  # a statement
                self._skip_to("\n")
            else:
                self._at += 1

        def ends(node: Node, found: set[str]) -> bool:
            if node is None or isinstance(node, str):
                return node in found or node not in {None, *rules}
            return (all if isinstance(node, tuple) else any)(ends(part, found) for part in node)

        finite, entered, waiting = _finite(rules, ends), {"start"}, ["start"]
        while waiting:
            name = waiting.pop()
            inner = set(_names(rules[name]))
            if name not in finite or None in inner:
                return name
            more = {other for other in inner if other is not None and other in rules} - entered
            entered |= more
            waiting += more
        return ""

    @property
    def _next(self) -> str:
        return self._lexemes[self._at][1]

    def _take(self, *wanted: str) -> str:
        """The next lexeme, read if it is one of `wanted`; else an empty text."""
        found = self._next if self._next in wanted else ""
        self._at += bool(found)
        return found

    def _skip_to(self, *wanted: str) -> None:
        """Go to the next of `wanted` outside of brackets, or to the end."""
        depth = 0
        while self._next and (depth or self._next.strip("\r") not in wanted):
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(self._next, 0)
            self._at += 1

    def _alternatives(self) -> Node:
        found = [self._sequence()]
        while True:
            at = self._at
            while self._take("\n", "\r\n"):
                pass
            if not self._take("|"):
                self._at = at
                return found
            found.append(self._sequence())

    def _sequence(self) -> Node:
        found: list[Node] = []
        while self._next.strip("\r\n") not in _AFTER_SEQUENCE:
            if self._take("->", "%if"):
                self._skip_to("\n", *_AFTER_SEQUENCE)
                break
            found.append(self._repeated(self._atom()))
        return tuple(found)

    def _atom(self) -> Node:
        kind, lexeme = self._lexemes[self._at]
        self._at += 1
        if lexeme == "(":
            node = self._alternatives()
            self._take(")")
            return node
        if lexeme == "[":
            node = [self._alternatives(), ()]
            self._take("]")
            return node
        if lexeme == "%lark":
            self._take("{")
            known = self._used, self._definitions
            self._used, self._definitions = {}, []
            node = None if self._grammar() else ()
            self._used, self._definitions = known
            self._take("}")
            return node
        if kind == "rule":
            if self._take("::"):  # a parameter: a name or number, or an expression
                self._at += self._next not in ("(", "[")
                if self._next in ("(", "["):
                    self._at += 1
                    self._skip_to(")", "]")
                    self._at += 1
            return lexeme
        if kind == "terminal" and lexeme[0] not in '"<@%':
            self._used[lexeme] = None
        return None if kind == "endless" else ()

    def _repeated(self, node: Node) -> Node:
        """`node` with the operator after it."""
        if self._take("?", "*"):
            return [node, ()]
        n_least = "1"
        if self._take("~"):
            n_least = self._next
            self._at += 1
            if self._take(".."):
                self._at += 1
        elif self._take("{"):
            n_least = self._next
            self._skip_to("}")
            self._at += 1
        return [node, ()] if n_least in (",", "0") else node


def _names(node: Node) -> Iterator[str | None]:
    if node is None or isinstance(node, str):
        yield node
    else:
        for part in node:
            yield from _names(part)
