"""`specllama`, and `python -m specllama`.

A signal ends the process at once, without a traceback, except while a command runs (specllama/cli/screen/ending.py):
the imports take some tenths of a second, and shutdown takes some hundredths. Imports nothing at the top for that.
"""

import gc
import os
import signal
import sys


def main() -> int:
    """Run the command line; the entry point of the package."""
    gc.disable()  # until a command runs: looking for garbage is a tenth of a start, and imports leave none
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: os._exit(128 + number))
    from specllama.cli.app import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
