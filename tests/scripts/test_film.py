"""`scripts/record.py`: what a film shows without animation."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
FRAMES = [(0.0, ("A", "k", "")), (1.0, ("B", "k", "x")), (2.0, ("B", "k", "y")), (3.0, ("", "k", "y"))]


@pytest.fixture(scope="module")
def record() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("record", REPOSITORY / "scripts" / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(svg: str) -> set[str]:
    """Pictures that show without animation; a line that never changes is in no group."""
    assert "visibility:hidden;animation" not in svg
    return set(re.findall(r'<g id="l\d+">(.*?)</g>', svg))


def test_the_last_frame_is_there_where_nothing_plays(record: ModuleType) -> None:
    """Prevents: an empty window in previews, in print and with reduced motion."""
    svg = record.film(FRAMES, 10, 3, "title")
    assert shown(svg) == {"y"}
    assert svg.count(record.HIDDEN) == 3
    assert "prefers-reduced-motion" in svg
    assert "</g>k<g" in svg


def test_the_films_of_the_documents_show_their_last_frame() -> None:
    """Prevents: an empty picture in the README wherever nothing plays."""
    for name in ("run", "chat"):
        assert shown((REPOSITORY / "docs" / f"{name}.svg").read_text(encoding="utf-8"))
