"""Read thousands of damaged headers in a separate process.

    python -m tests.headerfuzz FOLDER SEED COUNT

writes tiny models into FOLDER, damages their headers COUNT times, and loads each header and vocabulary. Each must load
or raise one of our errors; any other error ends the process with exit code 1, a crash of llama.cpp with a signal, and
FOLDER/case.gguf is the file. The last line of stdout counts the outcomes.
"""

from __future__ import annotations

import random
import struct
import sys
from collections import Counter
from pathlib import Path

from specllama import llama
from specllama.base.errors import SpecllamaError
from tests import tiny

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
        tiny.write_model(folder / "spm.gguf", arch="gemma3", vocabulary=tiny.sentencepiece(), **small),
        tiny.write_model(folder / "experts.gguf", extra=experts, **small),
        tiny.write_bare(folder / "bare.gguf", vocabulary=tiny.letters()),
    ]
    return [bytearray(path.read_bytes()) for path in paths]


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


def outcome(path: Path) -> str:
    """ "sound" or the class of our error; raises any other error."""
    try:
        llama.read_header(path)
        llama.load_vocabulary(path).close()
    except SpecllamaError as error:
        if not str(error) or "\n" in str(error):
            raise AssertionError(f"no sentence: {error!r}") from error
        return type(error).__name__
    return "sound"


def main(folder: Path, seed: int, count: int) -> int:
    """Prints the outcomes; see the module."""
    rng, bodies, path, seen = random.Random(seed), seeds(folder), folder / "case.gguf", Counter[str]()
    n_headers = [body.find(b"output_norm.weight") + 300 for body in bodies]
    for _ in range(count):
        which = rng.randrange(len(bodies))
        path.write_bytes(damage(bodies[which], rng, n_headers[which]))
        seen[outcome(path)] += 1
    print(dict(seen))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
