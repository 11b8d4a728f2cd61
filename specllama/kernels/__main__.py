"""`python -m specllama.kernels`: compile the kernels unless they are there. `make setup` calls this."""

from __future__ import annotations

import signal
import sys

from specllama.base.errors import SpecllamaError
from specllama.kernels import build

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # ends the compilers
    try:
        if not build.unsupported() and not build.library().is_file():
            print("specllama's kernels are compiled once; this takes about a minute", file=sys.stderr, flush=True)
            build.build()
    except SpecllamaError as error:  # llama.cpp's kernels do
        print(f"specllama: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
