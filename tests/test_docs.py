"""The documents against the repository: links, cited files and tests, commands, and the table of rooms."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from specllama.cli.app import app
from tests.test_layers import MAY_IMPORT

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
NAMES = [page.relative_to(REPOSITORY).as_posix() for page in PAGES]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
ROOTS, ENDINGS = "specllama|tests|benchmarks|scripts|docs", "py|md|svg|toml|jsonl"
CITED = re.compile(rf"(?<![\w/.~])((?:{ROOTS})/[\w./-]*\w\.(?:{ENDINGS}))(?:::(\w+))?")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def commands(page: Path) -> list[list[str]]:
    """The arguments of every `specllama ...` in the shell blocks of a page."""
    found = []
    for kind, block in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in block.splitlines() if kind == "sh" else ():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            words: list[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set("|;&<>()"):
                    if words[:1] == ["specllama"]:
                        found.append(words[1:])
                    words = []
                else:
                    words.append(word)
    return found


def unknown_script_options(page: Path) -> list[str]:
    """Options of `python benchmarks/x.py ...` that the script does not name."""
    return [
        f"{script} {option}"
        for script, rest in re.findall(r"python ((?:benchmarks|scripts)/\w+\.py)([^`\n]*)", page.read_text("utf-8"))
        for option in re.findall(r"--[\w-]+", rest)
        if f'"{option}"' not in (REPOSITORY / script).read_text("utf-8")
    ]


def parse(words: list[str]) -> None:
    """Parse a command line without running it. Raises typer's usage errors."""
    command: Any = get_command(app)
    while words and hasattr(command, "list_commands"):
        name, *words = words
        command = command.get_command(None, name)
        assert command is not None, f"no command {name}"
    # With its settings: the first context of a command names its --help for good.
    command.make_parser(command.context_class(command, **command.context_settings)).parse_args(list(words))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_cited_files_and_tests_exist(page: Path) -> None:
    """Prevents: a page that points to what was moved or removed."""
    assert broken_links(page) == []
    for path, test in CITED.findall(page.read_text(encoding="utf-8")):
        assert (REPOSITORY / path).exists(), path
        assert not test or f"def {test}(" in (REPOSITORY / path).read_text("utf-8"), f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_parse(page: Path) -> None:
    """Prevents: an example with an option that no longer exists."""
    for words in commands(page):
        parse(words)
    assert unknown_script_options(page) == []


def test_a_wrong_link_or_option_is_seen(tmp_path: Path) -> None:
    """Prevents: checks that pass whatever a page says."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A head\n[a](#a-head) [b](#b) [c](none.md)\n"
        "```sh\nls | specllama run --none x # y\n```\n`python benchmarks/loop.py --none`"
    )
    assert broken_links(page) == ["#b", "none.md"]
    assert commands(page) == [["run", "--none", "x"]]
    assert unknown_script_options(page) == ["benchmarks/loop.py --none"]
    with pytest.raises(Exception, match="--none"):
        parse(["run", "--none", "x"])


@pytest.mark.parametrize("name", ["run", "chat"])
def test_the_films_show_their_last_frame_where_nothing_plays(name: str) -> None:
    """Prevents: an empty picture in previews, in print and with reduced motion."""
    svg = (REPOSITORY / "docs" / f"{name}.svg").read_text(encoding="utf-8")
    assert "visibility:hidden;animation" not in svg
    assert re.search(r'<g id="l\d+">.+?</g>', svg)


def test_the_readme_is_short() -> None:
    """Prevents: a manual on the first page."""
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_the_table_of_rooms_is_the_one_that_is_checked() -> None:
    """Prevents: a plan in docs/design.md that the imports do not follow."""
    text = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    assert {room: " ".join(re.findall(r"`(\w+)`", rest)) for room, rest in rows} == {
        room: rest for room, rest in MAY_IMPORT.items() if room != "top"
    }
