"""Set up .venv for a recipe of the Makefile. Needs only Python, and is quick if .venv is up to date.

This file must run on any Python, also Python 2, so that an old one gives an error message and no traceback. The modules
beside it use newer syntax.
"""
# ruff: noqa: UP031

import os
import subprocess
import sys

OLDEST = (3, 10)


def version_problem(version, executable):
    """The error message for a Python that is too old, or an empty string."""
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
    """The name of a new enough Python that runs (a version manager's shim may not), or an empty string."""
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
