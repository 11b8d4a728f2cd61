"""The products and the attention of our kernels: against plain C++, and under sanitizers."""

from __future__ import annotations

import os
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from specllama.base.cpu import this_cpu
from specllama.base.disk import Silent, only_one, work_folder
from specllama.kernels import build
from specllama.kernels.library import ISA_VARIABLE, self_test

pytestmark = pytest.mark.skipif(bool(build.unsupported() or not build.compiler()), reason="no kernels on this machine")


@pytest.fixture(scope="module")
def library() -> Path:
    """The library as `make setup` compiles it."""
    return build.build()


@pytest.mark.slow
def test_every_type_and_instruction_set_equals_plain_code(library: Path) -> None:
    """Prevents: a wrong product; a row whose result depends on its neighbours; a NaN that is lost."""
    assert self_test(library, "all") == ""


@pytest.mark.slow
def test_every_instruction_set_of_the_cpu_is_compiled(library: Path) -> None:
    """Prevents: a set that does not compile and is left out in silence, as if the compiler did not know it."""
    lacks = self_test(library, "avx10")
    sets = {"avx2": ["avx2"], "avxvnni": ["avx_vnni"], "avx512vnni": ["avx512f", "avx512bw", "avx512vl", "avx512_vnni"]}
    there = [name for name, flags in sets.items() if set(flags) <= set(this_cpu().flags)]
    assert [name for name in sets if self_test(library, name) != lacks] == there


def test_an_instruction_set_that_the_cpu_lacks_is_refused(library: Path) -> None:
    """Prevents: an illegal instruction."""
    assert self_test(library, "avx10") != ""


# One build covers the arithmetic and the attention of both (the self-test) and the buffer type inside ggml's CPU back
# end (backend.cpp). avxvnni has two instructions of its own. Two of the ten widths of a tile: the others repeat them.
# Compiling path.cpp takes 25 s each; with every check of `undefined` it would take 50. It is kept with the library.
SANITIZED = ("avx2", "avx512vnni")
SANITIZERS = ("-O1", "-g1", "-DSPECK_TWO_WIDTHS", "-fno-sanitize-recover=all", "-w")
CHECKS = dict.fromkeys(SANITIZED, "-fsanitize=address,alignment,bounds,shift,signed-integer-overflow")
CHECKS["backend_test"] = "-fsanitize=address,undefined"
BACKEND_TEST = Path(__file__).with_name("backend_test.cpp")
GGML = build.headers().parent / "llama_cpp" / "lib"


@pytest.fixture(scope="module")
def sanitized(library: Path) -> Path:
    """backend_test.cpp with sanitizers, linked with ggml; the folder's name covers the other sources."""
    version = subprocess.run([*build.compiler(), "--version"], capture_output=True, check=True).stdout
    key = repr((build.compiler(), version, SANITIZERS, CHECKS, BACKEND_TEST.read_bytes()))
    made = library.parent / f"sanitized-{sha256(key.encode()).hexdigest()[:20]}"
    with only_one("building", Silent(), library.parent), work_folder(library.parent / "building") as folder:
        if made.exists():
            return made
        sources = {name: (build.SOURCES / "path.cpp", *build.PATHS[name]) for name in SANITIZED}
        sources["backend_test"] = (BACKEND_TEST,)
        objects = [str(folder / f"{name}.o") for name in sources]
        flags, places = [*build.FLAGS, *SANITIZERS], (f"-I{build.headers()}", f"-I{build.SOURCES}")
        commands = [
            [*build.compiler(), *flags, CHECKS[name], *places, "-c", *map(str, source), "-o", compiled]
            for compiled, (name, source) in zip(objects, sources.items(), strict=True)
        ]
        assert build.run_all(commands, folder) == [""] * len(commands)
        libraries = (f"-L{GGML}", "-pthread", "-lggml-base", "-lggml-cpu")
        link = [*build.compiler(), CHECKS["backend_test"], *objects, *libraries, "-o", str(folder / "made")]
        assert build.run_all([link], folder) == [""]
        os.replace(folder / "made", made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("isa", SANITIZED)
def test_sanitizers_find_nothing(library: Path, sanitized: Path, isa: str) -> None:
    """Prevents: a read or write outside of an array, an unaligned or overflowing operation; a wrong number, whatever
    the rows, columns, heads and threads, also where the work is left to llama.cpp.
    """
    if self_test(library, isa) == self_test(library, "avx10"):
        pytest.skip(f"the CPU lacks {isa}")
    env = {**os.environ, ISA_VARIABLE: isa, "LD_LIBRARY_PATH": str(GGML), "DYLD_LIBRARY_PATH": str(GGML)}
    done = subprocess.run([sanitized], env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr[-2000:]
