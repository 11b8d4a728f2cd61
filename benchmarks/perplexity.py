"""The perplexity of a text with our kernels and with llama.cpp's, for quantized types of weights.

    python benchmarks/perplexity.py [MODEL] [--types Q4_0,Q4_K_S] [--tokens 512]

MODEL (the default pair's target) is requantized to each type in a temporary folder. The columns: weights as in the
file, llama.cpp's default layouts, our kernels. The first two differ by what two builds of llama.cpp differ by.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specllama import llama
from specllama.base.errors import SpecllamaError
from specllama.files import hub
from specllama.files.catalog import load_catalog
from specllama.llama import LoadOptions, tested_kernels
from specllama.llama.kernel_path import AS_IN_FILE, DEFAULT, OWN, KernelPath
from specllama.llama.quantize import QUANTS
from specllama.prompts.load import built_in

ROWS = 32  # tokens of a pass
FEW = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K_S", "Q4_K_S", "Q5_K_S", "Q6_K", "IQ4_XS")


def perplexity(model: Path, path: KernelPath, n_tokens: int) -> float:
    """exp of the mean surprise of our own prompts' text, each token after all tokens before it."""
    options = LoadOptions(n_ctx=n_tokens + ROWS, max_block=ROWS)
    with llama.load(model, path.applied(options)) as loaded:
        text = "\n\n".join(turn for prompt in built_in() for turn in prompt.turns)
        tokens = loaded.vocab.tokenize(text, special=False)[: n_tokens + 1]
        surprise = 0.0
        for at in range(0, len(tokens) - 1, ROWS):
            block = tokens[at : min(at + ROWS, len(tokens) - 1)]
            rows = np.array(loaded.eval(block), dtype=np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            log_z = np.log(np.exp(rows).sum(axis=1))
            surprise += float(np.sum(log_z - rows[np.arange(len(block)), tokens[at + 1 : at + 1 + len(block)]]))
    return math.exp(surprise / (len(tokens) - 1))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--types", default=",".join(FEW))
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args(arguments)
    try:
        catalog = load_catalog()
        name = options.model or catalog.pair().target.name
        source = Path(name) if Path(name).is_file() else hub.find(catalog.model(name))
        if source is None:
            raise SystemExit(f"{name} is not here; fetch it: specllama models pull {name}")
        if problem := tested_kernels.problem():
            raise SystemExit(f"our kernels cannot be used: {problem}")
        print(f"{source.name}, {options.tokens} tokens")
        print("| type | as in the file | llama.cpp's default | ours |\n|---|---|---|---|")
        with tempfile.TemporaryDirectory() as folder:
            for kind in options.types.split(","):
                if kind not in QUANTS:
                    raise SystemExit(f"unknown type {kind} (expected one of {', '.join(QUANTS)})")
                file = Path(folder) / f"{kind}.gguf"
                llama.requantize(source, file, kind)
                found = [perplexity(file, path, options.tokens) for path in (AS_IN_FILE, DEFAULT, OWN)]
                print(f"| {kind} | {' | '.join(f'{each:.4f}' for each in found)} |", flush=True)
                file.unlink()
    except SpecllamaError as error:
        raise SystemExit(str(error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
