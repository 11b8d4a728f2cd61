"""Renders the chat template of a model file: jinja2's sandbox with limits on time and memory.

A model file is not trusted. Jinja2's sandbox keeps a template away from Python, but not from endless loops or from
filling the memory. Here every loop, call, filter and growing operator first checks the time and the size of its result.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from types import GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from specllama.base.errors import TemplateError

HINT = "Use --raw with a prompt that carries its own markers, or another model file."

_MAX_SOURCE = 200_000  # characters; the longest known template has 30,000
_MAX_SECONDS = 3.0  # a real template needs milliseconds
_MAX_SIZE = 20_000_000  # characters of one value, and of the whole text
_ITEM_SIZE = 16  # characters that one item of a list counts as

# Filters and methods whose result can be many times as large as their arguments; all others only add.
_GROWING_FILTERS = frozenset({"batch", "center", "format", "indent", "join", "replace", "slice", "tojson", "wordwrap"})
_GROWING_METHODS = frozenset(
    {"center", "expandtabs", "format", "format_map", "join", "ljust", "replace", "rjust", "zfill"}
)
# Slow, and of no use in a chat template.
_LEFT_OUT = (("filters", "urlize"), ("filters", "pprint"), ("globals", "lipsum"))

# Not identifiers, so that no template can use them.
_STEPS, _BOUNDED, _CONCAT = "each step", "bounded value", "joined text"


class TemplateOverrun(TemplateError):
    """The template exceeds the limits of time or memory."""


class _Refused(jinja2.TemplateRuntimeError):
    """The template called `raise_exception`."""


class _Overrun(jinja2.TemplateRuntimeError):
    """The template exceeds a limit."""


class _Namespace(Namespace):
    """Jinja2's namespace, printed without its contents: two of them can hold each other, which grows exponentially."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metering(NodeTransformer):
    """Sends every loop, literal collection and `~` through a filter that checks the limits."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, _STEPS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return self._filtered(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Filter:  # noqa: N802
        return self._filtered(self.generic_visit(node), _BOUNDED)

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._filtered(node, _BOUNDED) if node.ctx == "load" else node

    def _filtered(self, node: nodes.Node, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _size(value: object) -> int:
    """Characters, items and bits of numbers in `value`, counted up to the limit."""
    size, todo = 0, [value]
    while todo and size <= _MAX_SIZE:
        item = todo.pop()
        if isinstance(item, (str, range)):
            size += len(item)
        elif isinstance(item, int):
            size += item.bit_length()
        elif isinstance(item, (list, tuple, dict)):
            size += _ITEM_SIZE * len(item)
            todo.extend(item)
            if isinstance(item, dict):
                todo.extend(item.values())
    return size


def _listed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """`values` with generators as lists, because a generator has no size. Running them is metered."""
    return tuple(list(value) if isinstance(value, GeneratorType) else value for value in values)


def _factor(value: object) -> int:
    """How many times `value` can repeat another value."""
    return abs(value) if isinstance(value, int) else _size(value)


def _product(values: Iterable[object]) -> int:
    """The product of the two largest factors: the largest result of a growing operation."""
    first, second = sorted((1, 1, *map(_factor, values)))[-2:]
    return first * second


def _written_numbers(text: str) -> int:
    """The sum of all numbers in a format string, which are its widths and precisions."""
    return sum(int(digits[:18]) for digits in re.findall(r"[0-9]+", text))


def _growth(operator: str, left: Any, right: Any) -> int:
    """The largest size of `left operator right`."""
    if isinstance(left, str) and operator == "%":
        return _written_numbers(left) + _product([left, *(right if isinstance(right, tuple) else [right])])
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        return _product([left, right]) if operator == "*" else _size(left) + _size(right)
    if operator == "**" and isinstance(right, int):
        return _size(left) * abs(right)
    return _size(left) + _size(right)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja2's sandbox with the set-up of Hugging Face's templates, and with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # compute nothing while compiling
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self._deadline = math.inf
        for kind, name in _LEFT_OUT:
            del getattr(self, kind)[name]
        self.globals.update(namespace=_Namespace, raise_exception=_raise_exception)
        self.filters["tojson"] = _tojson
        self.filters = {name: self._metered(name, function) for name, function in self.filters.items()}
        self.tests = {name: self._metered(name, function) for name, function in self.tests.items()}
        self.filters.update({_STEPS: self._steps, _BOUNDED: self._bounded, _CONCAT: self._concatenated})

    def start(self) -> None:
        """Start the time limit of one rendering."""
        self._deadline = time.monotonic() + _MAX_SECONDS

    def admit(self, size: int = 0) -> None:
        """Raise _Overrun if the time is over, or a result of `size` is too large."""
        if size > _MAX_SIZE:
            raise _Overrun("makes a text or list that is too large")
        if time.monotonic() > self._deadline:
            raise _Overrun(f"takes more than {_MAX_SECONDS:g} seconds")

    def concat(self, parts: Iterable[str]) -> str:
        """Join the text of the template, of a macro or of a block; called by jinja2."""
        kept, size = [], 0
        for part in parts:
            size += len(part)
            self.admit(size)
            kept.append(part)
        return "".join(kept)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a macro, method or function within the limits; called by jinja2."""
        args = _listed(args)
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        owner = getattr(method, "__self__", None)
        values = [*args, *kwargs.values()]
        if isinstance(owner, str) and method.__name__ in _GROWING_METHODS:
            widths = _written_numbers(owner) if method.__name__.startswith("format") else 0
            __self.admit(widths + _product([owner, *values]))
        else:
            __self.admit(_size(values))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator within the limits; called by jinja2."""
        self.admit(_growth(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _metered(self, name: str, function: Any) -> Callable[..., Any]:
        """The filter or test `function` within the limits."""

        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            args = _listed(args)
            values = [*args, *kwargs.values()]
            widths = _written_numbers(str(args[0])) if name == "format" else 0
            self.admit(widths + _product(values) if name in _GROWING_FILTERS else _size(values))
            return function(*args, **kwargs)

        return metered

    def _steps(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.admit()
            yield item

    def _bounded(self, value: Any) -> Any:
        self.admit(_size(value))
        return value

    def _concatenated(self, values: list[Any]) -> str:
        return self.concat(map(str, values))


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(message: object) -> str:
    """`message` of a template for a terminal: one printable line of at most 200 characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in str(message)[:2000]).split())
    return line if len(line) <= 200 else line[:199] + "…"


class ChatTemplate:
    """A compiled chat template.

    `literals`: the non-empty strings in its expressions, which it may look for in a message. `names`: its variables.
    """

    def __init__(
        self, source: str, *, bos: str = "", eos: str = "", variables: Mapping[str, object] | None = None
    ) -> None:
        """Compile `source`; `variables` are its switches, such as `enable_thinking`. Raises TemplateError."""
        if len(source) > _MAX_SOURCE:
            found = f"the chat template has {len(source)} characters (at most {_MAX_SOURCE} are allowed)"
            raise TemplateError(found, hint=HINT)
        self.source = source
        self._sandbox = _Sandbox()
        self._fixed = {**(variables or {}), "bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        try:
            tree = self._sandbox.parse(source)
            constants = (node.value for node in tree.find_all(nodes.Const))
            self.literals = frozenset(value for value in constants if isinstance(value, str) and value)
            self.names = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
            tree = _Metering().visit(tree).set_environment(self._sandbox)
            self._template = self._sandbox.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {_one_line(error.message)}"
            raise TemplateError(f"the chat template does not compile: {where}", hint=HINT) from error
        except Exception as error:  # nesting can exhaust jinja2's parser or Python's compiler in several ways
            raise TemplateError(f"the chat template does not compile: {_one_line(error)}", hint=HINT) from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, now: datetime) -> str:
        """The text of a conversation. Raises TemplateError if the template refuses it, fails or exceeds a limit."""
        self._sandbox.start()
        try:
            return self._template.render(
                self._fixed,
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                strftime_now=now.strftime,
            )
        except _Refused as error:
            raise TemplateError(
                f"the chat template refuses this conversation: {_one_line(error)}", hint=HINT
            ) from error
        except _Overrun as error:
            raise TemplateOverrun(f"the chat template {error}", hint=HINT) from error
        except Exception as error:  # undefined names, types, division, recursion, memory
            found = f"{type(error).__name__}: {_one_line(error)}"
            raise TemplateError(f"the chat template fails on this conversation: {found}", hint=HINT) from error
