"""Makes .venv ready for a recipe of the Makefile; needs nothing but Python, and is quick when there is nothing to do.

This file must be understood by any Python there is, Python 2 included, so that a wrong one gets a sentence and not a
traceback. Everything newer stands in the modules beside it.
"""
# ruff: noqa: UP031

import os
import subprocess
import sys

OLDEST = (3, 10)


def version_problem(version, executable):
    """The sentence to say about a Python that is too old, or an empty string."""
    if tuple(version[:2]) >= OLDEST:
        return ""
    found = ".".join(str(part) for part in version[:3])
    wanted = ".".join(str(part) for part in OLDEST)
    newer = newer_python() or "a newer python3"
    return "specllama needs Python %s or newer, but %s is %s; try: make PYTHON=%s ..." % (
        wanted,
        executable or "this Python",
        found,
        newer,
    )


def newer_python():
    """The name of a Python that is new enough and runs (a version manager's stand-in may not), or an empty string."""
    for minor in (14, 13, 12, 11, 10):
        name = "python3.%d" % minor
        with open(os.devnull, "w") as nowhere:
            try:
                if subprocess.call([name, "-c", ""], stdout=nowhere, stderr=nowhere) == 0:
                    return name
            except OSError:
                continue
    return ""


if __name__ == "__main__":
    problem = version_problem(sys.version_info, sys.executable)
    if problem:
        sys.stderr.write("specllama: %s\n" % problem)
        sys.exit(1)

    from environment import main

    sys.exit(main(sys.argv[1:]))
