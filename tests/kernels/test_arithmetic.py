"""The products and the attention of our kernels: against plain C++, and under sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from specllama.kernels import build
from specllama.kernels.library import self_test

pytestmark = pytest.mark.skipif(bool(build.unsupported() or not build.compiler()), reason="no kernels on this machine")


@pytest.fixture(scope="module")
def library() -> Path:
    """The library as `make setup` compiles it."""
    return build.build()


def test_every_type_and_instruction_set_equals_plain_code(library: Path) -> None:
    """Prevents: a wrong product; a row whose result depends on its neighbours; a NaN that is lost."""
    assert self_test(library, "all") == ""


def test_an_instruction_set_that_the_cpu_lacks_is_refused(library: Path) -> None:
    """Prevents: an illegal instruction."""
    assert self_test(library, "avx10") != ""


@pytest.mark.slow
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """Prevents: a read or write outside of an array, an unaligned or overflowing operation."""
    flags = ("-O1", "-g1", "-DSPECK_TWO_WIDTHS", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = build.build_program(tmp_path, "avx2", *flags)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr[-2000:]
