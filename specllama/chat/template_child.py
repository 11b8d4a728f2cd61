"""The child process of `template`: compiles and renders chat templates in jinja2's sandbox.

It runs as a script of its own, `python -I -S`, and imports little, so that it starts fast. Arguments: most bytes of
memory, seconds after which a request ends the process, and the folders of jinja2 and its parts. Requests and replies
are lines of JSON. It ends when its stdin ends.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

sys.path += sys.argv[3:]

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_TEXT = 20_000_000  # characters of a rendered conversation: the parent has to handle it
_MAX_TEMPLATES = 8  # compiled ones that are kept


class _Refused(jinja2.TemplateRuntimeError):
    """The template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


@jinja2.pass_context
def _as_it_is(_context: object, value: object) -> object:
    """What is printed. Because it takes the context, jinja2 cannot compute it while it compiles."""
    return value


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja2's sandbox with the set-up of Hugging Face's templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        # Compute nothing while compiling: it may be in a branch that this conversation does not take.
        optimized=False,
        finalize=_as_it_is,
        extensions=["jinja2.ext.loopcontrols", _Generation],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _tojson
    return environment


@lru_cache(_MAX_TEMPLATES)
def _compiled(source: str) -> tuple[jinja2.Template, dict[str, object]]:
    """The template, and the reply to a request without messages."""
    environment = _environment()
    tree = environment.parse(source)
    literals = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str) and node.value}
    names = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
    return environment.from_string(tree), {"literals": list(literals), "names": list(names)}


def _reply(request: dict[str, Any]) -> dict[str, object]:
    """The rendered text, or facts about the template, or what is wrong with it. Raises MemoryError."""
    try:
        template, facts = _compiled(request["source"])
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"does not compile: line {error.lineno}: {error.message}"}
    except Exception as error:  # nesting can exhaust jinja2's parser or Python's compiler in several ways
        return {"error": f"does not compile: {error}"}
    if "variables" not in request:
        return facts
    try:
        strftime_now = datetime.fromisoformat(request["now"]).strftime
        text = template.render(request["variables"], strftime_now=strftime_now)
    except MemoryError:
        raise
    except _Refused as error:
        return {"error": f"refuses this conversation: {error}"}
    except Exception as error:  # undefined names, types, division, recursion
        return {"error": f"fails on this conversation: {type(error).__name__}: {error}"}
    if len(text) > _MAX_TEXT:
        return {"error": f"writes {len(text)} characters (at most {_MAX_TEXT} are allowed)"}
    return {"text": text}


def _limit_memory(n_bytes: int) -> None:
    """Where the system enforces it; the parent watches as well."""
    with suppress(ImportError, ValueError, OSError):  # no such limits, or lower ones already
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected
        resource.setrlimit(resource.RLIMIT_DATA, (n_bytes, n_bytes))


def main() -> None:
    """Answer requests until stdin ends."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    _limit_memory(int(sys.argv[1]))
    replies.write(b"\n")  # ready
    replies.flush()
    for line in requests:
        # The parent ends an endless template. If the parent was killed, this timer does; it needs no interpreter.
        faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
        replies.write(json.dumps(_reply(json.loads(line))).encode() + b"\n")
        replies.flush()
        faulthandler.cancel_dump_traceback_later()


main()
