"""Use thousands of files with damaged headers in a separate process.

    python -m tests.headerfuzz FOLDER SEED COUNT [commands]

writes tiny models into FOLDER, damages their headers COUNT times, and uses each file as the first load does, or runs
`check` and `run` with it. Each must work or give one of our errors, within MOST_S of computing, which a busy machine
does not change, and HANG_S by the clock; any other error ends the process with exit code 1, and FOLDER/case.gguf is the
file. The last line of stdout counts the outcomes. A first load may die by a signal, because the program does it in a
child; here that child is a fork, which takes milliseconds. test_header_fuzz.py also starts the program itself.
"""

from __future__ import annotations

import math
import os
import random
import resource
import signal
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from specllama import llama
from specllama.base.errors import ModelFileError, SpecllamaError
from specllama.files import gguf_rewrite
from specllama.files.gguf_header import walk
from specllama.llama import crash_test
from specllama.llama.header import Header, refuse_architecture
from specllama.llama.model import rehearse
from tests import tiny

MOST_S = 2.0  # of computing, the system's for it included; then SIGPROF ends the process
HANG_S = 120.0  # by the clock; then SIGALRM does
TOO_SLOW = (-signal.SIGPROF, -signal.SIGALRM)
MOST_BYTES = 8 << 30  # of address space
CASE = "case.gguf"

# Limits of counts, lengths, types and ids.
EDGES = (0, 1, 2, 7, 8, 9, 12, 13, 255, 1 << 15, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 60, 1 << 63)
WORDS = (b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"none", b"no_vocab", b"gemma4", b"plamo2", b"test", b"mamba")


def seeds(folder: Path) -> list[bytearray]:
    """Small valid files with several vocabularies and architectures."""
    small = {"n_layer": 1, "n_embd": 8, "n_head": 1, "n_ff": 8}
    experts = {"llama.expert_count": 4, "llama.expert_used_count": 2}
    paths = [
        tiny.write_model(folder / "letters.gguf", **small),
        tiny.write_model(folder / "bytes.gguf", arch="qwen2", vocabulary=tiny.byte_level(), **small),
        tiny.write_model(
            folder / "spm.gguf", arch="gemma3", vocabulary=tiny.sentencepiece(), sliding_window=4, **small
        ),
        tiny.write_model(folder / "experts.gguf", extra=experts, **small),
        tiny.write_bare(folder / "bare.gguf", vocabulary=tiny.letters()),
    ]
    return [bytearray(path.read_bytes()) for path in paths]


def other_values(body: bytes, rng: random.Random) -> bytes:
    """One or two metadata values replaced by others, of any type."""
    header = walk(body, len(body))
    entries = {key: gguf_rewrite._copied(header, key) for key in header.entries}
    numbers, texts = [rng.choice(EDGES) % (1 << 32) for _ in range(3)], [rng.choice(WORDS) for _ in range(3)]
    values = (
        gguf_rewrite.u32(numbers[0]),
        gguf_rewrite.u32(rng.randrange(40)),
        gguf_rewrite.f32(rng.choice((-1.0, 0.0, 0.5, 1e30, math.inf, math.nan))),
        gguf_rewrite.text(texts[0].decode()),
        gguf_rewrite.integers(np.array(numbers[: rng.randrange(4)], np.int64)),
        gguf_rewrite.strings(texts[: rng.randrange(4)]),
        struct.pack("<IB", 7, rng.randrange(2)),
    )
    for _ in range(rng.choice((1, 1, 2))):
        entries[rng.choice(list(entries))] = rng.choice(values)
    tensors = [(each.name, each.shape, each.kind, each.n_bytes) for each in header.tensors]
    return gguf_rewrite.packed_header(entries, tensors) + body[header.data_start :]


def damage(body: bytearray, rng: random.Random, n_header: int) -> bytes:
    """One to four damages, mostly in the header."""
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if len(data) < 9:
            break
        at = rng.randrange(8, min(max(n_header, 9), len(data)))
        kind = rng.choice((0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 7))
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            value = (rng.choice(EDGES) + rng.choice((-1, 0, 0, 1))) % (1 << 64)
            data[at : at + 8] = struct.pack("<Q", value)
        elif kind == 3:
            data[at : at + 4] = struct.pack("<I", rng.choice(EDGES) % (1 << 32))
        elif kind == 4:
            del data[at : at + rng.choice((1, 4, 8, rng.randrange(1, 200)))]
        elif kind == 5:
            data[at:at] = bytes(data[at : at + rng.choice((1, 4, 8, rng.randrange(1, 200)))])
        elif kind == 6:
            del data[at:]
        else:
            data[at : at + 5] = rng.choice(WORDS)[:5].ljust(5, b"\0")
    return bytes(data)


def limit(is_on: bool = True) -> None:
    """Let this process compute for MOST_S and live for HANG_S from now on; a fork begins without limits."""
    signal.setitimer(signal.ITIMER_PROF, MOST_S if is_on else 0)
    signal.setitimer(signal.ITIMER_REAL, HANG_S if is_on else 0)


def in_fork(work: Callable[[], int], said: Path) -> int:
    """The exit code of `work` in a fork; minus the signal that ended it. `said` gets what it prints.

    This process must have started no threads.
    """
    child = os.fork()
    if child == 0:
        code = 99
        limit(said.name == "rehearsed")
        with said.open("w+b") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def require_sound(models: Mapping[Header, bool]) -> None:
    """`crash_test.require_sound` in a fork, without its memory. The other file of a pair is sound."""
    case = next((model for model in models if model.path.name == CASE), None)
    if case is None:
        return

    def use() -> int:
        try:
            rehearse(crash_test.Use(str(case.path), weights=models[case]))
        except SpecllamaError:
            return 3
        return 0

    code = in_fork(use, case.path.with_name("rehearsed"))
    assert code in (0, 3) or code < 0
    assert code not in TOO_SLOW
    if code:
        name = signal.Signals(-code).name if code < 0 else "an error"
        raise ModelFileError(f"llama.cpp ends with {name} on {case.path}", hint="download it again")


def outcome(path: Path) -> str:
    """ "sound" or the class of our error; raises any other error, and dies if llama.cpp does."""
    try:
        header = llama.read_header(path, needs_weights=False)
        refuse_architecture(header)
        rehearse(crash_test.Use(str(path)))
    except SpecllamaError as error:
        if not str(error) or "\n" in str(error):
            raise AssertionError(f"no sentence: {error!r}") from error
        return type(error).__name__
    return "sound"


def commands(path: Path) -> str:
    """The exit codes of `check` and `run` with the file. A file that fits must run."""
    from specllama.cli.app import main as program

    models, start = ["-m", str(path), "-md", str(path.with_name("partner.gguf"))], os.fstat(1).st_size
    checked = program(["check", *models])
    ran = program(["run", *models, "-n", "1", "--spec-draft-n-max", "2", "-c", "64", "-t", "1", "hi"])
    sys.stdout.flush()
    said = os.pread(1, 1 << 20, start)
    assert 0 <= checked <= 2
    assert 0 <= ran <= (2 if checked else 0), f"run {ran} after check {checked}"
    assert b"Traceback" not in said
    assert b"internal error" not in said
    return f"check {checked}, run {ran}"


def use_all(path: Path, bodies: list[bytearray], seed: int, numbers: range, use: Callable[[Path], str]) -> int:
    """Damage `bodies`, write each as `path` and use it, with a line in the file `done` for each of `numbers`."""
    n_headers = [body.find(b"output_norm.weight") + 300 for body in bodies]
    with path.with_name("done").open("a", buffering=1) as lines:
        for number in numbers:
            rng = random.Random(seed << 32 | number)
            which = rng.randrange(len(bodies))
            body = bodies[which]
            if use is commands:
                path.with_name("partner.gguf").write_bytes(body)
            path.write_bytes(other_values(body, rng) if rng.random() < 0.3 else damage(body, rng, n_headers[which]))
            limit()
            print(use(path), file=lines)
            limit(False)
    return 0


def main(folder: Path, seed: int, count: int, use: Callable[[Path], str]) -> int:
    """Prints the outcomes; see the module."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["GGML_NO_BACKTRACE"] = "1"
    crash_test.require_sound = require_sound  # type: ignore[assignment]
    crash_test.installed = lambda: crash_test.ProbeResult(crash_test.State.OK)  # type: ignore[assignment]
    done, said, n_done = folder / "done", folder / "worker", 0
    done.touch()
    bodies = seeds(folder)
    if use is commands:
        bodies.pop()  # without weights, which `check` accepts
    partner = folder / "partner.gguf"
    partner.write_bytes(bodies[0])
    outcome(partner)  # imports and libraries, once for all forks
    while n_done < count:
        code = in_fork(partial(use_all, folder / CASE, bodies, seed, range(n_done, count), use), said)
        n_done = len(done.read_text().splitlines())
        if code < 0 and code not in TOO_SLOW and use is outcome:  # where the program ends a child, and says so
            with done.open("a") as lines:
                print(signal.Signals(-code).name, file=lines)
            n_done += 1
        elif code:
            print(f"file {n_done}: exit code {code}\n{said.read_text()}", file=sys.stderr)
            return 1
    print(dict(Counter(done.read_text().splitlines())))
    return 0


if __name__ == "__main__":
    place, seed, count, *mode = sys.argv[1:]
    sys.exit(main(Path(place), int(seed), int(count), commands if mode else outcome))
