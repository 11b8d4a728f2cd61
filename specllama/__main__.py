"""`python -m specllama` is `specllama`."""

import sys

from specllama.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
