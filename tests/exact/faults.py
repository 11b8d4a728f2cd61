"""Seeded faults: a case that is exact, and the same case with one rule broken.

faults_verification.py and faults_engine.py break each rule of docs/design.md once; test_faults.py checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import pytest

from specllama.base.errors import SpecllamaError
from tests.enumeration import tv

Law: TypeAlias = Mapping[Hashable, float]
Install: TypeAlias = Callable[[pytest.MonkeyPatch], None]

VISIBLE = 1e-6  # a bias this large has to be seen


@dataclass(frozen=True)
class Case:
    """An enumerated law and the expected one."""

    found: Callable[[], Law]
    expected: Callable[[], Law]

    def verdict(self) -> str:
        """What is wrong with the law that was found; '' = nothing."""
        try:
            found = self.found()
        except (SpecllamaError, AssertionError, ValueError) as error:
            return f"raises {type(error).__name__}"
        expected = self.expected()
        if found.keys() - expected.keys():
            return "says what is impossible"
        distance = tv(found, expected)
        return f"TV {distance:.3g}" if distance > VISIBLE else ""


@dataclass(frozen=True)
class SeededFault:
    """One broken rule. `install` breaks it, unless the case `broken` itself does."""

    name: str
    healthy: Case
    broken: Case
    install: Install = lambda monkeypatch: None
